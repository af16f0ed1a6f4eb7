"""How much memory an evaluation takes."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any, Callable

import psutil

_STATUS = Path("/proc/self/status")
TELLS_ANONYMOUS = _STATUS.exists()

# For the environment of a process that is measured: malloc gives back at once what is freed.
PLAIN_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


def resident() -> float:
    """Resident memory of this process, MiB."""
    return psutil.Process().memory_info().rss / 2**20


def anonymous() -> float:
    """The same without what is mapped from files, and can be dropped."""
    found = re.search(r"RssAnon:\s+(\d+) kB", _STATUS.read_text())
    assert found
    return int(found[1]) / 1024


def growth(run: Callable[[], Any], measure: Callable[[], float] = resident) -> float:
    """By how much memory is higher at its highest while `run` runs than before, MiB."""
    before, peak, done = measure(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, measure())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return max(0.0, peak - before)
