"""Run a program under a policy, its worker processes included, without a change to its code.

:func:`start` replaces this process by the program (``execve``), with two variables in its environment:
``TRITON_TUNING_RUN`` holds the policy, and ``PYTHONPATH`` begins with a folder of this package that holds a
``sitecustomize``. Python imports that in each process as it starts, whoever started it and however: ``torchrun``,
``multiprocessing`` by spawn or fork server, ``subprocess``, a Ray worker. A forked process inherits what its parent
has installed. The policy is installed as soon as Triton itself has been imported, before the import returns and so
before any kernel can be decorated; in deterministic mode, as soon as torch or Triton has been. A process that imports
neither is left alone.

Because the program takes this process over, its exit code, signals, terminal, process id, ``sys.argv``, ``__main__``
and ``sys.path`` are those that ``python`` would give it; and because the folder belongs to the package, there is
nothing to remove afterwards, not even after SIGKILL.

Weighed and left:

- running the program in this process (``runpy``): processes that it spawns start without the policy, and ``__main__``,
  pickles of its classes and ``multiprocessing`` see another main module;
- a ``.pth`` file in site-packages: reaches every process of the environment, whoever runs it, and is left behind;
- a private temporary folder on ``PYTHONPATH``: somebody has to remove it, which nobody does after SIGKILL, and a worker
  on another host does not have it;
- installing at the start of each process: imports Triton into resource trackers, launchers and data loaders, and
  before the program has set the variables that Triton reads at import.

Out of reach are processes that Python starts without its environment (``-I``, ``-E``), without site (``-S``), or with
an environment of their own making, be it only another ``PYTHONPATH``. Ray's workers have the environment of ``ray
start``, or of the driver where that starts Ray itself: for a cluster that runs already, pass the variables of
:func:`environment` in ``runtime_env={"env_vars": ...}``. Another host needs this package at the same place.

A process that imports Triton past our finder, because the program put another in front of it, says so as it ends.

A program that installs a policy itself, or uninstalls this one, has its way, as after any second ``install``: its code
says what it wants, and who runs it can give it the flags. That it did is a warning, which names both policies, and
stands in the manifest and in the last line about it. A program that has another package named ``tuning`` keeps that:
this one is then loaded under another name (:mod:`tuning._program_beside`).
"""

from __future__ import annotations

import argparse
import atexit
import json
import logging
import os
import shutil
import stat
import sys
import time
import zipfile
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from .arguments import add_arguments, policy_from_args, policy_to_argv
from .errors import PolicyError, TuningError
from .installation import Installation, active_installation, install, process_rank
from .manifest import read_manifest, write_manifest
from .policy import AutotunePolicy
from .tables import archs_in, load_tables

__all__ = ["VARIABLE", "command_line", "environment", "report", "start", "take_part"]

VARIABLE = "TRITON_TUNING_RUN"
logger = logging.getLogger("tuning")

_OWNER = "TRITON_TUNING_RUN_RANK"
_FOLDER = Path(__file__).with_name("_program_start")


# --- before the program -----------------------------------------------------------------------------------------------


def command_line(program: str, arguments: Sequence[str] = (), *, module: bool = False) -> list[str]:
    """The command that runs a program.

    Python programs are run by this Python, with the options that it was started with itself (``-O``, ``-X dev``, ``-W``
    and the like), but for those that would keep it from reading its environment (``-E``, ``-I``, ``-S``).

    Args:
        program: a Python program: a ``.py`` file, a folder or archive with a ``__main__``, a file whose first line
            names Python, or ``-`` for standard input; or a command: its name on ``PATH``, such as ``torchrun``, which
            goes before a file of that name in the current folder, or its path; a module's name with ``module``.
        arguments: what the program finds behind its name in ``sys.argv``.

    Raises:
        PolicyError: there is no such program.
    """
    python = [sys.executable, *_python_options()]
    if module:
        return [*python, "-m", program, *arguments]
    if program == "-" or (program.endswith((".py", ".pyc")) and os.path.isfile(program)):
        return [*python, program, *arguments]
    found = shutil.which(program) if os.sep not in program else None
    if found is not None:
        return [found, *arguments]
    if _read_by_python(program):
        return [*python, program, *arguments]
    if os.path.isfile(program) and os.access(program, os.X_OK):
        return [program if os.sep in program else os.path.join(os.curdir, program), *arguments]
    expected = "a Python file, or a command on PATH"
    if os.path.exists(program):
        kind = "a folder without __main__.py" if os.path.isdir(program) else "no Python file, and not executable"
        problem = f"{program!r} is {kind}"
    else:
        problem = f"{program!r} is neither a file nor a command"
    raise PolicyError(f"program: {problem}; expected {expected}; for a module use -m", value=program, expected=expected)


