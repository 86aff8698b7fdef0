"""The environment of deterministic mode: one test for each row of its table, and for each refusal its whole message."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from tuning.determinism.environment import (
    VARIABLES,
    apply_determinism_env,
    examine_environment,
    file_system_of,
    spawn_env,
)
from tuning.errors import DeterminismError

FILLED = {
    "NCCL_ALGO": "Ring",
    "NCCL_EP_HT_EM_AG_SCAN_MODE": "1",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}

ACCEPTED = [
    ("NCCL_ALGO", "Ring"),
    ("NCCL_ALGO", "CollnetDirect"),
    ("NCCL_ALGO", "CollnetChain"),
    ("NCCL_ALGO", "^NVLS"),
    ("NCCL_ALGO", "Ring,CollnetDirect, CollnetChain"),
    ("NCCL_ALGO", "ring"),
    ("NCCL_DETERMINISTIC", "1"),
    ("NCCL_EP_HT_EM_AG_SCAN_MODE", "1"),
    ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"),
    ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
    ("CUBLAS_WORKSPACE_CONFIG", ":16:8"),
    ("TRITON_CACHE_AUTOTUNING", "0"),
    ("TRITON_CACHE_DIR", "/anywhere"),
    ("TRITON_PRINT_AUTOTUNING", "1"),
    ("MAMBA_DETERMINISTIC", "1"),
    ("MAMBA_DETERMINISTIC", "1 (yes)"),
    ("MAMBA_DETERMINISTIC", ""),
    ("CAUSAL_CONV1D_DETERMINISTIC", "1"),
    ("CAUSAL_CONV1D_DETERMINISTIC", ""),
]

NCCL = "NCCL_ALGO (a comma-separated list) must be one of Ring, CollnetDirect, CollnetChain, ^NVLS, got "
REFUSED = [
    (
        "NCCL_ALGO",
        "Tree",
        NCCL
        + "'Tree' (Tree: the order of its reductions is not under the user's control): unset it and it becomes Ring",
    ),
    (
        "NCCL_ALGO",
        "Ring,NVLS,Fast",
        NCCL
        + "'Ring,NVLS,Fast' (NVLS: the NVLink switch adds in an order that is not under the user's control; not known "
        "to be bit-exact): unset it and it becomes Ring",
    ),
    (
        "NCCL_ALGO",
        "NVLSTree",
        NCCL
        + "'NVLSTree' (NVLSTree: the order of its reductions is not under the user's control): unset it and it becomes "
        "Ring",
    ),
    ("NCCL_ALGO", "PAT", NCCL + "'PAT' (PAT: not known to be bit-exact): unset it and it becomes Ring"),
    ("NCCL_ALGO", "", NCCL + "'' (not known to be bit-exact): unset it and it becomes Ring"),
    (
        "NCCL_DETERMINISTIC",
        "0",
        "NCCL_DETERMINISTIC must be one of 1, got '0' (lets NCCL use reductions whose order varies): unset it and it "
        "becomes "
        "1",
    ),
    (
        "NCCL_EP_HT_EM_AG_SCAN_MODE",
        "0",
        "NCCL_EP_HT_EM_AG_SCAN_MODE must be one of 1, got '0' (tokens arrive at an expert in the order of arrival): "
        "unset it "
        "and it becomes 1",
    ),
    (
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "1",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO must be one of 0, got '1' (Transformer Engine reads it as an integer, and "
        "anything "
        "but 0 allows nondeterministic algorithms): unset it and it becomes 0",
    ),
    (
        "CUBLAS_WORKSPACE_CONFIG",
        ":0:0",
        "CUBLAS_WORKSPACE_CONFIG must be one of :4096:8, :16:8, got ':0:0' (only these two workspaces are documented "
        "as "
        "deterministic): unset it and it becomes :4096:8",
    ),
    (
        "TRITON_CACHE_AUTOTUNING",
        "yes",
        "TRITON_CACHE_AUTOTUNING must be one of 0, 1, got 'yes' (Triton knows no other value): unset it",
    ),
    (
        "TRITON_PRINT_AUTOTUNING",
        "0",
        "TRITON_PRINT_AUTOTUNING must be one of 1, got '0' (Triton knows no other value that switches it on): unset it",
    ),
    (
        "MAMBA_DETERMINISTIC",
        "0",
        "MAMBA_DETERMINISTIC must be one of 1..., got '0' (switches mamba_ssm's deterministic reductions off although "
        "torch's flag is on): unset it",
    ),
    (
        "CAUSAL_CONV1D_DETERMINISTIC",
        "true",
        "CAUSAL_CONV1D_DETERMINISTIC must be one of 1..., got 'true' (switches causal_conv1d's deterministic backward "
        "off, "
        "or is a value that it does not read): unset it",
    ),
]
NO_CACHE_DIR = (
    "TRITON_CACHE_DIR must be a path on a file system that all nodes share where TRITON_CACHE_AUTOTUNING=1, got "
    "nothing "
    "(there is no safe default: each node would keep timings of its own): set it, or unset TRITON_CACHE_AUTOTUNING"
)


def test_the_table_has_these_rows() -> None:
    assert [variable.name for variable in VARIABLES] == list(dict.fromkeys(name for name, _ in ACCEPTED))


def test_an_empty_environment_gets_the_defaults() -> None:
    env: dict[str, str] = {}
    report = apply_determinism_env(env)
    assert env == FILLED
    assert (dict(report.filled), dict(report.kept), report.warnings) == (FILLED, {}, ())


def test_applying_twice_changes_nothing_more() -> None:
    env: dict[str, str] = {}
    apply_determinism_env(env)
    assert dict(apply_determinism_env(env).filled) == {}
    assert env == FILLED


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_a_value_that_is_set_and_accepted_wins(name: str, value: str) -> None:
    env = {name: value}
    report = apply_determinism_env(env)
    assert env == {**FILLED, name: value}
    assert dict(report.kept) == {name: value}


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_a_refused_value(name: str, value: str, message: str) -> None:
    env = {name: value}
    with pytest.raises(DeterminismError) as caught:
        apply_determinism_env(env)
    assert str(caught.value) == f"deterministic mode refuses this environment: {message}"
    assert caught.value.problems == (message,)
    assert env == {name: value}


def test_every_accepted_value_has_a_reason_and_so_has_every_other() -> None:
    for variable in VARIABLES:
        assert variable.why
        assert variable.accepted
        assert all(variable.accepted.values())
        assert variable.any_value or variable.otherwise


def test_all_problems_are_in_one_error_and_nothing_is_filled() -> None:
    env = {"NCCL_ALGO": "Tree", "CUBLAS_WORKSPACE_CONFIG": ":0:0", "TRITON_CACHE_AUTOTUNING": "1"}
    before = dict(env)
    with pytest.raises(DeterminismError) as caught:
        apply_determinism_env(env)
    first, second = REFUSED[0][2], REFUSED[8][2]
    assert str(caught.value) == (
        f"deterministic mode refuses this environment: 3 problems: (1) {first}; (2) {second}; (3) {NO_CACHE_DIR}"
    )
    assert caught.value.problems == (first, second, NO_CACHE_DIR)
    assert env == before
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.problems) == (str(caught.value), caught.value.problems)


def test_the_autotuning_cache_needs_a_folder() -> None:
    with pytest.raises(DeterminismError) as caught:
        apply_determinism_env({"TRITON_CACHE_AUTOTUNING": "1"})
    assert caught.value.problems == (NO_CACHE_DIR,)
    with pytest.raises(DeterminismError) as caught:
        apply_determinism_env({"TRITON_CACHE_AUTOTUNING": "1", "TRITON_CACHE_DIR": ""})
    assert caught.value.problems == (NO_CACHE_DIR.replace("got nothing", "got ''"),)


CACHED = {"TRITON_CACHE_AUTOTUNING": "1", "TRITON_CACHE_DIR": "/cache"}
CACHE_SCOPE = (
    "TRITON_CACHE_AUTOTUNING=1 affects only autotuners outside the pinned scope; "
    "pinned kernels never read Triton's cache"
)


@pytest.mark.parametrize(
    ("env", "kind", "expected"),
    [
        (
            {"NCCL_ALGO": "^NVLS,Ring"},
            "ext4",
            [
                "NCCL_ALGO='^NVLS,Ring' mixes ^NVLS with other names: NCCL reads ^ for the whole list, so a leading ^ "
                "excludes them all, and one further on is not understood; write ^NVLS alone, or the wanted names alone"
            ],
        ),
        (CACHED, "nfs4", [CACHE_SCOPE]),
        (
            CACHED,
            "ext4",
            [
                CACHE_SCOPE,
                "TRITON_CACHE_DIR='/cache' is on a ext4 file system, which nodes do not share: each node then keeps "
                "timings of its own; use a shared file system, or pin those kernels",
            ],
        ),
        (
            CACHED,
            None,
            [
                CACHE_SCOPE,
                "TRITON_CACHE_DIR='/cache': cannot tell which file system it is on; with TRITON_CACHE_AUTOTUNING=1 it "
                "must "
                "be one that all nodes share",
            ],
        ),
        ({"TRITON_CACHE_DIR": "/cache"}, "ext4", []),
        (
            {"TRITON_PRINT_AUTOTUNING": "1"},
            "ext4",
            [
                "TRITON_PRINT_AUTOTUNING=1 shows only what Triton times, outside the pinned scope; for pinned kernels "
                "use "
                "the enumerator (enumerate_autotuners) and the verifier (verify_every)"
            ],
        ),
        ({"NCCL_ALGO": "^NVLS"}, "ext4", []),
    ],
)
def test_warnings(env: dict[str, str], kind: str | None, expected: list[str]) -> None:
    findings = examine_environment(env, file_system=lambda path: kind)
    assert [warning for finding in findings for warning in finding.warnings] == expected
    assert not any(finding.problem for finding in findings)


def test_warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="tuning"):
        report = apply_determinism_env({"NCCL_ALGO": "Ring,^NVLS"})
    assert len(report.warnings) == 1
    assert [record.getMessage() for record in caplog.records] == list(report.warnings)


def test_a_worker_gets_nccl_deterministic_too_and_the_base_stays_as_it_is() -> None:
    base = {"PATH": "/bin", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    env = spawn_env(base)
    assert env == {
        **FILLED, "PATH": "/bin", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_DETERMINISTIC": "1",
    }  # fmt: skip
    assert base == {"PATH": "/bin", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}


def test_a_worker_is_not_started_with_a_refused_environment() -> None:
    with pytest.raises(DeterminismError, match="NCCL_DETERMINISTIC must be one of 1, got '0'"):
        spawn_env({"NCCL_DETERMINISTIC": "0"})


def test_a_worker_finds_the_variables_before_its_own_code_runs() -> None:
    program = "import os; print(os.environ['NCCL_DETERMINISTIC'], os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    out = subprocess.run([sys.executable, "-c", program], env=spawn_env(os.environ), capture_output=True, text=True)
    assert (out.stdout, out.stderr) == ("1 :4096:8\n", "")


def test_a_variable_that_is_none_is_unset_and_is_filled() -> None:
    env: dict[str, Any] = {"NCCL_ALGO": None, "MAMBA_DETERMINISTIC": None}
    report = apply_determinism_env(env)
    assert env == {**FILLED, "MAMBA_DETERMINISTIC": None}
    assert (dict(report.filled), dict(report.kept)) == (FILLED, {})


def test_a_worker_gets_no_variable_that_is_none() -> None:
    base: dict[str, Any] = {"NCCL_ALGO": None, "NCCL_DETERMINISTIC": None, "MAMBA_DETERMINISTIC": None, "OTHER": None}
    assert spawn_env(base) == {**FILLED, "NCCL_DETERMINISTIC": "1"}
    assert set(base.values()) == {None}


@pytest.mark.parametrize("name", [variable.name for variable in VARIABLES])
@pytest.mark.parametrize(("value", "got"), [(1, "1 (int)"), (0, "0 (int)"), (b"1", "b'1' (bytes)"), ([], "[] (list)")])
def test_a_value_that_is_no_string(name: str, value: Any, got: str) -> None:
    env: dict[str, Any] = {name: value}
    message = (
        f"{name}: values of environment variables must be strings, got {got}: pass it as a string, or leave it out"
    )
    for function in (spawn_env, apply_determinism_env):
        with pytest.raises(DeterminismError) as caught:
            function(env)
        assert caught.value.problems == (message,)
    assert env == {name: value}


def test_values_that_are_no_strings_stand_in_the_one_error() -> None:
    env: dict[str, Any] = {
        "NCCL_ALGO": 3,
        "TRITON_CACHE_AUTOTUNING": "1",
        "TRITON_CACHE_DIR": 0,
        "NCCL_DETERMINISTIC": "0",
    }
    with pytest.raises(DeterminismError) as caught:
        spawn_env(env)
    assert [problem.split()[0] for problem in caught.value.problems] == [
        "NCCL_ALGO:", "NCCL_DETERMINISTIC", "TRITON_CACHE_DIR:",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("env", "kind"), [(5, "int"), (None, "NoneType"), ("NCCL_ALGO=Ring", "str"), ([("NCCL_ALGO", "Ring")], "list")]
)
@pytest.mark.parametrize(
    ("function", "expected"),
    [(spawn_env, "mapping"), (apply_determinism_env, "mutable mapping"), (examine_environment, "mapping")],
)
def test_an_environment_that_is_no_mapping(function: Any, expected: str, env: Any, kind: str) -> None:
    with pytest.raises(DeterminismError) as caught:
        function(env)
    assert str(caught.value) == (
        f"deterministic mode refuses this environment: the environment must be a {expected} of names to strings, got "
        f"{kind}: pass os.environ or a dictionary"
    )
    assert len(caught.value.problems) == 1


def test_an_environment_that_cannot_be_changed_is_no_place_to_fill() -> None:
    frozen: Any = MappingProxyType({"PATH": "/bin"})
    with pytest.raises(DeterminismError, match="must be a mutable mapping of names to strings, got mappingproxy"):
        apply_determinism_env(frozen)
    assert spawn_env(frozen)["NCCL_ALGO"] == "Ring"


def test_the_file_system_of_a_path(tmp_path: Any) -> None:
    assert file_system_of("/proc/self") == "proc"
    assert file_system_of(str(tmp_path / "not" / "there")) == file_system_of(str(tmp_path))


# -- too late --------------------------------------------------------------------------------------------------------


class FakeTorch(SimpleNamespace):
    def __init__(self, *, group: str | None = None, allocated: int | None = None) -> None:
        distributed = SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: group is not None,
            get_backend=lambda: "undefined",
            distributed_c10d=SimpleNamespace(_world=SimpleNamespace(pg_backend_config={object(): group})),
        )
        cuda = SimpleNamespace(
            is_available=lambda: allocated is not None,
            is_initialized=lambda: allocated is not None,
            device_count=lambda: 1,
            memory_stats=lambda device: {"allocation.all.allocated": allocated},
        )
        super().__init__(distributed=distributed, cuda=cuda)


TOO_LATE_NCCL = (
    "NCCL_ALGO, NCCL_EP_HT_EM_AG_SCAN_MODE must be set before the process group starts, got unset with a process group "
    "on "
    "cpu:gloo,cuda:nccl running (NCCL has read its environment): set them in the launcher (spawn_env), or turn the "
    "mode on "
    "before init_process_group"
)
TOO_LATE_CUBLAS = (
    "CUBLAS_WORKSPACE_CONFIG must be set before the first cuBLAS handle, got unset with CUDA in use (a handle may "
    "exist, "
    "and keeps the workspace it was created with): set it in the launcher (spawn_env), or turn the mode on before any "
    "work "
    "on the device"
)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process's own environment without the variables of the table, under a torch of one's choosing."""
    for variable in VARIABLES:
        monkeypatch.setenv(variable.name, "")  # recorded, so that what the test fills is taken away again
        monkeypatch.delenv(variable.name)

    def use(torch: FakeTorch) -> None:
        monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]

    return use


