"""Times in turns: a machine that is slower for a while is so for both."""

from __future__ import annotations

import gc
import time
from typing import Callable, List, NamedTuple

import numpy as np


class Turns(NamedTuple):
    """Seconds of two pieces of work, turn by turn."""

    ours: List[float]
    reference: List[float]

    def ratios(self) -> List[float]:
        """Ours to the reference's: the lower quartile, the median and the upper quartile of the pairs."""
        pairs = np.array(self.ours) / np.array(self.reference)
        return [round(float(value), 3) for value in np.percentile(pairs, (25, 50, 75))]

    def ratio_of_lower_quartiles(self) -> float:
        """Noise only adds: what is left of each without it."""
        ours, reference = (np.percentile(seconds, 25) for seconds in self)
        return round(float(ours / reference), 4)


def in_turns(
    ours: Callable[[], float], reference: Callable[[], float], budget: float, least: int, most: int = 1000
) -> Turns:
    """Run both, each once a turn; who comes first changes.

    Args:
        ours, reference: do the work, and tell how many seconds it took. Once each is run before, and does not count.
        budget: seconds after which no turn begins.
        least, most: turns, whatever the budget says.
    """
    seconds: Turns = Turns([], [])
    ours(), reference()
    end = time.perf_counter() + budget
    while len(seconds.ours) < least or (len(seconds.ours) < most and time.perf_counter() < end):
        order = [(ours, seconds.ours), (reference, seconds.reference)]
        for work, times in order if len(seconds.ours) % 2 else order[::-1]:
            gc.collect()
            times.append(work())
    return seconds
