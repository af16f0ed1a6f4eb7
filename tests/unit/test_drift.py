"""What the shim assumes of upstream, each named with its place, so that a newer release tells what has moved.

A place that is missing fails as "gone"; one that is there and does something else fails as "changed".
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Callable, Iterator, NamedTuple
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from tests.fixtures import Rows, Stream, has_legacy_loop, make_trainer

pytestmark = pytest.mark.stock


class DriftError(AssertionError):
    """Upstream is no longer what the shim assumes."""


class Assumption(NamedTuple):
    """Args:
    place: module and attribute, as in "transformers.trainer:Trainer.evaluate".
    relies_on: what the shim relies on there, and for what.
    holds: whether what is found at the place is so.
    """

    place: str
    relies_on: str
    holds: Callable[[Any], bool]

    def check(self) -> None:
        """Raise `DriftError` that tells "gone" from "changed"."""
        module, _, path = self.place.partition(":")
        found: Any = importlib.import_module(module)
        for name in filter(None, path.split(".")):
            found = inspect.getattr_static(found, name, None) if inspect.isclass(found) else getattr(found, name, None)
            if found is None:
                raise DriftError(f"gone: {self.place}. The shim relies on it: {self.relies_on}.")
        if not self.holds(found):
            raise DriftError(f"changed: {self.place} is there, but not as the shim relies on it: {self.relies_on}.")


def takes(*parameters: str) -> Callable[[Any], bool]:
    return lambda function: set(parameters) <= set(inspect.signature(function).parameters)


def mentions(*names: str) -> Callable[[Any], bool]:
    """Whether the code of a function, and of those inside it, uses all of these names and string constants."""
    return lambda function: set(names) <= set(_names(inspect.unwrap(function).__code__))


def _names(code: Any) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from (item for item in constant if isinstance(item, str))
        elif inspect.iscode(constant):
            yield from _names(constant)


TRAINER, ARGUMENTS = "transformers.trainer:Trainer", "transformers.training_args:TrainingArguments"
LOOP = f"{TRAINER}.evaluation_loop"


def anything(found: Any) -> bool:
    return True


def _loops() -> Iterator[Assumption]:
    for loop in ("evaluation_loop", *(["prediction_loop"] if has_legacy_loop() else [])):
        place = f"{TRAINER}.{loop}"
        yield Assumption(
            place,
            "its parameters, from which the shim takes the loader, the mode and the prefix",
            takes("dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"),
        )
        yield Assumption(
            place, "calls self.prediction_step, where the logits are diverted", mentions("prediction_step")
        )
        yield Assumption(
            place,
            "calls callback_handler.on_prediction_step, during which the Trainer is as its user knows it",
            mentions("callback_handler", "on_prediction_step"),
        )
        yield Assumption(
            place,
            "reads compute_metrics and eval_accumulation_steps from the Trainer while it runs",
            mentions("compute_metrics", "eval_accumulation_steps"),
        )


ASSUMPTIONS = [
    *_loops(),
    Assumption(
        LOOP,
        "gathers with self.gather_function, and preprocesses with self.preprocess_logits_for_metrics",
        mentions("gather_function", "preprocess_logits_for_metrics", "pad_across_processes"),
    ),
    Assumption(f"{TRAINER}.evaluate", 'calls its loop "Evaluation"', mentions("Evaluation")),
    Assumption(f"{TRAINER}.predict", 'calls its loop "Prediction"', mentions("Prediction")),
    Assumption(
        f"{TRAINER}.prediction_step", "its parameters", takes("model", "inputs", "prediction_loss_only", "ignore_keys")
    ),
    Assumption(f"{TRAINER}.prediction_step", "looks for labels under label_names", mentions("label_names")),
    Assumption(f"{TRAINER}._prepare_input", "moves the main input to the device", takes("data")),
    Assumption(
        f"{TRAINER}.training_step",
        "calls self.compute_loss before accelerator.backward, between which the cache is emptied",
        mentions("compute_loss", "accelerator", "backward"),
    ),
    Assumption(f"{TRAINER}.compute_loss", "its parameters", takes("model", "inputs")),
    Assumption(f"{TRAINER}.__init__", "its parameters", takes("args", "compute_metrics")),
    Assumption(
        "transformers.trainer:torch",
        "is the module torch, through which the Trainer empties the CUDA cache",
        lambda found: found is torch,
    ),
    Assumption(
        "transformers.trainer_utils:EvalLoopOutput",
        "is a named tuple with metrics, in which the shim puts its own",
        lambda found: {"predictions", "label_ids", "metrics", "num_samples"} <= set(found._fields),
    ),
    Assumption(
        "transformers.trainer_utils:EvalPrediction", "its parameters", takes("predictions", "label_ids", "inputs")
    ),
    Assumption(
        "transformers.trainer_utils:denumpify_detensorize",
        "makes plain numbers of scalars, as the loop does with metrics",
        lambda found: found({"x": torch.tensor(1.0)}) == {"x": 1.0},
    ),
    Assumption(
        "transformers.trainer_pt_utils:find_batch_size",
        "tells the rows of a nested structure",
        lambda found: found({"x": (torch.zeros(3, 2),)}) == 3 and found({"x": None}) is None,
    ),
    Assumption(
        "transformers.trainer_pt_utils:nested_numpify",
        "makes arrays of tensors, for shim.metrics.spool as for an ordinary evaluation",
        lambda found: found((torch.zeros(2, dtype=torch.bfloat16),))[0].dtype == "float32",
    ),
    Assumption(
        "transformers.trainer_pt_utils:nested_concat",
        "pads dimension 1 with -100, as shim.metrics.spool does after it",
        lambda found: found(torch.ones(1, 2), torch.ones(1, 1), padding_index=-100).tolist() == [[1, 1], [1, -100]],
    ),
    Assumption(ARGUMENTS, "is a dataclass whose fields can be added to", lambda found: found.__dataclass_fields__),
    Assumption(
        f"{ARGUMENTS}.__init__",
        "is written by dataclasses, and calls __post_init__",
        lambda found: found.__code__.co_filename == "<string>" and "__post_init__" in found.__code__.co_names,
    ),
    Assumption(f"{ARGUMENTS}.device", "is the device whose cache is emptied", anything),
    Assumption(
        "transformers.trainer_callback:CallbackHandler.on_prediction_step",
        "its parameters",
        takes("args", "state", "control"),
    ),
    Assumption(
        "accelerate.state:GradientState",
        "knows the active loader, whether it is at its end, and the rows that are no repetition",
        lambda found: all(
            hasattr(found(), name)
            for name in ("active_dataloader", "dataloader_references", "end_of_dataloader", "remainder")
        ),
    ),
    Assumption(
        "accelerate.data_loader:IterableDatasetShard",
        "keeps what is needed to tell the repeated rows of a stream",
        lambda found: all(
            hasattr(found(Stream(4), batch_size=2, num_processes=2), name)
            for name in ("dataset", "batch_size", "num_processes", "split_batches", "drop_last")
        ),
    ),
    Assumption("accelerate:Accelerator.gather", "gathers tensors", takes("tensor")),
    Assumption("accelerate:Accelerator.pad_across_processes", "its parameters", takes("tensor", "dim", "pad_index")),
    Assumption("accelerate:Accelerator.gather_for_metrics", "is what Trainer.gather_function is by default", anything),
    Assumption("accelerate:Accelerator.num_processes", "is the number of processes", anything),
    Assumption(
        "accelerate.utils:recursively_apply",
        "its parameters, for outputs that are not all tensors",
        takes("func", "data", "error_on_other_type"),
    ),
]


@pytest.mark.parametrize("assumption", ASSUMPTIONS, ids=lambda assumption: assumption.place.partition(":")[2])
def test_upstream_is_as_the_shim_assumes(assumption):
    assumption.check()


def test_a_trainer_has_the_attributes_that_the_shim_reads_and_shadows():
    trainer = make_trainer()
    for name in ("accelerator", "callback_handler", "gather_function", "label_names", "state", "args"):
        assert name in vars(trainer), f"gone: Trainer.{name}"
    function = getattr(trainer.gather_function, "func", trainer.gather_function)
    assert function.__self__ is trainer.accelerator, "changed: Trainer.gather_function"


def test_a_prepared_loader_is_the_active_one_while_it_is_iterated_over():
    trainer = make_trainer()
    loader = trainer.get_eval_dataloader()
    state = trainer.accelerator.gradient_state
    at_end = []
    for _ in loader:
        assert state.active_dataloader is loader, "changed: accelerate's GradientState.active_dataloader"
        at_end.append(state.end_of_dataloader)
    assert at_end == [False, False, True], "changed: accelerate's GradientState.end_of_dataloader"
    for _ in DataLoader(Rows(4)):
        assert state.active_dataloader is not loader


def test_each_training_run_has_a_state_object_of_its_own():
    trainer = make_trainer(train_dataset=Rows(4), max_steps=1)
    states = [trainer.state]
    for _ in range(2):
        trainer.train()
        states.append(trainer.state)
    assert len({id(state) for state in states}) == 3, "changed: Trainer.train() no longer makes a new state"


class TestDrift:
    """A run against a newer release would tell what has happened."""

    def test_what_is_gone_is_called_gone(self):
        with (
            mock.patch("transformers.trainer.Trainer.prediction_step", None),
            pytest.raises(DriftError, match=r"^gone: transformers\.trainer:Trainer\.prediction_step\. The shim relies"),
        ):
            next(a for a in ASSUMPTIONS if a.place == f"{TRAINER}.prediction_step").check()

    def test_what_is_changed_is_called_changed(self):
        with (
            mock.patch("transformers.trainer.Trainer.prediction_step", lambda self, batch: None),
            pytest.raises(DriftError, match=r"^changed: transformers\.trainer:Trainer\.prediction_step is there, but"),
        ):
            next(a for a in ASSUMPTIONS if a.place == f"{TRAINER}.prediction_step").check()
