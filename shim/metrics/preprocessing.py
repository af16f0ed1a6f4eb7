"""From an `EvalPrediction` to what metrics of other libraries take: predictions and targets, position by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional, Tuple

import torch

_IGNORED = -100


def counted(eval_pred: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    """The first output and the labels, without the positions whose label is -100.

    Where the outputs have a dimension of classes (the last one, or dimension 1 for pictures), every position becomes a
    row: predictions of shape (positions, classes), targets of shape (positions,). A single class is no dimension: the
    predictions are (positions,) then. Outputs of the labels' own shape keep it, unless there is a label to drop.
    Labels that are no integers are kept whatever their value. A language model's labels are not shifted here.

    Args:
        eval_pred: an `EvalPrediction` of tensors or numpy arrays.

    Raises:
        ValueError: there is more than one kind of labels, or the shapes do not belong together.
    """
    predictions, target = _first(eval_pred.predictions), eval_pred.label_ids
    if isinstance(target, (tuple, list, Mapping)):
        raise ValueError(
            f"The default preprocessing expected one tensor of labels, found a {type(target).__name__} of "
            f"{len(target)}: give preprocess, a function from eval_pred to (preds, target)."
        )
    predictions, target = torch.as_tensor(predictions), torch.as_tensor(target)
    keep = torch.ones_like(target, dtype=torch.bool)
    if not target.is_floating_point():
        keep = target != _IGNORED
    if predictions.shape == target.shape:
        return (predictions, target) if keep.all() else (predictions[keep], target[keep])
    classes = _dimension_of_classes(predictions, target)
    if classes is None:
        raise ValueError(
            f"The default preprocessing cannot match predictions of shape {tuple(predictions.shape)} with labels of "
            f"shape {tuple(target.shape)}: give preprocess, a function from eval_pred to (preds, target)."
        )
    predictions = predictions.movedim(classes, -1)[keep]
    return (predictions.squeeze(-1) if predictions.shape[-1] == 1 else predictions), target[keep]


def _first(outputs: Any) -> Any:
    if isinstance(outputs, Mapping):
        return next(iter(outputs.values()))
    return outputs[0] if isinstance(outputs, (tuple, list)) else outputs


def _dimension_of_classes(predictions: torch.Tensor, target: torch.Tensor) -> Optional[int]:
    """Last for classifiers of samples and tokens, dimension 1 for those of pixels, as the models of transformers do."""
    if predictions.ndim != target.ndim + 1:
        return None
    for dimension in (1, -1) if target.ndim > 2 else (-1, 1):
        shape = list(predictions.shape)
        shape.pop(dimension)
        if shape == list(target.shape):
            return dimension
    return None
