"""Environment variables of a bit-exact run: what is accepted, what is filled in, and why.

The environment is a mapping that the caller passes, usually ``os.environ`` or a copy for a worker. Everything is
validated first, all problems go into one error, and only then are unset variables filled: a value that is set and
accepted always wins. A variable whose value is None counts as unset; any other value that is no string is a problem.

NCCL reads its variables when a process group starts, cuBLAS its own when a handle is created, both in native code that
runs before a worker's Python can do much. So a launcher calls :func:`spawn_env` for its workers; inside a process it
can be too late, which is an error too (only where a variable still had to be filled: one that was set in time is
fine).

Sources: NCCL's and cuBLAS's reference pages for the variables' meaning; Megatron-LM's determinism page and
``megatron/training/determinism.py`` (megatron-core 0.19.2) for which algorithms were found bit-exact; the reader of
``CAUSAL_CONV1D_DETERMINISTIC`` in ``csrc/causal_conv1d.cpp`` (causal-conv1d 1.6.0) and of ``MAMBA_DETERMINISTIC`` in
``mamba_ssm/utils/determinism.py`` (mamba-ssm 2.3.2).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tuning.determinism.lateness import too_late
from tuning.determinism.refusal import one_of, refuse

__all__ = [
    "SHARED_FILE_SYSTEMS",
    "VARIABLES",
    "EnvironmentReport",
    "Variable",
    "VariableFinding",
    "apply_determinism_env",
    "environment_problems",
    "examine_environment",
    "file_system_of",
    "spawn_env",
]

logger = logging.getLogger("tuning.determinism")

_EMPTY: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Variable:
    """One row of the table.

    Attributes:
        name: the variable.
        why: why the mode cares about it.
        accepted: accepted value, and the reason why it is.
        refused: well-known refused value, and the reason why it is; any other value that is not accepted is refused
            for the reason ``otherwise``.
        otherwise: the reason against every other value.
        default: filled in where unset; None leaves it unset.
        spawn_default: filled in only for a process that has not started yet; None leaves it unset.
        is_list: the value is a comma-separated list of accepted values, in any case of letters.
        is_prefix: the accepted values are prefixes, and an empty value counts as unset.
        any_value: every value is accepted.
    """

    name: str
    why: str
    accepted: Mapping[str, str]
    refused: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    otherwise: str = ""
    default: str | None = None
    spawn_default: str | None = None
    is_list: bool = False
    is_prefix: bool = False
    any_value: bool = False

    def fill(self, *, at_worker_spawn: bool) -> str | None:
        """What an unset variable gets, or None."""
        return self.spawn_default if at_worker_spawn and self.spawn_default is not None else self.default

    def problem(self, value: object) -> str | None:
        """Why ``value`` is refused, in one sentence, or None where it is accepted."""
        if value is None:
            return None
        if not isinstance(value, str):
            return (
                f"{self.name}: values of environment variables must be strings, got {value!r} "
                f"({type(value).__name__}): pass it as a string, or leave it out"
            )
        if self.any_value:
            return None
        if self.is_prefix:
            ok = not value or value.startswith(tuple(self.accepted))
            bad: Sequence[str] = () if ok else (value,)
        elif self.is_list:
            known = {token.lower() for token in self.accepted}
            tokens = [token.strip() for token in value.split(",") if token.strip()]
            bad = [token for token in tokens if token.lower() not in known] if tokens else [value]
        else:
            bad = () if value in self.accepted else (value,)
        if not bad:
            return None
        reasons = {name.lower(): reason for name, reason in self.refused.items()}
        why = "; ".join(
            f"{token}: {reasons[token.lower()]}" if token.lower() in reasons else self.otherwise for token in bad
        )
        shown = [f"{text}..." for text in self.accepted] if self.is_prefix else list(self.accepted)
        name = f"{self.name} (a comma-separated list)" if self.is_list else self.name
        fill = self.default or self.spawn_default
        remedy = f"unset it and it becomes {fill}" if fill else "unset it"
        return one_of(name, shown, value, why, remedy)


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "NCCL_ALGO",
        why="the algorithm fixes the order in which ranks' values are added",
        accepted={
            "Ring": "one fixed order of ranks; bit-exact by construction",
            "CollnetDirect": "reduction in the switch (SHARP), found bit-exact on a fixed allocation",
            "CollnetChain": "reduction in the switch (SHARP), found bit-exact on a fixed allocation",
            "^NVLS": "excludes the NVLink switch; what remains was found bit-exact, though NCCL then chooses by itself",
        },
        refused={
            "Tree": "the order of its reductions is not under the user's control",
            "NVLS": "the NVLink switch adds in an order that is not under the user's control",
            "NVLSTree": "the order of its reductions is not under the user's control",
            "PAT": "not known to be bit-exact",
        },
        otherwise="not known to be bit-exact",
        default="Ring",
        is_list=True,
    ),
    Variable(
        "NCCL_DETERMINISTIC",
        why="read when the process group starts, so it must be there when a worker is spawned",
        accepted={"1": "NCCL keeps to deterministic reductions"},
        otherwise="lets NCCL use reductions whose order varies",
        spawn_default="1",
    ),
    Variable(
        "NCCL_EP_HT_EM_AG_SCAN_MODE",
        why="keeps expert token order",
        accepted={"1": "tokens arrive at an expert in a fixed order"},
        otherwise="tokens arrive at an expert in the order of arrival",
        default="1",
    ),
    Variable(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        why="Transformer Engine uses only deterministic attention and reductions",
        accepted={"0": "only deterministic algorithms"},
        otherwise="Transformer Engine reads it as an integer, and anything but 0 allows nondeterministic algorithms",
        default="0",
    ),
    Variable(
        "CUBLAS_WORKSPACE_CONFIG",
        why="with a fixed workspace cuBLAS is deterministic, also with several streams",
        accepted={
            ":4096:8": "eight buffers of 4 MiB, about 32 MiB a handle; large enough to leave cuBLASLt unconstrained",
            ":16:8": "eight buffers of 16 KiB; saves memory, and can make matrix products slower",
        },
        otherwise="only these two workspaces are documented as deterministic",
        default=":4096:8",
    ),
    Variable(
        "TRITON_CACHE_AUTOTUNING",
        why="affects only autotuners outside the pinned scope: a pinned kernel never consults Triton's cache",
        accepted={
            "0": "autotuners outside the pinned scope are timed in each process",
            "1": "they are timed once for each cache folder; needs TRITON_CACHE_DIR on a shared file system",
        },
        otherwise="Triton knows no other value",
    ),
    Variable(
        "TRITON_CACHE_DIR",
        why="has no safe default: unset, each node tunes on its own the autotuners outside the pinned scope",
        accepted={"any path": "on a file system that all nodes share, all nodes read one set of timings"},
        any_value=True,
    ),
    Variable(
        "TRITON_PRINT_AUTOTUNING",
        why="logs what Triton times, which is only what lies outside the pinned scope",
        accepted={"1": "shows the autotuners outside the pinned scope"},
        otherwise="Triton knows no other value that switches it on",
    ),
    Variable(
        "MAMBA_DETERMINISTIC",
        why="unset, mamba_ssm follows torch's flag, which the mode switches on",
        accepted={"1": "deterministic reductions in mamba_ssm's backward"},
        otherwise="switches mamba_ssm's deterministic reductions off although torch's flag is on",
        is_prefix=True,
    ),
    Variable(
        "CAUSAL_CONV1D_DETERMINISTIC",
        why="unset, causal_conv1d follows torch's flag, which the mode switches on",
        accepted={"1": "deterministic weight gradients in causal_conv1d"},
        otherwise="switches causal_conv1d's deterministic backward off, or is a value that it does not read",
        is_prefix=True,
    ),
)
"""The table, in the order in which it is checked and shown."""

SHARED_FILE_SYSTEMS = frozenset(
    {"afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "glusterfs", "gpfs", "lustre"}
    | {"nfs", "nfs4", "orangefs", "pvfs2", "smb3", "wekafs", "fuse.ceph", "fuse.weka", "vastnfs", "panfs"}
)
"""Linux file system types that several nodes can mount."""


def file_system_of(path: str) -> str | None:
    """Type of the file system that ``path`` lies, or would lie, on; None where that cannot be found out."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        wanted = Path(path).absolute()
        best: tuple[int, str] | None = None
        for line in mounts:
            fields, _, rest = line.partition(" - ")
            point = Path(fields.split()[4].encode().decode("unicode_escape"))
            if (point == wanted or point in wanted.parents) and (best is None or len(point.parts) >= best[0]):
                best = (len(point.parts), rest.split()[0])
    except (OSError, IndexError, UnicodeError):
        return None
    return best[1] if best else None