def _read_by_python(path: str) -> bool:
    """Whether a path that is not named like a Python file is one, by what it holds."""
    if os.path.isdir(path):
        return any(os.path.isfile(os.path.join(path, f"__main__.{suffix}")) for suffix in ("py", "pyc"))
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)  # as by <(...) of a shell: nothing else can run it
        with open(path, "rb") as file:
            first = file.readline(1000)
        if first.startswith(b"#!") and b"python" in first:
            return True
        if not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            return not {"__main__.py", "__main__.pyc"}.isdisjoint(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _python_options() -> list[str]:
    """The options that this Python was started with, as far as they may hold for the program's."""
    flags = sys.flags
    counts = {
        "d": flags.debug,
        "i": flags.interactive,
        "O": flags.optimize,
        "B": flags.dont_write_bytecode,
        "s": flags.no_user_site,
        "P": getattr(flags, "safe_path", False),
        "u": getattr(sys.__stdout__, "write_through", False),
        "b": flags.bytes_warning,
        "q": flags.quiet,
        "v": flags.verbose,
    }
    options = [f"-{letter * int(count)}" for letter, count in counts.items() if count]
    for name, value in sys._xoptions.items():
        options += ["-X", name if value is True else f"{name}={value}"]
    # These two are Python's own, made of -X dev and -b.
    implied = {"default"} if flags.dev_mode else set()
    implied |= {"error::BytesWarning", "default::BytesWarning"} if flags.bytes_warning else set()
    return options + [f"-W{word}" for word in sys.warnoptions if word not in implied]


def environment(
    policy: AutotunePolicy, *, deterministic: bool = False, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """``base`` (None: this process's environment) with what brings the policy into each Python process.

    Paths of the policy are made absolute: workers may run in other folders.

    Raises:
        DeterminismError: in deterministic mode, a variable has a value that the mode refuses.
    """
    env: MutableMapping[str, str] = dict(os.environ if base is None else base)
    if deterministic:
        from .determinism import apply_determinism_env

        apply_determinism_env(env, at_worker_spawn=True)
    policy = _absolute(policy)
    request = {
        "argv": policy_to_argv(policy),
        "deterministic": deterministic,
        "manifest": policy.manifest_path,
        "pid": os.getpid(),
        "since_ns": time.time_ns(),
    }
    env[VARIABLE] = json.dumps(request)
    env.pop(_OWNER, None)
    # An empty entry is the current folder, but an empty variable is none.
    path = env.get("PYTHONPATH")
    others = [entry for entry in path.split(os.pathsep) if entry != str(_FOLDER)] if path else []
    env["PYTHONPATH"] = os.pathsep.join([str(_FOLDER), *others])
    return dict(env)


def start(command: Sequence[str], policy: AutotunePolicy, *, deterministic: bool = False) -> NoReturn:
    """Become the program.

    Raises:
        PolicyError: a path of the policy cannot be used, or the command cannot be executed.
        TableError: a table of ``table_path`` is malformed or missing.
        DeterminismError: as :func:`environment`.
    """
    policy = _absolute(policy)
    for folder in policy.table_path:
        for arch in (archs_in(folder) if os.path.isdir(folder) else ()) or ("cpu",):
            load_tables(arch, policy.table_path)
    _require_places(policy)
    env = environment(policy, deterministic=deterministic)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(command[0], list(command), env)
    except OSError as error:
        raise PolicyError(
            f"program: {command[0]} cannot be executed ({error.strerror}); expected a program",
            value=command[0],
            expected="a program that can be executed",
        ) from error


def _require_places(policy: AutotunePolicy) -> None:
    """Refuse paths that no process could write to; each would find that out by itself, in the midst of the program."""
    manifest, record = policy.manifest_path, policy.record_path
    if manifest is not None and not _writable(os.path.dirname(manifest)):
        raise _no_place("manifest_path", manifest, "a file in a writable folder")
    if record is not None:
        folder = record if os.path.isdir(record) else os.path.dirname(record)
        while not os.path.lexists(folder):  # what is missing is created
            folder = os.path.dirname(folder)
        if not _writable(folder):
            raise _no_place("record_path", record, "a prefix in a folder that can be written or created")


def _writable(folder: str) -> bool:
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def _no_place(field: str, path: str, expected: str) -> PolicyError:
    return PolicyError(
        f"{field}: {path!r} lies in no folder that can be written; expected {expected}",
        field=field,
        value=path,
        expected=expected,
    )


def _absolute(policy: AutotunePolicy) -> AutotunePolicy:
    def absolute(path: str) -> str:
        # A prefix that ends in a separator means files inside that folder.
        return os.path.join(os.path.abspath(path), "") if path.endswith(os.sep) else os.path.abspath(path)

    return replace(
        policy,
        table_path=tuple(absolute(folder) for folder in policy.table_path),
        record_path=None if policy.record_path is None else absolute(policy.record_path),
        manifest_path=None if policy.manifest_path is None else absolute(policy.manifest_path),
    )


# --- in each process of the program -----------------------------------------------------------------------------------


def take_part(request: Mapping[str, Any]) -> None:
    """Install the policy in this process. Called by the ``sitecustomize``, inside of the import of Triton.

    It ends the process by an error: going on without the policy is what nobody asked for.

    Raises:
        As :func:`tuning.install`.
    """
    if active_installation() is not None:
        return
    args = add_arguments(argparse.ArgumentParser()).parse_args(request["argv"])
    policy = replace(policy_from_args(args), manifest_path=None)  # written below: several processes share the path
    _Part(install(policy, deterministic=bool(request["deterministic"])), request)


_REPLACED = {"replaced": "installed a policy of its own", "taken_out": "took this policy out"}
"""What a program did to the policy, by the kind of the notice in the manifest that says so."""


class _Part:
    """What this process has to do with the run: what was in charge in it, and the manifest of that."""

    def __init__(self, installation: Installation, request: Mapping[str, Any]) -> None:
        self.installations = [installation]  # ours, and those of the program's own that came after
        self.notices: list[tuple[str, str]] = []
        installation.when_taken_out = self.taken_out
        if not request["manifest"]:
            return
        self.path = Path(request["manifest"])
        self.inherited = (0, 0)
        # A rank's own process is the first that has its RANK; what it starts has it too, and is not the rank.
        self.rank = os.environ.get("RANK", "")
        self.owner = request["pid"] == os.getpid() or (self.rank != "" and os.environ.get(_OWNER) != self.rank)
        if self.rank:
            os.environ[_OWNER] = self.rank
        atexit.register(self.write)
        os.register_at_fork(after_in_child=self.forked)

    def taken_out(self, successor: Installation | None) -> None:
        """The program has installed a policy of its own, which it may, or has uninstalled ours: say so, once."""
        ours = self.installations[0]
        if successor is not None:
            successor.when_taken_out = self.taken_out
            self.installations.append(successor)
            policy = replace(successor.policy, manifest_path=None)
            if policy == ours.policy and successor.deterministic == ours.deterministic:
                return
        if self.notices or (successor is None and len(self.installations) > 1):
            return
        kind = "taken_out" if successor is None else "replaced"
        text = f"the program {_REPLACED[kind]}"
        if successor is None:
            text += f": that of triton-tuning run, {ours!r}, is in charge no more, and Triton times what is launched"
        else:
            text += (
                f", {successor!r}, in place of that of triton-tuning run, {ours!r}: from here on its own holds. Give "
                "the flags to the program instead, or leave its install out"
            )
        self.notices.append((kind, text))
        logger.warning("%s", text)

    def _size(self) -> tuple[int, int]:
        installed = self.installations
        return sum(len(each.reached) for each in installed), sum(len(each.choices) for each in installed)

    def forked(self) -> None:
        """This process is a copy now, and has launched nothing of its own."""
        self.owner = False
        self.inherited = self._size()
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            # Its children end without atexit, and forget the finalizers that they were forked with.
            util.register_after_fork(self, lambda part: util.Finalize(None, part.write, exitpriority=0))

    def write(self) -> None:
        """Write it, where anything was launched that a parent had not launched before the fork."""
        if self._size() == self.inherited:
            return
        rank = process_rank()
        if self.owner or os.environ.get("RANK", "") != self.rank:
            name = self.path if rank == 0 else self.path.with_name(f"{self.path.stem}.rank{rank}{self.path.suffix}")
        else:
            name = self.path.with_name(f"{self.path.stem}.pid{os.getpid()}{self.path.suffix}")
        # Ours, where anything was launched under it; else that of the policy under which it was.
        manifest = next(each for each in self.installations if each.reached).manifest()
        try:
            write_manifest(name, replace(manifest, notices=tuple(sorted({*manifest.notices, *self.notices}))))
        except TuningError as error:
            sys.stderr.write(f"triton-tuning: error: {error.message}\n")


def report(request: Mapping[str, Any]) -> None:
    """Say which manifests the program's processes have written; called as its first process ends."""
    path = Path(request["manifest"])
    candidates = (path, *sorted(path.parent.glob(f"{path.stem}.*{path.suffix}")))
    written = [file for file in candidates if file.is_file() and file.stat().st_mtime_ns >= request["since_ns"]]
    for file in dict.fromkeys(written):
        try:
            found = read_manifest(file)
        except TuningError:
            continue  # another program's file beside it
        timed = sum(count for _, count in found.benchmarks)
        own = "".join(f"; the program {_REPLACED[kind]}" for kind, _ in found.notices if kind in _REPLACED)
        sys.stderr.write(
            f"triton-tuning: manifest {file}: mode {found.mode}, {len(found.choices)} choices, "
            f"{len(found.autotuners)} autotuners launched, {timed} candidates timed in scope{own}\n"
        )
    if not written:
        sys.stderr.write(
            f"triton-tuning: no process launched an autotuner under a policy, so there is no manifest {path}\n"
        )
