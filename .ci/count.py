"""Count the tests in pytest's reports and print one line; exit 1 if one failed, or if none ran."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from xml.etree import ElementTree


def count(reports: Iterable[str]) -> Counter[str]:
    """Tests by outcome; an error while setting up or collecting is a failure."""
    outcomes: Counter[str] = Counter()
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            tags = {child.tag for child in case}
            outcomes["failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"] += 1
    return outcomes


if __name__ == "__main__":
    found = count(sys.argv[1:])
    print(f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped")
    sys.exit(bool(found["failed"]) or not found["passed"])
