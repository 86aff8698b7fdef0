"""Which functions of the CUDA driver and runtime a piece of code calls, by CUPTI's callback interface.

torch's profiler does not show them all (of the driver it keeps launches alone), and torch's sync debug mode sees only
torch. Types, names and numbers are those of ``cupti_callbacks.h``: a subscriber is called on entering and leaving each
function of the domains that it enabled, with a record that starts with the site (0: entering) and the function's name.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

DRIVER_API, RUNTIME_API = 1, 2


class CallbackData(ctypes.Structure):
    _fields_ = (("site", ctypes.c_int), ("function", ctypes.c_char_p))


CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(CallbackData))


def find_cupti() -> str:
    """Path of libcupti: the one that torch has loaded, else one on Python's path."""
    maps = Path("/proc/self/maps").read_text().split()
    loaded = sorted({word for word in maps if "libcupti.so" in word})
    lying = (path for folder in sys.path for path in sorted(Path(folder).glob("nvidia/*/lib/libcupti.so*")))
    return next(iter(loaded), None) or str(next(lying, "libcupti.so"))


@contextlib.contextmanager
def driver_calls() -> Iterator[list[str]]:
    """Within the block, names of the functions that any thread calls, in order, are appended to the list."""
    cupti = ctypes.CDLL(find_cupti())
    names: list[str] = []

    def on_call(user: object, domain: int, number: int, data: ctypes._Pointer[CallbackData]) -> None:
        if domain in (DRIVER_API, RUNTIME_API) and data.contents.site == 0:
            names.append((data.contents.function or b"").decode())

    callback = CALLBACK(on_call)
    subscriber = ctypes.c_void_p()

    def check(status: int, what: str) -> None:
        if status:
            raise RuntimeError(f"{what} of CUPTI failed with status {status}")

    check(cupti.cuptiSubscribe(ctypes.byref(subscriber), callback, None), "cuptiSubscribe")
    try:
        for domain in (DRIVER_API, RUNTIME_API):
            check(cupti.cuptiEnableDomain(1, subscriber, domain), "cuptiEnableDomain")
        yield names
    finally:
        check(cupti.cuptiUnsubscribe(subscriber), "cuptiUnsubscribe")
