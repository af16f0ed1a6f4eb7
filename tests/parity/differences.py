"""Where the Trainer as released does something else on purpose of ours: the one table of it, with the reasons.

A disagreement that is not here fails the matrix, and so does an agreement where one is announced here.
"""

from __future__ import annotations

import inspect
from fnmatch import fnmatchcase
from typing import Callable, List, NamedTuple, Tuple

from transformers import Trainer

from tests.fixtures import has_legacy_loop
from tests.parity.matrix import Aspects
from tests.parity.scenarios import NATIVE, SCENARIOS, STOCK


def always() -> bool:
    return True


def frees_a_loss_that_may_not_exist() -> bool:
    """transformers 4.41: the loop in batch mode deletes `losses`, which a batch without a loss does not set."""
    source = inspect.getsource(Trainer.evaluation_loop)
    return "loss, logits, labels = self.prediction_step" in source and "del losses" in source


def others_free_it() -> bool:
    return not frees_a_loss_that_may_not_exist()


def legacy_loop_fails_over_prepared_loaders() -> bool:
    """Before transformers 4.47 (#34343): it reads a batch size that Accelerate does not set."""
    return has_legacy_loop() and "total_batch_size" not in inspect.getsource(Trainer.prediction_loop)


def legacy_loop_works() -> bool:
    return has_legacy_loop() and not legacy_loop_fails_over_prepared_loaders()


class Difference(NamedTuple):
    """Args:
    implementation: the one that differs from the shim.
    scenarios: patterns of their names.
    aspects: in what it differs, and in nothing else.
    reason: why it is right that it does.
    applies: whether it is so in the installed release.
    """

    implementation: str
    scenarios: Tuple[str, ...]
    aspects: Tuple[str, ...]
    reason: str
    applies: Callable[[], bool] = always


_UNPREPARED = ("plain_dataloader", "plain_stream", "list_of_batches", "only_iter")

