"""An evaluation that is interrupted, anywhere, leaves no more behind than the stock Trainer's would."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any, Dict, List
from unittest import TestCase

import torch
from accelerate.state import GradientState
from parameterized import parameterized
from transformers import Trainer, TrainerCallback

import shim
from tests.fixtures import Count, Lin, Rows, batches, loading, make_trainer, once


class Interruption(BaseException):
    """Like KeyboardInterrupt: no `except Exception` stops it."""


class Interrupting:
    """Raises at its second call at a place, once."""

    def __init__(self, place: str) -> None:
        self._place, self._calls = place, 0

    def at(self, place: str) -> None:
        self._calls += place == self._place
        if place == self._place and self._calls == 2:
            raise Interruption


PLACES = ("data", "collator", "forward", "prediction step", "preprocessing", "callback", "metric")


def trainer_interrupted(place: str, prepared: bool, seen: List[Any], metric: Any, **options: Any) -> Any:
    GradientState._reset_state()  # the loader of the Trainer before this one is registered still
    interrupting = Interrupting(place)

    class Model(Lin):
        def forward(self, x: Any, labels: Any = None) -> Any:
            outputs = super().forward(x, labels)
            seen.append(weakref.ref(outputs["logits"]))
            interrupting.at("forward")
            return outputs

    class Data(Rows):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                interrupting.at("data")
                interrupting.at("data")
            return super().__getitem__(index)

    class Steps(Trainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().prediction_step(*args, **kwargs)
            interrupting.at("prediction step")
            return outputs

    class Callback(TrainerCallback):
        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            interrupting.at("callback")

    def collate(rows: Any) -> Any:
        interrupting.at("collator")
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def preprocess(logits: Any, labels: Any) -> Any:
        interrupting.at("preprocessing")
        return logits

    class Metric(Count):
        def __call__(self, eval_pred: Any, compute_result: bool = True) -> Any:
            interrupting.at("metric")
            return super().__call__(eval_pred, compute_result)

    trainer = make_trainer(
        Metric() if metric is None else metric,
        cls=Steps if prepared else loading(lambda: _through(Data(10)), Steps),
        model=Model(),
        eval_rows=Data(10),
        data_collator=collate,
        preprocess_logits_for_metrics=preprocess,
        callbacks=[Callback()],
        **options,
    )
    with contextlib.suppress(Interruption):
        trainer.evaluate()
    return trainer


def _through(data: Any) -> Any:
    """The batches of a set that is asked for each of its rows."""
    for start, batch in zip(range(0, 10, 4), batches(10)):
        for index in range(start, start + len(batch["labels"])):
            data[index]
        yield batch


def left_behind(trainer: Any) -> Dict[str, Any]:
    """What hangs on the Trainer and on what it holds."""
    return {
        "trainer": sorted(vars(trainer)),
        "args": sorted(vars(trainer.args)),
        "callback_handler": sorted(vars(trainer.callback_handler)),
        "registered loaders": len(trainer.accelerator.gradient_state.dataloader_references),
    }


class Interrupted(TestCase):
    @parameterized.expand([(place, prepared) for place in PLACES for prepared in (True, False)])
    def test_nothing_is_left_that_stock_would_not_leave(self, place, prepared):
        if place == "collator" and not prepared:
            self.skipTest("a loader that nobody prepared has batches already")
        with_shim: List[Any] = []
        gc.disable()  # what is freed is freed at once, without the collector
        try:
            trainer = trainer_interrupted(place, prepared, with_shim, None, batch_eval_metrics=True)
            self.assertEqual([logits() for logits in with_shim if logits() is not None], [])
            found = left_behind(trainer)
        finally:
            gc.enable()
        added = {"batch_eval_metrics", "cuda_cache_clear", "cuda_cache_clear_steps"}
        shim.revert()
        try:
            # Stock calls its metric after the loop: its callback is what is called in the loop, as our metric is.
            stock = trainer_interrupted("callback" if place == "metric" else place, prepared, [], None)
            expected = left_behind(stock)
        finally:
            shim.apply()
        found["args"] = [name for name in found["args"] if name not in added]
        expected["args"] = [name for name in expected["args"] if name not in added]
        self.assertEqual(found, expected)
        self.assertIs(trainer.args.batch_eval_metrics, True)
        count = trainer.compute_metrics
        count.flags.clear()
        self.assertEqual(trainer.evaluate()["eval_rows"], 10)
        self.assertEqual(count.flags, once(3))
