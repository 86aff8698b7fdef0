"""Attention backends by name: the order of the rules, each rejection with its whole message, and registration."""

from __future__ import annotations

import enum
import subprocess
import sys
from typing import Any

import pytest

from tuning.determinism.attention import (
    check_attention_backend,
    classify_backend,
    register_attention_backend,
    registered_attention_backends,
)
from tuning.errors import DeterminismError


class Backend(enum.Enum):
    FLASH = "flash"


class Numbered(enum.Enum):
    math = 1
    listed = ("sage", "x.math.y")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("math", "math"),
        ("_native_math", "math"),
        ("math_flash", "math"),  # the first rule that fits
        ("SDPBackend.MATH", "math"),
        ("native/math", "math"),
        ("torch-math", "math"),
        ("mathematical", "rejected"),
        ("aftermath", "rejected"),
        ("x-math-sage", "rejected"),
        ("aiter_math", "rejected"),
        ("xformers.math", "rejected"),
        ("flex/math", "rejected"),
        ("flash", "flash"),
        ("flash_varlen", "flash"),
        ("_flash_3", "flash"),
        ("flash_attention_2", "flash"),
        ("FLASH_HUB", "flash"),
        ("_native_flash", "flash"),
        ("sage_flash", "flash"),
        (Backend.FLASH, "flash"),
        (None, "native"),
        ("", "native"),
        ("native", "native"),
        ("sdpa", "native"),
        ("eager", "native"),
        ("sage", "rejected"),
        ("sage_varlen", "rejected"),
        ("xformers", "rejected"),
        ("flex", "rejected"),
        ("flex_attention", "rejected"),
        ("aiter_fa2_hub", "rejected"),
        ("_native_cudnn", "rejected"),
        ("_native_efficient", "rejected"),
        ("nothing_we_know", "rejected"),
    ],
)
def test_which_rule_applies(name: str | None, kind: str) -> None:
    verdict = classify_backend(name)
    assert verdict.kind == kind
    assert verdict.accepted == (kind != "rejected")
    assert verdict.reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sage", "SageAttention quantises its operands and has no deterministic backward"),
        ("xformers", "xFormers' memory-efficient backward may add with atomics and cannot be told not to"),
        (
            "flex",
            "FlexAttention's kernels come from Inductor's templates, which neither torch's flags nor the pin cover",
        ),
        ("aiter_fa2_hub", "AITER's kernels have no deterministic switch that this mode can set"),
        ("mystery", "nothing is known about a backend of this name"),
    ],
)
def test_a_rejected_backend(name: str, reason: str) -> None:
    with pytest.raises(DeterminismError) as caught:
        check_attention_backend(name)
    assert str(caught.value) == (
        "deterministic mode refuses this attention backend: the attention backend must be one of math, *flash*, "
        "native, "
        f"sdpa, eager, got {name!r} ({reason}): choose another backend, or register this one "
        "(register_attention_backend) if you know it to be bit-exact"
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [(["sage", "math"], "list"), ({"sage": "math"}, "dict"), (("math",), "tuple"), (b"math", "bytes"), (0, "int")],
)
@pytest.mark.parametrize("library", [None, "transformer_engine"])
def test_what_is_no_name_is_rejected(name: Any, kind: str, library: Any) -> None:
    verdict = classify_backend(name, library=library)
    assert (verdict.kind, verdict.reason) == (
        "rejected",
        f"a backend is named by a string or an enumeration member, not by {kind}",
    )
    with pytest.raises(DeterminismError, match=f"not by {kind}"):
        check_attention_backend(name, library=library)


@pytest.mark.parametrize("member", list(Numbered))
def test_a_member_whose_value_is_no_name_is_only_the_librarys(member: Numbered) -> None:
    assert classify_backend(member, library="transformer_engine").accepted
    verdict = classify_backend(member)
    assert (verdict.kind, verdict.reason) == (
        "rejected",
        f"the enumeration member {member} has a value that is no name, so no rule for names applies to it",
    )


def test_an_accepted_backend_is_returned() -> None:
    assert check_attention_backend("math").kind == "math"


@pytest.mark.parametrize("name", ["flash", "fused", "unfused", "auto", None])
def test_transformer_engine_under_its_variable(name: str | None) -> None:
    env = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    verdict = classify_backend(name, library="transformer_engine", env=env)
    assert verdict.kind == "transformer_engine"
    assert verdict.accepted


@pytest.mark.parametrize(("env", "got"), [({}, "unset"), ({"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}, "'1'")])
def test_transformer_engine_without_its_variable(env: dict[str, str], got: str) -> None:
    verdict = classify_backend("flash", library="transformer_engine", env=env)
    assert (verdict.kind, verdict.reason) == (
        "rejected",
        f"Transformer Engine needs NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 for it, got {got}",
    )


def test_a_caller_registers_a_backend() -> None:
    unregister = register_attention_backend("_Native_Flash", "native", reason="torch's own kernel in this model")
    try:
        assert classify_backend("_native_flash").kind == "native"
        assert classify_backend("_native_flash").reason == "torch's own kernel in this model"
        assert [verdict.name for verdict in registered_attention_backends()] == ["_Native_Flash"]
        again = register_attention_backend("_native_flash", "rejected", reason="no more")
        assert classify_backend("_native_flash").kind == "rejected"
        again()
        assert classify_backend("_native_flash").kind == "native"
    finally:
        unregister()
    assert classify_backend("_native_flash").kind == "flash"


def test_a_registration_is_checked() -> None:
    with pytest.raises(DeterminismError) as caught:
        register_attention_backend("mine", "fast", reason="")  # type: ignore[arg-type]
    assert caught.value.problems == (
        "the kind of an attention backend must be one of math, flash, native, transformer_engine, rejected, got 'fast' "
        "(it "
        "chooses the treatment): use one of them",
        "an attention backend needs a name and a reason, got 'mine' and ''",
    )


def test_a_driver_classifies_without_torch() -> None:
    program = (
        "import sys; from tuning.determinism import classify_backend, spawn_env, doctor\n"
        "print(classify_backend('flash').kind, spawn_env({})['NCCL_ALGO'])\n"
        "assert not {'torch', 'triton'} & set(sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (out.stdout, out.stderr) == ("flash Ring\n", "")
