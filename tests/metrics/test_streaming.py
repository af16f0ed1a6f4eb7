"""`StreamingMetric` keeps the contract, with the shim and without it; `per_sample_mean` is exact."""

from __future__ import annotations

import math
from typing import Any, Dict, List
from unittest import TestCase

import numpy as np
import pytest
import torch
from parameterized import parameterized
from transformers import TrainerCallback

import shim
from shim.metrics import StreamingMetric, per_sample_mean
from tests.fixtures import (
    LOADERS,
    FailingOnce,
    InterruptedOnce,
    Lin,
    Rows,
    has_batch_eval_metrics,
    has_losses,
    including,
    keeping_the_best,
    make_trainer,
    oracle,
    trainer_over,
    without_timing,
)

BATCH_SIZES = [(size,) for size in (1, 2, 3, 4, 7, 10)]


class Accuracy(StreamingMetric):
    def __init__(self, fails_at: int = 0) -> None:
        self.sizes: List[int] = []
        self._fails_at = fails_at

    def reset(self) -> None:
        self.right = self.rows = 0

    def update(self, eval_pred: Any) -> None:
        self.sizes.append(len(eval_pred.label_ids))
        if len(self.sizes) == self._fails_at:
            raise ZeroDivisionError
        self.right += int((eval_pred.predictions.argmax(-1) == eval_pred.label_ids).sum())
        self.rows += len(eval_pred.label_ids)

    def compute(self) -> Dict[str, Any]:
        return {"accuracy": self.right / self.rows, "rows": self.rows}


def found(trainer: Any) -> Dict[str, Any]:
    metrics = trainer.evaluate()
    return {"accuracy": metrics["eval_accuracy"], "rows": metrics["eval_rows"]}


