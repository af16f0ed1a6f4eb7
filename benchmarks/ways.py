"""The ways to evaluate that are compared, and what is evaluated.

The model is the cheapest there is for its 20,000 logits, and its loss adds nothing to their memory: what is measured is
the evaluation. The metric is accuracy, for all ways.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, ContextManager, Dict, NamedTuple

import shim.metrics
from tests.fixtures import CLASSES, Count, Lin, Rows, has_batch_eval_metrics, make_trainer

WIDTH = 20_000  # logits a row, float32
BATCH = 200


class Way(NamedTuple):
    """A way to evaluate."""

    label: str
    options: Dict[str, Any]
    applied: bool = False
    """Whether the shim is."""
    metric: Callable[[], Any] = Count


def _spooled_count() -> Any:
    count = Count()
    return shim.metrics.spool(lambda eval_pred: count(eval_pred))


WAYS = {
    "stock": Way("stock", {}),
    "accumulate": Way("stock, eval_accumulation_steps=1", {"eval_accumulation_steps": 1}),
    "native": Way("native batch_eval_metrics", {"batch_eval_metrics": True}),
    "shim": Way("shim, batch_eval_metrics", {"batch_eval_metrics": True}, applied=True),
    "spool": Way("shim, spool", {"batch_eval_metrics": True}, applied=True, metric=_spooled_count),
}


def offered() -> Dict[str, Way]:
    """The ways that the installed transformers offers."""
    return {name: way for name, way in WAYS.items() if name != "native" or has_batch_eval_metrics()}


class Evaluation:
    """An evaluation that can be run again and again.

    Args:
        way: a key of `WAYS`.
        rows: how many are evaluated.
        width: logits a row.
        batch: rows a batch.
    """

    def __init__(self, way: str, rows: int, width: int = WIDTH, batch: int = BATCH) -> None:
        self.way, self._rows = WAYS[way], rows
        with self.surroundings():
            self._trainer = make_trainer(
                self.way.metric(),
                model=Lin(wide=width - CLASSES),
                eval_rows=Rows(rows),
                per_device_eval_batch_size=batch,
                **self.way.options,
            )

    def surroundings(self) -> ContextManager[Any]:
        """Within it the shim is applied, if this way needs it."""
        return shim.applied() if self.way.applied else contextlib.nullcontext()

    def run(self) -> None:
        """Evaluate, and check that every row was counted. To be called in its surroundings."""
        counted = self._trainer.evaluate()["eval_rows"]
        if counted != self._rows:
            raise AssertionError(f"{self.way.label} counted {counted} of {self._rows} rows")

    def seconds(self) -> float:
        """Evaluate, and tell how long it took."""
        with self.surroundings():
            start = time.perf_counter()
            self.run()
            return time.perf_counter() - start
