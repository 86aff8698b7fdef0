"""While recording: whether what a winner leaves behind is its own work.

Triton times every candidate on the launch's own arguments and launches the winner last. So an output holds, after that
first launch, whatever any of them wrote: a winner that writes one half of it looks right, until it is launched from a
table and nobody has written the other half. In the same way a kernel that updates an argument in place has updated it
once for each run that was timed.

The check takes copies of the arguments before anything is timed, runs the winner on them, twice, and compares with what
the caller's own arguments hold by then, byte for byte. It needs the memory of the arguments once more while timing,
twice more afterwards. Not judged: kernels whose ``best_config`` the caller reads (it sizes what it reads by that), and
launches whose arguments cannot be copied.

Weighed and left: comparing candidates with each other (``triton-tuning probe`` does), and filling outputs with a
pattern, which a kernel that reads what it updates cannot bear.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ._launch_arguments import CannotBeCopied, Copies, same_bytes
from ._launch_pointers import copies_to_replay
from ._launch_replay import readers_of_best_config
from .spec import Kernel, LaunchConfig

__all__ = ["watch_outputs"]

logger = logging.getLogger("tuning.interception")


def watch_outputs(
    autotuner: Any, kernel: Kernel, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[Any], str] | None:
    """Copy the arguments of a launch that is about to be timed.

    Returns:
        What is to be called once the winner has been launched, with its live config; it returns a line about what is
        wrong, or nothing. None where this launch cannot be judged.
    """
    if readers_of_best_config(kernel):
        return None
    names = tuple(autotuner.arg_names)
    try:
        clean_args, clean_kwargs, tensors = copies_to_replay(autotuner, args, kwargs).copy()
    except CannotBeCopied as error:
        logger.info("%s: outputs are not checked: %s", kernel.qualified_name, error.message)
        return None
    if not tensors:
        return None
    clean = Copies(names, clean_args, clean_kwargs)

    def compare(winner: Any) -> str:
        config = LaunchConfig.of(winner)
        alone = _run(autotuner, winner, clean)
        again = _run(autotuner, winner, clean)
        for name, values in alone.items():
            if not same_bytes(values, again[name]):
                return f"{config} leaves other bits in argument {name!r} when it runs again on equal arguments"
        del again
        found = Copies(names, args, kwargs).tensors
        for name, values in alone.items():
            if not same_bytes(values, found[name]):
                return _difference(config, name, values, found[name])
        return ""

    return compare


def _run(autotuner: Any, config: Any, clean: Copies) -> dict[str, Any]:
    """The tensors of a launch's arguments after the config has run on copies of them."""
    args, kwargs, tensors = clean.copy()
    values = config.all_kwargs()
    named = {**dict(zip(autotuner.arg_names, args, strict=False)), **kwargs, **values}
    # As Triton does between timing and launching the winner: reset_to_zero.
    autotuner.pre_hook(named, reset_only=True)
    if config.pre_hook is not None:
        config.pre_hook(named)
    autotuner.fn.run(*args, **kwargs, **values)
    return tensors


def _difference(config: LaunchConfig, name: str, alone: Any, found: Any) -> str:
    import torch

    width = alone.element_size()
    left, right = (each.contiguous().reshape(-1).view(torch.uint8).reshape(-1, width) for each in (alone, found))
    different = (left != right).any(1)
    first = int(different.nonzero()[0])
    index = tuple(int(place) for place in torch.unravel_index(torch.tensor(first), alone.shape))
    values = f"{found[index].item()} after timing, {alone[index].item()} when it runs alone"
    return (
        f"{config} alone leaves other values in {int(different.sum())} of {alone.numel()} elements of argument "
        f"{name!r}, first at {index}: {values}. What other candidates, or earlier runs, wrote while being timed hides "
        "that; it shows when the config is pinned. Mend the candidates, or name the argument in restore_value or "
        "reset_to_zero"
    )
