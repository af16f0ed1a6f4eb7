"""Trainers of other libraries train and evaluate the same with the shim off and on, and the options work in them."""

from __future__ import annotations

import importlib.util
from typing import Any, Callable, Dict, List, NamedTuple
from unittest import TestCase

import pytest
import torch
from parameterized import parameterized

import shim
from tests.ecosystem import tiny, trainers
from tests.fixtures import EVAL_BATCH, once, without_timing
from tests.unit.test_cache_clear import device_called

pytestmark = pytest.mark.stock


class Case(NamedTuple):
    make: Callable[..., Any]
    takes_metrics: bool = True
    rows_of_a_sample: int = 1


CASES = {
    "sft": Case(trainers.sft),
    "dpo": Case(trainers.dpo, rows_of_a_sample=trainers.ROWS_OF_A_PREFERENCE),
    "reward": Case(trainers.reward, rows_of_a_sample=trainers.ROWS_OF_A_PREFERENCE),
    "lora": Case(trainers.lora),
    "sentence_transformer": Case(trainers.sentence_transformer, takes_metrics=False),
    "cross_encoder": Case(trainers.cross_encoder, takes_metrics=False),
}
WITH_METRICS = [name for name, case in CASES.items() if case.takes_metrics]
OPTIONS = {
    "off": {},
    "batches": {"batch_eval_metrics": True},
    "never": {"batch_eval_metrics": True, "cuda_cache_clear": "never"},
    "always": {"batch_eval_metrics": True, "cuda_cache_clear": "always"},
}
SUMS = ("rows", "counted", "total", "right")


class Sums:
    """Sums that are the same whether they come by batch or at the end."""

    def __init__(self) -> None:
        self.flags: List[bool] = []
        self.reset()

    def reset(self) -> None:
        self.rows = self.counted = self.total = self.right = 0

    def __call__(self, eval_pred: Any, compute_result: bool = True) -> Dict[str, float]:
        self.flags.append(compute_result)
        predictions = torch.as_tensor(eval_pred.predictions)
        self.rows += len(predictions)
        labels = eval_pred.label_ids
        if isinstance(labels, tuple):  # trl's rewards have none
            counted = torch.ones(len(predictions), dtype=torch.bool)
        else:
            labels = torch.as_tensor(labels)
            counted = labels != -100
            if predictions.ndim > labels.ndim:
                self.right += int((predictions.argmax(-1) == labels)[counted].sum())
        self.counted += int(counted.sum())
        self.total += float(predictions[counted].double().sum())
        result = {name: getattr(self, name) for name in SUMS}
        if compute_result:
            self.reset()
        return result


def require(name: str) -> Case:
    case = CASES[name]
    if name == "cross_encoder" and not trainers.has_cross_encoder_trainer():
        pytest.skip("this sentence-transformers has no CrossEncoderTrainer yet (it came with 4.0)")
    return case


def made(name: str, **options: Any) -> Any:
    """With a metric where one can be given: trl 0.8's RewardTrainer brings one otherwise, which sees the whole set."""
    case = require(name)
    return case.make(Sums(), **options) if case.takes_metrics else case.make(**options)


def history(trainer: Any) -> List[Dict[str, Any]]:
    """What two steps and their evaluations have logged."""
    trainer.train()
    return [without_timing(entry) for entry in trainer.state.log_history]


def without_sums(entries: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    sums = {f"eval_{name}" for name in SUMS}
    return [{name: value for name, value in entry.items() if name not in sums} for entry in entries]


class Losses(TestCase):
    @parameterized.expand([(name, options) for name in CASES for options in OPTIONS])
    def test_are_the_same_with_the_shim_and_its_options(self, name, options):
        expected = without_sums(history(made(name)))
        assert {"loss", "eval_loss"} <= {key for entry in expected for key in entry}
        with shim.applied():
            self.assertEqual(without_sums(history(made(name, **OPTIONS[options]))), expected)

    @parameterized.expand([(name,) for name in CASES])
    def test_clears_come_in_each_training_step_and_evaluation_batch(self, name):
        with shim.applied(), device_called("cuda") as clears:
            history(made(name, cuda_cache_clear="always"))
        self.assertEqual(len(clears), 2 + 2 * -(-tiny.EVALUATED // EVAL_BATCH))

    @pytest.mark.skipif(not importlib.util.find_spec("setfit"), reason="setfit is not installed")
    def test_setfit_trains_and_predicts_the_same_with_the_shim(self):
        def outcome():
            trainer = trainers.setfit_classifier()
            trainer.train()
            logged = [without_timing(entry) for entry in trainer.st_trainer.state.log_history]
            return trainer.evaluate(), [{k: v for k, v in entry.items() if "loss" in k} for entry in logged]

        expected = outcome()
        self.assertEqual(len(expected[1]), 5)
        with shim.applied():
            self.assertEqual(outcome(), expected)


class Metrics(TestCase):
    @parameterized.expand([(name,) for name in WITH_METRICS])
    def test_batch_by_batch_are_those_at_the_end(self, name):
        case = require(name)
        # stock loses rows of pairs where the last batch is not full: see the next test
        rows = tiny.EVALUATED if case.rows_of_a_sample == 1 else 3 * EVAL_BATCH
        expected = [entry for entry in history(case.make(Sums(), rows=rows)) if "eval_total" in entry]
        metric = Sums()
        with shim.applied():
            found = history(case.make(metric, rows=rows, batch_eval_metrics=True))
        self.assertEqual(metric.flags, 2 * once(3))
        found = [entry for entry in found if "eval_total" in entry]
        self.assertEqual((len(found), len(expected)), (2, 2))
        for by_batch, at_the_end in zip(found, expected):
            self.assertEqual(set(by_batch), set(at_the_end))
            self.assertEqual(by_batch, pytest.approx(at_the_end, rel=1e-6))

    @parameterized.expand([(name,) for name in WITH_METRICS])
    def test_all_rows_count_also_those_of_a_last_batch_that_is_not_full(self, name):
        case = require(name)
        stock = case.make(Sums()).evaluate()
        with shim.applied():
            found = case.make(Sums(), batch_eval_metrics=True).evaluate()
        if name == "dpo" and case.rows_of_a_sample == 1:
            self.assertEqual(found["eval_rows"], 2 * 3)  # two numbers a batch, in trl 0.8
            return
        self.assertEqual(found["eval_rows"], tiny.EVALUATED * case.rows_of_a_sample)
        # accelerate takes the two samples of the last batch for two rows
        lost = 0 if case.rows_of_a_sample == 1 else 2
        self.assertEqual(stock["eval_rows"], found["eval_rows"] - lost)

    @pytest.mark.skipif(trainers.stacks_preferences(), reason="trl brings no metric of its own any more")
    def test_a_librarys_own_metric_that_sees_the_whole_set_is_named_with_the_remedies(self):
        with shim.applied(), pytest.raises(ValueError, match=r"Found compute_accuracy\(eval_pred\).*metrics\.spool"):
            trainers.reward(batch_eval_metrics=True)
