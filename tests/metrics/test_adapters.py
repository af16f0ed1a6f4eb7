"""Metrics of other libraries give over batches what they give over the whole set at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict
from unittest import TestCase, mock

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassJaccardIndex,
)
from torchmetrics.regression import MeanSquaredError

from shim.metrics import counted, from_evaluate, from_torcheval, from_torchmetrics
from tests.fixtures import (
    CLASSES,
    Boxes,
    Dense,
    Detector,
    FailingOnce,
    Lin,
    Pictures,
    Rows,
    Segmenter,
    detection_batch,
    logits_of,
    make_trainer,
    to_bfloat16,
    token_trainer,
    without_timing,
)

SIZES = [(size,) for size in (1, 2, 3, 4, 7, 10)]
N = 23


def classification() -> MetricCollection:
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
            "f1": MulticlassF1Score(CLASSES, average="macro"),
            "auroc": MulticlassAUROC(CLASSES),
            "binned_auroc": MulticlassAUROC(CLASSES, thresholds=50),
        }
    )


def at_once(metrics: MetricCollection, predictions: torch.Tensor, target: torch.Tensor) -> Dict[str, float]:
    metrics.update(predictions, target)
    return {name: float(value) for name, value in metrics.compute().items()}


def results(trainer: Any, *names: str) -> Dict[str, Any]:
    metrics = trainer.evaluate()
    return {name: metrics[f"eval_{name}"] for name in names}


class ExactForAnyBatchSize(TestCase):
    def assert_equal_twice(self, trainer: Any, expected: Dict[str, float]) -> None:
        first, second = (results(trainer, *expected) for _ in range(2))
        self.assertEqual(first, second)
        self.assertEqual(list(first), list(expected))
        for name, value in expected.items():
            self.assertAlmostEqual(first[name], value, delta=1e-6, msg=name)

    @parameterized.expand(SIZES)
    def test_classification_c29(self, size):
        expected = at_once(classification(), logits_of(Lin(), Rows(N)), Rows(N).labels)
        metric = from_torchmetrics(classification())
        self.assert_equal_twice(
            make_trainer(metric, eval_rows=N, batch_eval_metrics=True, per_device_eval_batch_size=size), expected
        )

    @parameterized.expand(SIZES)
    def test_segmentation(self, size):
        pictures = Pictures(N)
        logits = logits_of(Segmenter(), pictures).movedim(1, -1)[pictures.labels != -100]
        jaccard = MetricCollection({"mean_iou": MulticlassJaccardIndex(CLASSES)})
        expected = at_once(jaccard, logits, pictures.labels[pictures.labels != -100])
        metric = from_torchmetrics(MetricCollection({"mean_iou": MulticlassJaccardIndex(CLASSES)}))
        trainer = make_trainer(
            metric, model=Segmenter(), eval_rows=pictures, batch_eval_metrics=True, per_device_eval_batch_size=size
        )
        self.assert_equal_twice(trainer, expected)

    def test_tokens_of_any_length_c12(self):
        lengths = [3, 5, 2, 7, 4, 6, 1]
        trainer = token_trainer(
            lengths,
            from_torchmetrics(MetricCollection({"accuracy": MulticlassAccuracy(3, average="micro")})),
            batch_eval_metrics=True,
        )
        rows = trainer.eval_dataset
        x, labels = torch.cat([row["x"] for row in rows]), torch.cat([row["labels"] for row in rows])
        self.assertEqual(len(labels), 28)
        with torch.no_grad():
            right = (Dense()(x)["logits"].argmax(-1) == labels).double().mean().item()
        self.assert_equal_twice(trainer, {"accuracy": right})

    @parameterized.expand([("ordinary", False), ("batched", True)])
    def test_both_kinds_of_evaluation_agree(self, _, batched):
        metric = from_torchmetrics(classification())
        expected = at_once(classification(), logits_of(Lin(), Rows(N)), Rows(N).labels)
        self.assert_equal_twice(make_trainer(metric, eval_rows=N, batch_eval_metrics=batched), expected)


class Torchmetrics(TestCase):
    def test_a_single_metric_is_named_after_its_class(self):
        metrics = make_trainer(from_torchmetrics(MulticlassAccuracy(CLASSES)), batch_eval_metrics=True).evaluate()
        self.assertIsInstance(metrics["eval_MulticlassAccuracy"], float)

    def test_values_by_class_can_be_logged_and_saved(self):
        metric = from_torchmetrics(MulticlassAccuracy(CLASSES, average=None))
        metrics = make_trainer(metric, batch_eval_metrics=True).evaluate()
        self.assertEqual(len(metrics["eval_MulticlassAccuracy"]), CLASSES)
        json.dumps(metrics)

    def test_bfloat16_arrives_as_it_is_c18(self):
        metric = from_torchmetrics(classification())
        trainer = make_trainer(metric, bf16_full_eval=True, batch_eval_metrics=True, data_collator=to_bfloat16)
        logits = logits_of(Lin().bfloat16(), SimpleNamespace(x=Rows(10).x.bfloat16(), labels=None))
        expected = at_once(classification(), logits, Rows(10).labels)
        self.assertEqual(results(trainer, *expected), expected)

    def test_a_preprocess_of_the_users_own(self):
        metric = from_torchmetrics(MulticlassAccuracy(CLASSES, average="micro"), lambda p: (p.label_ids, p.label_ids))
        self.assertEqual(
            results(make_trainer(metric, batch_eval_metrics=True), "MulticlassAccuracy"), {"MulticlassAccuracy": 1}
        )

    def test_a_metric_with_more_arguments_gets_them(self):
        class WeightedError(MeanSquaredError):
            def update(self, preds: Any, target: Any, weight: Any) -> None:
                super().update(preds * weight, target)

        metric = from_torchmetrics(WeightedError(), lambda p: (p.label_ids.float(), p.label_ids * 2.0, 2.0))
        self.assertEqual(results(make_trainer(metric, batch_eval_metrics=True), "WeightedError"), {"WeightedError": 0})

    def test_it_is_moved_to_the_device_of_the_predictions_once_an_evaluation(self):
        moved = []

        class Moving(MulticlassAccuracy):
            def _apply(self, *args: Any, **kwargs: Any) -> Any:
                moved.append(args)
                return super()._apply(*args, **kwargs)

        metric = from_torchmetrics(Moving(CLASSES))
        moved.clear()
        make_trainer(metric, batch_eval_metrics=True).evaluate()
        self.assertEqual(len(moved), 1)

    def test_predictions_that_are_kept_are_given_up_at_the_end(self):
        exact = MulticlassAUROC(CLASSES)
        make_trainer(from_torchmetrics(exact), batch_eval_metrics=True).evaluate()
        self.assertEqual(exact.preds, [])

    def test_a_failed_evaluation_leaves_nothing_to_the_next_c22(self):
        metric = FailingOnce(from_torchmetrics(classification()), at=2)
        trainer = make_trainer(metric, batch_eval_metrics=True)
        with self.assertRaises(ZeroDivisionError):
            trainer.evaluate()
        expected = at_once(classification(), logits_of(Lin(), Rows(10)), Rows(10).labels)
        self.assertEqual(results(trainer, *expected), expected)

    def test_detection_with_a_list_of_labels(self):
        from torchmetrics import SumMetric

        metric = from_torchmetrics(
            SumMetric(), lambda p: (torch.tensor([float(len(label["boxes"])) for label in p.label_ids]),)
        )
        trainer = make_trainer(
            metric,
            model=Detector(),
            eval_rows=Boxes([3, 4, 5, 6, 3, 4]),
            data_collator=detection_batch,
            batch_eval_metrics=True,
        )
        self.assertEqual(results(trainer, "SumMetric"), {"SumMetric": 25})


class Counted(TestCase):
    """Shapes of (predictions, labels) -> of (preds, target)."""

    @parameterized.expand(
        [
            ("samples", (4, 3), (4,), (4, 3), (4,)),
            ("tokens", (2, 5, 3), (2, 5), (10, 3), (10,)),
            ("tokens as many as classes", (2, 3, 3), (2, 3), (6, 3), (6,)),
            ("pixels", (2, 3, 5, 4), (2, 5, 4), (40, 3), (40,)),
            ("pixels as many as classes", (2, 3, 3, 3), (2, 3, 3), (18, 3), (18,)),
            ("pixels with the classes last", (2, 5, 4, 3), (2, 5, 4), (40, 3), (40,)),
            ("a single column", (4, 1), (4,), (4,), (4,)),
            ("classes already", (2, 5), (2, 5), (2, 5), (2, 5)),
        ]
    )
    def test_shapes(self, _, predictions, labels, preds, target):
        given = SimpleNamespace(predictions=torch.zeros(predictions), label_ids=torch.zeros(labels, dtype=torch.long))
        found = counted(given)
        self.assertEqual([tuple(part.shape) for part in found], [preds, target])

    def test_each_position_keeps_its_own_scores(self):
        pixels = torch.arange(24.0).view(2, 3, 2, 2)
        labels = torch.tensor([[[0, -100], [1, 2]], [[-100, 0], [1, 1]]])
        preds, target = counted(SimpleNamespace(predictions=pixels, label_ids=labels))
        self.assertEqual(target.tolist(), [0, 1, 2, 0, 1, 1])
        self.assertEqual(preds[0].tolist(), [0, 4, 8])
        self.assertEqual(preds[3].tolist(), [13, 17, 21])

    def test_the_first_of_several_outputs(self):
        hidden = torch.zeros(2, 9)
        for outputs in ((torch.ones(2, 3), hidden), {"logits": torch.ones(2, 3), "hidden": hidden}):
            preds, _ = counted(SimpleNamespace(predictions=outputs, label_ids=torch.zeros(2, dtype=torch.long)))
            self.assertEqual(preds.tolist(), [[1, 1, 1]] * 2)

    def test_a_measurement_of_minus_100_is_no_padding(self):
        labels = torch.tensor([-100.0, 1.0])
        _, target = counted(SimpleNamespace(predictions=torch.zeros(2, 1), label_ids=labels))
        self.assertEqual(target.tolist(), [-100.0, 1.0])

    def test_classes_without_padding(self):
        labels = torch.tensor([[0, -100], [1, 1]])
        preds, target = counted(SimpleNamespace(predictions=torch.tensor([[5, 6], [7, 8]]), label_ids=labels))
        self.assertEqual((preds.tolist(), target.tolist()), ([5, 7, 8], [0, 1, 1]))

    def test_arrays_of_an_ordinary_evaluation(self):
        preds, target = counted(SimpleNamespace(predictions=np.ones((2, 3), np.float16), label_ids=np.array([0, -100])))
        self.assertEqual((preds.dtype, target.tolist()), (torch.float16, [0]))

    @parameterized.expand(
        [
            ("another scale", torch.zeros(2, 3, 2, 2), torch.zeros(2, 8, 8), r"\(2, 3, 2, 2\).*\(2, 8, 8\)"),
            ("several labels", torch.zeros(2, 3), (torch.zeros(2), torch.zeros(2)), "found a tuple of 2"),
        ]
    )
    def test_what_does_not_belong_together_is_refused_with_the_remedy(self, _, predictions, labels, message):
        with self.assertRaisesRegex(ValueError, f"{message}.*give preprocess"):
            counted(SimpleNamespace(predictions=predictions, label_ids=labels))


class WrongUse(TestCase):
    @parameterized.expand(
        [("torchmetrics", from_torchmetrics), ("torcheval", from_torcheval), ("evaluate", from_evaluate)]
    )
    def test_a_missing_library_is_named_with_its_extra(self, library, adapter):
        hidden = {name: None for name in {library, *sys.modules} if name.split(".")[0] == library}
        with mock.patch.dict(sys.modules, hidden), self.assertRaises(ImportError) as raised:
            adapter(object())
        self.assertIn(f'pip install "transformers-trainer-shim[{library}]"', str(raised.exception))
        pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
        self.assertRegex(pyproject, rf'(?m)^{library} = \["{library}>=')

    def test_another_kind_of_object_is_refused(self):
        with self.assertRaisesRegex(TypeError, "expected a torchmetrics.Metric or .*, found 'f1'"):
            from_torchmetrics("f1")

    def test_a_class_in_place_of_its_object_is_told_apart(self):
        with self.assertRaisesRegex(TypeError, r"give MulticlassAccuracy\(...\), an object"):
            from_torchmetrics(MulticlassAccuracy)


class Scikit(TestCase):
    """The libraries agree with scikit-learn, through batches."""

    @parameterized.expand(SIZES)
    def test_classification(self, size):
        metrics = pytest.importorskip("sklearn.metrics")
        scores, labels = logits_of(Lin(), Rows(N)).softmax(-1).numpy(), Rows(N).labels.numpy()
        expected = {
            "accuracy": metrics.accuracy_score(labels, scores.argmax(-1)),
            "f1": metrics.f1_score(labels, scores.argmax(-1), average="macro"),
            "auroc": metrics.roc_auc_score(labels, scores, multi_class="ovr", average="macro"),
        }
        metric = from_torchmetrics(classification())
        trainer = make_trainer(metric, eval_rows=N, batch_eval_metrics=True, per_device_eval_batch_size=size)
        found = results(trainer, *expected)
        for name, value in expected.items():
            self.assertAlmostEqual(found[name], value, delta=1e-6, msg=name)

    @parameterized.expand(SIZES)
    def test_segmentation(self, size):
        metrics = pytest.importorskip("sklearn.metrics")
        pictures = Pictures(N)
        classes, kept = logits_of(Segmenter(), pictures).argmax(1), pictures.labels != -100
        expected = metrics.jaccard_score(pictures.labels[kept], classes[kept], average="macro")
        metric = from_torchmetrics(MetricCollection({"mean_iou": MulticlassJaccardIndex(CLASSES)}))
        trainer = make_trainer(
            metric, model=Segmenter(), eval_rows=pictures, batch_eval_metrics=True, per_device_eval_batch_size=size
        )
        self.assertAlmostEqual(trainer.evaluate()["eval_mean_iou"], expected, delta=1e-6)


class Torcheval(TestCase):
    @parameterized.expand(SIZES)
    def test_classification_twice(self, size):
        torcheval = pytest.importorskip("torcheval.metrics")
        metric = from_torcheval(
            {
                "accuracy": torcheval.MulticlassAccuracy(),
                "f1": torcheval.MulticlassF1Score(num_classes=CLASSES, average="macro"),
            }
        )
        trainer = make_trainer(metric, eval_rows=N, batch_eval_metrics=True, per_device_eval_batch_size=size)
        expected = at_once(classification(), logits_of(Lin(), Rows(N)), Rows(N).labels)
        first, second = (results(trainer, "accuracy", "f1") for _ in range(2))
        self.assertEqual(first, second)
        for name, value in first.items():
            self.assertAlmostEqual(value, expected[name], delta=1e-6)

    def test_a_single_metric_is_named_after_its_class(self):
        torcheval = pytest.importorskip("torcheval.metrics")
        trainer = make_trainer(from_torcheval(torcheval.MulticlassAccuracy()), batch_eval_metrics=True)
        self.assertIsInstance(trainer.evaluate()["eval_MulticlassAccuracy"], float)

    def test_another_kind_of_object_is_refused(self):
        pytest.importorskip("torcheval.metrics")
        with self.assertRaisesRegex(TypeError, "expected a torcheval.Metric, found"):
            from_torcheval({"accuracy": MulticlassAccuracy(CLASSES)})


def evaluate_module(**features: str) -> Any:
    """A module of huggingface evaluate, made here: those of the hub need a network."""
    evaluate, datasets = pytest.importorskip("evaluate"), pytest.importorskip("datasets")
    metrics = pytest.importorskip("sklearn.metrics")

    class MacroF1(evaluate.Metric):
        def _info(self) -> Any:
            columns = {name: datasets.Value(features.get(name, "int32")) for name in ("predictions", "references")}
            return evaluate.MetricInfo(
                description="", citation="", inputs_description="", features=datasets.Features(columns)
            )

        def _compute(self, predictions: Any, references: Any, average: str) -> Dict[str, float]:
            return {"f1": metrics.f1_score(references, [round(one) for one in predictions], average=average)}

    return MacroF1()


def classes_of(eval_pred: Any) -> Any:
    preds, target = counted(eval_pred)
    return preds.argmax(-1), target


class Evaluate(TestCase):
    def expected(self) -> float:
        return at_once(classification(), logits_of(Lin(), Rows(N)), Rows(N).labels)["f1"]

    @parameterized.expand(SIZES)
    def test_classification_twice(self, size):
        metric = from_evaluate(evaluate_module(), classes_of, average="macro")
        trainer = make_trainer(metric, eval_rows=N, batch_eval_metrics=True, per_device_eval_batch_size=size)
        first, second = (results(trainer, "f1") for _ in range(2))
        self.assertEqual(first, second)
        self.assertAlmostEqual(first["f1"], self.expected(), delta=1e-6)

    def test_batches_of_a_failed_evaluation_are_forgotten_c22(self):
        trainer = make_trainer(
            FailingOnce(from_evaluate(evaluate_module(), classes_of, average="macro"), at=2),
            eval_rows=N,
            batch_eval_metrics=True,
        )
        with self.assertRaises(ZeroDivisionError):
            trainer.evaluate()
        self.assertAlmostEqual(results(trainer, "f1")["f1"], self.expected(), delta=1e-6)

    @parameterized.expand([("float16",), ("bfloat16",)])
    def test_half_precision_becomes_float32_c18(self, dtype):
        module = evaluate_module(predictions="float32")
        metric = from_evaluate(module, lambda p: (p.predictions, p.label_ids), average="macro")
        predictions = torch.tensor([0.0, 1.0, 2.0], dtype=getattr(torch, dtype))
        result = metric(SimpleNamespace(predictions=predictions, label_ids=torch.arange(3)))
        self.assertEqual(without_timing(result), {"f1": 1.0})

    def test_another_kind_of_object_is_refused(self):
        pytest.importorskip("evaluate")
        with self.assertRaisesRegex(TypeError, "found 'f1'"):
            from_evaluate("f1")