@dataclass(frozen=True)
class VariableFinding:
    """What the mode makes of one variable.

    Attributes:
        variable: the row of the table.
        found: the value that is set (of one that is no string, its ``repr``), or None.
        fill: the value that the mode sets because none is, or None.
        problem: why it is refused, or None.
        warnings: what to know although it is accepted.
    """

    variable: Variable
    found: str | None
    fill: str | None
    problem: str | None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class EnvironmentReport:
    """What :func:`apply_determinism_env` did.

    Attributes:
        filled: variables that were unset, and what they were set to.
        kept: variables of the table that were set already.
        warnings: what to know about them; each was logged too.
    """

    filled: Mapping[str, str]
    kept: Mapping[str, str]
    warnings: tuple[str, ...]


def _warnings(env: Mapping[str, str], name: str, file_system: Callable[[str], str | None]) -> list[str]:
    value = env.get(name)
    if not value:
        return []
    if name == "NCCL_ALGO" and "^" in value and "," in value:
        return [
            f"NCCL_ALGO={value!r} mixes ^NVLS with other names: NCCL reads ^ for the whole list, so a leading ^ "
            "excludes them all, and one further on is not understood; write ^NVLS alone, or the wanted names alone"
        ]
    if name == "TRITON_CACHE_AUTOTUNING" and value in ("0", "1"):
        return [
            f"TRITON_CACHE_AUTOTUNING={value} affects only autotuners outside the pinned scope; pinned kernels never "
            "read Triton's cache"
        ]
    if name == "TRITON_CACHE_DIR" and env.get("TRITON_CACHE_AUTOTUNING") == "1":
        kind = file_system(value)
        if kind is None:
            return [
                f"TRITON_CACHE_DIR={value!r}: cannot tell which file system it is on; with TRITON_CACHE_AUTOTUNING=1 "
                "it must be one that all nodes share"
            ]
        if kind not in SHARED_FILE_SYSTEMS:
            return [
                f"TRITON_CACHE_DIR={value!r} is on a {kind} file system, which nodes do not share: each node then "
                "keeps timings of its own; use a shared file system, or pin those kernels"
            ]
    if name == "TRITON_PRINT_AUTOTUNING" and value == "1":
        return [
            "TRITON_PRINT_AUTOTUNING=1 shows only what Triton times, outside the pinned scope; for pinned kernels use "
            "the enumerator (enumerate_autotuners) and the verifier (verify_every)"
        ]
    return []


