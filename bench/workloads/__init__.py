"""Real workloads, as data (:class:`Workload`) and the code that runs one step of them.

Importing this loads neither torch nor a workload's package; running a workload does.
"""

from __future__ import annotations

from .catalog import Tensor, Workload, find, workloads
from .ssd import Ssd, SsdShape, digest, import_mamba_ssm
from .steps import prepare

__all__ = [
    "Ssd",
    "SsdShape",
    "Tensor",
    "Workload",
    "digest",
    "find",
    "import_mamba_ssm",
    "prepare",
    "workloads",
]
