"""A GPU that is not there: the real Triton decorates, specialises and compiles kernels for it; launches do nothing.

Run as a program in a process of its own: ``python fake_gpu.py MODULE FIELDS`` installs a policy with these fields
(JSON), calls ``launch_all`` of the module, and prints the choices as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ARCH = "sm90"


class Driver:
    """Answers what Triton asks of a driver, for one kind of GPU, on CPU tensors."""

    def __init__(self) -> None:
        import triton
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)
        self.utils = self
        self.handles = (0, 0, 1, 0) if triton.__version__ < "3.4" else (0, 0, 1, 0, 1024)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, *args: Any) -> tuple[int, ...]:
        return self.handles

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        return lambda *args, **kwargs: None

    def get_benchmarker(self) -> Any:
        return self.bench

    def bench(self, call: Any, quantiles: Any = None, **options: Any) -> list[float]:
        """Times nothing, and so compiles nothing: the first candidate wins."""
        return [1.0, 1.0, 1.0]


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from triton.runtime.driver import driver

    driver.set_active(Driver())  # type: ignore[arg-type]
    import tuning

    module = importlib.import_module(sys.argv[1])
    fields = json.loads(sys.argv[2])
    with tuning.install(tuning.AutotunePolicy(modules=(module.SCOPE,), **fields)) as installed:
        module.launch_all()
    print(json.dumps([[c.kernel, str(c.key), str(c.launch_config)] for c in installed.choices]))


if __name__ == "__main__":
    main()