DIFFERENCES: List[Difference] = [
    # --- batch_eval_metrics as released ---
    Difference(
        NATIVE,
        (*_UNPREPARED, "best model, list_of_batches"),
        ("metrics", "flags"),
        "The last batch of a loader that Accelerate did not prepare is not known: compute_result is never True.",
    ),
    Difference(
        NATIVE,
        tuple(f"{loader} in training" for loader in _UNPREPARED),
        ("metrics", "flags", "handed"),
        "The flag, and the rows that are cut off, are those of the training loader.",
    ),
    Difference(
        NATIVE,
        ("interrupted data, plain",),
        ("metrics", "flags", "handed", "events"),
        "The same, and the rows before the interruption are in the next result.",
    ),
    Difference(
        NATIVE,
        ("pictures of any size",),
        ("flags",),
        "The last batch of a loader that Accelerate did not prepare is not known. The metric does not mind here.",
    ),
    Difference(
        NATIVE,
        ("inputs, prepared_sized", "losses, prepared_sized"),
        ("handed",),
        "inputs is the dictionary of the batch, not the model's main input.",
    ),
    Difference(
        NATIVE,
        ("inputs, list_of_batches", "losses, list_of_batches"),
        ("flags", "handed"),
        "inputs is the dictionary of the batch; losses has more entries than the last batch has rows; no last batch.",
    ),
    Difference(
        NATIVE,
        ("detection*",),
        ("metrics", "handed"),
        "The last batch is cut to its number of rows in each inner tensor: boxes are lost.",
    ),
    Difference(
        NATIVE,
        ("failing metric",),
        ("metrics",),
        "Nothing is reset: the rows of the evaluation that failed are in the next result.",
    ),
    Difference(
        NATIVE,
        ("a number",),
        ("events",),
        "The error comes from the code after the last clear; ours comes before, with what was expected and found.",
    ),
    Difference(
        NATIVE,
        ("nothing", "no logits", "no batch"),
        ("warnings",),
        "Metrics that cannot be had are not mentioned.",
    ),
    Difference(
        NATIVE,
        ("no labels, evaluate",),
        ("warnings",),
        "Metrics that cannot be had are not mentioned.",
        others_free_it,
    ),
    Difference(
        NATIVE,
        ("no labels in batch 1",),
        ("events", "warnings"),
        "A metric over a part of the set is not mentioned. Ours is handed a batch when a labelled one follows.",
        others_free_it,
    ),
    Difference(
        NATIVE,
        ("no labels in batch 2",),
        ("metrics", "flags", "events", "warnings"),
        "A last batch without labels swallows the result, and its rows are in the next one.",
        others_free_it,
    ),
    Difference(
        NATIVE,
        ("no labels, evaluate",),
        ("metrics", "keys", "events", "warnings", "error"),
        "UnboundLocalError at a batch without a loss.",
        frees_a_loss_that_may_not_exist,
    ),
    Difference(
        NATIVE,
        ("no labels, predict",),
        ("metrics", "keys", "predictions", "events", "error"),
        "UnboundLocalError at a batch without a loss.",
        frees_a_loss_that_may_not_exist,
    ),
    Difference(
        NATIVE,
        ("no labels in batch *",),
        ("metrics", "keys", "flags", "handed", "events", "warnings", "error"),
        "UnboundLocalError at a batch without a loss.",
        frees_a_loss_that_may_not_exist,
    ),
    Difference(
        NATIVE,
        ("no labels and no metric",),
        ("metrics", "keys", "events", "error"),
        "UnboundLocalError at a batch without a loss.",
        frees_a_loss_that_may_not_exist,
    ),
    Difference(
        NATIVE,
        ("one argument, later",),
        ("events", "error"),
        "A function that was put on later is not checked, and fails with a TypeError at the first batch.",
    ),
    Difference(
        NATIVE,
        ("2 processes, 10 rows", "2 processes, 9 rows", "2 processes, 1 row", "2 processes, stream"),
        ("handed",),
        "inputs is the dictionary of the batch of its own process.",
    ),
    Difference(
        NATIVE,
        ("2 processes, sharded stream",),
        ("metrics", "handed", "predictions"),
        "Rows that are repeated to fill up the last batch of the stream count twice.",
    ),
    Difference(
        NATIVE,
        ("legacy evaluate",),
        ("metrics", "keys", "flags", "handed", "events", "error"),
        "The legacy loop fails over a prepared loader (transformers#34343).",
        legacy_loop_fails_over_prepared_loaders,
    ),
    Difference(
        NATIVE,
        ("legacy predict", "clear None, legacy"),
        ("metrics", "keys", "flags", "handed", "predictions", "events", "error"),
        "The legacy loop fails over a prepared loader (transformers#34343).",
        legacy_loop_fails_over_prepared_loaders,
    ),
    # --- metrics computed once, at the end ---
    Difference(
        STOCK,
        tuple(f"{loader} in training" for loader in _UNPREPARED),
        ("metrics",),
        "Rows are cut off by the remainder of the training loader.",
    ),
    Difference(
        STOCK,
        ("pictures of any size",),
        ("metrics", "keys", "error"),
        "Outputs of different sizes cannot be concatenated.",
    ),
    Difference(
        STOCK,
        ("detection*",),
        ("metrics",),
        "The labels of the pictures are concatenated over the batches, and cut in the last one.",
    ),
    Difference(
        STOCK,
        ("nothing",),
        ("metrics", "keys", "error"),
        "A metric that returns None is a TypeError.",
    ),
    Difference(
        STOCK,
        ("no labels in batch *",),
        ("metrics", "keys", "error"),
        "There are fewer labels than predictions: the metric fails.",
    ),
    Difference(
        STOCK,
        ("legacy evaluate",),
        ("metrics", "keys", "error"),
        "The legacy loop fails over a prepared loader (transformers#34343).",
        legacy_loop_fails_over_prepared_loaders,
    ),
    Difference(
        STOCK,
        ("legacy predict", "clear None, legacy"),
        ("metrics", "keys", "predictions", "error"),
        "The legacy loop fails over a prepared loader (transformers#34343).",
        legacy_loop_fails_over_prepared_loaders,
    ),
    Difference(
        STOCK,
        ("2 processes, sharded stream",),
        ("metrics", "predictions"),
        "Rows that are repeated to fill up the last batch of the stream count twice.",
    ),
]


def announced() -> Aspects:
    """What the table says of the installed release."""
    return {
        (difference.implementation, name): difference.aspects
        for difference in DIFFERENCES
        if difference.applies()
        for name in SCENARIOS
        if any(fnmatchcase(name, pattern) for pattern in difference.scenarios)
    }
