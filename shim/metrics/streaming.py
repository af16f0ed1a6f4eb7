"""The base class of metrics that are computed batch by batch, and the mean of one value a row."""

from __future__ import annotations

import abc
import math
from array import array
from typing import Any, Callable, Dict, List, Optional

import torch
from transformers.trainer_pt_utils import find_batch_size

from shim.metrics import ranks


class StreamingMetric(abc.ABC):
    """A metric that is updated with one batch after the other: subclass it, and write the three methods.

    An object of it is a `compute_metrics` for `batch_eval_metrics=True`, with the shim and with the option that
    transformers has itself from 4.41 on; and one for an ordinary evaluation, whose one call brings the whole set.

        class Accuracy(StreamingMetric):
            def reset(self):
                self.right = self.rows = 0

            def update(self, eval_pred):
                self.right += int((eval_pred.predictions.argmax(-1) == eval_pred.label_ids).sum())
                self.rows += len(eval_pred.label_ids)

            def compute(self):
                return {"accuracy": self.right / self.rows}

    Keep sums and counts, not a mean of batch means: see transformers#39842, where users ask for what is written here.

    With several processes, `update` gets the rows of all of them, and every process computes the same. With the class
    attribute `gather = False` it gets the rows of its own process only, without those that samplers repeat to even the
    processes out, so that no logits are copied from device to device; `compute` has to combine the states, once, with
    `self.from_all_ranks(state)`. A transformers without the shim ignores the attribute and gathers, and so does the
    shim where torch.distributed is not in use: then `from_all_ranks` returns the one state that there is.
    """

    gather = True
    _has_begun = False
    _is_partial = False

    @abc.abstractmethod
    def reset(self) -> None:
        """Set the state to that of an evaluation that has seen no batch.

        The shim calls it when an evaluation begins. It is also called before the first batch, after the last, and
        after an exception: the state of an evaluation is not kept, as it may be as large as the set.
        """

    @abc.abstractmethod
    def update(self, eval_pred: Any) -> None:
        """Take one batch in; it has at least one row.

        Args:
            eval_pred: `transformers.EvalPrediction`, with tensors on the device of the model (numpy arrays in an
                ordinary evaluation).
        """

    @abc.abstractmethod
    def compute(self) -> Dict[str, Any]:
        """The metrics over all batches since `reset`, by name; the Trainer adds its prefix (`eval_`)."""

    def from_all_ranks(self, state: Any) -> List[Any]:
        """The states that `compute` has to combine: that of each process, or the only one where batches are gathered.

        Args:
            state: anything that can be pickled. All processes have to call this together, in `compute`.
        """
        return ranks.from_all(state) if self._is_partial else [state]

    def evaluation_aborted(self) -> None:
        """Called by the shim when an evaluation ends with an exception."""
        self.reset()
        self._has_begun = False

    def __call__(self, eval_pred: Any, compute_result: bool = True) -> Optional[Dict[str, Any]]:
        """The contract of `compute_metrics`.

        Args:
            eval_pred: one batch, or the whole set.
            compute_result: whether this is the last batch.

        Returns:
            The metrics for the last batch, else None.
        """
        try:
            if not self._has_begun:
                self.reset()  # a transformers without the shim does not
                self._has_begun = True
            self._is_partial = not getattr(eval_pred, "gathered", True)
            # A process may have no row in the last batch; it takes part in `compute` all the same.
            if find_batch_size(eval_pred.predictions) != 0:
                self.update(eval_pred)
            if not compute_result:
                return None
            result = self.compute()
        except BaseException:
            self.evaluation_aborted()
            raise
        self.reset()
        self._has_begun = False
        return result


class _PerSampleMean(StreamingMetric):
    gather = False

    def __init__(self, fn: Callable[[Any], Any], name: str) -> None:
        self._fn, self._name = fn, name
        self._values = array("d")

    def reset(self) -> None:
        self._values = array("d")

    def update(self, eval_pred: Any) -> None:
        values = torch.as_tensor(self._fn(eval_pred)).double()
        rows = find_batch_size(eval_pred.predictions)
        if values.ndim != 1 or (rows is not None and len(values) != rows):
            raise ValueError(
                f"per_sample_mean expected {self._name} to return one value for each of the {rows} rows, "
                f"found shape {tuple(values.shape)}."
            )
        self._values.extend(values.tolist())

    def compute(self) -> Dict[str, Any]:
        values = [value for of_rank in self.from_all_ranks(self._values) for value in of_rank]
        # fsum rounds once, so that the result does not depend on how the rows came in batches and to processes.
        return {self._name: math.fsum(values) / len(values)}


def per_sample_mean(fn: Callable[[Any], Any], name: Optional[str] = None) -> StreamingMetric:
    """The mean of one value a row: the same to the last bit for any batch size and number of processes.

    Args:
        fn: takes an `EvalPrediction` of any number of rows, gives one number for each (tensor, array or list, of shape
            (rows,)). Its rows are those of one process. The values are kept until the end, 8 bytes a row.
        name: the metric's name; by default that of `fn`.

    Raises:
        ValueError: `fn` has no name to take, as a lambda. In an evaluation: it gave another number of values.
    """
    named = name or getattr(fn, "__name__", "<lambda>")
    if named == "<lambda>":
        raise ValueError(
            'per_sample_mean names the metric after the function, found one without a name: give name="...".'
        )
    return _PerSampleMean(fn, str(named))
