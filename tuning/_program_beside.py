"""This package under another name, in a program that has a ``tuning`` of its own.

Both are needed in one process then, and ``tuning`` is what the program has to find under that name. So ours is loaded
as ``triton_tuning``, from its place. Its modules name each other by ``from tuning.spec import ...`` as well as
relatively: those statements are turned to the other name as a module is compiled.

Weighed and left: to lend ``sys.modules["tuning"]`` to ours while it runs (other threads import meanwhile, and our own
modules import on their way), and to refuse such programs.
"""

from __future__ import annotations

import ast
import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

__all__ = ["NAME", "load"]

NAME = "triton_tuning"
_OWN = "tuning"


class _Renamed(SourceFileLoader):
    """Loads a module of this package under the other name."""

    def get_code(self, fullname: str) -> CodeType:
        # Past the bytecode cache, which holds what the module is under its own name.
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                root, dot, rest = (node.module or "").partition(".")
                if root == _OWN:
                    node.module = NAME + dot + rest
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        return code


class _Finder:
    """Finds the modules below the other name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{NAME}."):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _Renamed(name, spec.origin)
        return spec


def load(package: str) -> ModuleType:
    """The module ``program`` of the package in this folder, under the other name."""
    if NAME not in sys.modules:
        init = str(Path(package) / "__init__.py")
        spec = spec_from_file_location(NAME, init, loader=_Renamed(NAME, init), submodule_search_locations=[package])
        assert spec is not None
        module = module_from_spec(spec)
        sys.modules[NAME] = module
        sys.meta_path.insert(0, _Finder())
        _Renamed(NAME, init).exec_module(module)
    return importlib.import_module(f"{NAME}.program")
