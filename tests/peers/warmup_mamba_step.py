"""A step of mamba_ssm's SSD on CPU tensors, for a GPU that is not there (``fake_gpu``). Its values mean nothing."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.workloads import Ssd, SsdShape
from tuning.interpreter import stand_in_for_cuda

SCOPE = "mamba_ssm"


def launch_all() -> None:
    stand_in_for_cuda()
    Ssd(SsdShape(seqlen=64, nheads=2, headdim=16, ngroups=1, dstate=16, chunk_size=32), device="cpu").step()
