"""Compile for a GPU that need not be there.

Triton asks its active driver for the target. In a process made for compiling, a driver of ours answers with a fixed one
and touches no device, so that kernels are decorated, specialised and compiled as on a machine with that GPU, into the
same entries of Triton's compile cache.

**Launchers.** Up to Triton 3.6 the first launch of each signature also compiles a small C module, and every version
compiles one for the driver's calls. These are built too. They are linked against ``libcuda.so.1``; where the machine
has none, an empty library of that name stands in for it while they are linked. Nothing of it gets into them: they find
the real one, by its name, on the machine where they run. From Triton 3.9 on, where only the one module is left, its
entry is tied to the folder of the library, and it is built only where the real one is.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .errors import TuningError

__all__ = [
    "SHARED_MEMORY",
    "Compiled",
    "build_driver_module",
    "build_launcher",
    "compile_config",
    "compile_for",
    "vendor",
]

SHARED_MEMORY: Mapping[str, int] = {
    **dict.fromkeys(("sm80", "sm87"), 163 << 10),
    **dict.fromkeys(("sm86", "sm89", "sm120", "sm121"), 99 << 10),
    **dict.fromkeys(("sm90", "sm100", "sm103"), 227 << 10),
    **dict.fromkeys(("sm75",), 64 << 10),
    **dict.fromkeys(("gfx90a", "gfx942"), 64 << 10),
    **dict.fromkeys(("gfx950",), 160 << 10),
}
"""Most shared memory of a block in bytes. Of NVIDIA: CUDA C++ Programming Guide, technical specifications per compute
capability. Of AMD: the local data share in the CDNA 2, 3 and 4 instruction set manuals."""


def vendor(arch: str) -> str:
    """``cuda`` or ``hip``.

    Raises:
        TuningError: no GPU of that name can be compiled for.
    """
    if re.fullmatch(r"sm\d+", arch):
        return "cuda"
    if re.fullmatch(r"gfx[0-9a-f]+", arch):
        return "hip"
    raise TuningError(f"arch: expected a GPU that Triton compiles for, such as sm90 or gfx942, found {arch!r}")


class _Driver:
    """All that decorating and compiling ask of a driver."""

    def __init__(self, target: Any, shared_memory: int, multiprocessors: int) -> None:
        self._target = target
        self._properties = {
            "max_shared_mem": shared_memory,
            "multiprocessor_count": multiprocessors,
            "warpSize": target.warp_size,
        }
        self.utils = self  # where a device's properties are asked for

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, Any]:
        return dict(self._properties)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def get_benchmarker(self) -> Any:
        def benchmark(call: Any, **options: Any) -> Any:
            raise RuntimeError("nothing is timed in a process that only compiles")

        return benchmark


def compile_for(arch: str, *, multiprocessors: int = 0) -> None:
    """Let this process compile for ``arch`` from now on, for good, and launch nothing.

    Call it before kernels are imported: packages ask the driver what they run on as they are imported.

    Raises:
        TuningError: no GPU of that name can be compiled for.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    if vendor(arch) == "cuda":
        target = GPUTarget("cuda", int(arch[2:]), 32)
    else:
        target = GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    driver.set_active(_Driver(target, SHARED_MEMORY.get(arch, 0), multiprocessors))


class Compiled(NamedTuple):
    """A compiled candidate.

    Attributes:
        hash: names its entry in Triton's compile cache.
        seconds: how long it took.
        cached: whether the entry was there before.
        shared_memory: bytes of it that a block needs.
        kernel: Triton's own object.
    """

    hash: str
    seconds: float
    cached: bool
    shared_memory: int
    kernel: Any


def compile_config(autotuner: Any, config: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Compiled:
    """Compile one candidate for the arguments of a launch, or stand-ins for them, by the very path of a launch.

    What Triton raises passes through.
    """
    from triton.runtime.cache import get_cache_manager

    wall, started = time.time(), time.perf_counter()
    kernel = autotuner.fn.run(*args, grid=(1,), warmup=True, **kwargs, **config.all_kwargs())
    seconds = time.perf_counter() - started
    if kernel is None:
        raise TuningError("a hook of Triton's compiler kept the kernel from being compiled: remove the hook")
    entry = get_cache_manager(kernel.hash).get_file(f"{kernel.src.name[:150]}.json")
    cached = entry is not None and os.stat(entry).st_mtime < wall
    return Compiled(str(kernel.hash), seconds, cached, int(kernel.metadata.shared), kernel)


def build_driver_module(arch: str) -> None:
    """Build the C module for the driver's calls, which the first launch of a process needs, into the same cache.

    Raises:
        Exception: whatever the C compiler or Triton raise where it cannot be built.
    """
    if vendor(arch) == "cuda":
        from triton.backends.nvidia import driver as nvidia

        _build(nvidia.CudaUtils)


def build_launcher(compiled: Compiled, arch: str) -> None:
    """Build the C modules that the first launch of a compiled candidate would build, into the same cache.

    Raises:
        Exception: as for :func:`build_driver_module`.
    """
    if vendor(arch) != "cuda":
        return  # AMD's link against the runtime of the machine at hand
    from triton.backends.nvidia import driver as nvidia

    build_driver_module(arch)
    if hasattr(nvidia, "make_launcher"):  # from 3.7 on one launcher, which is part of the above, serves all
        _build(lambda: nvidia.CudaLauncher(compiled.kernel.src, compiled.kernel.metadata))


def _build(make: Callable[[], object]) -> None:
    from triton.runtime import build

    stand_in = _stand_in_for_libcuda()
    if stand_in and hasattr(build, "_get_cache_manager"):
        return  # from 3.9 on the folder of the library is part of the key: no other machine would find it
    try:
        make()
    except ImportError:
        # Triton loads what it has built and put into the cache. Without CUDA's library it cannot be loaded here.
        if not stand_in:
            raise


@functools.lru_cache(maxsize=1)
def _stand_in_for_libcuda() -> bool:
    """Whether an empty library has to take the place of ``libcuda.so.1`` when something is linked against it."""
    if os.environ.get("TRITON_LIBCUDA_PATH"):
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        return False
    folder = Path(tempfile.mkdtemp(prefix="triton-tuning-libcuda-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "libcuda.so.1"
    compiler = os.environ.get("CC") or "cc"
    command = [compiler, "-shared", "-x", "c", os.devnull, "-o", str(library), "-Wl,-soname,libcuda.so.1"]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "libcuda.so").symlink_to(library.name)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    return True
