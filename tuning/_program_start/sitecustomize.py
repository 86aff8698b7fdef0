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
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != folder]
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
        _program(folder).take_part(request)

    # The program may install a policy of its own, which imports Triton on its way: ours has to be there before.
    names = ["triton", "tuning.installation"] + (["torch"] if request["deterministic"] else [])
    waiting: Any = Waiting(names, hand_over)
    sys.meta_path.insert(0, waiting)
    if request["manifest"] and request["pid"] == os.getpid():
        import atexit

        def report() -> None:
            state["done"] = True  # nothing is to be installed any more, though what follows imports our own modules
            _program(folder).report(request)

        atexit.register(report)
    if "triton" in sys.modules:
        hand_over("triton")


def _half_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _program(folder: str) -> Any:
    """``tuning.program``; by its place where this Python does not find ``tuning``, which then stays out of its path."""
    import importlib

    try:
        return importlib.import_module("tuning.program")
    except ImportError as error:
        if error.name != "tuning":
            raise
    from importlib.util import module_from_spec, spec_from_file_location

    package = os.path.dirname(folder)
    spec = spec_from_file_location("tuning", os.path.join(package, "__init__.py"), submodule_search_locations=[package])
    loader: Any = spec.loader if spec is not None else None
    module: Any = module_from_spec(spec) if spec is not None else None
    sys.modules["tuning"] = module
    loader.exec_module(module)
    return importlib.import_module("tuning.program")


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
