"""A record as it stands in a journal: what was measured, kept apart from what was found.

A merge reads millions of timings, on which objects for each would be wasted; :class:`Measurement` holds them as they
come from a frame, and gives the record (:class:`tuning.spec.TuningRecord`) where one is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tuning.spec import CandidateTiming, Json, Kernel, Key, LaunchConfig, TuningRecord

__all__ = ["Identity", "Measurement"]


@dataclass(frozen=True, eq=False)
class Identity:
    """What is equal in the records of all ranks: see :class:`tuning.spec.TuningRecord`.

    Attributes:
        kernel, key, arch, specialization: as there.
        configs: the candidates, and after them the winner, should it be none of them.
    """

    kernel: Kernel
    key: Key
    arch: str
    configs: tuple[LaunchConfig, ...]
    specialization: Json


class Measurement(NamedTuple):
    """A record as it stands in a frame; a merge of millions of timings needs no objects for them.

    Attributes:
        identity: what was measured. Readers give equal ones as one object.
        times: for each candidate its times in milliseconds, or None.
        errors: why candidates failed, by their index.
        winner: index of the winner in ``identity.configs``.
        shared, note: as in :class:`tuning.spec.TuningRecord`.
    """

    identity: Identity
    times: Sequence[Sequence[float] | None]
    errors: Mapping[int, str]
    winner: int
    shared: bool
    note: str

    @classmethod
    def of(cls, record: TuningRecord) -> Measurement:
        """The measurement that a record holds."""
        configs = tuple(timing.config for timing in record.timings)
        if record.winner not in configs:
            configs += (record.winner,)
        return cls(
            Identity(record.kernel, record.key, record.arch, configs, record.specialization),
            [timing.times_ms for timing in record.timings],
            {index: timing.error for index, timing in enumerate(record.timings) if timing.error is not None},
            configs.index(record.winner),
            record.shared,
            record.note,
        )

    def record(self) -> TuningRecord:
        """The record that was written."""
        identity, errors = self.identity, self.errors
        timings = tuple(
            CandidateTiming(config, None if times is None else tuple(times), errors.get(index))
            for index, (config, times) in enumerate(zip(identity.configs, self.times, strict=False))
        )
        return TuningRecord(
            identity.kernel,
            identity.key,
            identity.arch,
            timings,
            identity.configs[self.winner],
            self.shared,
            identity.specialization,
            self.note,
        )
