"""Proof that two runs are equal bit for bit, or the first place where they are not.

Bit-exact means equal bytes: ``0.0`` and ``-0.0`` differ, and the payload of a NaN counts.
"""

from __future__ import annotations

from tuning.bitexact.bisect import Bisection, Divergence, bisect_runs
from tuning.bitexact.compare import Comparison, compare_runs
from tuning.bitexact.difference import Difference, compare_tensors
from tuning.bitexact.digest import (
    Digest,
    Digests,
    digest_gradients,
    digest_module,
    digest_optimizer,
    digest_tensor,
    digest_value,
)
from tuning.bitexact.processes import compare_processes

__all__ = [
    "Bisection",
    "Comparison",
    "Difference",
    "Digest",
    "Digests",
    "Divergence",
    "bisect_runs",
    "compare_processes",
    "compare_runs",
    "compare_tensors",
    "digest_gradients",
    "digest_module",
    "digest_optimizer",
    "digest_tensor",
    "digest_value",
]
