"""Every order of imports, definitions, `apply` and `revert`, in fresh processes; and two threads at once."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import transformers
from transformers import Trainer

import shim
from shim import compat
from tests.fixtures import Count, make_trainer, once
from tests.unit.orders import STEPS

ROOT = Path(__file__).parents[2]


# 756 processes: at the ends of the range, where releases differ the most
@pytest.mark.skipif(
    transformers.__version__ not in (compat.OLDEST_SUPPORTED, compat.NEWEST_TESTED),
    reason=f"runs with transformers {compat.OLDEST_SUPPORTED} and {compat.NEWEST_TESTED}",
)
@pytest.mark.stock
def test_every_order_of_a_programs_life_works_and_all_are_covered():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.orders"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    covered = [tuple(line.split(" > ")) for line in done.stdout.splitlines() if " > " in line]
    assert len(covered) == len(set(covered))
    assert set(covered) == {order for order in itertools.permutations(STEPS) if is_possible(order)}


def is_possible(order):
    place = {step: number for number, step in enumerate(order)}
    return all(place[before] < place[step] for step, after in STEPS.items() for before in after)


@pytest.mark.stock
def test_threads_that_apply_and_revert_at_once():
    stock = vars(Trainer)["evaluation_loop"]
    start = threading.Barrier(8)
    problems = []

    def work(what):
        try:
            start.wait()
            what()
        except Exception as error:
            problems.append(error)

    for what in (shim.apply, shim.revert):
        threads = [threading.Thread(target=work, args=(what,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        if what is shim.apply:
            assert shim.status().applied
            assert vars(Trainer)["evaluation_loop"].__wrapped__ is stock
            count = Count()
            make_trainer(count, batch_eval_metrics=True).evaluate()
            assert count.flags == once(3)
        start = threading.Barrier(8)
    assert vars(Trainer)["evaluation_loop"] is stock
