"""Join what packages define with the manifests of a run: what was launched there, by which rules, from which files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ._autotuner_info import AutotunerInfo, State
from ._autotuner_join import note_shared_names, with_choices
from .errors import PolicyError, TableError
from .manifest import AutotunerUse, Launch, Manifest
from .policy import AutotunePolicy

__all__ = ["join_manifests", "policy_of"]

_STATES: dict[str, State] = {"pinned": "pinned", "recorded": "timed", "timed": "timed", "single": "singleton"}
_OUTSIDE = "outside the policy's modules"


def policy_of(manifests: Sequence[Manifest]) -> AutotunePolicy:
    """The policy of a run.

    Raises:
        TableError: the manifests are of different policies, or of a policy that this version does not know.
    """
    kept = ("mode", "modules", "config_invariant", "on_miss", "table_path")
    parts = [{name: manifest.policy.get(name) for name in kept} for manifest in manifests]
    if any(part != parts[0] for part in parts):
        raise TableError(
            "manifests: expected those of one run, found different policies; give the files of one run",
            expected="manifests of one policy",
            found="several policies",
        )
    try:
        # Not its tables: they are those of the run's machine, and what came from them stands in the choices. Nor its
        # record path, without which a policy in mode record is none; what is asked of this one is the scope.
        fields = {name: value for name, value in parts[0].items() if value is not None and name != "table_path"}
        fields["mode"] = "auto" if manifests[0].mode == "auto" else "pinned"
        return AutotunePolicy(**fields)
    except (PolicyError, TypeError) as error:
        raise TableError(
            f"manifest: run.policy: {error}; expected a policy of this version",
            expected="a policy of this version",
            found=str(error),
        ) from error


def join_manifests(infos: Iterable[AutotunerInfo], manifests: Sequence[Manifest]) -> list[AutotunerInfo]:
    """The list with what the run did with each autotuner; what the run launched and the list lacks is added. Pure.

    Args:
        infos: listed under the policy of :func:`policy_of`.
        manifests: one for each process.
    """
    infos = list(infos)
    uses: dict[str, AutotunerUse] = {}
    launches: dict[str, list[Launch]] = {}
    compiled: set[str] = set()
    for manifest in manifests:
        for use in manifest.autotuners:
            uses.setdefault(use.kernel, use)
        for launch in manifest.choices:
            launches.setdefault(launch.kernel, []).append(launch)
        compiled |= {message.partition(" ")[0] for kind, message in manifest.notices if kind == "compiled"}
    listed = {info.kernel for info in infos}
    joined = [_reached(info, uses.get(info.kernel)) for info in infos]
    for kernel in sorted((uses.keys() | launches.keys() | compiled) - listed):
        module = kernel.partition(".<locals>")[0].rpartition(".")[0]
        names = uses[kernel].key_names if kernel in uses else ()
        info = AutotunerInfo(kernel=kernel, module=module, candidates=(), key_names=names)
        joined.append(_reached(info, uses.get(kernel)))
    return note_shared_names(
        with_choices(info, launches.get(info.kernel, ()), info.kernel in compiled) for info in joined
    )


def _reached(info: AutotunerInfo, use: AutotunerUse | None) -> AutotunerInfo:
    if use is None:
        return info
    state = "outside scope" if use.reason == _OUTSIDE else _STATES[use.state]
    reason = use.reason or ("recorded by the run" if use.state == "recorded" else info.reason)
    return replace(info, reached=True, state=state, reason=reason)
