"""What a merge takes from journals before it decides anything: pools of timings, and where they come from."""

from __future__ import annotations

from collections import defaultdict

from tuning._journal_files import token
from tuning._merge_contexts import AFTER, Breakage, with_breaks
from tuning._merge_pools import Pool
from tuning.errors import JournalError
from tuning.journal import Journal, Scan
from tuning.spec import Environment

__all__ = ["Gathered"]

_TOO_MANY_FOR_CHANCE = 32  # candidates' timings that two independent recordings do not share


class Gathered:
    """Everything taken from the journals.

    Attributes:
        pools: what was measured, by arch, kernel and key.
        origins: path and environment of each journal.
        torn: path and number of bytes of the torn tails.
        archs: those met, whether taken or not.
        records: how many were taken.
        sources: for each arch and kernel, the source hashes seen, each with the first journal by name that has it.
        environments: for each arch and package, those of the journals that recorded kernels of it.
        copies: how many journals were copies of others.
    """

    def __init__(self) -> None:
        self.pools: dict[tuple[str, str, str], Pool] = {}
        self.origins: list[tuple[str, Environment]] = []
        self.torn: list[tuple[str, int]] = []
        self.archs: set[str] = set()
        self.records = 0
        self.copies = 0
        self._contents: dict[str, set[str]] = {}
        self.sources: defaultdict[tuple[str, str], dict[str, str]] = defaultdict(dict)
        self.environments: defaultdict[tuple[str, str], set[Environment]] = defaultdict(set)

    def add(self, journal: Journal | Scan, arch: str | None) -> None:
        """Take one journal; of ``arch`` alone if that is given. A copy of one taken before is no recording."""
        if self._is_copy(journal):
            self.copies += 1
            return
        source = len(self.origins)
        self.origins.append((journal.path, journal.environment))
        if journal.torn_bytes:
            self.torn.append((journal.path, journal.torn_bytes))
        groups = set()
        breakage: Breakage | None = None
        for measurement, broke in with_breaks(journal.measurements):
            identity = measurement.identity
            self.archs.add(identity.arch)
            if arch not in (None, identity.arch):
                continue
            self.records += 1
            kernel = identity.kernel
            name = (identity.arch, kernel.qualified_name, identity.key.text)
            pool = self.pools.get(name)
            if pool is None:
                pool = self.pools[name] = Pool(identity.key)
            if broke is None:
                pool.add(measurement, source)
            elif broke != AFTER:
                breakage = pool.add_broken(measurement, broke, source)
            elif breakage is not None:
                breakage.later += len(measurement.times)
            groups.add((identity.arch, kernel.package))
            if kernel.source_hash is not None:
                seen = self.sources[identity.arch, kernel.qualified_name]
                seen[kernel.source_hash] = min(journal.path, seen.get(kernel.source_hash, journal.path))
        for group in groups:
            self.environments[group].add(journal.environment)

    def _is_copy(self, journal: Journal | Scan) -> bool:
        """Whether this is a file that was taken before, under another path.

        Two short recordings of one rank may be equal by chance, since clocks are coarse: equal bytes are those of a
        copy where the file still has the name that no other process gives, or where they hold many times.
        """
        if not journal.content:
            return False
        same = self._contents.setdefault(journal.content, set())
        name = token(journal.path)
        many = sum(len(each.times) for each in journal.measurements) >= _TOO_MANY_FOR_CHANCE
        if same and (many or (name and name in same)):
            return True
        same.add(name)
        return False

    def source_hashes(self) -> dict[tuple[str, str], str]:
        """The one hash of the source of each arch and kernel.

        Raises:
            JournalError: a kernel was recorded from different sources.
        """
        for (arch, kernel), seen in sorted(self.sources.items()):
            if len(seen) > 1:
                shown = "; ".join(f"{digest[:12]} in {path}" for digest, path in sorted(seen.items()))
                raise JournalError(
                    f"kernel {kernel} on {arch} was recorded from {len(seen)} different sources ({shown}): timings of "
                    "different code cannot be pooled; merge the journals of one version of the package",
                    file=min(seen.values()),
                )
        return {name: next(iter(seen)) for name, seen in self.sources.items()}
