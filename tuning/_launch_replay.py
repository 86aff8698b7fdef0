"""Watch launches of autotuners, replay them with any candidate, and name the compiler that made them.

The watch lies over whatever is installed: it sees a launch before anything is chosen for it, may replay it on copies,
and may say which config is to be launched instead. Everything else goes on to what lies beneath.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ._launch_arguments import Copies, form_name, launch_form
from ._launch_key import KeyReader, constexpr_names
from ._launch_pointers import copies_to_replay
from ._launch_within import capturing
from ._patches import Patch, take_back
from .interception import (
    current_arch,
    kernel_name,
    live_candidates,
    running_under_interpreter,
    source_hash,
    supported_triton,
)
from .spec import Kernel, Key

__all__ = ["Reached", "compiler_identity", "readers_of_best_config", "uses_atomics", "watch_launches"]


@dataclass(frozen=True, eq=False)
class Reached:
    """One launch of an autotuner, before anything is chosen for it.

    Attributes:
        autotuner: the autotuner.
        kernel, key, arch: what a choice depends on.
        form: name of the launch's form; see :mod:`tuning._launch_arguments`.
        args, kwargs: of the launch.
    """

    autotuner: Any
    kernel: Kernel
    key: Key
    arch: str
    form: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def candidates(self) -> list[Any]:
        """The live candidates that the kernel's own pruning leaves."""
        return live_candidates(self.autotuner, self.args, self.kwargs)

    def copies(self) -> Copies:
        """Makes copies of the arguments.

        Raises:
            CannotBeCopied: not of these, or a replay might reach memory that is none of them.
        """
        return copies_to_replay(self.autotuner, self.args, self.kwargs)

    def launch(self, config: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Launch one config as a pinned launch does, hook and all. What Triton raises passes through."""
        autotuner = self.autotuner
        autotuner.best_config = config
        values = config.all_kwargs()
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(autotuner.arg_names, args, strict=False)), **kwargs, **values})
        return autotuner.fn.run(*args, **kwargs, **values)


@contextmanager
def watch_launches(in_scope: Callable[[str], bool], reached: Callable[[Reached], Any]) -> Iterator[Callable[[], None]]:
    """Tell of every launch of an autotuner in scope that has several candidates, while the block runs.

    Not of those that a graph captures: a replay would be captured with them, or end the capture.

    Args:
        in_scope: by qualified name.
        reached: called before the launch. It returns a live config to launch that one, or None to let what is installed
            choose. It may replay the launch: launches from inside of it are not told of.

    Yields:
        What to call once a policy has been installed meanwhile: it stands above the watch, and launches past it.

    Raises:
        UnsupportedTritonError: see :func:`tuning.interception.supported_triton`.
    """
    supported_triton()
    from triton.runtime.autotuner import Autotuner

    readers: weakref.WeakKeyDictionary[Any, tuple[KeyReader, Kernel]] = weakref.WeakKeyDictionary()
    busy = threading.local()
    patches: list[Patch] = []
    top: Any = None
    over = False

    def watch() -> None:
        """Stand above what is there; a watch further down passes everything through from then on."""
        nonlocal top
        if over:
            return
        beneath = vars(Autotuner)["run"]
        top = watched(beneath)
        patches.append(Patch(Autotuner, "run", beneath, top))
        setattr(Autotuner, "run", top)  # noqa: B010

    def watched(beneath: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if top is not run or getattr(busy, "now", False) or len(self.configs) < 2 or capturing():
                return beneath(self, *args, **kwargs)
            known = readers.get(self)
            if known is None:
                function = self.base_fn
                kernel = Kernel(kernel_name(function), source_hash(function))
                known = readers[self] = (KeyReader(self.arg_names, self.keys, constexpr_names(function)), kernel)
            reader, kernel = known
            if not in_scope(kernel.qualified_name):
                return beneath(self, *args, **kwargs)
            form = form_name(launch_form(reader, args, kwargs))
            launch = Reached(self, kernel, reader.typed(args, kwargs), current_arch(), form, args, kwargs)
            busy.now = True
            before = self.__dict__.get("best_config")
            try:
                config = reached(launch)
            finally:
                busy.now = False
                if before is not None:
                    self.best_config = before
                else:
                    self.__dict__.pop("best_config", None)
            if config is not None:
                return launch.launch(config, args, kwargs)
            return beneath(self, *args, **kwargs)

        run.__name__, run.__qualname__, run.__wrapped__ = "run", beneath.__qualname__, beneath  # type: ignore[attr-defined]
        return run

    watch()
    try:
        yield watch
    finally:
        top, over = None, True
        take_back(reversed(patches))


def compiler_identity() -> str:
    """What turns a kernel into code here: Triton's version, its backend's (with the assembler), and what steers them.

    Text that is equal where the same source with the same config gives the same code. It reads the environment.

    Raises:
        Exception: whatever the driver raises that should name the target.
    """
    version = supported_triton()
    if running_under_interpreter():
        numpy = sys.modules.get("numpy")
        return f"triton {version}, interpreter, numpy {getattr(numpy, '__version__', 'unknown')}"
    from triton.compiler import make_backend
    from triton.runtime.driver import driver

    try:
        backend = str(make_backend(driver.active.get_current_target()).hash())
    except RuntimeError:  # no GPU: nothing is compiled
        return f"triton {version}, no target"
    settings: dict[str, str] = {}
    try:
        from triton._C.libtriton import get_cache_invalidating_env_vars

        settings = {str(name): str(value) for name, value in get_cache_invalidating_env_vars().items()}
    except ImportError:
        pass  # a Triton that has none
    steered = "".join(f", {name}={value}" for name, value in sorted(settings.items()))
    return f"triton {version}, backend {hashlib.sha256(backend.encode()).hexdigest()[:12]}{steered}"


@lru_cache(maxsize=1024)
def _module_tree(name: str) -> ast.Module | None:
    try:
        source = inspect.getsource(sys.modules[name])
    except (OSError, TypeError, KeyError):
        return None
    if "best_config" not in source:
        return None
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def readers_of_best_config(kernel: Kernel) -> tuple[str, ...]:
    """Modules of the kernel's package, of those imported by now, whose code reads ``<kernel>.best_config``.

    Read off the source: an autotuner that is reached under another name, or by ``getattr``, is not found.
    """
    found = []
    for name in sorted(sys.modules):
        spec = getattr(sys.modules[name], "__spec__", None) if name == "__main__" else None
        if (name if spec is None else spec.name).partition(".")[0] != kernel.package:
            continue
        tree = _module_tree(name)
        nodes = ast.walk(tree) if tree is not None else ()
        reads = (node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr == "best_config")
        if any(ast.unparse(value).rpartition(".")[2] == kernel.bare_name for value in reads):
            found.append(name)
    return tuple(found)


def uses_atomics(autotuner: Any) -> bool:
    """Whether the kernel's own source names an atomic operation. Functions that it calls are not looked into."""
    try:
        return "atomic_" in inspect.getsource(autotuner.base_fn)
    except (OSError, TypeError):
        return False
