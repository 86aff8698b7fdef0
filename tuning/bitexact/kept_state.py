"""Random state, and whatever else a run changes: remembered, put back, and told by name.

What is put back is the same objects with the same bytes: a tensor is written in place where it lies, so that views of
it and flat buffers that it is a view of see it too. A parameter or buffer that was replaced, added or taken away is
bound as it was, and so are gradients, an optimizer's entries and its parameter groups.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tuning.bitexact.digest import flatten
from tuning.bitexact.digest_parts import is_plain

__all__ = ["kept_state", "random_state", "restore_random_state", "run_values", "state_values"]

logger = logging.getLogger(__name__)

_EXPECTED = "modules, tensors, generators, or objects with state_dict and load_state_dict"


def random_state() -> dict[str, Any]:
    """State of the random number generators: Python's, numpy's global one, torch's on the CPU and each CUDA device.

    CUDA is started where there is a device, and numpy is loaded where it is installed: a generator that starts within
    a run could not be put back to what it started from.
    """
    import torch

    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    try:
        import numpy
    except ImportError:
        pass
    else:
        state["numpy"] = numpy.random.get_state()
    # In a process that was forked after CUDA had started there, nothing can use it.
    if torch.cuda.is_available() and not torch.cuda._is_in_bad_fork():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the generators back to what :func:`random_state` found."""
    import torch

    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def kept_state(state: Sequence[Any], *, after: bool = True) -> Iterator[Callable[[], None]]:
    """Remember random state and ``state``; yields what puts both back, and does it at the end if ``after``.

    Raises:
        TypeError: something in ``state`` has no state that can be restored.
    """
    restores = [_restorer(item, f"state[{number}]") for number, item in enumerate(state)]
    generators = random_state()

    def restore() -> None:
        for back in restores:
            back()
        restore_random_state(generators)

    try:
        yield restore
    finally:
        if after:
            restore()


def state_values(state: Sequence[Any]) -> dict[str, Any]:
    """Every value in ``state`` as it is now, by a name such as ``state[0].weight`` and ``state[0].weight.grad``."""
    import torch

    found: dict[str, Any] = {}
    for number, item in enumerate(state):
        here = f"state[{number}]"
        if isinstance(item, torch.nn.Module):
            _reshard(item)
            named = [*item.named_parameters(), *item.named_buffers()]
            found.update({f"{here}.{name}": tensor for name, tensor in named})
            found.update({f"{here}.{name}.grad": _gradient(tensor) for name, tensor in named if tensor.requires_grad})
        elif isinstance(item, torch.Tensor):
            found[here] = item
            if item.requires_grad:
                found[f"{here}.grad"] = _gradient(item)
        elif isinstance(item, torch.Generator):
            found[here] = item.get_state()
        else:
            try:
                found.update(flatten(item.state_dict(), here))
            except TypeError as error:
                logger.info("%s is put back and not compared: %s", here, error)
    return found


def run_values(returned: Any, state: Sequence[Any], shared: set[str] | None = None) -> tuple[dict[str, Any], set[str]]:
    """What a run returned, by name, and then what it left in ``state``.

    Args:
        returned: nested; see :func:`tuning.bitexact.digest.flatten`.
        state: as of :func:`kept_state`.
        shared: names in ``state`` that are left out, those that the first run gave; None for the first run.

    Returns:
        The values, and the names of those in ``state`` that the first run returned itself.

    Raises:
        TypeError: something was returned whose bits are not known.
    """
    values, left = flatten(returned), state_values(state)
    if shared is None:
        known = {id(value) for value in values.values() if value is not None}
        shared = {name for name, value in left.items() if id(value) in known and hasattr(value, "detach")}
    values.update({name: value for name, value in left.items() if name not in shared})
    return values, shared


def _gradient(tensor: Any) -> Any:
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def _restorer(item: Any, name: str) -> Callable[[], None]:
    import torch

    if isinstance(item, torch.nn.Module):
        return _module_restorer(item, name)
    if isinstance(item, torch.Tensor):
        return _tensor_restorer(item, name)
    if isinstance(item, torch.Generator):
        return _generator_restorer(item)
    if isinstance(item, torch.optim.Optimizer):
        return _optimizer_restorer(item, name)
    if hasattr(item, "state_dict") and hasattr(item, "load_state_dict"):
        # A copy each time: what loads may keep the tensors and change them.
        saved = copy.deepcopy(item.state_dict())
        return lambda: item.load_state_dict(copy.deepcopy(saved))
    raise TypeError(f"state: expected {_EXPECTED}, found {type(item).__name__}")


