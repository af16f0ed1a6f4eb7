"""What is written down of a scenario, so that implementations can be compared to the bit."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import warnings
from typing import Any, Callable, Dict, Iterator, List, Mapping
from unittest import mock

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from transformers import Trainer

from tests.fixtures import clears_added_to, without_timing

ASPECTS = ("metrics", "keys", "flags", "handed", "predictions", "events", "warnings", "error")


class NotOffered(Exception):  # noqa: N818
    """The implementation does not have the option that a scenario is about."""


def described(nested: Any) -> Any:
    """Type, shape and content of tensors and arrays in their structure, as JSON can hold it."""
    if isinstance(nested, Mapping):
        return {str(key): described(value) for key, value in nested.items()}
    if isinstance(nested, (list, tuple)):
        return [type(nested).__name__, *map(described, nested)]
    if isinstance(nested, torch.Tensor):
        content = _digest(
            nested.detach().float().numpy() if nested.dtype == torch.bfloat16 else nested.detach().numpy()
        )
        return ["Tensor", str(nested.dtype), list(nested.shape), nested.device.type, nested.requires_grad, content]
    if isinstance(nested, np.ndarray):
        return ["ndarray", str(nested.dtype), list(nested.shape), _digest(nested)]
    return [type(nested).__name__, repr(nested)]


def _digest(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


class Record:
    """Collects the aspects of one scenario in one implementation."""

    def __init__(self) -> None:
        self.metrics: List[Any] = []
        self.keys: List[List[str]] = []
        self.flags: List[bool] = []
        self.handed: List[Any] = []
        self.predictions: List[Any] = []
        self.events: List[str] = []
        self.warnings: List[str] = []
        self.error = ""

    def result(self, metrics: Mapping[str, Any]) -> None:
        """The metrics that an evaluation or prediction has returned."""
        kept = without_timing(dict(metrics))
        self.metrics.append({key: described(kept[key]) for key in sorted(kept)})
        self.keys.append(list(kept))

    def output(self, output: Any) -> None:
        """What `predict()` has returned."""
        self.result(output.metrics)
        self.keep([output.predictions, output.label_ids])

    def keep(self, arrays: Any) -> None:
        """Predictions, or whatever else has to be the same."""
        self.predictions.append(described(arrays))

    def call(self, eval_pred: Any, compute_result: bool) -> None:
        """A call of `compute_metrics`."""
        names = ("predictions", "label_ids", "inputs", "losses")
        given = {name: getattr(eval_pred, name, None) for name in names}
        self.flags.append(compute_result)
        self.handed.append({name: described(value) for name, value in given.items() if value is not None})
        self.events.append("metric")

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, note steps, clears, warnings and the type of the error that ends it."""
        GradientState._reset_state()  # a training that stopped in the middle of an epoch leaves its loader active
        with contextlib.ExitStack() as stack:
            caught = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            stack.enter_context(clears_added_to(_Prefixed(self.events, "clear ")))
            for owner, method, event in (
                (Trainer, "prediction_step", "batch"),
                (Trainer, "compute_loss", "loss"),
                (Accelerator, "backward", "backward"),
            ):
                stack.enter_context(mock.patch.object(owner, method, self._noted(getattr(owner, method), event)))
            try:
                yield
            except NotOffered:
                raise
            except Exception as error:
                self.error = type(error).__name__
        self.warnings = [str(warning.message) for warning in caught if warning.category is UserWarning]

    def _noted(self, function: Callable[..., Any], event: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.events.append(event)
            return function(*args, **kwargs)

        return noted

    def as_json(self) -> Dict[str, Any]:
        return {aspect: getattr(self, aspect) for aspect in ASPECTS}


class _Prefixed(List[str]):
    """Hands what is appended on to another list."""

    def __init__(self, target: List[str], prefix: str) -> None:
        super().__init__()
        self._target, self._prefix = target, prefix

    def append(self, item: str) -> None:
        self._target.append(self._prefix + item)
