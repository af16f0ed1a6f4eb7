"""The scenarios of the matrix. Each is one function, which every implementation runs in a process of its own."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.fixtures import (
    EVAL_BATCH,
    LOADERS,
    BoxCounts,
    Boxes,
    Count,
    Dense,
    Detector,
    Evaluating,
    FailingOnce,
    InterruptedOnce,
    Rows,
    Stream,
    TokenAccuracy,
    batches,
    detection_batch,
    device_faked,
    has_legacy_loop,
    has_losses,
    including,
    keeping_the_best,
    loading,
    make_args,
    make_trainer,
    to_bfloat16,
    token_trainer,
    trainer_over,
    with_evaluation_every_step,
    without_labels,
)
from tests.parity.record import NotOffered, Record

STOCK, SHIM, PATCH, NATIVE = "stock", "shim", "patch", "native"


class Bench:
    """Gives a scenario what depends on the implementation, and the record to write to.

    Args:
        implementation: STOCK leaves batch_eval_metrics out, so that metrics are computed once; NATIVE uses the option
            of the installed release; SHIM and PATCH have all options.
    """

    def __init__(self, implementation: str) -> None:
        self._implementation = implementation
        self.record = Record()

    @property
    def batched(self) -> Dict[str, Any]:
        """The option that asks for metrics batch by batch."""
        return {} if self._implementation == STOCK else {"batch_eval_metrics": True}

    @property
    def batched_only(self) -> Dict[str, Any]:
        """The same, where the scenario means nothing without the option."""
        if self._implementation == STOCK:
            raise NotOffered
        return self.batched

    def clearing(self, value: Any, steps: int = 1) -> Dict[str, Any]:
        """The options that say when the cache is emptied; None is every Trainer's own way."""
        if value is None:
            return {}
        if self._implementation in (STOCK, NATIVE):
            raise NotOffered
        return {"cuda_cache_clear": value, **({} if steps == 1 else {"cuda_cache_clear_steps": steps})}

    def metric(self, inner: Optional[Callable[..., Any]] = None) -> Any:
        """A recorded `compute_metrics` around `inner`, or a `Count`."""
        return _Recorded(self.record, inner or Count())

    def evaluate(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.record.result(trainer.evaluate(*args, **kwargs))


class _Recorded:
    def __init__(self, record: Record, inner: Callable[..., Any]) -> None:
        self._record, self._inner = record, inner
        if hasattr(inner, "reset"):
            self.reset = inner.reset

    def __call__(self, eval_pred: Any, compute_result: bool = True) -> Any:
        self._record.call(eval_pred, compute_result)
        return self._inner(eval_pred, compute_result)


class Scenario(NamedTuple):
    """Args:
    group: what it is about; the support table has a line for each.
    run: does it.
    processes: how many take part.
    """

    group: str
    run: Callable[[Bench], None]
    processes: int = 1


SCENARIOS: Dict[str, Scenario] = {}


def scenario(group: str, name: str, processes: int = 1, needs: bool = True, **arguments: Any) -> Any:
    """Register a function under `name`, called with `arguments`, where the release has what it `needs`."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        if needs:
            SCENARIOS[name] = Scenario(group, functools.partial(function, **arguments), processes)
        return function

    return register


def for_each(group: str, name: str, values: Any, argument: str, **others: Any) -> Any:
    """Register a function once for each of `values`, under `name` with the value in it."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for value in values:
            scenario(group, name.format(value), **{argument: value}, **others)(function)
        return function

    return register


# --- loaders ---------------------------------------------------------------------------------------------------------


@for_each("any loader", "{}", LOADERS, "loader")
def any_loader(bench: Bench, loader: str) -> None:
    trainer = trainer_over(loader, 10, bench.metric(), **bench.batched)
    for _ in range(2):
        bench.evaluate(trainer)


@for_each("any loader", "{} rows", (8, 1), "rows")
def other_sizes(bench: Bench, rows: int) -> None:
    bench.evaluate(make_trainer(bench.metric(), eval_rows=rows, **bench.batched))


@scenario("any loader", "two sets")
def two_sets(bench: Bench) -> None:
    bench.evaluate(make_trainer(bench.metric(), eval_rows={"one": Rows(10), "two": Rows(5)}, **bench.batched))


# 14 rows leave a remainder of 2 at the end of the epoch
@for_each("in training", "{} in training", LOADERS, "loader")
def in_training(bench: Bench, loader: str) -> None:
    evaluating = Evaluating()
    trainer = trainer_over(
        loader,
        10,
        bench.metric(),
        train_dataset=Rows(14),
        num_train_epochs=1,
        learning_rate=0.0,
        callbacks=[evaluating],
        **bench.batched,
    )
    evaluating.trainer = trainer
    trainer.train()
    for result in evaluating.results:
        bench.record.result(result)


@for_each("in training", "best model, {}", ("prepared", "list_of_batches"), "loader")
def best_model(bench: Bench, loader: str) -> None:
    trainer = make_trainer(
        bench.metric(),
        cls=Trainer if loader == "prepared" else loading(lambda: batches(10)),
        **keeping_the_best(),
        **bench.batched,
    )
    trainer.train()
    bench.record.result({"best": trainer.state.best_metric})


# --- what the metric is given ----------------------------------------------------------------------------------------


def with_inputs(trainer: Any) -> Any:
    trainer.model.main_input_name = "x"
    return trainer


@for_each("what the metric is given", "inputs, {}", ("prepared_sized", "list_of_batches"), "loader")
def inputs(bench: Bench, loader: str) -> None:
    bench.evaluate(with_inputs(trainer_over(loader, 10, bench.metric(), **including("inputs"), **bench.batched)))


@for_each("what the metric is given", "losses, {}", ("prepared_sized", "list_of_batches"), "loader", needs=has_losses())
def losses(bench: Bench, loader: str) -> None:
    bench.evaluate(
        with_inputs(trainer_over(loader, 10, bench.metric(), **including("inputs", "loss"), **bench.batched))
    )


@for_each("what the metric is given", "preprocessed, {}", ("evaluate", "predict"), "method")
def preprocessed(bench: Bench, method: str) -> None:
    def preprocess(logits: Any, labels: Any) -> Any:
        return logits.argmax(-1), {"sum": logits.sum(-1)}

    rows: List[int] = []

    def metric(eval_pred: Any, compute_result: bool) -> Dict[str, int]:
        rows.append(len(eval_pred.predictions[0]))
        return {"rows": sum(rows)}

    trainer = make_trainer(bench.metric(metric), preprocess_logits_for_metrics=preprocess, **bench.batched)
    if method == "evaluate":
        bench.evaluate(trainer)
    else:
        bench.record.output(trainer.predict(Rows(10)))


@scenario("what the metric is given", "ragged tokens")
def ragged_tokens(bench: Bench) -> None:
    bench.evaluate(token_trainer((3, 5, 2, 7, 4, 6, 1), bench.metric(TokenAccuracy()), **bench.batched))


@scenario("what the metric is given", "pictures of any size")
def pictures_of_any_size(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(3)
    pictures = [
        {
            "x": torch.randn(1, *size, 4, generator=generator),
            "labels": torch.randint(3, (1, *size), generator=generator),
        }
        for size in ((4, 4), (6, 4), (4, 8))
    ]
    bench.evaluate(
        make_trainer(bench.metric(TokenAccuracy()), cls=loading(lambda: pictures), model=Dense(), **bench.batched)
    )


@for_each("what the metric is given", "detection{}", ("", ", gather object"), "how")
def detection(bench: Bench, how: str) -> None:
    torch.manual_seed(4)
    option = {"eval_use_gather_object": True} if hasattr(TrainingArguments, "eval_use_gather_object") else {}
    boxes = BoxCounts()
    trainer = make_trainer(
        bench.metric(boxes),
        model=Detector(),
        eval_rows=Boxes([3, 4, 5, 6, 3, 4]),
        data_collator=detection_batch,
        **(option if how else {}),
        **bench.batched,
    )
    for _ in range(2):
        boxes.boxes = []
        bench.evaluate(trainer)


@scenario("what the metric is given", "half precision")
def half_precision(bench: Bench) -> None:
    bench.evaluate(make_trainer(bench.metric(), bf16_full_eval=True, data_collator=to_bfloat16, **bench.batched))


@scenario("what the metric is given", "generation")
def generation(bench: Bench) -> None:
    torch.manual_seed(0)
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    generator = torch.Generator().manual_seed(5)
    rows = [
        {
            "input_ids": torch.randint(2, 32, (5,), generator=generator),
            "labels": torch.randint(2, 32, (4,), generator=generator),
        }
        for _ in range(10)
    ]
    seen: List[int] = []

    def metric(eval_pred: Any, compute_result: bool) -> Dict[str, int]:
        seen.append(len(eval_pred.predictions))
        return {"rows": sum(seen)}

    trainer = make_trainer(
        bench.metric(metric),
        model=T5ForConditionalGeneration(config).eval(),
        cls=Seq2SeqTrainer,
        args=make_args(Seq2SeqTrainingArguments, predict_with_generate=True, **bench.batched),
        eval_rows=rows,
    )
    bench.evaluate(trainer, max_length=7, num_beams=1)


# --- what the metric returns -----------------------------------------------------------------------------------------


@scenario("what the metric returns", "values of many types")
def values_of_many_types(bench: Bench) -> None:
    values = {
        "scalar": np.float64(0.5),
        "zero_d": torch.tensor(2.0),
        "nested": {"int": np.int64(3)},
        "eval_named": 1,
        "list": [np.float32(1.0)],
        "eval_loss": -1.0,
    }
    bench.evaluate(make_trainer(bench.metric(lambda eval_pred, compute_result: dict(values)), **bench.batched))


@scenario("what the metric returns", "earlier returns")
def earlier_returns(bench: Bench) -> None:
    def metric(eval_pred: Any, compute_result: bool) -> Dict[str, int]:
        return {"final": 1} if compute_result else {"partial": 1, "eval_loss": 0}

    bench.evaluate(make_trainer(bench.metric(metric), **bench.batched))


@scenario("what the metric returns", "a number")
def a_number(bench: Bench) -> None:
    bench.evaluate(make_trainer(bench.metric(lambda eval_pred, compute_result: 0.5), **bench.batched))


@scenario("what the metric returns", "nothing")
def nothing(bench: Bench) -> None:
    bench.evaluate(make_trainer(bench.metric(lambda eval_pred, compute_result: None), **bench.batched))


# --- results that cannot be had --------------------------------------------------------------------------------------


@for_each("no result", "no labels, {}", ("evaluate", "predict"), "method")
def no_labels(bench: Bench, method: str) -> None:
    trainer = make_trainer(bench.metric(), data_collator=without_labels(), **bench.batched)
    if method == "evaluate":
        bench.evaluate(trainer)
    else:
        bench.record.output(trainer.predict(Rows(10)))


@for_each("no result", "no labels in batch {}", (1, 2), "batch")
def no_labels_in_a_batch(bench: Bench, batch: int) -> None:
    trainer = make_trainer(bench.metric(), data_collator=without_labels({batch}), **bench.batched)
    bench.evaluate(trainer)
    trainer.data_collator = without_labels(set())
    bench.evaluate(trainer)


@scenario("no result", "no labels and no metric")
def no_labels_and_no_metric(bench: Bench) -> None:
    bench.evaluate(make_trainer(None, data_collator=without_labels(), **bench.batched))


@scenario("no result", "no logits")
def no_logits(bench: Bench) -> None:
    bench.evaluate(make_trainer(bench.metric(), prediction_loss_only=True, **bench.batched))


@scenario("no result", "no batch")
def no_batch(bench: Bench) -> None:
    bench.evaluate(make_trainer(bench.metric(), cls=loading(list), **bench.batched))


# --- interruptions ---------------------------------------------------------------------------------------------------


@scenario("interruptions", "failing metric")
def failing_metric(bench: Bench) -> None:
    trainer = make_trainer(bench.metric(FailingOnce(Count(), at=2)), **bench.batched_only)
    with contextlib.suppress(ZeroDivisionError):
        trainer.evaluate()
    bench.evaluate(trainer)


@for_each("interruptions", "interrupted data, {}", ("prepared", "plain"), "loader")
def interrupted_data(bench: Bench, loader: str) -> None:
    rows = InterruptedOnce(10, at=5)
    cls = Trainer if loader == "prepared" else loading(lambda: DataLoader(rows, batch_size=EVAL_BATCH))
    trainer = make_trainer(bench.metric(), cls=cls, eval_rows=rows, **bench.batched)
    with contextlib.suppress(KeyboardInterrupt):
        trainer.evaluate()
    bench.evaluate(trainer)


@scenario("interruptions", "evaluation in a callback")
def evaluation_in_a_callback(bench: Bench) -> None:
    class Inner(TrainerCallback):
        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            if trainer.compute_metrics is inner:
                return
            own, trainer.compute_metrics = trainer.compute_metrics, inner
            bench.evaluate(trainer, Rows(6), metric_key_prefix="inner")
            trainer.compute_metrics = own

    inner = bench.metric()
    trainer = make_trainer(bench.metric(), callbacks=[Inner()], **bench.batched)
    bench.evaluate(trainer)


# --- predict ---------------------------------------------------------------------------------------------------------


@for_each("predict", "predict, eval_accumulation_steps {}", (None, 1, 2), "steps")
def predict(bench: Bench, steps: Optional[int]) -> None:
    trainer = make_trainer(bench.metric(), eval_accumulation_steps=steps, **bench.batched)
    bench.record.output(trainer.predict(Rows(10)))


@scenario("predict", "evaluate, eval_accumulation_steps 1")
def evaluate_accumulating(bench: Bench) -> None:
    bench.evaluate(make_trainer(bench.metric(), eval_accumulation_steps=1, **bench.batched))


@for_each("legacy loop", "legacy {}", ("evaluate", "predict"), "method", needs=has_legacy_loop())
def legacy_loop(bench: Bench, method: str) -> None:
    trainer = make_trainer(bench.metric(), use_legacy_prediction_loop=True, **bench.batched)
    if method == "evaluate":
        bench.evaluate(trainer)
    else:
        bench.record.output(trainer.predict(Rows(10)))


# --- errors ----------------------------------------------------------------------------------------------------------


@scenario("errors", "one argument, at init")
def one_argument_at_init(bench: Bench) -> None:
    make_trainer(lambda eval_pred: {}, **bench.batched_only)


@scenario("errors", "one argument, later")
def one_argument_later(bench: Bench) -> None:
    trainer = make_trainer(bench.metric(), **bench.batched_only)
    trainer.compute_metrics = lambda eval_pred: {}
    trainer.evaluate()


@for_each("errors", "cuda_cache_clear={!r}", ("sometimes", 1, ""), "value")
def wrong_clear(bench: Bench, value: Any) -> None:
    make_args(**bench.clearing(value))


@for_each("errors", "cuda_cache_clear_steps={!r}", (0, -1, 1.5, True), "steps")
def wrong_steps(bench: Bench, steps: Any) -> None:
    make_args(**bench.clearing("eval"), cuda_cache_clear_steps=steps)


@scenario("errors", "idle steps")
def idle_steps(bench: Bench) -> None:
    make_args(**bench.clearing("never", steps=2))


@scenario("errors", "two opinions", needs=hasattr(TrainingArguments, "torch_empty_cache_steps"))
def two_opinions(bench: Bench) -> None:
    make_args(**bench.clearing("never"), torch_empty_cache_steps=1)


# --- cache clears ----------------------------------------------------------------------------------------------------

VALUES = (None, False, "never", "around_eval", "eval", "train", True, "always")


def cleared(bench: Bench, options: Dict[str, Any], value: Any = None, steps: int = 1, kind: str = "cuda") -> Any:
    """Evaluate and predict on a device that is called `kind`; gives the Trainer."""
    trainer = make_trainer(
        bench.metric(),
        train_dataset=Rows(24),
        max_steps=3,
        gradient_accumulation_steps=2,
        **options,
        **bench.clearing(value, steps),
    )
    with device_faked(kind):
        bench.evaluate(trainer)
        bench.record.output(trainer.predict(Rows(10)))
    return trainer


def cleared_in_training(bench: Bench, *args: Any, kind: str = "cuda", **options: Any) -> None:
    """The same, and six training steps, two of which make one of the optimizer's."""
    trainer = cleared(bench, *args, kind=kind, **options)
    with device_faked(kind):
        trainer.train()
    bench.record.keep(trainer.model.linear.weight)


@for_each("cache clears", "clear {!r}, batched", VALUES, "value")
def clear_batched(bench: Bench, value: Any) -> None:
    cleared(bench, bench.batched, value=value)


@for_each("cache clears", "clear {!r}, ordinary", VALUES, "value")
def clear_ordinary(bench: Bench, value: Any) -> None:
    cleared_in_training(bench, {}, value=value)


@for_each("cache clears", "clear {!r}, accumulating", VALUES, "value")
def clear_accumulating(bench: Bench, value: Any) -> None:
    cleared(bench, {**bench.batched, "eval_accumulation_steps": 1}, value=value)


@for_each("cache clears", "clear {!r}, legacy", VALUES, "value", needs=has_legacy_loop())
def clear_legacy(bench: Bench, value: Any) -> None:
    cleared(bench, {**bench.batched, "use_legacy_prediction_loop": True}, value=value)


@for_each("cache clears", "clear every {}", (2, 4), "steps")
def clear_cadence(bench: Bench, steps: int) -> None:
    cleared_in_training(bench, bench.batched, steps=steps, value="always")


@for_each("cache clears", "clear on {}", ("xpu", "npu", "mlu", "musa", "mps", "hpu", "cpu"), "kind")
def clear_device(bench: Bench, kind: str) -> None:
    cleared_in_training(bench, bench.batched, kind=kind, value="always")


# --- several processes -----------------------------------------------------------------------------------------------


def over_processes(rows: Any, **options: Any) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        options.update(including("inputs"), ddp_backend="gloo")
        trainer = with_inputs(make_trainer(bench.metric(), eval_rows=rows(), **options, **bench.batched))
        bench.evaluate(trainer)
        bench.record.output(trainer.predict(rows()))

    return run


for _name, _rows, _options in (
    ("10 rows", lambda: Rows(10), {}),
    ("9 rows", lambda: Rows(9), {}),
    ("1 row", lambda: Rows(1), {}),
    ("stream", lambda: Stream(10), {}),
    ("sharded stream", lambda: Stream(10), {"accelerator_config": {"dispatch_batches": False}}),
):
    scenario("several processes", f"2 processes, {_name}", processes=2)(over_processes(_rows, **_options))


@scenario("several processes", "2 processes, in training", processes=2)
def processes_in_training(bench: Bench) -> None:
    evaluating = Evaluating()
    trainer = make_trainer(
        bench.metric(),
        train_dataset=Rows(16),
        max_steps=2,
        learning_rate=0.0,
        ddp_backend="gloo",
        callbacks=[evaluating],
        **bench.batched,
    )
    evaluating.trainer = trainer
    trainer.train()
    for result in evaluating.results:
        bench.record.result(result)


# --- everything off --------------------------------------------------------------------------------------------------


@for_each("off", "off, clears{}", ("", ", accumulating"), "mode")
def off_clears(bench: Bench, mode: str) -> None:
    cleared_in_training(bench, {"eval_accumulation_steps": 1} if mode else {})


@for_each("off", "off, {}", ("evaluate", "predict", "accumulating", "train"), "what")
def off(bench: Bench, what: str) -> None:
    options = {"eval_accumulation_steps": 1} if what == "accumulating" else {}
    trainer = make_trainer(
        bench.metric(), train_dataset=Rows(8), max_steps=2, **with_evaluation_every_step(), **options
    )
    if what == "train":
        trainer.train()
        for entry in trainer.state.log_history:
            bench.record.result(entry)
        bench.record.keep(trainer.model.linear.weight)
    elif what == "predict":
        bench.record.output(trainer.predict(Rows(10)))
    else:
        bench.evaluate(trainer)
