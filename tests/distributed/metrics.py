"""Metrics on this rank of several: what the worker runs for a scenario `metrics_KIND_ROWS_BATCH`."""

from __future__ import annotations

import logging
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch
import torch.distributed
import torcheval.metrics
from torchmetrics import CatMetric, MetricCollection, SumMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassJaccardIndex,
)
from transformers import TrainingArguments

import shim
from shim import compat
from shim.metrics import StreamingMetric, from_torcheval, from_torchmetrics, per_sample_mean, spool
from tests.fixtures import (
    CLASSES,
    Boxes,
    Detector,
    Evaluating,
    Lin,
    Pictures,
    Rows,
    Segmenter,
    Stream,
    detection_batch,
    make_trainer,
    without_timing,
)
from tests.gathers import handed_to_gather

# A transformers with the patches of patches/ knows nothing of `gather = False`. Ask where the shim is not applied.
ALWAYS_GATHERS = compat.has_both_options(TrainingArguments)

LOADING: Dict[str, Dict[str, Any]] = {
    "sized": {},
    "stream": {},
    "dispatched": {"accelerator_config": {"dispatch_batches": True}},
    "sharded": {"accelerator_config": {"dispatch_batches": False}},
}


def sums(gather: bool = False) -> StreamingMetric:
    metrics = {
        "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
        "f1": MulticlassF1Score(CLASSES, average="macro"),
    }
    return from_torchmetrics(MetricCollection(metrics), gather=gather)


def jaccard() -> StreamingMetric:
    return from_torchmetrics(MetricCollection({"mean_iou": MulticlassJaccardIndex(CLASSES)}))


def auroc() -> StreamingMetric:
    return from_torchmetrics(MetricCollection({"auroc": MulticlassAUROC(CLASSES)}))


def label(eval_pred: Any) -> Any:
    return eval_pred.label_ids


def checksum(eval_pred: Any) -> Dict[str, Any]:
    """An ordinary metric, which sees the whole set in its order."""
    weights = 1 + torch.arange(len(eval_pred.label_ids))
    return {"checksum": int((torch.as_tensor(eval_pred.label_ids) * weights).sum())}


class OnlyOwnRows(StreamingMetric):
    """How many rows each rank has got in the batches."""

    gather = False

    def reset(self) -> None:
        self.sizes: List[int] = []

    def update(self, eval_pred: Any) -> None:
        self.sizes.append(len(eval_pred.label_ids))

    def compute(self) -> Dict[str, Any]:
        return {"sizes": self.from_all_ranks(self.sizes)}


def evaluators() -> StreamingMetric:
    metrics = {
        "accuracy": torcheval.metrics.MulticlassAccuracy(),
        "f1": torcheval.metrics.MulticlassF1Score(num_classes=CLASSES, average="macro"),
    }
    return from_torcheval(metrics)


def boxes() -> StreamingMetric:
    metrics = MetricCollection({"boxes": SumMetric()})
    return from_torchmetrics(metrics, lambda p: (torch.tensor([float(len(label["boxes"])) for label in p.label_ids]),))


def pictures_with_boxes(rows: int) -> Boxes:
    torch.manual_seed(0)
    return Boxes([1 + number % 5 for number in range(rows)])


class Case(NamedTuple):
    metric: Callable[[], Any]
    model: Callable[[], torch.nn.Module] = Lin
    data: Callable[[int], Any] = Rows
    options: Optional[Dict[str, Any]] = None


CASES = {
    "sums": Case(sums),
    "gathered sums": Case(lambda: sums(gather=True)),
    "torcheval": Case(evaluators),
    "auroc": Case(auroc),
    "jaccard": Case(jaccard, Segmenter, Pictures),
    "boxes": Case(boxes, Detector, pictures_with_boxes, {"data_collator": detection_batch}),
    "mean": Case(lambda: per_sample_mean(label)),
    "spool": Case(lambda: spool(checksum)),
    "own rows": Case(OnlyOwnRows),
}


def trainer_for(kind: str, rows: int, batch: int, case: Case, **options: Any) -> Any:
    return make_trainer(
        case.metric(),
        model=case.model(),
        eval_rows=case.data(rows) if kind == "sized" else Stream(rows, of=case.data),
        batch_eval_metrics=True,
        per_device_eval_batch_size=batch,
        ddp_backend="gloo",
        **LOADING[kind],
        **(case.options or {}),
        **options,
    )


def run(scenario: str) -> Dict[str, Any]:
    _, kind, rows, batch = scenario.split("_")
    logging.disable(logging.WARNING)
    found: Dict[str, Any] = {}
    for name, case in CASES.items():
        if name == "boxes" and (kind in ("stream", "dispatched") or ALWAYS_GATHERS):
            continue  # accelerate sends lists of labels from rank to rank wrongly, or fails
        trainer = trainer_for(kind, int(rows), int(batch), case)
        with handed_to_gather() as handed:
            results = [computed(trainer.evaluate()) for _ in range(2)]
        found[name] = {"results": results, "dimensions": max(len(shape) for shape, _ in handed)}
    return found


