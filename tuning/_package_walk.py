"""Import every module of a package, and say of each that was not imported why.

A module is imported in the ordinary way, so its top-level code runs. Not imported are ``__main__``, modules and folders
named as tests, examples, scripts or build files, extension modules (a kernel needs Python source), and modules in
folders without ``__init__`` whose source never mentions triton: such folders hold scripts as often as modules.

**A package whose own __init__ fails.** mamba_ssm's needs ``selective_scan_cuda``, which a build without CUDA lacks, yet
its Triton kernels import without it. Python drops a package whose ``__init__`` raises, and with it every module below.
So an empty module object with the package's ``__path__`` stands in for it while its folder is walked, and is taken
out of ``sys.modules`` afterwards: code that asks ``try: import mamba_ssm`` later gets the same answer as before. Two
alternatives were rejected: reading the source alone finds decorators but neither candidates nor keys, and keeping the
half-run module would let a later ``import`` believe in a package that is not there. The modules imported meanwhile
stay: dropping them would make the process import them twice, which torch's operator registry refuses.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from .errors import InventoryError

__all__ = ["Unimported", "Walk", "explain", "module_source", "package_without_init", "walk"]

# Names of what is run by hand and not imported. `testing` is not among them: torch and others ship it as a library.
_SKIPPED = re.compile(
    r"__main__|setup|conftest|tests?|test_.*|.*_tests?|(?:unit|functional)_?tests|scripts?|examples?|benchmarks?"
)


@dataclass(frozen=True)
class Unimported:
    """A module of a walked package that was not imported.

    Attributes:
        module: its name.
        kind: ``failed``: its import raised; ``walked``: a package whose ``__init__`` raised and whose folder was walked
            without it; ``skipped``: its name says that it is run, not imported.
        reason: why, in one line.
        source: its source text, where it is at hand.
    """

    module: str
    kind: Literal["failed", "walked", "skipped"]
    reason: str
    source: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Walk:
    """What walking one module or package gave.

    Attributes:
        name: what was asked for.
        unimported: what was not imported, by name.
    """

    name: str
    unimported: tuple[Unimported, ...]


@dataclass(frozen=True)
class _Child:
    name: str
    is_package: bool
    spec: Any


def walk(name: str) -> Walk:
    """Import a module and, if it is a package, all that lies below it, in the order of names.

    Raises:
        InventoryError: there is no such module, or it is no package and its import raises.
    """
    walker = _Walker()
    try:
        module = walker.enter(name)
        if hasattr(module, "__path__"):
            walker.below(module)
            walker.retry()
    finally:
        walker.undo()
    return Walk(name, tuple(sorted(walker.unimported.values(), key=lambda item: item.module)))


@contextmanager
def package_without_init(name: str) -> Iterator[ModuleType]:
    """While the block runs, modules below the package ``name`` can be imported even if its own ``__init__`` raises.

    ``with package_without_init("mamba_ssm"): from mamba_ssm.ops.triton import ssd_bmm``. A package that imports is left
    as it is. The stand-in is removed at the end of the block; modules imported in it stay.

    Raises:
        InventoryError: there is no such package.
    """
    walker = _Walker()
    try:
        yield walker.enter(name)
    finally:
        walker.undo()


class _Walker:
    def __init__(self) -> None:
        self.unimported: dict[str, Unimported] = {}
        self._stand_ins: dict[str, ModuleType] = {}
        self._folders: set[str] = set()
        self._again: dict[str, tuple[str, ...]] = {}  # what to try once more, and the stand-ins that it blamed

    # -- importing --

    def enter(self, name: str) -> ModuleType:
        """Import what was asked for; a stand-in takes the place of each package above it, or it, that does not."""
        module: ModuleType | None = None
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            above = ".".join(parts[:depth])
            module, error = _import(above)
            if module is not None:
                continue
            spec = _find_spec(above)
            if spec is None:
                reason = _reason(error)
                raise InventoryError(
                    f"{name}: no module named {above!r} can be found here ({reason}); expected the name of an "
                    "installed package or module; install it, or correct the name",
                    module=name,
                    reason=reason,
                )
            reason = explain(error)
            if spec.submodule_search_locations is None:
                raise InventoryError(
                    f"{name} does not import: {reason}; expected a module that imports, or a package",
                    module=name,
                    reason=reason,
                )
            module = self._stand_in(above, spec, reason)
        assert module is not None
        return module

    def _stand_in(self, name: str, spec: Any, reason: str) -> ModuleType:
        module = importlib.util.module_from_spec(spec)
        self._stand_ins[name] = module
        sys.modules[name] = module
        self.unimported[name] = Unimported(
            name, "walked", f"package __init__ failed with {reason}; walking its folder without it", _source(name, spec)
        )
        return module

    def undo(self) -> None:
        """Take the stand-ins out again."""
        for name, module in self._stand_ins.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    # -- walking --

    def below(self, package: ModuleType) -> None:
        """Import everything below a package."""
        for child in self._children(package):
            self._import_child(child)

    def _import_child(self, child: _Child) -> None:
        if isinstance(getattr(child.spec, "loader", None), importlib.machinery.ExtensionFileLoader):
            return
        last = child.name.rpartition(".")[2]
        if _SKIPPED.fullmatch(last) or not last.isidentifier():
            reason = "not imported: by its name it is run by hand or by a test runner"
            self.unimported[child.name] = Unimported(child.name, "skipped", reason, _source(child.name, child.spec))
            return
        module, error = _import(child.name)
        if module is None:
            reason = explain(error)
            blamed = tuple(name for name in self._stand_ins if f"'{name}'" in reason)
            if blamed:
                reason += f" ({', '.join(blamed)} is walked without its __init__)"
            if blamed or "partially initialized module" in reason:
                self._again[child.name] = blamed
            if child.is_package and getattr(child.spec, "submodule_search_locations", None) is not None:
                module = self._stand_in(child.name, child.spec, reason)
            else:
                source = _source(child.name, child.spec)
                self.unimported[child.name] = Unimported(child.name, "failed", reason, source)
                return
        if child.is_package and hasattr(module, "__path__"):
            self.below(module)

    def retry(self) -> None:
        """Try once more what failed in a circle of imports: with the rest loaded, the circle may be open.

        What failed for want of names in a stand-in follows, where the package has taken its place back.
        """
        for name in [name for name, blamed in self._again.items() if not blamed]:
            self._try_again(name)
        for name, blamed in self._again.items():
            if blamed and not any(package in self._stand_ins for package in blamed):
                self._try_again(name)

    def _try_again(self, name: str) -> None:
        stand_in = self._stand_ins.get(name)
        if stand_in is not None and sys.modules.get(name) is stand_in:
            del sys.modules[name]
        module, _ = _import(name)
        if module is not None:
            self.unimported.pop(name, None)
            self._stand_ins.pop(name, None)
            # Python sets a submodule as an attribute when it imports it; these were imported under the stand-in.
            for loaded, below in list(sys.modules.items()):
                parent, _, last = loaded.rpartition(".")
                if parent == name and not hasattr(module, last):
                    setattr(module, last, below)
        elif stand_in is not None:
            sys.modules[name] = stand_in

    def _children(self, package: ModuleType) -> list[_Child]:
        prefix = package.__name__ + "."
        children: dict[str, _Child] = {}
        for folder in list(package.__path__):
            real = os.path.realpath(folder)
            if real in self._folders:
                continue  # a link to a folder that was walked already
            self._folders.add(real)
            regular = os.path.isdir(folder) and _has_init(folder)
            for info in pkgutil.iter_modules([folder], prefix):
                spec = _spec_of(info)
                if not regular and os.path.isdir(folder) and not info.ispkg and not _mentions_triton(info.name, spec):
                    continue
                children.setdefault(info.name, _Child(info.name, info.ispkg, spec))
            for name in _namespace_folders(folder):
                children.setdefault(prefix + name, _Child(prefix + name, True, None))
        return [children[name] for name in sorted(children)]


def _import(name: str) -> tuple[ModuleType | None, BaseException | None]:
    try:
        return importlib.import_module(name), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script may exit, a test module may skip: neither is an Exception
        return None, error.with_traceback(None)


def _find_spec(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


def _spec_of(info: pkgutil.ModuleInfo) -> Any:
    try:
        return info.module_finder.find_spec(info.name, None)
    except (ImportError, AttributeError, TypeError):
        return None


def _has_init(folder: str) -> bool:
    return any(entry.startswith("__init__.") for entry in os.listdir(folder))


def _namespace_folders(folder: str) -> list[str]:
    """Names of the folders without ``__init__`` that hold Python files: they import, yet pkgutil does not list them."""
    if not os.path.isdir(folder):
        return []
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir() or not entry.name.isidentifier() or entry.name == "__pycache__":
                continue
            if not _has_init(entry.path) and any(
                file.endswith(".py") for _, _, files in os.walk(entry.path) for file in files
            ):
                found.append(entry.name)
    return sorted(found)


def _source(name: str, spec: Any) -> str | None:
    try:
        source = spec.loader.get_source(name)
    except (AttributeError, ImportError, OSError, SyntaxError, UnicodeDecodeError):
        return None
    return source if isinstance(source, str) else None


def module_source(module: ModuleType) -> str | None:
    """Source text of a loaded module, where it is at hand."""
    return _source(module.__name__, getattr(module, "__spec__", None))


def _mentions_triton(name: str, spec: Any) -> bool:
    return "triton" in (_source(name, spec) or "")


def _reason(error: BaseException | None) -> str:
    text = " ".join(str(error).split())
    kind = type(error).__name__
    return f"{kind}: {text[:300]}" if text else kind


def explain(error: BaseException | None) -> str:
    """Why an import raised, in one line, with what to do about it where that is known."""
    reason = _reason(error)
    lowered = reason.lower()
    if "active driver" in lowered:
        if not str(getattr(sys.modules.get("triton"), "__version__", "")).startswith(("3.2.", "3.3.")):
            return (
                f"{reason} (as it is imported, the module asks Triton for a GPU, which is not here or hidden by "
                "TRITON_INTERPRET: list on a machine with a GPU and without that variable)"
            )
        return (
            f"{reason} (Triton 3.2 and 3.3 need an active GPU driver to decorate a kernel: "
            "list on a machine with a GPU, or with Triton 3.4 or later)"
        )
    if "transformer-engine" in lowered and not os.environ.get("NVTE_PROJECT_BUILDING"):
        return (
            f"{reason} (without its compiled part, Transformer Engine's Triton kernels import with "
            "NVTE_PROJECT_BUILDING=1 in the environment)"
        )
    return reason
