"""Measurements in processes of their own, and what is shown meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, Optional, TypeVar

ROOT = Path(__file__).parents[1]
Item = TypeVar("Item")


def output_of(*arguments: str, environment: Optional[Dict[str, str]] = None) -> Any:
    """What Python with these arguments prints last, as JSON.

    Raises:
        SystemExit: it failed; its messages have been printed.
    """
    command = [sys.executable, "-W", "ignore", *arguments]
    settings = {**os.environ, **(environment or {})}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT, env=settings)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed with exit code {done.returncode}; its message is above.")
    return json.loads(done.stdout.splitlines()[-1])


def progress(name: str, total: int, items: Iterable[Item]) -> Iterator[Item]:
    """The items, while a line on stderr counts them."""
    for number, item in enumerate(items, start=1):
        print(f"\r{name}: {number} of {total}", end="" if number < total else "\n", file=sys.stderr, flush=True)
        yield item
