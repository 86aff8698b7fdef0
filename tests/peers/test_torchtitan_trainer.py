"""The trainer that the README writes for torchtitan, over torchtitan's own ``Trainer`` class."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import torchtitan.trainer as titan
from stub_kernels import FakeTensor, StubKernel, autotuner, configs, launch
import tuning

STUB = StubKernel()
TUNER = autotuner(configs(64, 16, 32), stub=STUB)
STUB.fn.__module__ = "fla.ops.stub"

# What the methods do on a GPU is torchtitan's; that they are called, and with what, is the README's.
def init(self, config): self.step = 0
def train_step(self, data_iterator):
    self.step += 1
    launch(TUNER, FakeTensor(), FakeTensor(), 8, flag=True)
for name, method in {{
    "__init__": init,
    "train_step": train_step,
    "state_dict": lambda self: {{"step": self.step}},
    "load_state_dict": lambda self, state: setattr(self, "step", state["step"]),
    "close": lambda self: None,
}}.items():
    assert name in vars(titan.Trainer), f"torchtitan's Trainer has no {{name}} of its own"
    setattr(titan.Trainer, name, method)

{block}

assert issubclass(PinnedTrainer.Config, titan.Trainer.Config)
first = PinnedTrainer(None)
first.train_step(None)
state = first.state_dict()
first.close()
second = PinnedTrainer(None)
second.load_state_dict(state)
second.train_step(None)
(choice,) = tuning.choices()
assert choice.detail.startswith("resumed from a checkpoint"), choice
assert tuning.benchmarks_run() == 0
second.close()
assert tuning.active_policy() is None
print("done", second.step)
"""


def test_the_readmes_trainer_resumes_over_torchtitans_class(tmp_path):
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("not installed: torchtitan")
    (block,) = re.findall(r"```python\n((?:(?!```).)*torchtitan.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(block=block))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env={**os.environ, "PYTHONPATH": ":".join([str(ROOT / "tests"), str(ROOT), *sys.path[1:]])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done 2"
