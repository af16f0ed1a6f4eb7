"""What a piece of work costs, counted: noise of the machine does not come into it."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, Callable

import shim


def calls_of(work: Callable[[], Any]) -> int:
    """Python and C calls that `work` makes."""
    counter: Counter = Counter()

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            counter[event] += 1

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return sum(counter.values())


def added_calls(work: Callable[[], Any]) -> int:
    """What the shim adds to `work` when it is applied and off: the least of several runs, for noise only adds."""
    work()
    stock = min(calls_of(work) for _ in range(3))
    with shim.applied():
        work()
        return min(calls_of(work) for _ in range(3)) - stock