def _generator_restorer(generator: Any) -> Callable[[], None]:
    saved = generator.get_state()

    def back() -> None:
        generator.set_state(saved)

    return back


def _module_restorer(module: Any, name: str) -> Callable[[], None]:
    _reshard(module)
    members = ("_parameters", "_buffers", "_modules")
    bound = [
        (each, each.training, [(getattr(each, member), dict(getattr(each, member))) for member in members])
        for each in module.modules()
    ]
    unsaved = [(each, set(each._non_persistent_buffers_set)) for each in module.modules()]
    named = [*module.named_parameters(), *module.named_buffers()]
    backs = [_tensor_restorer(tensor, f"{name}.{inner}") for inner, tensor in named]

    def back() -> None:
        _reshard(module)
        for each, training, tables in bound:
            each.training = training
            for table, saved in tables:
                if table.keys() != saved.keys() or any(table[key] is not saved[key] for key in saved):
                    table.clear()
                    table.update(saved)
        for each, names in unsaved:
            each._non_persistent_buffers_set.clear()
            each._non_persistent_buffers_set.update(names)
        for restore in backs:
            restore()

    return back


def _reshard(module: Any) -> None:
    """Have FSDP2 bind its shards again where it left whole parameters bound: those are copies that it makes itself."""
    sharding = sys.modules.get("torch.distributed.fsdp")
    kind: Any = getattr(sharding, "FSDPModule", ())
    for each in module.modules():
        if isinstance(each, kind):
            each.reshard()


def _mapping_restorer(mapping: Any, name: str) -> Callable[[], None]:
    """Of a dictionary: its tensors are kept and written in place, the rest is copied."""
    import torch

    saved: dict[Any, Any] = {}
    backs = []
    for key, value in mapping.items():
        if isinstance(value, torch.Tensor):
            saved[key] = value
            backs.append(_tensor_restorer(value, f"{name}.{key}"))
        else:
            saved[key] = copy.deepcopy(value)

    def back() -> None:
        mapping.clear()
        for key, value in saved.items():
            mapping[key] = value if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for restore in backs:
            restore()

    return back


def _optimizer_restorer(optimizer: Any, name: str) -> Callable[[], None]:
    # Not by load_state_dict, which casts float32 moments of a bfloat16 parameter to bfloat16.
    state = []
    for parameter, entry in optimizer.state.items():
        restore = _mapping_restorer(entry, f"{name}.state") if isinstance(entry, dict) else None
        state.append((parameter, entry if restore else copy.deepcopy(entry), restore))
    groups = []
    for group in optimizer.param_groups:
        rest = {key: value for key, value in group.items() if key != "params"}
        groups.append((group, group["params"], list(group["params"]), rest, _mapping_restorer(rest, name)))

    def back() -> None:
        optimizer.state.clear()
        for parameter, entry, restore in state:
            if restore is not None:
                restore()
            optimizer.state[parameter] = entry if restore else copy.deepcopy(entry)
        optimizer.param_groups[:] = [group for group, *_ in groups]
        for group, parameters, kept, rest, restore in groups:
            restore()
            parameters[:] = kept
            group.clear()
            group.update({"params": parameters, **rest})

    return back


def _tensor_restorer(tensor: Any, name: str) -> Callable[[], None]:
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        raise TypeError(f"{name}: expected tensors that hold something, found a lazy one: call its module once before")
    write = _bytes_restorer(tensor)
    gradient = _gradient(tensor)
    write_gradient = None if gradient is None else _bytes_restorer(gradient)
    requires_grad, leaf = tensor.requires_grad, tensor.is_leaf

    def back() -> None:
        write()
        if not leaf:
            return
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        if write_gradient is not None:
            write_gradient()
        if tensor.grad is not gradient:
            tensor.grad = gradient

    return back


def _bytes_restorer(tensor: Any) -> Callable[[], None]:
    """Puts a tensor's bytes back in place, and the tensor to the memory that it had."""
    import torch

    memory = tensor.detach()
    plain = is_plain(memory)
    own = memory
    if plain:
        for dim, (size, step) in enumerate(zip(memory.shape, memory.stride(), strict=True)):
            own = own.narrow(dim, 0, 1) if size > 1 and step == 0 else own  # an expanded dimension is one element
    value = own.clone()

    def place(found: Any) -> Any:
        return found.data_ptr(), found.dtype, found.shape, found.stride()

    def back() -> None:
        with torch.inference_mode() if memory.is_inference() else torch.no_grad():
            if plain and place(tensor) != place(memory):
                tensor.data = memory
            own.copy_(value)

    return back
