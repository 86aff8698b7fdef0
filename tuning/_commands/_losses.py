"""Say what another system's format could not carry: each kind once, since a table loses the same with every entry."""

from __future__ import annotations

from collections.abc import Sequence

from .._console import Console
from ..interop import Loss

__all__ = ["show_losses"]


def show_losses(console: Console, losses: Sequence[Loss]) -> None:
    """Print how many there are of each kind, and the first."""
    kinds: dict[str, list[Loss]] = {}
    for loss in losses:
        kinds.setdefault(loss.kind, []).append(loss)
    for kind, group in kinds.items():
        times = f"{len(group)} times, as in " if len(group) > 1 else ""
        console.text(f"not carried: {kind.replace('_', ' ')}: {times}{group[0]}", hanging=2, style="yellow")
    if len(losses) > len(kinds):
        console.line(f"{len(losses)} times in all; --json lists each")
