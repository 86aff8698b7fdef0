"""Gates for a framework's options: each one, each refusal with its whole message, and gates of others."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tuning.determinism.arguments import (
    apply_determinism_to_args,
    argument_gates,
    argument_problems,
    examine_arguments,
    register_argument_gate,
)
from tuning.determinism.mode import DeterministicMode
from tuning.determinism.torch_flags import read_torch_flags, restore_torch_flags
from tuning.errors import DeterminismError

CROSS_ENTROPY = (
    "cross_entropy_loss_fusion must be False, got True (the fused loss is not bit-exact from run to run): set "
    "cross_entropy_loss_fusion to False"
)
OVERLAP = (
    "tp_comm_overlap must be False, got True (overlapped tensor-parallel communication adds partial sums in order of "
    "arrival): set tp_comm_overlap to False"
)
ROUTER = (
    "moe_router_aux_loss_fusion must be False, got True (the fused auxiliary loss of the router adds with atomics): "
    "set "
    "moe_router_aux_loss_fusion to False"
)
ROUTER_FOLLOWS = (
    "moe_router_aux_loss_fusion must be False, got True (unset, so moe_router_fusion decides) (the fused auxiliary "
    "loss of "
    "the router adds with atomics): set moe_router_aux_loss_fusion or moe_router_fusion to False"
)


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    before = read_torch_flags()
    yield
    restore_torch_flags(before)


def make(kind: type, values: dict[str, Any]) -> Any:
    return argparse.Namespace(**values) if kind is argparse.Namespace else dict(values)


each_kind = pytest.mark.parametrize("kind", [argparse.Namespace, dict])


@each_kind
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cross_entropy_loss_fusion": True}, CROSS_ENTROPY),
        ({"tp_comm_overlap": True}, OVERLAP),
        ({"moe_router_aux_loss_fusion": True}, ROUTER),
        ({"moe_router_aux_loss_fusion": True, "moe_router_fusion": False}, ROUTER),
        ({"moe_router_fusion": True}, ROUTER_FOLLOWS),
        ({"moe_router_aux_loss_fusion": None, "moe_router_fusion": True}, ROUTER_FOLLOWS),
        ({"tp_comm_overlap": "false"}, OVERLAP.replace("got True", "got 'false'")),
        ({"tp_comm_overlap": 1}, OVERLAP.replace("got True", "got 1")),
        ({"tp_comm_overlap": 0}, OVERLAP.replace("got True", "got 0")),
        ({"tp_comm_overlap": ""}, OVERLAP.replace("got True", "got ''")),
    ],
)
def test_a_refused_option(kind: type, values: dict[str, Any], message: str) -> None:
    args = make(kind, values)
    before, env = copy.deepcopy(args), dict[str, str]()
    with pytest.raises(DeterminismError) as caught:
        apply_determinism_to_args(args, env=env)
    assert str(caught.value) == f"deterministic mode refuses these arguments: {message}"
    assert (args, env) == (before, {})
    assert not read_torch_flags().deterministic_algorithms


@each_kind
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"cross_entropy_loss_fusion": False, "tp_comm_overlap": False, "moe_router_aux_loss_fusion": False},
        {"cross_entropy_loss_fusion": None},
        {"moe_router_aux_loss_fusion": False, "moe_router_fusion": True},
        {"moe_router_fusion": False},
    ],
)
def test_accepted_options(kind: type, values: dict[str, Any]) -> None:
    args = make(kind, values)
    before, env = copy.deepcopy(args), dict[str, str]()
    for _ in range(2):  # idempotent
        findings = apply_determinism_to_args(args, env=env)
        assert [finding.gate for finding in findings] == list(argument_gates())
        assert args == before
        assert env["NCCL_ALGO"] == "Ring"
        assert read_torch_flags().deterministic_algorithms


def test_all_problems_of_options_and_environment_are_in_one_error() -> None:
    args = argparse.Namespace(cross_entropy_loss_fusion=True, tp_comm_overlap=True, moe_router_fusion=True)
    env = {"TRITON_CACHE_AUTOTUNING": "2"}
    with pytest.raises(DeterminismError) as caught:
        apply_determinism_to_args(args, env=env)
    cache = "TRITON_CACHE_AUTOTUNING must be one of 0, 1, got '2' (Triton knows no other value): unset it"
    assert caught.value.problems == (CROSS_ENTROPY, OVERLAP, ROUTER_FOLLOWS, cache)
    assert str(caught.value) == (
        f"deterministic mode refuses these arguments: 4 problems: (1) {CROSS_ENTROPY}; (2) {OVERLAP}; "
        f"(3) {ROUTER_FOLLOWS}; (4) {cache}"
    )
    assert env == {"TRITON_CACHE_AUTOTUNING": "2"}


class Text(str):
    """Has a __dict__, and no options in it."""


class Slotted:
    __slots__ = ("tp_comm_overlap",)

    def __init__(self, tp_comm_overlap: bool) -> None:
        self.tp_comm_overlap = tp_comm_overlap


NO_ARGUMENTS = [
    (["--x"], "list"),
    (("--x",), "tuple"),
    ({"--x"}, "set"),
    ("--x", "str"),
    (Text("--x"), "Text"),
    (b"--x", "bytes"),
    (5, "int"),
    (True, "bool"),
    (0.5, "float"),
    (object(), "object"),
]


@pytest.mark.parametrize(("args", "kind"), [(None, "NoneType"), *NO_ARGUMENTS])
def test_what_is_no_arguments_at_all(args: Any, kind: str) -> None:
    problem = f"the arguments must be a namespace or a mapping, got {kind}: pass the parsed arguments"
    env: dict[str, str] = {}
    for call in (lambda: apply_determinism_to_args(args, env=env), lambda: examine_arguments(args)):
        with pytest.raises(DeterminismError) as caught:
            call()
        assert str(caught.value) == f"deterministic mode refuses these arguments: {problem}"
        assert caught.value.problems == (problem,)
    assert argument_problems(args) == [problem]
    assert env == {}


@pytest.mark.parametrize(("args", "kind"), NO_ARGUMENTS)
def test_the_mode_refuses_what_is_no_arguments_with_everything_else(args: Any, kind: str) -> None:
    mode = DeterministicMode(env={"NCCL_ALGO": "Tree"}, args=args, causal_conv1d="unused", fla=False)
    with pytest.raises(DeterminismError) as caught:
        mode.check()
    nccl, arguments = caught.value.problems
    assert nccl.startswith("NCCL_ALGO")
    assert arguments == f"the arguments must be a namespace or a mapping, got {kind}: pass the parsed arguments"


def test_no_arguments_and_a_refused_environment_are_one_error() -> None:
    with pytest.raises(DeterminismError) as caught:
        apply_determinism_to_args(5, env={"NCCL_ALGO": "Tree"})
    assert [problem.split()[0] for problem in caught.value.problems] == ["the", "NCCL_ALGO"]


def test_attributes_in_slots_are_options_too() -> None:
    assert argument_problems(Slotted(False)) == []
    assert argument_problems(Slotted(True)) == [OVERLAP]


def test_a_framework_adds_its_own_gate() -> None:
    unregister = register_argument_gate("fast_moe", reason="drops tokens by arrival", required=False, owner="mine")
    try:
        assert register_argument_gate("fast_moe", reason="drops tokens by arrival", owner="mine") is not None
        with pytest.raises(DeterminismError) as caught:
            apply_determinism_to_args({"fast_moe": True}, env={})
        assert caught.value.problems == (
            "fast_moe must be False, got True (drops tokens by arrival): set fast_moe to False",
        )
    finally:
        unregister()
    assert apply_determinism_to_args({"fast_moe": True}, env={})


def test_a_gate_may_require_another_value() -> None:
    unregister = register_argument_gate("seed_mode", reason="ranks must agree", required="fixed")
    try:
        found = {finding.gate.name: finding for finding in examine_arguments({})}["seed_mode"]
        assert found.problem == "seed_mode must be 'fixed', got None (ranks must agree): set seed_mode to 'fixed'"
        assert not any(finding.problem for finding in examine_arguments({"seed_mode": "fixed"}))
    finally:
        unregister()


def test_two_gates_for_one_option_are_refused() -> None:
    with pytest.raises(DeterminismError) as caught:
        register_argument_gate("tp_comm_overlap", reason="another reason", owner="mine")
    assert caught.value.problems == (
        "the argument gate tp_comm_overlap exists already (built in: overlapped tensor-parallel communication adds "
        "partial "
        "sums in order of arrival), got another one for it from mine: take the first away, or register an equal one",
    )


def test_a_gate_needs_a_name_and_a_reason() -> None:
    with pytest.raises(DeterminismError) as caught:
        register_argument_gate("", reason=" ")
    assert caught.value.problems == (
        "the name of an argument gate must be a non-empty string, got ''",
        "the reason of an argument gate must be a non-empty string, got ' '",
    )
    assert "" not in {gate.name for gate in argument_gates()}
