"""Models, data, metrics and oracles that the scenarios share. Each exists once."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, Optional
from unittest import mock

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

FEATURES, CLASSES, EVAL_BATCH = 4, 3, 4

_outputs = tempfile.TemporaryDirectory(prefix="shim-test-")  # removed when the process ends


class Lin(torch.nn.Module):
    """A seeded linear classifier; `wide` adds that many columns to its logits, all of them smaller."""

    def __init__(self, wide: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(FEATURES, CLASSES)
        self.wide = wide

    def forward(self, x: torch.Tensor, labels: Optional[torch.Tensor] = None) -> Dict[str, torch.Tensor]:
        logits = self.linear(x)
        loss = {} if labels is None else {"loss": torch.nn.functional.cross_entropy(logits, labels)}
        if self.wide:
            logits = torch.nn.functional.pad(logits, (0, self.wide), value=-1e4)
        return {**loss, "logits": logits}


class Rows(Dataset):
    """`n` seeded rows with labels."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(n, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (n,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Dict[str, torch.Tensor]:
        if index >= len(self):
            raise IndexError(index)
        return {"x": self.x[index], "labels": self.labels[index]}


class Stream(IterableDataset):
    """The same rows, or those of another data set, without a length."""

    def __init__(self, n: int, of: Any = Rows) -> None:
        self.rows = of(n)

    def __iter__(self) -> Iterator[Dict[str, torch.Tensor]]:
        return iter([self.rows[index] for index in range(len(self.rows))])


def batches(n: int, size: int = EVAL_BATCH) -> List[Dict[str, torch.Tensor]]:
    """`Rows(n)` as a plain list of batches."""
    rows = Rows(n)
    return [{"x": x, "labels": y} for x, y in zip(rows.x.split(size), rows.labels.split(size))]


class Count:
    """Counts correct and seen rows; records every `compute_result`."""

    def __init__(self) -> None:
        self.flags: List[bool] = []
        self.resets = 0
        self._clear()

    def reset(self) -> None:
        self.resets += 1
        self._clear()

    def _clear(self) -> None:
        self.correct = self.rows = 0

    def __call__(self, eval_pred: Any, compute_result: bool = True) -> Dict[str, float]:
        self.flags.append(compute_result)
        predictions = torch.as_tensor(eval_pred.predictions)
        self.correct += int((predictions.argmax(-1) == torch.as_tensor(eval_pred.label_ids)).sum())
        self.rows += len(predictions)
        result = {"accuracy": self.correct / self.rows, "rows": self.rows}
        if compute_result:
            self._clear()
        return result


class Keeping(Count):
    """Keeps every `EvalPrediction` as well."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: List[Any] = []

    def __call__(self, eval_pred: Any, compute_result: bool = True) -> Dict[str, float]:
        self.seen.append(eval_pred)
        return super().__call__(eval_pred, compute_result)


class CountWithoutReset:
    """`Count` for people who write no `reset`."""

    def __init__(self) -> None:
        self._count = Count()

    def __call__(self, eval_pred: Any, compute_result: bool) -> Dict[str, float]:
        return self._count(eval_pred, compute_result)


def oracle(model: torch.nn.Module, rows: Rows, first: Optional[int] = None) -> Dict[str, float]:
    """What a plain loop over the whole set gives, or over the first rows of it."""
    with torch.no_grad():
        logits = model(rows.x[:first])["logits"].numpy()
    return {"accuracy": float(np.mean(logits.argmax(-1) == rows.labels[:first].numpy())), "rows": len(logits)}


def logits_of(model: torch.nn.Module, rows: Any) -> torch.Tensor:
    """The logits of the whole set at once."""
    with torch.no_grad():
        return model(rows.x, labels=rows.labels)["logits"]


def once(calls: int) -> List[bool]:
    return [False] * (calls - 1) + [True]


def with_evaluation_every_step() -> Dict[str, Any]:
    """`eval_strategy` was called `evaluation_strategy` before transformers 4.41."""
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    return {"eval_strategy" if "eval_strategy" in names else "evaluation_strategy": "steps", "eval_steps": 1}


def keeping_the_best() -> Dict[str, Any]:
    """The arguments of a training of two steps that keeps the model with the best accuracy."""
    return {
        "train_dataset": Rows(8),
        "max_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
        **with_evaluation_every_step(),
    }


def including(*what: str) -> Dict[str, Any]:
    """The arguments that ask for inputs, or inputs and losses, in `EvalPrediction`."""
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    if "include_for_metrics" in names:
        return {"include_for_metrics": list(what)}
    return {"include_inputs_for_metrics": "inputs" in what}


def has_losses() -> bool:
    """Whether `EvalPrediction` of this release has losses (4.46 and later)."""
    return "include_for_metrics" in {field.name for field in dataclasses.fields(TrainingArguments)}


def has_batch_eval_metrics() -> bool:
    """Whether this release has the option itself (4.41 and later); ask where the shim is not applied."""
    return "batch_eval_metrics" in {field.name for field in dataclasses.fields(TrainingArguments)}


def has_legacy_loop() -> bool:
    return hasattr(Trainer, "prediction_loop")


def make_args(cls: type = TrainingArguments, **options: Any) -> Any:
    defaults: Dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(dir=_outputs.name),
        "per_device_eval_batch_size": EVAL_BATCH,
        "per_device_train_batch_size": EVAL_BATCH,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
    }
    return cls(**{**defaults, **options})


def make_trainer(
    compute_metrics: Any = None, *, model: Any = None, cls: type = Trainer, eval_rows: Any = 10, **options: Any
) -> Any:
    """A Trainer over `eval_rows` (a count, or a data set); Trainer arguments are told from TrainingArguments."""
    own = {
        name: options.pop(name)
        for name in ("callbacks", "data_collator", "preprocess_logits_for_metrics", "train_dataset", "args")
        if name in options
    }
    own.setdefault("args", None)
    args = own.pop("args") or make_args(**options)
    return cls(
        model=model or Lin(),
        args=args,
        eval_dataset=Rows(eval_rows) if isinstance(eval_rows, int) else eval_rows,
        compute_metrics=compute_metrics,
        **own,
    )


def loading(loader: Any, cls: type = Trainer) -> type:
    """A Trainer class whose evaluation and test loader is `loader()`, which accelerate has not prepared."""

    class WithLoader(cls):  # type: ignore[misc, valid-type]
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return loader()

        def get_test_dataloader(self, test_dataset: Any) -> Any:
            return loader()

    return WithLoader


class OnlyIter:
    """A loader that knows nothing but how to iterate."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __iter__(self) -> Any:
        return iter(self._source)


