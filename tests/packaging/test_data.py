"""The numbers that tools/demo/data/README.md states, counted again."""

import gzip
from collections import Counter
from datetime import UTC, datetime

from tests.packaging.tree import ROOT

DAY_S = 86_400


def test_the_delays_are_what_their_description_says() -> None:
    """Every number in the description of the delays is what the file gives."""
    with gzip.open(ROOT / "tools" / "demo" / "data" / "git-delays.tsv.gz", "rt", encoding="ascii") as lines:
        rows = [line.rstrip("\n").split("\t") for line in lines]
    pairs = [(int(written), int(due)) for written, due, _ in rows]
    sharing = [count for count in Counter(due for _, due in pairs).values() if count > 1]
    assert pairs == sorted(pairs)
    assert {len(commit) for _, _, commit in rows} == {12}

    stated = [
        f"{len(pairs):,} pairs of times",
        f"{datetime.fromtimestamp(pairs[0][0], UTC):%Y-%m-%d} to {datetime.fromtimestamp(pairs[-1][0], UTC):%Y-%m-%d}",
        f"{sum(due > written for written, due in pairs):,} are due after they were written",
        f"{sum(due > written + DAY_S for written, due in pairs):,} of them by more than a day",
        f"{sum(due > written + 7 * DAY_S for written, due in pairs):,} by more than a week",
        f"delay is {max(due - written for written, due in pairs) // DAY_S:,} days",
        f"{sum(due == written for written, due in pairs):,} are due in the second they were written",
        f"{sum(due < written for written, due in pairs):,} before it",
        f"{len({due // DAY_S for _, due in pairs}):,} different days",
        f"delayed ones on {len({due // DAY_S for written, due in pairs if due > written}):,}",
        f"{sum(sharing):,} share their due second with another, {max(sharing)} at most",
    ]
    text = " ".join((ROOT / "tools" / "demo" / "data" / "README.md").read_text(encoding="utf-8").split())
    assert [phrase for phrase in stated if phrase not in text] == []
