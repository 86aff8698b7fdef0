"""Probe: which candidates of a kernel compute the same bits, observed by running them all on the same arguments.

While a training step runs, every launch of an autotuner in scope that has a new kernel, key or form is replayed, on
copies, with each candidate on several inputs (:mod:`tuning.bitexact._probe_replay`); the run itself goes on as ever.
Candidates that left the same bytes everywhere are one *bit class*. That is an observation on so many inputs and never a
proof, and it is bound to the arch, the kernel's source, the compiler, the key and the form of the launch.

A replay is not felt by the run as far as it works on its arguments. A config's ``pre_hook`` runs for each replay, too:
what it changes besides the arguments and the state of random numbers, it changes as often. Nothing is replayed while a
graph is captured, nor where a kernel makes pointers of integers (:mod:`tuning._launch_pointers`).

A kernel whose caller reads ``best_config`` (mamba_ssm's backward sizes its reductions by it) writes outputs that mean
nothing alone. Nothing is claimed of it unless the caller's outputs are compared: :func:`probe_steps` runs the whole
step once for each of its candidates.

**File.** JSON, versioned, one key to a line: it is reviewed and compared like a table. The alternative, classes in
tables alone, has no room for distances, failures and what each claim rests on.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tuning._atomic import write_atomically
from tuning._launch_replay import Reached, compiler_identity, watch_launches
from tuning.bitexact._probe_classes import (
    CandidateProbe,
    Distance,
    InputProbe,
    KeyProbe,
    comparable,
    contradictions,
    deciding_fields,
)
from tuning.bitexact._probe_compare import Pair, compare_probes
from tuning.bitexact._probe_replay import replay
from tuning.bitexact._probe_steps import probe_steps
from tuning.bitexact._probe_tables import write_classes
from tuning.errors import DeterminismError, TableError
from tuning.interception import device_facts
from tuning.spec import Json, LaunchConfig

__all__ = [
    "CandidateProbe",
    "Distance",
    "InputProbe",
    "KeyProbe",
    "Pair",
    "Probe",
    "comparable",
    "compare_probes",
    "contradictions",
    "deciding_fields",
    "probe_launches",
    "probe_steps",
    "read_probe",
    "write_classes",
    "write_probe",
]

logger = logging.getLogger("tuning.bitexact")

_FORMAT = "triton-tuning probe"
_VERSION = 1
_MAX_BYTES = 256 << 20
_HEADER = ("format", "schema_version", "arch", "device", "multiprocessors", "compiler")


@dataclass
class Probe:
    """What one process's probe found.

    Attributes:
        arch, device, multiprocessors, compiler: where, and by which compiler.
        keys: what was found, in the order of launch.
        incomplete: why the program was not probed to its end; empty where it was.
        watch_again: while launches are probed: to call once another policy has been installed, which stands above.
    """

    arch: str = ""
    device: str = ""
    multiprocessors: int = 0
    compiler: str = ""
    keys: list[KeyProbe] = field(default_factory=list)
    incomplete: str = ""
    watch_again: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels, sorted."""
        return tuple(sorted({each.kernel for each in self.keys}))

    def of(self, kernel: str) -> tuple[KeyProbe, ...]:
        """What was found for one kernel."""
        return tuple(each for each in self.keys if each.kernel == kernel)

    @property
    def config_invariant(self) -> tuple[str, ...]:
        """Kernels for which ``config_invariant`` may be proposed: no difference was observed at any of their launches.

        A name in that list frees the kernel for every key, and the observation is one of the keys that were run.
        """
        return tuple(name for name in self.kernels if all(each.single for each in self.of(name)))

    def contradicted(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Of these ``config_invariant`` names, those of which some launch showed a difference; a line each."""
        return tuple(
            f"{name} is listed in config_invariant, but [{each.key}]: {each.verdict}"
            for name in names
            for each in self.of(name)
            if each.claims and not each.single
        )

    def replace(self, probes: tuple[KeyProbe, ...]) -> None:
        """Put better evidence in the place of what was found for the same launches."""
        better = {each.place: each for each in probes}
        self.keys = [better.pop(each.place, each) for each in self.keys] + list(better.values())

    def to_json(self) -> Json:
        """JSON form."""
        values = {name: getattr(self, name) for name in _HEADER[2:]}
        if self.incomplete:
            values["incomplete"] = self.incomplete
        return {"format": _FORMAT, "schema_version": _VERSION, **values, "keys": [each.to_json() for each in self.keys]}


def write_probe(path: str | os.PathLike[str], probe: Probe) -> None:
    """Write a probe's file whole.

    Raises:
        TableError: it cannot be written.
    """
    data = probe.to_json()
    head = "".join(f"{json.dumps(name)}: {json.dumps(data[name])},\n" for name in data if name != "keys")
    rows = ",\n".join(json.dumps(row, allow_nan=False) for row in data["keys"])
    try:
        write_atomically(Path(path), ("{\n" + head + '"keys": [\n' + rows + "\n]\n}\n").encode())
    except OSError as error:
        expected, found = "a place that can be written", error.strerror or str(error)
        message = f"{os.fspath(path)}: expected {expected}, found {found}"
        raise TableError(message, file=os.fspath(path), expected=expected, found=found) from error


def read_probe(path: str | os.PathLike[str]) -> Probe:
    """Read a probe's file.

    Raises:
        TableError: it cannot be read, or is none; it says where.
    """
    file = os.fspath(path)

    def fail(where: str, expected: str, found: str) -> TableError:
        return TableError(
            f"{file}: {where}: expected {expected}, found {found}; give a file that `probe --out` wrote",
            file=file,
            where=where,
            expected=expected,
            found=found,
        )

    try:
        # Looked at before it is opened: opening a named pipe would wait for a writer that may never come.
        state = os.stat(file)
        if not stat.S_ISREG(state.st_mode):
            raise fail("$", "a regular file", "a folder" if stat.S_ISDIR(state.st_mode) else "something else")
        with open(file, "rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise fail("$", "a file that can be read", getattr(error, "strerror", None) or str(error)) from error
    if len(content) > _MAX_BYTES:
        raise fail("$", f"at most {_MAX_BYTES} bytes", f"{max(state.st_size, len(content))}")
    try:
        data = json.loads(content, object_pairs_hook=_members, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise fail("$", "JSON", " ".join(str(error).split())[:200]) from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise fail("$.format", json.dumps(_FORMAT), "something else")
    if data.get("schema_version") != _VERSION:
        raise fail("$.schema_version", str(_VERSION), json.dumps(data.get("schema_version"))[:80])
    incomplete = data.get("incomplete", "")
    if type(incomplete) is not str:
        raise fail("$.incomplete", "a str", json.dumps(incomplete)[:80])
    unknown = data.keys() - {*_HEADER, "keys", "incomplete"}
    if unknown:
        raise fail("$", "the members of a probe", f"also {json.dumps(min(unknown))[:80]}")
    kinds = {"arch": str, "device": str, "multiprocessors": int, "compiler": str, "keys": list}
    for name, kind in kinds.items():
        if type(data.get(name)) is not kind:
            raise fail(f"$.{name}", f"a {kind.__name__}", json.dumps(data.get(name))[:80])
    rows = [KeyProbe.from_json(row, f"$.keys[{index}]", file) for index, row in enumerate(data["keys"])]
    return Probe(**{name: data[name] for name in _HEADER[2:]}, keys=rows, incomplete=incomplete)


def _members(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a member that stands twice in one object")
    return found


def _no_number(text: str) -> Json:
    raise ValueError(f"{text}, which is no number")


@contextmanager
def probe_launches(
    in_scope: Callable[[str], bool],
    *,
    inputs: int = 5,
    repeats: int = 2,
    against: Probe | None = None,
    progress: Callable[[KeyProbe], None] | None = None,
) -> Iterator[Probe]:
    """Probe every launch in scope, once for each kernel, key and form, while the block runs.

    Args:
        in_scope: by qualified name of the kernel.
        inputs: how many inputs each candidate is run on: as captured, then random ones and wide magnitudes in turn.
        repeats: how often each candidate is run on the captured input, to find those that differ from themselves.
        against: an earlier probe; a launch that contradicts it is not carried out.
        progress: told of each launch that was probed.

    Yields:
        The probe, which fills as the block runs.

    Raises:
        DeterminismError: out of the launch: it contradicts the earlier probe.
        ValueError: a count is not positive.
    """
    if inputs < 1 or repeats < 1:
        raise ValueError(f"inputs and repeats: expected positive numbers, got {inputs} and {repeats}")
    probe = Probe()
    seen: set[tuple[str, str, str]] = set()

    def reached(launch: Reached) -> None:
        place = (launch.kernel.qualified_name, launch.key.text, launch.form)
        if place in seen:
            return
        seen.add(place)
        if not probe.compiler:
            probe.compiler, probe.arch = compiler_identity(), launch.arch
            probe.device, probe.multiprocessors = device_facts()
        found = _replayed(launch, probe.compiler, inputs, repeats)
        probe.keys.append(found)
        if progress is not None:
            progress(found)
        lines = contradictions(against.keys, [found]) if against is not None else ()
        if lines:
            raise DeterminismError(f"bit classes are contradicted: {'; '.join(lines)}. Probe anew, and pin until then")

    with watch_launches(in_scope, reached) as probe.watch_again:
        yield probe


def _replayed(launch: Reached, compiler: str, inputs: int, repeats: int) -> KeyProbe:
    try:
        return replay(launch, compiler, inputs=inputs, repeats=repeats)
    except Exception as error:
        # The run goes on with the launch itself: where the fault is the caller's, it meets it there.
        reason = f"a replay failed with {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        logger.warning("%s [%s]: %s", launch.kernel.qualified_name, launch.key, reason)
        return _unclaimed(launch, compiler, reason)


def _unclaimed(launch: Reached, compiler: str, reason: str) -> KeyProbe:
    configs = sorted(map(LaunchConfig.of, launch.candidates()), key=lambda config: config.order)
    name, source = launch.kernel.qualified_name, launch.kernel.source_hash
    candidates = tuple(CandidateProbe(config, None) for config in configs)
    return KeyProbe(name, source, launch.key, launch.form, launch.arch, compiler, "nothing", reason, candidates)