def _require(env: object, kind: type, expected: str) -> None:
    if not isinstance(env, kind):
        refuse(
            "this environment",
            [
                f"the environment must be a {expected} of names to strings, got {type(env).__name__}: pass os.environ "
                "or a dictionary"
            ],
        )


def examine_environment(
    env: Mapping[str, str],
    *,
    at_worker_spawn: bool = False,
    file_system: Callable[[str], str | None] = file_system_of,
) -> tuple[VariableFinding, ...]:
    """What the mode makes of each variable of the table, changing nothing.

    Args:
        env: the environment.
        at_worker_spawn: it belongs to a process that has not started yet.
        file_system: gives the type of the file system of a path.

    Raises:
        DeterminismError: ``env`` is no mapping.
    """
    _require(env, Mapping, "mapping")
    findings = []
    for variable in VARIABLES:
        value: object = env.get(variable.name)  # what a caller built by hand need not hold strings
        problem = variable.problem(value)
        found = value if value is None or isinstance(value, str) else repr(value)
        if variable.name == "TRITON_CACHE_DIR" and env.get("TRITON_CACHE_AUTOTUNING") == "1" and not found:
            problem = (
                "TRITON_CACHE_DIR must be a path on a file system that all nodes share where "
                f"TRITON_CACHE_AUTOTUNING=1, got {'nothing' if found is None else repr(found)} (there is no safe "
                "default: each node would keep timings of its own): set it, or unset TRITON_CACHE_AUTOTUNING"
            )
        fill = variable.fill(at_worker_spawn=at_worker_spawn) if found is None else None
        warnings = () if problem else tuple(_warnings(env, variable.name, file_system))
        findings.append(VariableFinding(variable, found, fill, problem, warnings))
    return tuple(findings)