# name -> (a Trainer class, the evaluation set): every way in which an evaluation can get its batches
LOADERS: Dict[str, Any] = {
    "prepared_sized": (Trainer, Rows),
    "prepared_stream": (Trainer, Stream),
    "plain_dataloader": (None, lambda n: DataLoader(Rows(n), batch_size=EVAL_BATCH)),
    "plain_stream": (None, lambda n: DataLoader(Stream(n), batch_size=EVAL_BATCH)),
    "list_of_batches": (None, batches),
    "only_iter": (None, lambda n: OnlyIter(batches(n))),
}


def trainer_over(loader: str, n: int, compute_metrics: Any, **options: Any) -> Any:
    cls, source = LOADERS[loader]
    if cls is not None:
        return make_trainer(compute_metrics, eval_rows=source(n), **options)
    return make_trainer(compute_metrics, cls=loading(lambda: source(n)), eval_rows=n, **options)


class Evaluating(TrainerCallback):
    """Evaluates after every training step."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.results: List[Dict[str, Any]] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.results.append(self.trainer.evaluate())


class Dense(torch.nn.Module):
    """Classifies every position of its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x, labels=None):
        logits = self.linear(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten()), "logits": logits}


class TokenAccuracy:
    """Accuracy over positions whose label is not -100."""

    def __init__(self) -> None:
        self.widths: List[int] = []
        self.right = self.tokens = 0

    def __call__(self, eval_pred, compute_result=True):
        predictions, labels = torch.as_tensor(eval_pred.predictions), torch.as_tensor(eval_pred.label_ids)
        self.widths.append(labels.shape[1])
        kept = labels != -100
        self.right += int((predictions.argmax(-1) == labels)[kept].sum())
        self.tokens += int(kept.sum())
        return {"accuracy": self.right / self.tokens, "tokens": self.tokens}


def token_trainer(lengths, metric, **options):
    torch.manual_seed(2)
    sequences = [{"x": torch.randn(n, 4), "labels": torch.randint(3, (n,))} for n in lengths]

    def collate(features):
        return {
            "x": torch.nn.utils.rnn.pad_sequence([f["x"] for f in features], batch_first=True),
            "labels": torch.nn.utils.rnn.pad_sequence(
                [f["labels"] for f in features], batch_first=True, padding_value=-100
            ),
        }

    return make_trainer(
        metric, model=Dense(), eval_rows=sequences, data_collator=collate, per_device_eval_batch_size=2, **options
    )


