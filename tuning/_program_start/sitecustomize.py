"""Read by every Python process of a program that ``triton-tuning run`` started: this folder is on its ``PYTHONPATH``.

It leaves the process as it would have been: its folder is taken off ``sys.path``, and a ``sitecustomize`` of the
user's own runs in its place. What stays is a finder that waits for Triton and then calls :mod:`tuning.program`.

A process that never imports Triton pays for this file alone. So it imports nothing that Python has not loaded by now
but ``json``, and keeps to syntax that Python 3.7 reads: the program may start another one.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # loading typing would cost each process a few milliseconds
    from collections.abc import Callable, Container
    from types import ModuleType
    from typing import Any

__all__ = ["Waiting"]

_VARIABLE = "TRITON_TUNING_RUN"


class Waiting:
    """A finder that finds nothing, and calls back once one of some modules has been executed."""

    def __init__(self, names: Container[str], then: Callable[[str], None]) -> None:
        self.names = names
        self.then = then
        self.asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Let the other finders find it, and call back when the module has run."""
        if self.asking or name not in self.names:
            return None
        from importlib.util import find_spec

        self.asking = True
        try:
            spec = find_spec(name)
        finally:
            self.asking = False
        loader: Any = getattr(spec, "loader", None)
        if not hasattr(loader, "exec_module"):
            return None
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            original(module)
            self.then(name)

        loader.exec_module = exec_module
        return spec


def _start(folder: str) -> None:
    """Take this folder off the path, and wait."""
    # An entry that is not absolute is none of ours, and asks for a current folder, which may be gone.
    sys.path[:] = [entry for entry in sys.path if not os.path.isabs(entry) or os.path.realpath(entry) != folder]
    text = os.environ.get(_VARIABLE)
    if not text:
        return
    import json

    request = json.loads(text)
    state = {"done": False}

    def hand_over(name: str) -> None:
        if state["done"] or (name == "triton" and "torch" in names and _half_imported("torch")):
            return  # torch, whose import asked for Triton, comes to its end in a moment
        state["done"] = True
        if waiting in sys.meta_path:
            sys.meta_path.remove(waiting)
        try:
            _program(folder).take_part(request)
        except BaseException as error:
            # Raised, it would be taken for a Triton that is not there, or be caught, and the program go on without the
            # policy, which is what nobody asked for.
            _end(error)

    names = ["triton"] + (["torch"] if request["deterministic"] else [])
    waiting: Any = Waiting(names, hand_over)
    sys.meta_path.insert(0, waiting)

    def missed() -> None:
        if state["done"] or "triton.language" not in sys.modules:
            return
        before = sys.meta_path[: sys.meta_path.index(waiting)] if waiting in sys.meta_path else sys.meta_path
        names = ", ".join(getattr(each, "__qualname__", type(each).__qualname__) for each in before)
        sys.stderr.write(
            f"triton-tuning: warning: process {os.getpid()} imported Triton past the finder that installs the policy, "
            f"so Triton timed what was launched: put no finder in front of it in sys.meta_path (found: {names})\n"
        )

    import atexit

    atexit.register(missed)
    if request["manifest"] and request["pid"] == os.getpid():
        atexit.register(lambda: _program(folder).report(request))
    if "triton" in sys.modules:
        hand_over("triton")


def _end(error: BaseException) -> None:
    """Say what is wrong, and end the process here and now, from whichever thread, whoever would catch what."""
    text = getattr(error, "message", None)
    if text is None:
        text = f"the policy cannot be installed by {sys.executable}: {type(error).__name__}: {error}"
    try:
        sys.stderr.write(f"triton-tuning: error: {' '.join(text.split())}\n")
        sys.stderr.flush()
        sys.stdout.flush()
    finally:
        os._exit(1)


def _half_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _program(folder: str) -> Any:
    """Our module ``program``; by its place where this Python finds no ``tuning``, or one that is not ours."""
    import importlib
    from importlib.util import find_spec

    package = os.path.dirname(folder)
    found: Any = sys.modules.get("tuning") or find_spec("tuning")
    if found is None:
        _load("tuning", os.path.join(package, "__init__.py"), [package])
    else:
        # Of a module or of a spec; None where a folder without an __init__ has the name.
        file = getattr(found, "__file__", None) or getattr(found, "origin", None) or ""
        if not os.path.isfile(os.path.join(os.path.dirname(file), "_program_start", "sitecustomize.py")):
            return _load("_triton_tuning_beside", os.path.join(package, "_program_beside.py")).load(package)
    return importlib.import_module("tuning.program")


def _load(name: str, file: str, folders: Any = None) -> Any:
    from importlib.util import module_from_spec, spec_from_file_location

    spec: Any = spec_from_file_location(name, file, submodule_search_locations=folders)
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _users_own() -> None:
    """Run the ``sitecustomize`` that Python would have found without us; as it does, raise if there is none."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        raise ImportError("No module named 'sitecustomize'", name="sitecustomize")
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    _start(os.path.dirname(os.path.realpath(__file__)))
    _users_own()
