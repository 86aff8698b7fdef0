"""Several processes write into one folder while another reads: no lost and no torn file."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tuning.tables import load_tables, read_table

ROOT = Path(__file__).parents[2]
WRITERS, ROUNDS, ENTRIES = 8, 12, 200

WRITE = f"""
import sys
from tuning.spec import LaunchConfig
from tuning.tables import Entry, TableFile, write_table

number, folder = int(sys.argv[1]), sys.argv[2]
for round_ in range({ROUNDS}):
    for package in ("shared", f"own{{number}}"):
        rows = tuple(
            Entry(f"{{package}}.m.k{{i}}", None, None, None, LaunchConfig.build({{"WRITER": number, "ROUND": round_}}),
                  {{"reported_by": "a test"}})
            for i in range({ENTRIES})
        )
        write_table(folder, TableFile("sm90", package, "", "", "", rows))
"""


def test_eight_writers_and_a_reader(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITE, str(number), tmp_path], cwd=ROOT, stderr=subprocess.PIPE)
        for number in range(WRITERS)
    ]
    versions: set[tuple[str, str]] = set()
    try:
        while any(writer.poll() is None for writer in writers):
            if not (tmp_path / "sm90" / "shared.json").exists():
                time.sleep(0.01)
                continue
            tables = load_tables("sm90", [tmp_path])
            found = {
                row.config.text
                for name in tables.kernels()
                if name.startswith("shared.")
                for row in tables.entries(name)
            }
            assert len(found) == 1, "rows of two writers in one file"
            versions.add(("shared", found.pop()))
    finally:
        for writer in writers:
            writer.wait(timeout=60)
    assert [writer.communicate()[1] for writer in writers] == [b""] * WRITERS
    assert len(versions) > 1, "the reader saw no replacement; nothing was shown"
    names = {f"own{number}.json" for number in range(WRITERS)} | {"shared.json"}
    assert {path.name for path in (tmp_path / "sm90").iterdir()} == names
    for path in (tmp_path / "sm90").iterdir():
        table = read_table(path)
        assert len(table.entries) == ENTRIES
        rounds = {dict(row.config.kwargs)["ROUND"] for row in table.entries}
        assert len(rounds) == 1
        if path.stem != "shared":
            assert rounds == {str(ROUNDS - 1)}, "a later write was lost"
