"""Let a launch's config vary within the chosen one's bit class, and refuse where the class does not hold.

**When.** At the first launch of a form for which a table has evidence. Before anything is timed, each candidate of the
class is run once on copies of the launch's arguments, and compared with the chosen one: the evidence is tried again at
every start, on real data, and a difference is an error. Then, once for a key, Triton times those that ran, on
copies too, so that an argument that is read and written is not written a hundred times.

**Which.** The evidence is bound to the form of a launch (:mod:`tuning._launch_arguments`), which is more than the key.
So a key whose config may vary is looked up by form at every launch, off the path of a pinned hit, which does not
change. A form without evidence gets the chosen config. While a stream captures a graph nothing is tried or timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from ._launch_arguments import Copies, same_bytes
from .errors import DeterminismError
from .spec import LaunchConfig

__all__ = ["Within", "capturing", "rehearse"]

_FORMS_LIMIT = 4096


class Within:
    """What is known of one key whose config may vary.

    Args:
        free: a :class:`tuning.selection.Freedom`.
    """

    __slots__ = ("_by_form", "free", "winner")

    def __init__(self, free: Any) -> None:
        self.free = free
        self.winner: Any = None
        self._by_form: dict[tuple[Any, ...], Any] = {}

    def __contains__(self, form: object) -> bool:
        return form in self._by_form

    def __getitem__(self, form: tuple[Any, ...]) -> Any:
        """What is launched for a form; None: the chosen config. Raises KeyError where it is new."""
        return self._by_form[form]

    def keep(self, form: tuple[Any, ...], entry: Any) -> None:
        """Remember what is launched for a form."""
        if len(self._by_form) >= _FORMS_LIMIT:
            self._by_form = {}  # sizes that never repeat: they are looked at anew
        self._by_form[form] = entry


def capturing() -> bool:
    """Whether the current stream captures a graph, so that nothing may be copied, compared or timed."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._initialized) and bool(torch.cuda.is_current_stream_capturing())


def rehearse(
    what: str,
    configs: Sequence[Any],
    copies: Copies,
    launch: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
    resource_errors: tuple[type[BaseException], ...],
) -> list[Any]:
    """Run each candidate on copies and compare it with the first; those that could be launched, in order.

    Args:
        what: kernel and key, for the error.
        configs: live candidates of one class, the chosen one first.
        copies: of the arguments.
        launch: launches a config.
        resource_errors: what is raised where a config cannot be launched. If the first cannot, nothing is returned.

    Raises:
        DeterminismError: two of them differ.
    """
    ran: list[Any] = []
    expected: dict[str, Any] = {}
    for config in configs:
        args, kwargs, tensors = copies.copy()
        try:
            launch(config, args, kwargs)
        except resource_errors:
            if not ran:
                return []
            continue
        expected = expected or tensors
        differing = [name for name in tensors if not same_bytes(tensors[name], expected[name])]
        if differing:
            raise DeterminismError(
                f"{what}: {LaunchConfig.of(config)} and {LaunchConfig.of(ran[0])} are in one bit class, and differ in "
                f"{', '.join(differing)} here: drop the classes from the table and probe again, or set within_class to "
                "'pinned'"
            )
        ran.append(config)
    return ran
