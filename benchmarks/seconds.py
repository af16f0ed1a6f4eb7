"""Time of an evaluation against its rows, as a ratio to the native option's, in turns in one process.

    python -m benchmarks.seconds ROWS WIDTH BATCH

prints, for each way, its median of seconds and the ratios. Where the release has no option of its own, the ratio is to
the shim's.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any, Dict, Iterable, Tuple

from benchmarks.memory import ROWS
from benchmarks.processes import output_of, progress
from benchmarks.turns import in_turns
from benchmarks.ways import BATCH, WIDTH, Evaluation, offered

BUDGET = 12  # seconds for each way and number of rows
# Turns, whatever the budget says: as many as it takes to tell 1.00 from 1.03, where that is the question.
LEAST = {"stock": 3, "accumulate": 3, "shim": 31, "spool": 5}
KEEPS_ALL = ("stock", "accumulate")
MOST_ROWS_KEPT = 8_000  # where every row is kept: 32,000 take some minutes a turn
# Rows, logits a row, rows a batch. Few logits: what a batch costs beside its logits.
NARROW = (4_000, 3, 8)
DEFAULT_BATCH = (3_000, WIDTH, 8)  # rows a batch as the Trainer has them if nobody says


def reference() -> str:
    """The way to which the others are compared."""
    return "native" if "native" in offered() else "shim"


def ratios(rows: int, width: int, batch: int) -> Dict[str, Dict[str, Any]]:
    """Each way's median of seconds, turns, and quartiles of its ratio to the reference."""
    base = Evaluation(reference(), rows, width, batch)
    found: Dict[str, Dict[str, Any]] = {}
    for way in offered():
        if way == reference() or (way in KEEPS_ALL and rows > MOST_ROWS_KEPT):
            continue
        turns = in_turns(Evaluation(way, rows, width, batch).seconds, base.seconds, BUDGET, LEAST[way])
        found[way] = {
            "seconds": round(statistics.median(turns.ours), 4),
            "turns": len(turns.ours),
            "ratios": turns.ratios(),
        }
        found.setdefault(reference(), {"seconds": round(statistics.median(turns.reference), 4)})
    return found


def measure(rows: Iterable[int] = ROWS) -> Dict[str, Any]:
    """The ratios against the rows, and for logits that are few."""
    cases: Dict[str, Tuple[int, int, int]] = {str(count): (count, WIDTH, BATCH) for count in rows}
    return _measured({**cases, "narrow": NARROW})


def measure_default_batch() -> Dict[str, Any]:
    """The ratios for batches of the Trainer's default size."""
    return _measured({"default batch": DEFAULT_BATCH})


def _measured(cases: Dict[str, Tuple[int, int, int]]) -> Dict[str, Any]:
    outputs = (output_of("-m", "benchmarks.seconds", *map(str, case)) for case in cases.values())
    return dict(zip(cases, progress("seconds", len(cases), outputs)))


if __name__ == "__main__":
    print(json.dumps(ratios(*map(int, sys.argv[1:4]))))
