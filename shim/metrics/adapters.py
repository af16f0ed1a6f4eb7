"""Metrics of torchmetrics, torcheval and huggingface evaluate, as `compute_metrics` for `batch_eval_metrics`.

What is computed, and how states of several processes are combined, is theirs.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import importlib
from collections.abc import Mapping
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply

from shim.metrics import ranks
from shim.metrics.preprocessing import counted
from shim.metrics.streaming import StreamingMetric
from shim.nested import tensors

_Preprocess = Callable[[Any], Tuple[Any, ...]]


def from_torchmetrics(
    metric_or_collection: Any, preprocess: Optional[_Preprocess] = None, *, gather: bool = False
) -> StreamingMetric:
    """A metric of torchmetrics, or a collection of them.

    Args:
        metric_or_collection: `torchmetrics.Metric` or `MetricCollection`. The result is named as a collection names
            it: after the class, or as in `MetricCollection({"accuracy": ...})`. Values that are no scalars become
            lists, so that they can be logged.
        preprocess: from an `EvalPrediction` to the arguments of `update`, usually (preds, target). Default: `counted`.
        gather: False: each process updates with its own rows, and torchmetrics combines the states. True: the rows are
            gathered first, for metrics whose states torchmetrics cannot combine.

    Raises:
        ImportError: torchmetrics is not installed.
        TypeError: `metric_or_collection` is something else.
    """
    library = _import("torchmetrics")
    _require_type(metric_or_collection, "from_torchmetrics", library.Metric, library.MetricCollection)
    return _FromTorchmetrics(library, metric_or_collection, preprocess, gather)


def from_torcheval(
    metric_or_metrics: Any, preprocess: Optional[_Preprocess] = None, *, gather: bool = False
) -> StreamingMetric:
    """A metric of torcheval, or a dict of them.

    Args:
        metric_or_metrics: `torcheval.metrics.Metric`, which is named after its class, or a dict from names to them.
            Values that are no scalars become lists.
        preprocess: from an `EvalPrediction` to the arguments of `update`, usually (input, target). Default: `counted`.
        gather: False: each process updates with its own rows, and torcheval combines the states. True: the rows are
            gathered first.

    Raises:
        ImportError: torcheval is not installed.
        TypeError: `metric_or_metrics` is something else.
    """
    base = _import("torcheval.metrics").Metric
    metrics = metric_or_metrics
    if not isinstance(metrics, Mapping):
        metrics = {type(metrics).__name__: metrics}
    for metric in metrics.values():
        _require_type(metric, "from_torcheval", base)
    return _FromTorcheval(dict(metrics), preprocess, gather)


def from_evaluate(module: Any, preprocess: Optional[_Preprocess] = None, **compute_kwargs: Any) -> StreamingMetric:
    """A module of huggingface evaluate. Its batches are gathered, and the main process computes.

    Args:
        module: `evaluate.load(...)` or `evaluate.combine(...)`. A copy of it is used.
        preprocess: from an `EvalPrediction` to (predictions, references), in the form that the module takes: class
            indices for most of them. Default: `counted`.
        compute_kwargs: passed to `module.compute`.

    Raises:
        ImportError: evaluate is not installed.
        TypeError: `module` is something else.
    """
    library = _import("evaluate")
    _require_type(module, "from_evaluate", library.EvaluationModule, library.CombinedEvaluations)
    return _FromEvaluate(module, preprocess, compute_kwargs)


class _FromLibrary(StreamingMetric):
    """A metric of a library that keeps its states in tensors."""

    def __init__(self, preprocess: Optional[_Preprocess], gather: bool) -> None:
        self.gather = gather
        self._preprocess = preprocess or counted
        self._device: Optional[torch.device] = None

    def update(self, eval_pred: Any) -> None:
        arguments = recursively_apply(
            torch.as_tensor, tuple(self._preprocess(eval_pred)), test_type=lambda leaf: hasattr(leaf, "__array__")
        )
        devices = [tensor.device for tensor in tensors(arguments)]
        if devices and devices[0] != self._device:
            self._device = devices[0]
            self._move(self._device)
        self._update(*arguments)

    @abc.abstractmethod
    def _move(self, device: torch.device) -> None: ...

    @abc.abstractmethod
    def _update(self, *arguments: Any) -> None: ...


class _FromTorchmetrics(_FromLibrary):
    def __init__(self, library: Any, metric: Any, preprocess: Optional[_Preprocess], gather: bool) -> None:
        super().__init__(preprocess, gather)
        is_collection = isinstance(metric, library.MetricCollection)
        # A collection names the results, and takes the dicts apart that some metrics return.
        self._collection = metric if is_collection else library.MetricCollection([metric])
        self._metrics = [module for module in self._collection.modules() if isinstance(module, library.Metric)]
        self._base = library.Metric
        self._has_rows = False

    def reset(self) -> None:
        self._collection.reset()
        self._has_rows = False

    def _move(self, device: torch.device) -> None:
        self._collection.to(device)

    def _update(self, *arguments: Any) -> None:
        self._collection.update(*arguments)
        self._has_rows = True

    def compute(self) -> Dict[str, Any]:
        if not self._is_partial:
            with self._combining(False):
                return _as_numbers(self._collection.compute())
        states = ranks.from_all((self._has_rows, self._lengths()))
        with_rows = [rank for rank, (has_rows, _) in enumerate(states) if has_rows]
        self._require_same_lengths([lengths for has_rows, lengths in states if has_rows])
        if len(with_rows) in (0, len(states)):
            with self._combining(True):
                return _as_numbers(self._collection.compute())
        # A state without a row has no shape or type yet: torchmetrics would gather what does not fit together.
        group = dist.new_group(with_rows)
        try:
            computed = None
            if self._has_rows:
                with self._combining(True, group):
                    computed = _as_numbers(self._collection.compute())
            return ranks.from_all(computed)[with_rows[0]] or {}
        finally:
            if self._has_rows:
                dist.destroy_process_group(group)

    @contextlib.contextmanager
    def _combining(self, combines: bool, group: Any = None) -> Iterator[None]:
        """Whether torchmetrics gathers the states of all processes, or of a group, when it computes."""
        before = [(metric.distributed_available_fn, metric.process_group) for metric in self._metrics]
        try:
            for metric in self._metrics:
                metric.distributed_available_fn = lambda: combines
                metric.process_group = group or metric.process_group
            yield
        finally:
            for metric, (available, process_group) in zip(self._metrics, before):
                metric.distributed_available_fn, metric.process_group = available, process_group

    def _lengths(self) -> List[Tuple[str, int]]:
        """The lengths of the lists that torchmetrics gathers element by element."""
        return [
            (f"{type(metric).__name__}.{name}", len(getattr(metric, name)))
            for metric in self._metrics
            if type(metric)._sync_dist is self._base._sync_dist
            for name, reduction in metric._reductions.items()
            if reduction is None and isinstance(getattr(metric, name), list)
        ]

    def _require_same_lengths(self, lengths: List[List[Tuple[str, int]]]) -> None:
        """torchmetrics would wait forever for the elements that one of the processes has not."""
        for states in zip(*lengths):
            if len(set(states)) > 1:
                raise ValueError(
                    f"torchmetrics cannot combine {states[0][0]} of several processes when they have different numbers "
                    f"of rows, found {', '.join(str(length) for _, length in states)} elements: use "
                    "from_torchmetrics(..., gather=True)."
                )


class _FromTorcheval(_FromLibrary):
    def __init__(self, metrics: Dict[str, Any], preprocess: Optional[_Preprocess], gather: bool) -> None:
        super().__init__(preprocess, gather)
        self._metrics = metrics

    def reset(self) -> None:
        for metric in self._metrics.values():
            metric.reset()

    def _move(self, device: torch.device) -> None:
        for metric in self._metrics.values():
            metric.to(device)

    def _update(self, *arguments: Any) -> None:
        for metric in self._metrics.values():
            metric.update(*arguments)

    def compute(self) -> Dict[str, Any]:
        if self._is_partial:
            toolkit = importlib.import_module("torcheval.metrics.toolkit")
            return _as_numbers(toolkit.sync_and_compute_collection(self._metrics))
        return _as_numbers({name: metric.compute() for name, metric in self._metrics.items()})


class _FromEvaluate(StreamingMetric):
    def __init__(self, module: Any, preprocess: Optional[_Preprocess], compute_kwargs: Dict[str, Any]) -> None:
        self._unused = module
        self._preprocess = preprocess or counted
        self._compute_kwargs = compute_kwargs
        self._module: Any = None

    def reset(self) -> None:
        self._module = None  # modules cannot forget the batches that they have

    def update(self, eval_pred: Any) -> None:
        if not ranks.is_main_process():
            return
        if self._module is None:
            self._module = copy.deepcopy(self._unused)
        predictions, references = recursively_apply(_as_array, tuple(self._preprocess(eval_pred)))
        self._module.add_batch(predictions=predictions, references=references)

    def compute(self) -> Dict[str, Any]:
        return ranks.on_main_process(lambda: self._module.compute(**self._compute_kwargs))


def _as_array(tensor: torch.Tensor) -> Any:
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)  # numpy lacks the one, pyarrow the other
    return (tensor.float() if is_half else tensor).cpu().numpy()


def _as_numbers(results: Mapping[str, Any]) -> Dict[str, Any]:
    numbers: Dict[str, Any] = recursively_apply(torch.Tensor.tolist, dict(results))
    return numbers


def _import(name: str) -> Any:
    extra = name.split(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != extra:
            raise
        raise ImportError(
            f'from_{extra} needs {extra}, which is not installed: pip install "transformers-trainer-shim[{extra}]".'
        ) from error


def _require_type(found: Any, function: str, *expected: type) -> None:
    if not isinstance(found, expected):
        names = " or ".join(f"{cls.__module__.split('.')[0]}.{cls.__name__}" for cls in expected)
        hint = f": give {found.__name__}(...), an object" if isinstance(found, type) else ""
        raise TypeError(f"{function} expected a {names}, found {found!r}{hint}.")
