"""What `import shim` and `apply()` cost, in fresh processes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Dict, Optional

import pytest

ROOT = Path(__file__).parents[2]


def on_releases(*releases: str) -> Any:
    """For tests in processes of their own, which take as long as the import of transformers: spread over lanes."""
    installed = importlib.metadata.version("transformers")
    return pytest.mark.skipif(installed not in releases, reason=f"runs with transformers {' and '.join(releases)}")


HEAVY = ("torch", "transformers", "accelerate", "numpy")


def run_fresh(code: str, environment: Optional[Dict[str, str]] = None) -> Any:
    """What a new process prints last, as JSON."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **(environment or {})}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_the_shim_loads_and_patches_nothing():
    loaded = run_fresh("import json, sys, shim; print(json.dumps(sorted(sys.modules)))")
    assert not set(HEAVY) & set(loaded)


@on_releases("4.41.0", "5.12.1")
def test_importing_the_shim_and_applying_it_cost_a_fraction_of_importing_the_trainer():
    # Ratios within one process: the absolute bounds are 60 ms and 200 ms on a quiet machine.
    seconds = run_fresh(
        """
        import json, time

        seconds = {}

        def timed(name, work):
            start = time.perf_counter()
            work()
            seconds[name] = time.perf_counter() - start

        timed("import shim", lambda: __import__("shim"))
        timed("import trainer", lambda: __import__("transformers.trainer"))
        import shim
        timed("apply", shim.apply)
        print(json.dumps(seconds))
        """
    )
    assert seconds["import shim"] < seconds["import trainer"] / 20
    assert seconds["apply"] < seconds["import trainer"] / 10