class Pictures(Rows):
    """`n` seeded pictures of 5 x 4 pixels; a class for each pixel, or -100."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(n, FEATURES, 5, 4, generator=generator)
        self.labels = torch.randint(-1, CLASSES, (n, 5, 4), generator=generator)
        self.labels[self.labels == -1] = -100


class Segmenter(torch.nn.Module):
    """Classifies every pixel; the classes are dimension 1 of the logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = torch.nn.Conv2d(FEATURES, CLASSES, kernel_size=1)

    def forward(self, x, labels=None):
        logits = self.convolution(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Detector(torch.nn.Module):
    """Seven queries of three classes for each picture; the labels are a list of dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 21)

    def forward(self, x, labels=None):
        logits = self.linear(x).view(-1, 7, 3)
        return {"loss": logits.mean(), "logits": logits}


class Boxes:
    def __init__(self, counts) -> None:
        self._rows = [
            {"x": torch.randn(4), "labels": {"boxes": torch.rand(n, 4), "classes": torch.arange(n)}} for n in counts
        ]

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return self._rows[index]


def detection_batch(features):
    return {"x": torch.stack([f["x"] for f in features]), "labels": [f["labels"] for f in features]}


class BoxCounts:
    def __init__(self) -> None:
        self.boxes: List[int] = []

    def __call__(self, eval_pred, compute_result):
        self.boxes += [len(label["boxes"]) for label in eval_pred.label_ids]
        return {"boxes": sum(self.boxes)}


def to_bfloat16(features):
    return {
        "x": torch.stack([f["x"] for f in features]).bfloat16(),
        "labels": torch.stack([f["labels"] for f in features]),
    }


def without_labels(skipped=None):
    """A collator that leaves the labels out of the batches with these numbers (None: of all)."""
    calls = iter(range(10**6))

    def collate(features):
        batch = {"x": torch.stack([f["x"] for f in features])}
        if skipped is not None and next(calls) not in skipped:
            batch["labels"] = torch.stack([f["labels"] for f in features])
        return batch

    return collate


class FailingOnce:
    """Calls `metric`, but raises on call number `at`, once."""

    def __init__(self, metric, at) -> None:
        self._metric, self._at, self._calls = metric, at, 0
        if hasattr(metric, "reset"):
            self.reset = metric.reset

    def __call__(self, eval_pred, compute_result):
        self._calls += 1
        if self._calls == self._at:
            raise ZeroDivisionError
        return self._metric(eval_pred, compute_result)


class InterruptedOnce(Rows):
    def __init__(self, n, at) -> None:
        super().__init__(n)
        self._at = at

    def __getitem__(self, index):
        if index == self._at:
            self._at = None
            raise KeyboardInterrupt
        return super().__getitem__(index)


def without_timing(metrics: Dict[str, Any]) -> Dict[str, Any]:
    """Metrics without what differs from run to run."""
    timed = ("runtime", "per_second", "preparation_time", "jit_compilation_time")
    return {key: value for key, value in metrics.items() if not key.endswith(timed)}


class FakeDevice(str):
    """A CPU for torch, which takes it for the string "cpu", that calls itself otherwise."""

    def __new__(cls, kind: str) -> FakeDevice:
        device = super().__new__(cls, "cpu")
        device.type = kind  # type: ignore[attr-defined]
        return device


@contextlib.contextmanager
def clears_added_to(clears: List[str]) -> Iterator[None]:
    """Add the backend's name to `clears` for each clear of any backend's cache.

    Clears by accelerate, which does one by itself when training starts, are left out: they are not the Trainer's.
    """
    with contextlib.ExitStack() as stack:
        for backend in ("cuda", "xpu", "npu", "mlu", "musa", "mps", "hpu"):
            record = _recorder(clears, backend)
            if hasattr(torch, backend):
                patched = mock.patch.object(getattr(torch, backend), "empty_cache", record, create=True)
            else:
                # torch 2.2 seeds any backend that it finds, unless it is in a bad fork
                stub = SimpleNamespace(empty_cache=record, _is_in_bad_fork=lambda: True)
                patched = mock.patch.object(torch, backend, stub, create=True)
            stack.enter_context(patched)
        yield


@contextlib.contextmanager
def device_faked(kind: str) -> Iterator[None]:
    """`args.device.type` is `kind`, and the device a CPU."""
    real = TrainingArguments.device

    def device(args: Any) -> FakeDevice:
        real.__get__(args)  # sets up the distributed state
        return FakeDevice(kind)

    with mock.patch.object(TrainingArguments, "device", property(device)):
        yield


@contextlib.contextmanager
def device_called(kind: str) -> Iterator[List[str]]:
    """The device is faked to be of `kind`; gives the list to which clears are added."""
    clears: List[str] = []
    with clears_added_to(clears), device_faked(kind):
        yield clears


def _recorder(clears: List[str], backend: str) -> Any:
    def empty_cache() -> None:
        caller = sys._getframe(1).f_globals["__name__"]
        if not caller.startswith("accelerate"):
            clears.append(backend)

    return empty_cache