def environment_problems(env: Mapping[str, str], *, at_worker_spawn: bool = False) -> list[str]:
    """Everything for which the environment is refused, one sentence each; nothing is changed.

    For ``os.environ`` itself it is also a problem if it is too late to fill a variable.

    Raises:
        DeterminismError: ``env`` is no mapping.
    """
    findings = examine_environment(env, at_worker_spawn=at_worker_spawn)
    problems = [finding.problem for finding in findings if finding.problem]
    if env is os.environ:
        problems += too_late([finding.variable.name for finding in findings if finding.fill is not None])
    return problems


def apply_determinism_env(env: MutableMapping[str, str], *, at_worker_spawn: bool = False) -> EnvironmentReport:
    """Validate the whole environment, then fill what is unset.

    Args:
        env: the environment to complete: ``os.environ``, or a copy meant for a worker. Only for ``os.environ`` itself
            is it checked whether it is too late.
        at_worker_spawn: ``env`` belongs to a process that has not started yet; NCCL_DETERMINISTIC is then filled too.

    Returns:
        What was filled, what was there, and warnings, which are logged as well.

    Raises:
        DeterminismError: with every problem, or ``env`` is no mapping that can be changed; nothing has been changed
            then.
    """
    _require(env, MutableMapping, "mutable mapping")
    refuse("this environment", environment_problems(env, at_worker_spawn=at_worker_spawn))
    findings = examine_environment(env, at_worker_spawn=at_worker_spawn)
    filled = {finding.variable.name: finding.fill for finding in findings if finding.fill is not None}
    kept = {finding.variable.name: finding.found for finding in findings if finding.found is not None}
    for name, value in filled.items():
        env[name] = value
    warnings = tuple(warning for finding in findings for warning in finding.warnings)
    for warning in warnings:
        logger.warning("%s", warning)
    return EnvironmentReport(MappingProxyType(filled), MappingProxyType(kept), warnings)


def spawn_env(base: Mapping[str, str]) -> dict[str, str]:
    """The environment for a worker that a launcher (Ray, torchrun, ``subprocess``) is about to start.

    Args:
        base: the environment that the worker would get otherwise; it is not changed.

    Returns:
        A copy in which every variable is filled that must be there before the worker's own code runs. A variable whose
        value is None is unset, so it is left out: no process can be started with it.

    Raises:
        DeterminismError: with every problem of ``base``, or ``base`` is no mapping.
    """
    _require(base, Mapping, "mapping")
    env = {name: value for name, value in base.items() if value is not None}
    apply_determinism_env(env, at_worker_spawn=True)
    return env
