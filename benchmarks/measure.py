"""Measure with the installed transformers, and put what was found into results.json.

    python -m benchmarks.measure memory seconds off

`tox run -e bench` does so with each release, and then draws what benchmarks/README.md shows.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from typing import Any, Callable, Dict

from benchmarks import memory, off, ranks, seconds
from benchmarks.machine import machine, versions
from benchmarks.report import RESULTS

MEASUREMENTS: Dict[str, Callable[[], Any]] = {
    "memory": memory.measure,
    "seconds": seconds.measure,
    "off": off.measure,
    "default_batch": seconds.measure_default_batch,
    "ranks": ranks.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measurements", nargs="+", choices=MEASUREMENTS, metavar="WHAT", help=", ".join(MEASUREMENTS))
    wanted = parser.parse_args().measurements
    release = importlib.metadata.version("transformers")
    for name in wanted:
        print(f"transformers {release}: {name}", flush=True)
        record(release, name, MEASUREMENTS[name]())


def record(release: str, name: str, found: Any) -> None:
    """Put what was found into results.json, beside what is there of other releases and measurements."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results.setdefault(release, {}).update({"machine": machine(), "versions": versions(), name: found})
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
