"""Peak resident memory of an evaluation against its rows: each point in a process of its own.

    python -m benchmarks.memory WAY ROWS

prints by how many MiB memory is higher at its highest than before. What is mapped from files does not count: the system
can drop it. malloc gives back at once what is freed, so that what is measured is held.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Dict, Iterable

from benchmarks.processes import output_of, progress
from benchmarks.ways import BATCH, Evaluation, offered
from tests.memory import PLAIN_MALLOC, TELLS_ANONYMOUS, anonymous, growth, resident

ROWS = (500, 1_000, 3_000, 8_000, 16_000, 32_000)
AT_A_TIME = 2  # memory does not mind


def peak(way: str, rows: int) -> float:
    """MiB that the evaluation takes at its most, in this process."""
    warm_up, evaluation = Evaluation(way, rows=2 * BATCH), Evaluation(way, rows)
    with evaluation.surroundings():
        warm_up.run()
        return growth(evaluation.run, anonymous if TELLS_ANONYMOUS else resident)


def measure(rows: Iterable[int] = ROWS) -> Dict[str, Dict[str, float]]:
    """The peak of each way for each number of rows, MiB."""
    points = [(way, str(count)) for way in offered() for count in rows]
    found: Dict[str, Dict[str, float]] = {}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        peaks = pool.map(lambda point: output_of("-m", "benchmarks.memory", *point, environment=PLAIN_MALLOC), points)
        for (way, count), mib in zip(points, progress("memory", len(points), peaks)):
            found.setdefault(way, {})[count] = mib
    return found


if __name__ == "__main__":
    print(round(peak(sys.argv[1], int(sys.argv[2])), 2))
