"""`spool` gives an ordinary metric what an ordinary evaluation gives it, from disk, and leaves no file behind."""

from __future__ import annotations

import errno
import gc
import logging
import os
import sys
from typing import Any, Dict, List
from unittest import TestCase

import numpy as np
import pytest
import torch
from parameterized import parameterized
from transformers import TrainingArguments

from shim.metrics import spool
from tests.fixtures import (
    Boxes,
    Detector,
    InterruptedOnce,
    Lin,
    Pictures,
    Rows,
    Segmenter,
    batches,
    detection_batch,
    has_losses,
    including,
    loading,
    make_trainer,
    to_bfloat16,
    token_trainer,
    without_timing,
)
from tests.memory import PLAIN_MALLOC, TELLS_ANONYMOUS
from tests.unit.test_import import on_releases, run_fresh

FIELDS = ("predictions", "label_ids", "inputs", "losses")


class Recording:
    """An ordinary `compute_metrics` that keeps a copy of what it got."""

    def __init__(self) -> None:
        self.seen: List[Dict[str, Any]] = []

    def __call__(self, eval_pred: Any) -> Dict[str, float]:
        self.seen.append({name: copied(getattr(eval_pred, name, None)) for name in FIELDS})
        return {"sum": float(sum(np.asarray(leaf, np.float64).sum() for leaf in leaves(eval_pred.predictions)))}


def copied(nested: Any) -> Any:
    """Each array as (its type, dtype, shape and bytes)."""
    if isinstance(nested, (list, tuple)):
        return type(nested), [copied(part) for part in nested]
    if isinstance(nested, dict):
        return {name: copied(part) for name, part in nested.items()}
    return nested if nested is None else (type(nested), nested.dtype, nested.shape, nested.tobytes())


def leaves(nested: Any) -> List[Any]:
    if isinstance(nested, (list, tuple)):
        return [leaf for part in nested for leaf in leaves(part)]
    return [leaf for part in nested.values() for leaf in leaves(part)] if isinstance(nested, dict) else [nested]


class Nested(Lin):
    """Logits, a pair of hidden states, and one number for the whole batch."""

    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        hidden = (x.half(), {"longer": x.repeat(1, 2).long()})
        return {**outputs, "hidden": hidden, "scale": outputs["logits"].mean()}


def sentences(metric: Any, **options: Any) -> Any:
    return token_trainer([3, 5, 2, 7, 4, 6, 1], metric, **options)


