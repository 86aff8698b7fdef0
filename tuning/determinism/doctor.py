"""What deterministic mode would set, accept and refuse here, as rows; nothing is changed or imported for it.

A row is plain data, so that the command line can print it as a table and as JSON. torch and other packages are looked
at only as far as they are imported already or their metadata is on disk.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from types import MappingProxyType
from typing import Any, Literal

from tuning.determinism.arguments import argument_gates, examine_arguments
from tuning.determinism.attention import classify_backend
from tuning.determinism.candidates import REDUCERS, reduced_kernels
from tuning.determinism.causal_conv1d import MINIMUM_VERSION, causal_conv1d_problem
from tuning.determinism.environment import examine_environment
from tuning.determinism.fla_replacement import PARTS, FlaReplacement
from tuning.determinism.kernel_checks import registered_kernel_checks
from tuning.determinism.lateness import nccl_group, too_late
from tuning.spec import Json

__all__ = ["DoctorReport", "DoctorRow", "RowStatus", "doctor"]

RowStatus = Literal["set", "accepted", "refused", "warning", "unset", "info"]
"""``set``: the mode would set it; ``accepted``: it is fine as it is; ``refused``: the mode would refuse to start;
``warning``: accepted, with something to know; ``unset``: fine unset, and left so; ``info``: for the reader only."""


@dataclass(frozen=True)
class DoctorRow:
    """One line of the report.

    Attributes:
        section: what it belongs to, such as ``environment``.
        name: the variable, option, flag or package.
        status: what the mode makes of it.
        found: what is there now, as text; empty where nothing is.
        becomes: what the mode would make of it; empty where it would leave it.
        reason: why, and for a refusal what to do.
    """

    section: str
    name: str
    status: RowStatus
    found: str
    becomes: str
    reason: str

    def cells(self) -> tuple[str, str, str, str, str, str]:
        """The row as six texts: section, name, status, found, becomes, reason."""
        return (self.section, self.name, self.status, self.found, self.becomes, self.reason)


@dataclass(frozen=True)
class DoctorReport:
    """Everything that :func:`doctor` looked at, in order."""

    rows: tuple[DoctorRow, ...]

    @property
    def refused(self) -> tuple[DoctorRow, ...]:
        """The rows because of which the mode would not start."""
        return tuple(row for row in self.rows if row.status == "refused")

    @property
    def verdict(self) -> str:
        """The result in one line."""
        if self.refused:
            names = ", ".join(row.name for row in self.refused)
            return f"deterministic mode would be refused here, because of {len(self.refused)}: {names}"
        count = sum(row.status == "set" for row in self.rows)
        return f"deterministic mode would start here and set {count} values"

    def to_json(self) -> Json:
        """JSON form."""
        names = ("section", "name", "status", "found", "becomes", "reason")
        return {
            "refused": bool(self.refused),
            "verdict": self.verdict,
            "rows": [dict(zip(names, row.cells(), strict=True)) for row in self.rows],
        }


def _environment(env: Mapping[str, str]) -> Iterator[DoctorRow]:
    findings = examine_environment(env, at_worker_spawn=env is not os.environ or nccl_group() is None)
    for finding in findings:
        variable, found = finding.variable, finding.found
        accepted = variable.accepted.get(found or "", "")
        if finding.problem:
            status: RowStatus = "refused"
            reason = finding.problem
        elif finding.warnings:
            status, reason = "warning", "; ".join(finding.warnings)
        elif finding.fill is not None:
            status, reason = "set", f"{variable.why}; {finding.fill}: {variable.accepted[finding.fill]}"
        elif found is None:
            status, reason = "unset", variable.why
        else:
            status, reason = "accepted", accepted or variable.why
        yield DoctorRow("environment", variable.name, status, found or "", finding.fill or "", reason)
    if env is os.environ:
        for problem in too_late([finding.variable.name for finding in findings if finding.fill is not None]):
            yield DoctorRow("environment", problem.partition(" must ")[0], "refused", "too late", "", problem)


def _arguments(args: Any) -> Iterator[DoctorRow]:
    if args is None:
        for gate in argument_gates():
            yield DoctorRow("arguments", gate.name, "info", "", "", f"must be {gate.required!r}: {gate.reason}")
        return
    for finding in examine_arguments(args):
        gate = finding.gate
        found = repr(finding.found) if finding.present else ""
        if finding.present and finding.decided_by != gate.name:
            found += f" ({finding.decided_by})"
        status: RowStatus = "refused" if finding.problem else "accepted" if finding.present else "unset"
        yield DoctorRow("arguments", gate.name, status, found, "", finding.problem or gate.reason)


_TORCH_WHY = MappingProxyType(
    {
        "deterministic_algorithms": "ops take their deterministic form, or raise where there is none",
        "warn_only": "a warning would leave attention's nondeterministic backward on",
        "cudnn_deterministic": "only deterministic convolutions",
        "cudnn_benchmark": "no convolution algorithm is chosen by a stopwatch",
        "fill_uninitialized_memory": "filling unwritten memory costs time and changes no correct result",
    }
)


def _torch() -> Iterator[DoctorRow]:
    from tuning.determinism.torch_flags import TorchFlags, read_torch_flags

    now = read_torch_flags() if "torch" in sys.modules else None
    wanted = TorchFlags()
    for name, reason in _TORCH_WHY.items():
        value = getattr(wanted, name)
        found = "" if now is None else str(getattr(now, name))
        same = found == str(value)
        yield DoctorRow("torch", name, "accepted" if same else "set", found, "" if same else str(value), reason)


def _attention(name: str | Enum | None, library: Any, env: Mapping[str, str]) -> Iterator[DoctorRow]:
    filled = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", **env}
    verdict = classify_backend(name, library=library, env=filled)
    status: RowStatus = "refused" if verdict.problem else "set" if verdict.kind == "flash" else "accepted"
    becomes = "deterministic=True" if verdict.kind == "flash" else ""
    yield DoctorRow("attention", "backend", status, verdict.name or "", becomes, verdict.problem or verdict.reason)


_PACKAGES = (
    "torch", "triton", "transformer-engine", "megatron-core", "mamba-ssm", "fla-core", "flash-attn", "flash-attn-3",
    "diffusers",
)  # fmt: skip


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _packages() -> Iterator[DoctorRow]:
    for name in _PACKAGES:
        found = _version(name)
        if found is not None:
            yield DoctorRow("packages", name, "info", found, "", "installed")
    problem = causal_conv1d_problem(required=False)
    found = _version("causal-conv1d")
    if found is not None:
        text = f"{MINIMUM_VERSION} and later have a deterministic backward"
        yield DoctorRow("packages", "causal-conv1d", "refused" if problem else "accepted", found, "", problem or text)
    if _version("fla-core") is not None:
        problems = FlaReplacement().problems()
        parts = ", ".join(part.name for part in PARTS)
        yield DoctorRow(
            "packages", "fla (gated delta nets)", "refused" if problems else "set", "autotuned kernels",
            "" if problems else "torch-native", "; ".join(problems) or f"replaced while the mode is on: {parts}",
        )  # fmt: skip


def _kernels() -> Iterator[DoctorRow]:
    for reducer in REDUCERS:
        reduced = reduced_kernels(reducer)
        if reduced:
            yield DoctorRow(
                "kernels", reducer.package, "warning", f"{len(reduced)} kernels with one candidate", "",
                f"reduced at import, and slower for it: {', '.join(reduced)}; turn the mode on before importing them",
            )  # fmt: skip
        elif _version(reducer.package.partition(".")[0].replace("_", "-").replace("megatron", "megatron-core")):
            yield DoctorRow(
                "kernels", reducer.package, "set", "", "candidates stay whole",
                f"{reducer.module}, where it exists, would keep one candidate; pinning makes that unnecessary",
            )  # fmt: skip
    for package in registered_kernel_checks():
        yield DoctorRow("kernels", package, "info", "", "", "its kernel check runs when a worker turns the mode on")


def doctor(
    env: Mapping[str, str] | None = None,
    *,
    args: Any = None,
    attention_backend: str | Enum | None = None,
    attention_library: Literal["transformer_engine"] | None = None,
) -> DoctorReport:
    """What the mode would set, accept and refuse, for this environment and these packages.

    Args:
        env: the environment; None means that of this process.
        args: a framework's parsed arguments, or None, which lists the gates instead.
        attention_backend: name of the attention backend; None for torch's own.
        attention_library: ``transformer_engine`` where that name is one of its own.
    """
    environment: Mapping[str, str] = os.environ if env is None else env
    return DoctorReport(
        (
            *_environment(environment),
            *_arguments(args),
            *_torch(),
            *_attention(attention_backend, attention_library, environment),
            *_packages(),
            *_kernels(),
        )
    )
