"""What the shim costs when it is applied and every option is at its default; and its calls a batch with the option on.

    python -m benchmarks.off

prints added calls, which no noise touches, and times in turns. The model is as small as it gets, so that what the shim
would add cannot hide behind it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any, Callable, Dict, List

import shim
from benchmarks.processes import output_of, progress
from benchmarks.turns import in_turns
from benchmarks.ways import Evaluation, offered
from tests.calls import added_calls, calls_of
from tests.fixtures import CLASSES, EVAL_BATCH, Count, Rows, make_trainer

BATCHES = (10, 100)
STEPS = 50  # in a turn
BUDGET, LEAST = 60, 40  # seconds and turns
IMPORTS = 5
IMPORTING = """
import json, time
import transformers.trainer
start = time.perf_counter()
import shim
imported = time.perf_counter()
shim.apply()
print(json.dumps([imported - start, time.perf_counter() - imported]))
"""


def timed(work: Callable[[], Any]) -> Callable[[], float]:
    """The work, which tells its seconds."""

    def seconds() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return seconds


def applied(work: Callable[[], float]) -> Callable[[], float]:
    """The work with the shim applied."""

    def with_shim() -> float:
        with shim.applied():
            return work()

    return with_shim


def evaluation_of(batches: int) -> Callable[[], Any]:
    """An evaluation of so many batches, by a Trainer of its own."""
    trainer = make_trainer(Count(), eval_rows=EVAL_BATCH * batches)
    loader = trainer.get_eval_dataloader()
    return lambda: trainer.evaluation_loop(loader, "Evaluation")


def training_steps(number: int) -> Callable[[], Any]:
    """So many training steps."""
    rows = Rows(EVAL_BATCH)
    trainer = make_trainer(train_dataset=rows)
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    batch = {"x": rows.x, "labels": rows.labels}

    def steps() -> None:
        for _ in range(number):
            trainer.training_step(trainer.model, dict(batch))

    return steps


def added_to_first_evaluation() -> int:
    """Calls that the forecast of memory adds to the first evaluation of a Trainer."""

    def calls() -> int:
        first = evaluation_of(10)
        return calls_of(first)

    calls()
    stock = calls()
    with shim.applied():
        return calls() - stock


def calls_with_the_option(way: str) -> Dict[str, float]:
    """Calls that a whole evaluation makes for each batch, and beside."""
    few, many = BATCHES
    calls = {}
    for batches in BATCHES:
        evaluation = Evaluation(way, rows=EVAL_BATCH * batches, width=CLASSES, batch=EVAL_BATCH)
        with evaluation.surroundings():
            evaluation.run()
            calls[batches] = min(calls_of(evaluation.run) for _ in range(3))
    of_batch = (calls[many] - calls[few]) / (many - few)
    return {"a batch": round(of_batch, 1), "beside": round(calls[few] - few * of_batch)}


def ratio(work: Callable[[], Any]) -> Dict[str, Any]:
    """Time with the shim applied to time without it."""
    turns = in_turns(applied(timed(work)), timed(work), BUDGET, LEAST)
    return {"ratio": turns.ratio_of_lower_quartiles(), "quartiles": turns.ratios(), "turns": len(turns.ours)}


def costs() -> Dict[str, Any]:
    """Everything but the import, in this process."""
    return {
        "added calls": {
            "evaluation": {str(batches): added_calls(evaluation_of(batches)) for batches in BATCHES},
            "training step": added_calls(training_steps(1)),
            "first evaluation": added_to_first_evaluation(),
        },
        "calls": {way: calls_with_the_option(way) for way in offered()},
        "time": {"evaluation": ratio(evaluation_of(100)), "training": ratio(training_steps(STEPS))},
    }


def measure() -> Dict[str, Any]:
    """The costs, and the milliseconds of `import shim` and `apply()`: the median of several processes."""
    imports: List[List[float]] = []
    for _ in progress("import and apply", IMPORTS, range(IMPORTS)):
        imports.append(output_of("-c", IMPORTING))
    milliseconds = [round(1000 * statistics.median(seconds), 1) for seconds in zip(*imports)]
    print("off: two minutes or so", file=sys.stderr, flush=True)
    return {**output_of("-m", "benchmarks.off"), "milliseconds": dict(zip(("import", "apply"), milliseconds))}


if __name__ == "__main__":
    print(json.dumps(costs()))