def refused_here() -> tuple[str, ...]:
    with pytest.raises(DeterminismError) as caught:
        apply_determinism_env(os.environ)
    assert not any(name in os.environ for name in FILLED)
    return caught.value.problems


def test_too_late_for_nccl(process: Any) -> None:
    process(FakeTorch(group="cpu:gloo,cuda:nccl"))
    assert refused_here() == (TOO_LATE_NCCL,)


def test_too_late_for_cublas(process: Any) -> None:
    process(FakeTorch(allocated=3))
    assert refused_here() == (TOO_LATE_CUBLAS,)


def test_too_late_for_both_is_one_error(process: Any) -> None:
    process(FakeTorch(group="cpu:gloo,cuda:nccl", allocated=3))
    assert refused_here() == (TOO_LATE_NCCL, TOO_LATE_CUBLAS)


@pytest.mark.parametrize("torch", [FakeTorch(), FakeTorch(group="cpu:gloo"), FakeTorch(allocated=0)])
def test_not_too_late(process: Any, torch: FakeTorch) -> None:
    process(torch)
    assert dict(apply_determinism_env(os.environ).filled) == FILLED


def test_what_the_launcher_has_set_is_not_too_late(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    process(FakeTorch(group="nccl", allocated=3))
    for name, value in FILLED.items():
        monkeypatch.setenv(name, value)
    assert dict(apply_determinism_env(os.environ).filled) == {}


def test_an_environment_for_somebody_else_is_never_too_late(process: Any) -> None:
    process(FakeTorch(group="nccl", allocated=3))
    assert spawn_env({})["NCCL_ALGO"] == "Ring"


def test_without_allocator_statistics_a_handle_is_assumed(process: Any) -> None:
    torch = FakeTorch(allocated=0)
    torch.cuda.memory_stats = lambda device: {}[device]
    process(torch)
    assert refused_here() == (TOO_LATE_CUBLAS,)
