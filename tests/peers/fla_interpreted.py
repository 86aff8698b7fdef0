"""Launch two autotuned kernels in Triton's interpreter, as a trainer or as an engine; started by the tests.

``trainer FOLDER``: a run pinned by this library, frozen to a table, which is written for FLA; then the same launches
with that table alone. ``engine``: FLA alone, without this library; what it uses is in its own environment variables.
Prints one JSON object with what was launched. Whatever is timed fails.
"""

from __future__ import annotations

import json
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("ignore")  # this machine has no GPU, says FLA

import torch  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a candidate was timed")


target = types.SimpleNamespace(backend="cpu", arch="", warp_size=32)
driver.set_active(types.SimpleNamespace(get_benchmarker=lambda: refuse, get_current_target=lambda: target))

from fla.modules.norm import l2norm  # noqa: E402
from own_kernels import scale_kernel  # noqa: E402

launched: list[list[Any]] = []


def log(kernel: Any) -> None:
    """Note each launch where it reaches the compiled function, below every autotuner."""
    run = kernel.fn.run

    def logged(*args: Any, **kwargs: Any) -> Any:
        names = ("BT", "BLOCK", "num_warps", "num_stages", "num_ctas", "maxnreg")
        launched.append([kernel.base_fn.__name__, {name: kwargs.get(name) for name in names}])
        return run(*args, **kwargs)

    kernel.fn.run = logged


def step() -> list[Any]:
    """The launches that both sides make, and what they are found to be."""
    launched.clear()
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.linspace(-1, 1, 24 * 16).to(dtype).reshape(24, 16)
        l2norm.l2norm_fwd(x)
    x = torch.ones(32, dtype=torch.float16)
    y = torch.empty(32, dtype=torch.float32)
    scale_kernel[(1,)](n=32, y=y, x=x)  # not in the order of the signature
    assert bool((y == 2).all())
    return list(launched)


def trainer(folder: Path) -> dict[str, Any]:
    import tuning
    from tuning import interop
    from tuning.freeze import freeze
    from tuning.inventory import take_inventory
    from tuning.tables import write_table

    scope = ("fla", "own_kernels")
    sizes = {"BT": 32, "BLOCK": 16}
    with tuning.install(tuning.AutotunePolicy(mode="pinned", modules=scope, block_sizes=sizes)) as installed:
        first = step()
        run = installed.manifest()
    frozen = freeze(run)
    for table in frozen.tables:
        write_table(folder / "tables", table)
    autotuners = take_inventory(("fla.modules.norm.l2norm", "own_kernels"), archs=()).autotuners
    done = interop.write("fla", frozen.tables, folder / "fla", names=[autotuners, run])
    with tuning.install(
        tuning.AutotunePolicy(mode="pinned", modules=scope, table_path=(str(folder / "tables"),), on_miss="error")
    ) as installed:
        second = step()
        assert {choice.source for choice in installed.choices} == {"exact"}
    back = interop.read("fla", [folder / "fla"], arch="cpu", names=[autotuners, run])
    return {
        "first": first,
        "second": second,
        "losses": [loss.kind for loss in done.losses],
        "files": [path.name for path in done.files],
        "back": sorted([str(entry), entry.config.text] for table in back.tables for entry in table.entries),
        "table": sorted([str(entry), entry.config.text] for table in frozen.tables for entry in table.entries),
    }


def engine() -> dict[str, Any]:
    found = {"launched": step()}
    assert not any(name.split(".")[0] == "tuning" for name in sys.modules)
    try:
        l2norm.l2norm_fwd(torch.ones(8, 64))
    except AssertionError as error:
        found["key that is not in the table"] = [str(error)]
    return found


def main() -> None:
    log(l2norm.l2norm_fwd_kernel)
    log(scale_kernel)
    print("\n" + json.dumps(trainer(Path(sys.argv[2])) if sys.argv[1] == "trainer" else engine()))


if __name__ == "__main__":
    main()
