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
an environment of their own making. Ray's workers have the environment of ``ray start``, or of the driver where that
starts Ray itself: for a cluster that runs already, pass the variables of :func:`environment` in
``runtime_env={"env_vars": ...}``. Another host needs this package at the same place.

A program that installs a policy itself replaces this one at that moment, as any second ``install`` does.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import sys
import threading
import time
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
_OWNER = "TRITON_TUNING_RUN_RANK"
_FOLDER = Path(__file__).with_name("_program_start")


# --- before the program -----------------------------------------------------------------------------------------------


def command_line(program: str, arguments: Sequence[str] = (), *, module: bool = False) -> list[str]:
    """The command that runs a program.

    Args:
        program: a Python file, folder or archive, ``-`` for standard input, or the name of a command on ``PATH``, such
            as ``torchrun``; a module's name with ``module``.
        arguments: what the program finds behind its name in ``sys.argv``.

    Raises:
        PolicyError: there is no such program.
    """
    if module:
        return [sys.executable, "-m", program, *arguments]
    if program == "-" or os.path.exists(program):
        return [sys.executable, program, *arguments]
    found = shutil.which(program)
    if found is None:
        expected = "a Python file, or a command on PATH"
        raise PolicyError(
            f"program: {program!r} is neither a file nor a command; expected {expected}; for a module use -m",
            value=program,
            expected=expected,
        )
    return [found, *arguments]


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
    others = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(_FOLDER)]
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
    for field in ("manifest_path", "record_path"):
        path = getattr(policy, field)
        folder = os.path.dirname(path or "")
        if field == "manifest_path" and path is not None and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
            raise PolicyError(
                f"{field}: {path!r} lies in no folder that can be written; expected a file in a writable folder",
                field=field,
                value=path,
                expected="a file in a writable folder",
            )
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

    An error ends the process: going on without the policy is what nobody asked for.
    """
    if active_installation() is not None:
        return
    try:
        args = add_arguments(argparse.ArgumentParser()).parse_args(request["argv"])
        policy = replace(policy_from_args(args), manifest_path=None)  # written below: several processes share the path
        installation = install(policy, deterministic=bool(request["deterministic"]))
    except TuningError as error:
        sys.stderr.write(f"triton-tuning: error: {' '.join(error.message.split())}\n")
        sys.stderr.flush()
        if threading.current_thread() is not threading.main_thread():
            os._exit(1)  # any other thread would end alone, and the program go on
        raise SystemExit(1) from None
    if request["manifest"]:
        _Leaving(installation, request)


class _Leaving:
    """Writes the manifest of this process as it ends, if an autotuner was launched in it."""

    def __init__(self, installation: Installation, request: Mapping[str, Any]) -> None:
        self.installation = installation
        self.path = Path(request["manifest"])
        self.inherited = (0, 0)
        # A rank's own process is the first that has its RANK; what it starts has it too, and is not the rank.
        self.rank = os.environ.get("RANK", "")
        self.owner = request["pid"] == os.getpid() or (self.rank != "" and os.environ.get(_OWNER) != self.rank)
        if self.rank:
            os.environ[_OWNER] = self.rank
        atexit.register(self.write)
        os.register_at_fork(after_in_child=self.forked)

    def _size(self) -> tuple[int, int]:
        return len(self.installation.reached), len(self.installation.choices)

    def forked(self) -> None:
        """This process is a copy now, and has launched nothing of its own."""
        self.owner = False
        self.inherited = self._size()
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            # Its children end without atexit, and forget the finalizers that they were forked with.
            util.register_after_fork(self, lambda leaving: util.Finalize(None, leaving.write, exitpriority=0))

    def write(self) -> None:
        """Write it, where anything was launched that a parent had not launched before the fork."""
        if self._size() == self.inherited:
            return
        rank = process_rank()
        if self.owner or os.environ.get("RANK", "") != self.rank:
            name = self.path if rank == 0 else self.path.with_name(f"{self.path.stem}.rank{rank}{self.path.suffix}")
        else:
            name = self.path.with_name(f"{self.path.stem}.pid{os.getpid()}{self.path.suffix}")
        try:
            write_manifest(name, self.installation.manifest())
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
        sys.stderr.write(
            f"triton-tuning: manifest {file}: mode {found.mode}, {len(found.choices)} choices, "
            f"{len(found.autotuners)} autotuners launched, {timed} candidates timed in scope\n"
        )
    if not written:
        sys.stderr.write(f"triton-tuning: no process launched an autotuner, so there is no manifest {path}\n")