class Contract(TestCase):
    @parameterized.expand([(loader,) for loader in LOADERS])
    def test_it_is_right_twice_for_any_loader(self, loader):
        trainer = trainer_over(loader, 10, Accuracy(), batch_eval_metrics=True)
        self.assertEqual(found(trainer), oracle(Lin(), Rows(10)))
        self.assertEqual(found(trainer), oracle(Lin(), Rows(10)))

    def test_it_serves_an_ordinary_evaluation_as_well(self):
        metric = Accuracy()
        trainer = make_trainer(metric)
        self.assertEqual(found(trainer), oracle(Lin(), Rows(10)))
        self.assertEqual(found(trainer), oracle(Lin(), Rows(10)))
        self.assertEqual(metric.sizes, [10, 10])

    @pytest.mark.stock
    @pytest.mark.skipif(not has_batch_eval_metrics(), reason="this transformers has no option of its own")
    def test_it_serves_the_option_of_transformers_itself_as_well(self):
        trainer = make_trainer(Accuracy(), batch_eval_metrics=True)
        self.assertEqual(found(trainer), oracle(Lin(), Rows(10)))
        self.assertEqual(found(trainer), oracle(Lin(), Rows(10)))

    @pytest.mark.stock
    @pytest.mark.skipif(not has_batch_eval_metrics(), reason="this transformers has no option of its own")
    def test_without_the_shim_too_a_failed_update_leaves_nothing_to_the_next_evaluation_c22(self):
        trainer = make_trainer(Accuracy(fails_at=2), batch_eval_metrics=True)
        with self.assertRaises(ZeroDivisionError):
            trainer.evaluate()
        self.assertEqual(found(trainer), oracle(Lin(), Rows(10)))

    def test_a_batch_without_rows_is_not_taken_in_but_can_be_the_last(self):
        metric = Accuracy()
        empty = Prediction(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
        one = Prediction(torch.eye(3)[:1], torch.tensor([0]))
        self.assertIsNone(metric(empty, compute_result=False))
        self.assertIsNone(metric(one, compute_result=False))
        self.assertEqual(metric(empty, compute_result=True), {"accuracy": 1.0, "rows": 1})
        self.assertEqual(metric.sizes, [1])


class Prediction:
    def __init__(self, predictions: Any, label_ids: Any) -> None:
        self.predictions, self.label_ids = predictions, label_ids


class State(TestCase):
    def test_it_is_given_up_when_the_metrics_are_there(self):
        metric = Accuracy()
        make_trainer(metric, batch_eval_metrics=True).evaluate()
        self.assertEqual(metric.rows, 0)

    def test_it_is_given_up_when_the_evaluation_is_interrupted_c23(self):
        metric = Accuracy()
        trainer = make_trainer(metric, eval_rows=InterruptedOnce(20, at=19), batch_eval_metrics=True)
        with self.assertRaises(KeyboardInterrupt):
            trainer.evaluate()
        self.assertGreater(len(metric.sizes), 0)
        self.assertEqual(metric.rows, 0)
        self.assertEqual(found(trainer), oracle(Lin(), Rows(20)))

    def test_a_metric_of_the_users_own_keeps_its_state_when_the_evaluation_is_interrupted(self):
        metric = CountingResets()
        trainer = make_trainer(metric, eval_rows=InterruptedOnce(20, at=19), batch_eval_metrics=True)
        with self.assertRaises(KeyboardInterrupt):
            trainer.evaluate()
        self.assertEqual(metric.resets, 1)

    def test_the_error_of_the_metric_comes_through_as_it_is(self):
        trainer = make_trainer(FailingOnce(Accuracy(), at=2), batch_eval_metrics=True)
        with self.assertRaises(ZeroDivisionError):
            trainer.evaluate()


class CountingResets:
    resets = 0

    def reset(self) -> None:
        self.resets += 1

    def __call__(self, eval_pred: Any, compute_result: bool) -> Dict[str, Any]:
        return {}


def margin(eval_pred: Any) -> Any:
    """How far the logit of the label is from the highest, row by row."""
    logits, labels = torch.as_tensor(eval_pred.predictions), torch.as_tensor(eval_pred.label_ids)
    return logits.gather(1, labels[:, None])[:, 0] - logits.amax(1)


class PerSampleMean(TestCase):
    @parameterized.expand(BATCH_SIZES)
    def test_it_is_the_same_to_the_last_bit_for_any_batch_size_c29(self, size):
        rows = Rows(23)
        with torch.no_grad():
            values = margin(Prediction(Lin()(rows.x)["logits"], rows.labels)).double().tolist()
        trainer = make_trainer(
            per_sample_mean(margin), eval_rows=rows, batch_eval_metrics=True, per_device_eval_batch_size=size
        )
        # torch may round the logits of another batch size otherwise
        self.assertAlmostEqual(trainer.evaluate()["eval_margin"], math.fsum(values) / 23, delta=1e-6)
        exact = per_sample_mean(lambda eval_pred: eval_pred.predictions, name="mean")
        for start in range(0, 23, size):
            batch = np.array(values[start : start + size])
            result = exact(Prediction(batch, batch), compute_result=start + size >= 23)
        self.assertEqual(result, {"mean": math.fsum(values) / 23})

    def test_a_mean_of_batch_means_would_be_another_number_c29(self):
        means = per_sample_mean(lambda eval_pred: eval_pred.predictions, name="mean")
        means(Prediction(np.array([0.0, 1.0, 0.0, 1.0]), None), compute_result=False)
        self.assertEqual(means(Prediction(np.array([0.0]), None), compute_result=True), {"mean": 0.4})

    @parameterized.expand([("a scalar", 0.5), ("a column", np.ones((2, 1))), ("one value too few", [1.0])])
    def test_anything_but_one_value_a_row_is_refused(self, _, returned):
        mean = per_sample_mean(lambda eval_pred: returned, name="mean")
        with self.assertRaisesRegex(ValueError, "one value for each of the 2 rows, found shape"):
            mean(Prediction(np.ones((2, 3)), np.ones(2)))

    def test_a_lambda_needs_a_name(self):
        with self.assertRaisesRegex(ValueError, 'give name="..."'):
            per_sample_mean(lambda eval_pred: eval_pred.losses)


class InTraining(TestCase):
    def test_the_metric_can_choose_the_best_model_c33(self):
        trainer = make_trainer(Accuracy(), batch_eval_metrics=True, **keeping_the_best())
        trainer.train()
        self.assertIn(trainer.state.best_metric, [log.get("eval_accuracy") for log in trainer.state.log_history])

    def test_another_evaluation_from_a_callback_has_its_own_metric_c24(self):
        inner: List[Dict[str, Any]] = []

        class Inner(TrainerCallback):
            def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
                if not inner:
                    inner.append({})
                    inner[0] = found(make_trainer(Accuracy(), eval_rows=7, batch_eval_metrics=True))

        trainer = make_trainer(Accuracy(), batch_eval_metrics=True, callbacks=[Inner()])
        self.assertEqual(found(trainer), oracle(Lin(), Rows(10)))
        self.assertEqual(inner, [oracle(Lin(), Rows(7))])


def test_shim_metrics_is_there_without_an_import_of_its_own():
    assert shim.metrics.per_sample_mean is per_sample_mean
    with pytest.raises(AttributeError, match="no attribute 'metric'"):
        shim.metric  # noqa: B018


def test_the_losses_of_a_batch_are_one_value_a_row():
    if not has_losses():
        pytest.skip("EvalPrediction has no losses in this release")
    metric = per_sample_mean(lambda eval_pred: eval_pred.losses, name="mean_loss")
    metrics = without_timing(make_trainer(metric, batch_eval_metrics=True, **including("loss")).evaluate())
    assert metrics["eval_mean_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-6)


def test_a_subclass_that_lacks_a_method_is_told_when_it_is_made():
    class Half(StreamingMetric):
        def reset(self) -> None: ...

    with pytest.raises(TypeError, match=r"abstract.*compute.*update"):
        Half()