def detections(metric: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return make_trainer(
        metric, model=Detector(), eval_rows=Boxes([3, 4, 5, 6, 3, 4, 2, 1]), data_collator=detection_batch, **options
    )


def over(**settings: Any) -> Any:
    return lambda metric, **options: make_trainer(metric, **settings, **options)


def with_inputs(metric: Any, **options: Any) -> Any:
    trainer = sentences(metric, **including("inputs", *(["loss"] if has_losses() else [])), **options)
    trainer.model.main_input_name = "x"
    return trainer


TRAINERS = {
    "dense": over(eval_rows=23),
    "a single batch": over(eval_rows=3),
    "tokens of any length": sentences,
    "inputs and losses": with_inputs,
    "pictures": over(model=Segmenter(), eval_rows=Pictures(6)),
    "nested outputs": over(model=Nested(), eval_rows=10),
    "bfloat16": over(eval_rows=10, bf16_full_eval=True, data_collator=to_bfloat16),
    "preprocessed to pairs": over(preprocess_logits_for_metrics=lambda p, labels: (p.argmax(-1), labels), eval_rows=10),
    "no column": over(preprocess_logits_for_metrics=lambda p, labels: p[:, :0], eval_rows=10),
    "a plain loader": over(cls=loading(lambda: batches(10))),
}


class TheSame(TestCase):
    @parameterized.expand([(name,) for name in TRAINERS])
    def test_as_an_ordinary_evaluation_to_the_bit(self, name):
        at_once, spooled = Recording(), Recording()
        expected = TRAINERS[name](at_once).evaluate()
        trainer = TRAINERS[name](spool(spooled), batch_eval_metrics=True)
        for _ in range(2):
            self.assertEqual(without_timing(trainer.evaluate()), without_timing(expected))
        self.assertEqual(spooled.seen, [at_once.seen[0]] * 2)

    @parameterized.expand([("tokens", sentences), ("detection", detections), ("inputs and losses", with_inputs)])
    @pytest.mark.skipif(not hasattr(TrainingArguments, "eval_do_concat_batches"), reason="4.40 and later")
    def test_as_lists_of_batches(self, _, trainer_with):
        at_once, spooled = Recording(), Recording()
        expected = trainer_with(at_once, eval_do_concat_batches=False).evaluate()
        metric = spool(spooled, concatenate=False)
        trainer = trainer_with(metric, eval_do_concat_batches=False, batch_eval_metrics=True)
        self.assertEqual(without_timing(trainer.evaluate()), without_timing(expected))
        self.assertEqual(spooled.seen, at_once.seen)

    def test_in_an_ordinary_evaluation_nothing_goes_to_disk(self):
        at_once, spooled = Recording(), Recording()
        make_trainer(at_once).evaluate()
        metric = spool(spooled)
        make_trainer(metric).evaluate()
        self.assertEqual(spooled.seen, at_once.seen)
        self.assertEqual(metric.bytes_written, 0)

    def test_the_arrays_can_be_changed_in_place(self):
        def without_padding(eval_pred: Any) -> Dict[str, Any]:
            eval_pred.label_ids[eval_pred.label_ids == -100] = 0
            return {"sum": int(eval_pred.label_ids.sum())}

        expected = sentences(without_padding).evaluate()["eval_sum"]
        found = sentences(spool(without_padding), batch_eval_metrics=True).evaluate()["eval_sum"]
        self.assertEqual(found, expected)

    def test_arrays_that_the_metric_keeps_stay_readable(self):
        kept = []
        trainer = make_trainer(spool(lambda p: kept.append(p.predictions) or {}), batch_eval_metrics=True)
        trainer.evaluate()
        with torch.no_grad():
            np.testing.assert_allclose(kept[0], Lin()(Rows(10).x)["logits"].numpy(), atol=1e-6)


def test_it_reports_how_much_it_wrote(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="shim")
    metric = spool(lambda eval_pred: {"files": len(list(tmp_path.glob("*/*")))}, tmp_path)
    metrics = make_trainer(metric, eval_rows=10, batch_eval_metrics=True).evaluate()
    assert metrics["eval_files"] == 2
    assert metric.bytes_written == 10 * (3 * 4 + 8)
    assert "spool() wrote 0.0 MiB in 3 batches." in caplog.messages
    tokens = spool(lambda eval_pred: {}, tmp_path)
    sentences(tokens, batch_eval_metrics=True).evaluate()
    # 2, 2, 2 and 1 rows of at most 5, 7, 6 and 1 tokens, and again 7 rows of 7 tokens
    assert tokens.bytes_written == (10 + 14 + 12 + 1 + 49) * (3 * 4 + 8)


class NoFileIsLeft(TestCase):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.folder = tmp_path

    def test_after_an_evaluation_nor_while_there_is_none(self):
        metric = spool(lambda eval_pred: {}, self.folder)
        self.assertEqual(os.listdir(self.folder), [])
        make_trainer(metric, batch_eval_metrics=True).evaluate()
        self.assertEqual(os.listdir(self.folder), [])

    @parameterized.expand([("data", InterruptedOnce(20, at=19), KeyboardInterrupt), ("metric", 10, ZeroDivisionError)])
    def test_after_an_exception(self, place, rows, error):
        folders = []

        def failing(eval_pred: Any) -> Dict[str, Any]:
            folders.append(os.listdir(self.folder))
            raise ZeroDivisionError

        metric = spool(failing, self.folder)
        trainer = make_trainer(metric, eval_rows=rows, batch_eval_metrics=True)
        with self.assertRaises(error):
            trainer.evaluate()
        self.assertEqual(os.listdir(self.folder), [])
        self.assertGreater(metric.bytes_written, 0)
        self.assertEqual(len(folders), place == "metric")

    def test_when_the_metric_is_forgotten_in_the_middle(self):
        metric = spool(lambda eval_pred: {}, self.folder)
        metric(prediction(torch.ones(2, 3)), compute_result=False)
        self.assertEqual(len(os.listdir(self.folder)), 1)
        del metric
        gc.collect()
        self.assertEqual(os.listdir(self.folder), [])

    def test_others_on_the_machine_cannot_read_it(self):
        metric = spool(lambda eval_pred: {}, self.folder)
        metric(prediction(torch.ones(2, 3)), compute_result=False)
        (folder,) = self.folder.iterdir()
        self.assertEqual(folder.stat().st_mode & 0o077, 0)


def prediction(predictions: torch.Tensor) -> Any:
    from transformers.trainer_utils import EvalPrediction

    return EvalPrediction(predictions=predictions, label_ids=torch.zeros(len(predictions), dtype=torch.long))


class WrongUse(TestCase):
    def test_a_folder_that_is_not_there_is_refused_before_any_evaluation(self):
        with self.assertRaisesRegex(
            FileNotFoundError, r"could not make a folder.*/no/such; it is not there.*directory="
        ):
            spool(lambda eval_pred: {}, "/no/such")

    def test_shapes_that_the_stock_trainer_cannot_join_either_are_named_c11(self):
        metric = spool(lambda eval_pred: {})
        metric(prediction(torch.ones(2, 3, 4)), compute_result=False)
        with self.assertRaisesRegex(ValueError, r"join the predictions .* shape \(2, 3, 5\) after \(2, 3, 4\)"):
            metric(prediction(torch.ones(2, 3, 5)), compute_result=True)

    def test_another_number_of_outputs_is_named(self):
        metric = spool(lambda eval_pred: {})
        metric(prediction([torch.ones(2, 3)] * 2), compute_result=False)
        with self.assertRaisesRegex(ValueError, r"predictions of each .* first, \[None, None\], found \[None\]"):
            metric(prediction([torch.ones(2, 3)]), compute_result=True)


@on_releases("4.40.0", "5.0.0")
@pytest.mark.skipif(sys.platform == "win32", reason="no limits on a process there")
def test_a_full_disk_ends_the_evaluation_with_the_remedy_and_the_files_removed(tmp_path):
    # To a process whose files may not become larger than 200 kB that is as good as a full disk.
    found = run_fresh(
        """
        import json, os, resource
        import shim
        from tests.fixtures import Lin, make_trainer

        shim.apply()
        folder = os.environ["SPOOL_FOLDER"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        metric = shim.metrics.spool(lambda eval_pred: {}, folder)
        trainer = make_trainer(metric, model=Lin(wide=20_000), eval_rows=40, batch_eval_metrics=True)
        try:
            trainer.evaluate()
        except OSError as error:
            print(json.dumps([error.errno, str(error), os.listdir(folder)]))
        """,
        {"SPOOL_FOLDER": str(tmp_path)},
    )
    number, message, left = found
    assert number == errno.EFBIG
    assert "spool() could not write the predictions" in message
    assert "MiB are free there" in message
    assert "directory=" in message
    assert left == []


@on_releases("4.40.0", "5.0.0")
@pytest.mark.skipif(not TELLS_ANONYMOUS, reason="cannot tell resident memory from mapped files")
def test_two_batches_of_memory_at_most_beyond_the_batched_evaluation():
    grown = run_fresh(
        """
        import json
        import shim
        from tests.fixtures import CountWithoutReset, Lin, make_trainer
        from tests.memory import anonymous, growth

        ROWS, WIDTH, BATCH = 3000, 20_000, 250
        shim.apply()

        def grown_by(metric, rows=ROWS, **options):
            trainer = make_trainer(
                metric, model=Lin(wide=WIDTH - 3), eval_rows=rows, per_device_eval_batch_size=BATCH, **options
            )
            return growth(trainer.evaluate, anonymous)

        def whole(eval_pred):
            assert eval_pred.predictions.shape == (ROWS, WIDTH)
            return {"sum": float(eval_pred.predictions.sum())}

        for metric in (CountWithoutReset(), shim.metrics.spool(lambda eval_pred: {})):  # late imports
            grown_by(metric, rows=BATCH, batch_eval_metrics=True)
        print(json.dumps({
            "batched": grown_by(CountWithoutReset(), batch_eval_metrics=True),
            "spooled": grown_by(shim.metrics.spool(whole), batch_eval_metrics=True),
            "stock": grown_by(whole),
            "batch": BATCH * WIDTH * 4 / 2**20,
        }))
        """,
        PLAIN_MALLOC,
    )
    assert grown["stock"] > 200, grown  # MiB: the logits are 229
    assert grown["spooled"] <= grown["batched"] + 2 * grown["batch"], grown
