"""Which elements of memory that came uninitialised have been written: by masks beside it, on its device.

``empty`` and its kin return whatever lay there. An op that writes a part of it leaves the rest as it was, so a digest
of all of it would tell two runs apart where nothing is wrong. Each such memory has a mask of its elements that were
written; ops that write are followed in it, and what a mask leaves out counts as 0.

Followed are ops that overwrite all of a tensor (a view of the memory, as often as not), and those that overwrite places
given by indices or by a mask. Any other op of torch that changes a tensor is taken to read it first, which leaves what
was not written unwritten. An op of an extension is taken to write all of what it says it changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tuning.bitexact.digest_parts import is_plain

__all__ = ["UnwrittenMemory", "named_arguments", "storage_of"]


def storage_of(tensor: Any) -> int:
    """What tells a tensor's memory from others while it lives."""
    import torch

    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)


class UnwrittenMemory:
    """Masks of the memory that has not been written whole, by its storage."""

    def __init__(self) -> None:
        self._masks: dict[int, tuple[int, Any]] = {}

    def __contains__(self, tensor: object) -> bool:
        return bool(self._masks) and storage_of(tensor) in self._masks

    def add(self, tensor: Any) -> None:
        """Note memory that nothing was written to yet."""
        import torch

        if tensor.device.type != "meta" and is_plain(tensor):
            count = tensor.untyped_storage().nbytes() // tensor.element_size()
            mask = torch.zeros(count, dtype=torch.bool, device=tensor.device)
            self._masks[storage_of(tensor)] = (tensor.element_size(), mask)

    def drop(self, tensor: Any) -> None:
        """All of a tensor's memory counts as written."""
        self._masks.pop(storage_of(tensor), None)

    def defined(self, tensor: Any) -> Any:
        """The tensor, or, where some of its memory was never written, its bits with 0 for that."""
        import torch

        mask = self._mask(tensor)
        if mask is None:
            return tensor
        plain = tensor.detach().resolve_conj().resolve_neg()
        if plain.is_complex():
            plain, mask = torch.view_as_real(plain), mask.unsqueeze(-1)
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return torch.where(mask, plain.view(integers[plain.element_size()]), 0)

    def overwritten(self, tensor: Any) -> None:
        """Note that an op wrote every element of a tensor."""
        mask = self._mask(tensor)
        if mask is not None:
            dense = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
            if dense and tensor.is_contiguous():
                self.drop(tensor)
            else:
                mask.fill_(True)

    def changed(self, name: str, tensor: Any, arguments: Mapping[str, Any]) -> None:
        """Note what an op that does not overwrite everything wrote of the tensor that it changes.

        Args:
            name: of the op with its namespace and overload.
            tensor: the one that it changed.
            arguments: all of its arguments by the names in its schema.
        """
        import torch

        if not name.startswith(("aten.", "prims.")):
            self.drop(tensor)
            return
        mask = self._mask(tensor)
        if mask is None or arguments.get("self") is not tensor:
            return
        base = name.split(".")[1]
        if base in ("index_copy_", "index_fill_"):
            mask.index_fill_(arguments["dim"], arguments["index"], True)
        elif base in ("masked_fill_", "masked_scatter_"):
            mask.masked_fill_(arguments["mask"], True)
        elif base in ("index_put_", "_index_put_impl_") and not arguments.get("accumulate", False):
            mask.index_put_(tuple(arguments["indices"]), torch.ones((), dtype=torch.bool, device=mask.device))
        elif name in ("aten.scatter_.src", "aten.scatter_.value"):
            mask.scatter_(arguments["dim"], arguments["index"], True)

    def _mask(self, tensor: Any) -> Any:
        if tensor not in self or not is_plain(tensor):
            return None
        size, mask = self._masks[storage_of(tensor)]
        if size != tensor.element_size():
            # Seen as another dtype: not followed any further.
            self.drop(tensor)
            return None
        return mask.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def named_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """An op's arguments by the names in its schema; those that were not given are left out."""
    names = [argument.name for argument in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
