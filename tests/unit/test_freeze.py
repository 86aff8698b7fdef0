"""A run, its manifest, the table frozen from it, and the same run with that table alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stub_kernels import Bench, FakeTensor, StubKernel, autotuner, configs, launch
from triton.runtime.errors import OutOfResources

import tuning
from tuning.errors import TableError
from tuning.freeze import Frozen, freeze
from tuning.manifest import Launch, Manifest, build_manifest, manifest_from_bytes, read_manifest
from tuning.spec import Environment, Key, LaunchConfig
from tuning.tables import table_bytes, write_table

pytestmark = pytest.mark.stub

SCOPE = ("stub_kernels",)
TOO_LARGE = OutOfResources(300000, 232448, "shared memory")


def candidates(*blocks: int) -> list[Any]:
    return configs(*blocks, num_stages=3)  # its default depends on the version of Triton


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    tuning.uninstall()


def steps(tuner: Any, *, addresses: tuple[int, ...] = (0,)) -> None:
    """Launches with several keys, dtypes, and typed values that Triton holds for equal."""
    for address in addresses:
        for n in (8, 16, True, 1, 1.0):
            launch(tuner, FakeTensor(address=address), FakeTensor("torch.bfloat16"), n, flag=True)
        launch(tuner, FakeTensor("torch.bfloat16", address), y=FakeTensor(), n=8, flag=True)


def run(policy: tuning.AutotunePolicy, tuner: Any, **how: Any) -> Manifest:
    tuner.fn.launches.clear()
    with tuning.install(policy) as installed:
        steps(tuner, **how)
        return installed.manifest()


def blocks(tuner: Any) -> list[int]:
    return [int(dict(config.kwargs)["BLOCK"]) for config in tuner.fn.launches]


def what_ran(manifest: Manifest) -> list[Any]:
    return sorted((launch.place, launch.config.text) for launch in manifest.choices)


def frozen_policy(folder: Path) -> tuning.AutotunePolicy:
    return tuning.AutotunePolicy(mode="pinned", modules=SCOPE, table_path=(str(folder),), on_miss="error")


def test_a_pinned_run_is_repeated_by_the_frozen_table_alone(tmp_path: Path) -> None:
    tuner = autotuner(candidates(64, 32, 128))
    first = run(
        tuning.AutotunePolicy(
            mode="pinned", modules=SCOPE, block_sizes={"BLOCK": 128}, manifest_path=str(tmp_path / "run.json")
        ),
        tuner,
    )
    launched = blocks(tuner)
    assert launched == [128] * 6
    frozen = freeze(read_manifest(tmp_path / "run.json"))
    assert frozen.conflicts == ()
    assert frozen.exact
    (table,) = frozen.tables
    assert all(entry.key is not None and entry.dtypes is not None for entry in table.entries)
    write_table(tmp_path / "tables", table)

    again = autotuner(candidates(32, 128, 64), bench=Bench())
    second = run(frozen_policy(tmp_path / "tables"), again)
    assert blocks(again) == launched
    assert what_ran(second) == what_ran(first)
    assert {launch.source for launch in second.choices} == {"exact"}
    assert again.do_bench.calls == 0


def test_a_timed_run_is_repeated_by_the_frozen_table_alone(tmp_path: Path) -> None:
    stub = StubKernel()
    tuner = autotuner(candidates(32, 64, 128), stub=stub, bench=Bench({32: 3.0, 64: 1.0, 128: 2.0}, stub))
    first = run(tuning.AutotunePolicy(mode="record", modules=SCOPE, record_path=str(tmp_path / "rec")), tuner)
    frozen = freeze(first)
    assert {entry.evidence["rule"] for entry in frozen.tables[0].entries} == {"timed"}
    write_table(tmp_path / "tables", frozen.tables[0])
    again = autotuner(candidates(32, 64, 128))
    second = run(frozen_policy(tmp_path / "tables"), again)
    assert what_ran(second) == what_ran(first)
    assert blocks(again) == [64] * 6


def test_what_was_launched_is_frozen_and_not_what_had_been_chosen(tmp_path: Path) -> None:
    tuner = autotuner(candidates(64, 32, 128), stub=StubKernel(fails=fails_where({128, 64}, set())))
    first = run(tuning.AutotunePolicy(mode="pinned", modules=SCOPE, block_sizes={"BLOCK": 128}), tuner)
    assert set(blocks(tuner)) == {32}
    frozen = freeze(first)
    assert frozen.conflicts == ()
    assert {entry.config for entry in frozen.tables[0].entries} == {LaunchConfig.build({"BLOCK": 32})}
    assert "128" in frozen.tables[0].entries[0].evidence["note"]
    write_table(tmp_path / "tables", frozen.tables[0])
    again = autotuner(candidates(64, 32, 128), stub=StubKernel(fails=fails_where({128, 64}, set())))
    second = run(frozen_policy(tmp_path / "tables"), again)
    assert what_ran(second) == what_ran(first)
    assert not any(launch.detail for launch in second.choices)


def fails_where(aligned: set[int], elsewhere: set[int]) -> Any:
    """A kernel some of whose block sizes run out of shared memory, others where its tensors are not aligned."""

    def fails(config: LaunchConfig, named: dict[str, Any]) -> BaseException | None:
        failing = aligned if named["x"].data_ptr() % 16 == 0 else elsewhere
        return TOO_LARGE if int(dict(config.kwargs)["BLOCK"]) in failing else None

    return fails


@pytest.mark.parametrize("addresses", [(0, 8), (8, 0)])
@pytest.mark.parametrize(
    ("aligned", "elsewhere", "frozen_block"),
    [
        (set(), {128}, 128),  # chosen here, replaced by 32 there
        ({128}, {128, 32}, 32),  # replaced by 32 here and, 32 failing too, by 64 there
        ({128, 32}, {128}, 32),
    ],
)
def test_several_specializations_of_one_key_are_reported_and_come_back(
    tmp_path: Path, addresses: tuple[int, ...], aligned: set[int], elsewhere: set[int], frozen_block: int
) -> None:
    tuner = autotuner(candidates(128, 64, 32), stub=StubKernel(fails=fails_where(aligned, elsewhere)))
    policy = tuning.AutotunePolicy(mode="pinned", modules=SCOPE, block_sizes={"BLOCK": 128})
    first = run(policy, tuner, addresses=addresses)
    assert len({launch.config for launch in first.choices}) == 2
    frozen = freeze(first)
    write_table(tmp_path / "tables", frozen.tables[0])
    again = autotuner(candidates(128, 64, 32), stub=StubKernel(fails=fails_where(aligned, elsewhere)))
    second = run(frozen_policy(tmp_path / "tables"), again, addresses=addresses)
    assert what_ran(second) == what_ran(first)
    assert blocks(again) == blocks(tuner)
    assert frozen.exact
    assert len(frozen.conflicts) == len(frozen.tables[0].entries) == 6
    conflict = frozen.conflicts[0]
    assert conflict.frozen == LaunchConfig.build({"BLOCK": frozen_block})
    assert set(conflict.configs) == {launch.config for launch in first.choices}
    assert "which take its place again where it cannot be launched" in str(conflict)
    assert json.dumps(conflict.to_json())


ENVIRONMENT = Environment(
    "sm90", "NVIDIA H200", 132, "3.6.0", "2.11.0", "3.11.7", (("pkg", "pkg 1.0"),), world_size=2, host="h"
)
KEY = Key.of({"n": 128, "causal": True}, {"x": "bfloat16", "y": "float32"}, ("y", "x"))


def made(*launches: Launch, environment: Environment = ENVIRONMENT) -> Manifest:
    return replace(
        build_manifest(library="1", mode="pinned", policy={}, environment=environment),
        choices=tuple(sorted(launches, key=lambda launch: launch.place)),
    )


def choice(block: int, *, kernel: str = "pkg.m.k", key: Key = KEY, arch: str = "sm90", **rest: Any) -> Launch:
    fields: dict[str, Any] = {"source": "exact", "origin": None, "source_hash": "0123abcd", **rest}
    return Launch(kernel, key, LaunchConfig.build({"BLOCK": block}), arch=arch, **fields)


def entries(frozen: Frozen) -> dict[str, Any]:
    return {entry.kernel: entry for table in frozen.tables for entry in table.entries}


def test_the_table_says_where_it_is_from() -> None:
    run = made(choice(64, source="cheapest"))
    (table,) = freeze(run).tables
    assert (table.arch, table.package, table.package_version) == ("sm90", "pkg", "pkg 1.0")
    assert (table.triton, table.device, table.multiprocessors) == ("3.6.0", "NVIDIA H200", 132)
    (entry,) = table.entries
    assert entry.evidence == {"frozen_from": f"run {run.digest}", "rule": "cheapest"}
    assert entry.source_hash == "0123abcd"
    assert entry.key == KEY.values
    assert entry.dtypes == KEY.dtypes
    assert table_bytes(table)


def test_one_table_for_each_arch_and_package() -> None:
    two = replace(ENVIRONMENT, arch="sm100+sm90")
    frozen = freeze(
        made(choice(1), choice(2, arch="sm100"), choice(3, kernel="other.k", source_hash=None), environment=two)
    )
    assert [(table.arch, table.package) for table in frozen.tables] == [
        ("sm100", "pkg"),
        ("sm90", "other"),
        ("sm90", "pkg"),
    ]
    # With devices of two archs in one process the manifest does not say which is which.
    assert {(table.device, table.multiprocessors) for table in frozen.tables} == {("", 0)}


def test_ranks_that_agree_freeze_to_one_table() -> None:
    ranks = [made(choice(64), environment=replace(ENVIRONMENT, rank=rank)) for rank in range(3)]
    frozen = freeze(ranks)
    assert frozen.conflicts == ()
    assert frozen.tables == freeze(ranks[0]).tables


def test_ranks_that_chose_differently_are_not_reproduced() -> None:
    frozen = freeze([made(choice(64)), made(choice(32), choice(16, kernel="pkg.m.other"))])
    assert not frozen.exact
    (conflict,) = frozen.conflicts
    assert (conflict.arch, conflict.kernel, conflict.key) == ("sm90", "pkg.m.k", KEY)
    assert conflict.frozen == LaunchConfig.build({"BLOCK": 64})
    assert not conflict.reproduced
    assert str(conflict).endswith(
        "frozen is BLOCK=64 num_warps=4 num_stages=3; the run also has BLOCK=32 num_warps=4 num_stages=3, "
        "which were chosen too and will not be launched"
    )
    assert set(entries(frozen)) == {"pkg.m.k", "pkg.m.other"}


def test_among_replacements_the_first_in_the_order_of_fallback_is_frozen() -> None:
    detail = "in place of BLOCK=128, which failed with OutOfResources"
    for order in ((32, 64), (64, 32)):
        frozen = freeze(made(*(choice(block, detail=detail) for block in order)))
        assert entries(frozen)["pkg.m.k"].config == LaunchConfig.build({"BLOCK": 32})
        assert frozen.exact


def test_of_a_resumed_run_the_choice_is_frozen_and_not_what_was_carried_for_its_failure() -> None:
    carried = choice(32, detail="resumed from a checkpoint; in place of BLOCK=64, which failed with OutOfResources")
    frozen = freeze(made(carried, choice(64, detail="resumed from a checkpoint")))
    assert entries(frozen)["pkg.m.k"].config == LaunchConfig.build({"BLOCK": 64})
    assert frozen.exact


def test_of_a_run_resumed_with_a_replacement_that_is_frozen_where_it_failed_too() -> None:
    carried = choice(32, detail="resumed from a checkpoint; in place of BLOCK=64, which failed with OutOfResources")
    then = choice(16, detail=f"in place of {LaunchConfig.build({'BLOCK': 32})}, which failed with OutOfResources")
    for order in ((carried, then), (then, carried)):
        frozen = freeze(made(*order))
        assert entries(frozen)["pkg.m.k"].config == LaunchConfig.build({"BLOCK": 32})


def test_no_choice_is_an_error() -> None:
    with pytest.raises(TableError, match="freeze: expected choices in the manifest, found none"):
        freeze(made())
    with pytest.raises(TableError, match="expected choices in the manifests, found none"):
        freeze([])


def test_two_sources_of_one_kernel_are_an_error() -> None:
    with pytest.raises(TableError, match=r"pkg\.m\.k on sm90 had two sources in these runs \(0123abcd and 89abcdef\)"):
        freeze([made(choice(64)), made(choice(64, source_hash="89abcdef"))])


def test_a_manifest_read_from_bytes_freezes_like_the_one_written() -> None:
    from tuning.manifest import manifest_bytes

    run = made(choice(64), choice(32, kernel="pkg.m.other"))
    assert freeze(manifest_from_bytes(manifest_bytes(run))) == freeze(run)