def computed(metrics: Dict[str, Any]) -> Dict[str, Any]:
    """What the metric gave, of what `evaluate` returns."""
    others = ("loss", "epoch")
    return {name: value for name, value in without_timing(metrics).items() if not name.endswith(others)}


def elsewhere() -> Dict[str, Any]:
    """Metrics that do not gather, where the Trainer gathers for itself or another loader is active."""
    trainer = trainer_for("sized", 23, 4, CASES["sums"])
    predicted = trainer.predict(trainer.eval_dataset, metric_key_prefix="eval")
    callback = Evaluating()
    training = {"train_dataset": Rows(16), "max_steps": 2, "learning_rate": 0.0, "callbacks": [callback]}
    callback.trainer = trainer_for("sized", 23, 4, CASES["sums"], **training)
    callback.trainer.train()
    estimate = shim.estimate_eval_memory(trainer)
    return {
        "estimate": [estimate.rows, estimate.bytes_per_row],
        "predictions": predicted.predictions.tolist(),
        "results": [computed(metrics) for metrics in (predicted.metrics, *callback.results)],
    }


def spooling() -> Dict[str, Any]:
    """What each rank writes, and what becomes of an error on the main one."""

    def failing(eval_pred: Any) -> Dict[str, Any]:
        raise ZeroDivisionError("on the main process")

    spools = {"right": spool(checksum), "failing": spool(failing)}
    found: Dict[str, Any] = {}
    for name, metric in spools.items():
        trainer = trainer_for("sized", 23, 4, Case(lambda metric=metric: metric))  # type: ignore[misc]
        try:
            found[name] = [computed(trainer.evaluate()), metric.bytes_written]
        except (ZeroDivisionError, RuntimeError) as error:
            found[name] = [type(error).__name__, str(error)]
    return found


def refusal() -> Dict[str, Any]:
    """States that torchmetrics gathers element by element, one for each row: 3 rows on 2 ranks."""

    class ByRow(CatMetric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("rows", default=[], dist_reduce_fx=None)

        def update(self, value: torch.Tensor) -> None:
            self.rows.extend(value)

        def compute(self) -> torch.Tensor:
            return torch.stack(self.rows).sum()

    found: Dict[str, Any] = {}
    for gather in (False, True):
        metric = from_torchmetrics(ByRow(), lambda p: (p.label_ids.float(),), gather=gather)
        trainer = trainer_for("sized", 3, 2, Case(lambda metric=metric: metric))  # type: ignore[misc]
        try:
            found[str(gather)] = trainer.evaluate()["eval_ByRow"]
        except ValueError as error:
            found[str(gather)] = str(error)
    return found


class Numbers(Rows):
    """Rows that are their own numbers."""

    def __getitem__(self, index: int) -> Dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "x": torch.tensor([float(index)])}


class Echo(torch.nn.Module):
    """The logits are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, labels: Any = None) -> Dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).mean(), "logits": self.weight * x}


def stacked_pairs(samples: Any) -> Dict[str, torch.Tensor]:
    """As the collators of preference data do it: first all rows that were chosen, then all rejected ones."""
    x, labels = (torch.stack([sample[name] for sample in samples]) for name in ("x", "labels"))
    return {"x": torch.cat([x, x + 0.5]), "labels": torch.cat([labels, labels])}


class RowsSeen(StreamingMetric):
    """Which rows the metric has got, on all ranks together."""

    def __init__(self, gather: bool) -> None:
        self.gather = gather
        super().__init__()

    def reset(self) -> None:
        self.seen: List[float] = []

    def update(self, eval_pred: Any) -> None:
        self.seen += eval_pred.predictions.flatten().tolist()

    def compute(self) -> Dict[str, Any]:
        of_ranks = [self.seen] if self.gather else self.from_all_ranks(self.seen)
        return {"seen": [row for rows in of_ranks for row in rows]}


def pairs(scenario: str) -> Dict[str, Any]:
    """What is seen, and said, of a set whose collator makes two rows of each sample."""
    _, kind, rows = scenario.split("_")
    case = Case(label, Echo, Numbers, {"data_collator": stacked_pairs})
    found: Dict[str, Any] = {}
    for gather in (True,) if ALWAYS_GATHERS else (True, False):
        trainer = trainer_for(kind, int(rows), 4, case._replace(metric=lambda gather=gather: RowsSeen(gather)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen = trainer.evaluate()["eval_seen"]
        said = [str(warning.message) for warning in caught if "cannot be told" in str(warning.message)]
        found[str(gather)] = {"seen": sorted(seen), "said": said}
    return found
