"""Batched evaluation: the stock evaluation loop keeps its work, its logits are diverted at `prediction_step`.

The stock loop calls `self.prediction_step`, and gets ours: it calls the real one, prepares and gathers the batch,
hands it to `compute_metrics`, and gives only the loss back to the loop. A batch is handed on when the next one is due,
or when the loop has ended: only then is it known which batch was the last, whatever the loader is.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any, Callable, ContextManager, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from accelerate.utils import recursively_apply
from transformers.trainer import Trainer
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalPrediction, denumpify_detensorize

from shim import bypass, cache, compat, memory
from shim.nested import tensors
from shim.shadow import Shadow

# What `predict()` calls its loop; the stock loops of transformers 4.41 and later tell it from `evaluate()` by the same.
_PREDICTING = "Prediction"
_PADDING_INDEX = -100


def wrappers() -> Iterator[Tuple[type, str, Callable[..., Any]]]:
    """(class, attribute, function that makes the wrapper) for each method of the Trainer that is wrapped here."""
    yield Trainer, "__init__", _make_init
    for name in compat.evaluation_loops(Trainer):
        yield Trainer, name, functools.partial(_make_evaluation_loop, legacy=name == compat.LEGACY_LOOP)


def _make_init(original: Callable[..., None], patch: Any) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *positional: Any, **keywords: Any) -> None:
        if patch.active:
            _check_before_making(signature, self, positional, keywords)
        original(self, *positional, **keywords)

    return __init__


def _check_before_making(signature: inspect.Signature, trainer: Any, positional: Any, keywords: Any) -> None:
    try:
        given = signature.bind(trainer, *positional, **keywords).arguments
    except TypeError:
        given = keywords  # with a name that the signature hides, such as the deprecated `tokenizer` of 4.46
    args, compute_metrics = given.get("args"), given.get("compute_metrics")
    if args is None:
        return
    policy = cache.policy_of(args)
    if args.batch_eval_metrics or policy is not None:
        bypass.warn_of_bypass(type(trainer), Trainer, args)
    if args.batch_eval_metrics and compute_metrics is not None:
        _require_compute_result(compute_metrics)


def _require_compute_result(compute_metrics: Callable[..., Any]) -> None:
    """The check of transformers 4.41 and later, on every release.

    Raises:
        ValueError: `compute_metrics` has no parameter `compute_result`.
    """
    parameters = inspect.signature(compute_metrics).parameters
    if "compute_result" not in parameters:
        name = getattr(compute_metrics, "__qualname__", type(compute_metrics).__qualname__)
        raise ValueError(
            "With batch_eval_metrics=True, compute_metrics is called as compute_metrics(eval_pred, compute_result): "
            "once per batch to update its sums, with compute_result=True on the last batch to return the metrics. "
            f"Found {name}({', '.join(parameters)}): give it a parameter compute_result, let "
            f"shim.metrics.spool({name}) keep the logits on disk for it, or set batch_eval_metrics=False."
        )


def _make_evaluation_loop(original: Callable[..., Any], patch: Any, legacy: bool) -> Callable[..., Any]:
    clears_in_batch_mode = compat.clears_in_batch_mode(original)

    @functools.wraps(original)
    def evaluation_loop(self: Any, *positional: Any, **keywords: Any) -> Any:
        args = self.args
        if not patch.active:
            return original(self, *positional, **keywords)
        if args.batch_eval_metrics or args.cuda_cache_clear is not None:
            evaluation = _Evaluation(self, legacy, clears_in_batch_mode, *positional, **keywords)
            return evaluation.run(lambda: original(self, *positional, **keywords))
        forecast = None if legacy or memory.is_told(self) else _forecast(self, *positional, **keywords)
        if forecast is None:
            return original(self, *positional, **keywords)
        with forecast.watching():
            return original(self, *positional, **keywords)

    return evaluation_loop


def _forecast(
    trainer: Any, dataloader: Any, description: str, prediction_loss_only: Optional[bool] = None, *_: Any, **__: Any
) -> Optional[memory.Forecast]:
    """For an evaluation that keeps all logits. (`predict()` does as well, but has to: nothing would help.)"""
    loss_only = trainer.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
    if trainer.compute_metrics is None or loss_only or description == _PREDICTING:
        return None
    return memory.forecast_for(trainer, dataloader)


class _Evaluation:
    """One run of an evaluation loop of upstream's, with its prediction steps diverted.

    The loop runs in its ordinary mode, which is the same code on every release: what it would do in batch mode is done
    here, the clear after each batch included.

    Args:
        trainer: the Trainer.
        legacy: whether the loop is the `prediction_loop` of 4.x.
        clears_in_batch_mode: whether the loop would empty the CUDA cache after each batch, in batch mode.
        dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix: as the loop gets them.
    """

    def __init__(
        self,
        trainer: Any,
        legacy: bool,
        clears_in_batch_mode: bool,
        dataloader: Any,
        description: str,
        prediction_loss_only: Optional[bool] = None,
        ignore_keys: Optional[List[str]] = None,
        metric_key_prefix: str = "eval",
    ) -> None:
        self._trainer = trainer
        self._policy = cache.policy_of(trainer.args)
        self._prefix = metric_key_prefix
        self._predicting = description == _PREDICTING
        self._metrics = self._batch_metrics(prediction_loss_only)
        # In batch mode the stock loop never comes to look at `eval_accumulation_steps`, and that of 4.41 fails at a
        # batch without a loss. It stays there if nobody wants the logits that it would collect in ordinary mode.
        wants_outputs = self._metrics is not None or self._predicting or prediction_loss_only
        self._leaves_batch_mode = trainer.args.batch_eval_metrics and bool(wants_outputs)
        self._clears_as_installed = self._policy is None and self._leaves_batch_mode and clears_in_batch_mode
        # The legacy loop never preprocesses, with the option or without.
        self._legacy = legacy
        self._preprocess = None if legacy else trainer.preprocess_logits_for_metrics
        self._dataloader = dataloader
        self._gather = _Gather(trainer, dataloader)
        self._collected: List[Any] = []
        self._batches = 0
        keeps_all = not (legacy or trainer.args.batch_eval_metrics or memory.is_told(trainer))
        self._forecast = _forecast(trainer, dataloader, description, prediction_loss_only) if keeps_all else None
        self._shadows = list(self._stand_ins())

    def _batch_metrics(self, loss_only: Optional[bool]) -> Optional[_BatchMetrics]:
        trainer = self._trainer
        if not trainer.args.batch_eval_metrics or trainer.compute_metrics is None or loss_only:
            return None
        _require_compute_result(trainer.compute_metrics)
        return _BatchMetrics(trainer.compute_metrics, several_processes=trainer.accelerator.num_processes > 1)

    def _stand_ins(self) -> Iterator[Shadow]:
        """What the stock loop sees, but no code of the user's: see `suspended`."""
        trainer = self._trainer
        yield Shadow(trainer, "prediction_step", self._prediction_step)
        yield Shadow(trainer.callback_handler, "on_prediction_step", self._on_prediction_step)
        if self._leaves_batch_mode:
            yield Shadow(trainer.args, "batch_eval_metrics", False)
        if self._forecast is not None:
            yield self._forecast.shadow
        if self._metrics is None:
            return
        yield Shadow(trainer.args, *compat.nothing_included(trainer.args))
        yield from self._gather.stand_ins()
        batch_size = compat.batch_size_for_legacy_loop(self._dataloader) if self._legacy else None
        if batch_size is not None:
            yield Shadow(self._dataloader, "batch_size", batch_size)
        if self._predicting:
            # `predict()` wants the predictions as well: the loop collects them, and computes nothing.
            yield Shadow(trainer, "compute_metrics", None)
            yield Shadow(trainer, "preprocess_logits_for_metrics", None)
            yield Shadow(trainer, "gather_function", self._gather_unless_collected)
        else:
            yield Shadow(trainer.args, "eval_accumulation_steps", None)

    def run(self, loop: Callable[[], Any]) -> Any:
        """Run the loop.

        Args:
            loop: calls the stock loop with the arguments that came.

        Returns:
            The loop's `EvalLoopOutput`, with the metrics of the last batch among its own.
        """
        self._clear_around()
        with self._metrics or contextlib.nullcontext():
            with self._diverted():
                output = loop()
            if self._metrics is not None:
                self._metrics.hand_on(last=True)
                self._check_result(self._metrics)
        self._clear_after_batch()
        self._clear_around()
        return output if self._metrics is None else self._with_metrics(output, self._metrics)

    @contextlib.contextmanager
    def _diverted(self) -> Iterator[None]:
        muted: ContextManager[None] = contextlib.nullcontext()
        if self._policy is not None or self._clears_as_installed:
            muted = cache.upstream_clears_muted()
        with muted, self._shadows_on():
            try:
                yield
            finally:
                # The stock loop resets it, and so forgets `eval_use_gather_object` (transformers#36213).
                if self._metrics is not None:
                    self._trainer.gather_function = self._gather.function

    @contextlib.contextmanager
    def _shadows_on(self) -> Iterator[None]:
        try:
            for shadow in self._shadows:
                shadow.put_on()
            yield
        finally:
            for shadow in reversed(self._shadows):
                shadow.take_off()
            self._shadows.clear()  # they refer to this object: without a cycle, an interrupted batch is freed at once

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Within the block the Trainer is as its user knows it: for the user's code, which may evaluate anew."""
        for shadow in reversed(self._shadows):
            shadow.take_off()
        try:
            with cache.upstream_clears_heard():
                yield
        finally:
            for shadow in self._shadows:
                shadow.put_on()

    def _on_prediction_step(self, *positional: Any, **keywords: Any) -> Any:
        with self.suspended():
            forecast, self._forecast = self._forecast, None
            if forecast is not None:
                forecast.conclude()
            return self._trainer.callback_handler.on_prediction_step(*positional, **keywords)

    def _prediction_step(self, model: Any, inputs: Any, *positional: Any, **keywords: Any) -> Tuple[Any, Any, Any]:
        """What the loop calls in place of `Trainer.prediction_step`."""
        with self.suspended():
            # The batch before goes before the forward pass needs its memory, unless it may turn out to be the last one.
            if self._metrics is not None and self._looks_labelled(inputs):
                self._metrics.hand_on(last=False)
            self._clear_after_batch()
            self._batches += 1
            self._collected.clear()
            loss, logits, labels = self._trainer.prediction_step(model, inputs, *positional, **keywords)
            if self._metrics is None:
                return loss, logits, labels
            share = self._gather.share(find_batch_size(logits) or find_batch_size(inputs))
            logits, labels = self._prepare(logits, labels)
            ungathered = logits, labels
            if self._metrics.gathers or self._predicting:
                logits, labels = self._gather(logits, share), self._gather(labels, share)
            if logits is not None and labels is not None:
                handed = (logits, labels) if self._metrics.gathers else ungathered
                self._metrics.take(self._eval_prediction(self._metrics.gathers, handed, inputs, loss, share))
            else:
                self._metrics.miss("logits" if logits is None else "labels")
        if not self._predicting:
            return loss, None, None
        if self._legacy:  # that loop gathers in a way of its own
            return (loss, *ungathered)
        self._collected = [*tensors(logits), *tensors(labels)]
        return loss, logits, labels

    def _gather_unless_collected(self, nested: Any) -> Any:
        """What the loop calls to gather for `predict()`: each batch has been gathered for the metrics already."""
        is_collected = any(tensor is ours for tensor in tensors(nested) for ours in self._collected)
        return nested if is_collected else self._gather.function(nested)

    def _looks_labelled(self, inputs: Any) -> bool:
        """The test of `Trainer.prediction_step`, before the forward pass."""
        return not isinstance(inputs, Mapping) or all(
            inputs.get(name) is not None for name in self._trainer.label_names
        )

    def _clear_around(self) -> None:
        if self._policy is not None and self._policy.around_eval:
            cache.clear(self._trainer.args)

    def _clear_after_batch(self) -> None:
        if not self._batches:
            return
        if self._clears_as_installed:
            cache.clear_as_installed()
        elif self._policy is not None and self._policy.due_after_eval_batch(self._batches):
            cache.clear(self._trainer.args)

    def _prepare(self, logits: Any, labels: Any) -> Tuple[Any, Any]:
        """Detached, of one size on all ranks, and preprocessed, in the order in which the stock loop does it."""
        labels = self._padded(_detached(labels))
        logits = self._padded(_detached(logits))
        if logits is not None and self._preprocess is not None:
            logits = self._preprocess(logits, labels)
        return logits, labels

    def _padded(self, nested: Any) -> Any:
        """`nested` as long as the longest of all processes, where it is going to be gathered."""
        is_gathered = self._predicting or (self._metrics is not None and self._metrics.gathers)
        return self._gather.padded(nested) if is_gathered else nested

    def _eval_prediction(
        self, gathered: bool, outputs: Tuple[Any, Any], inputs: Any, loss: Any, share: _Share
    ) -> EvalPrediction:
        """What `compute_metrics` gets: logits and labels, and what else the arguments ask for.

        Args:
            gathered: whether it gets the rows of all processes, which the outputs are already.
            outputs: logits and labels.
            inputs, loss: of this process's share.
            share: which rows that has.
        """
        trainer = self._trainer
        included = compat.included_for_metrics(trainer.args)
        given = functools.partial(self._gather, share=share) if gathered else share.own_rows
        logits, labels = outputs if gathered else map(share.own_rows, outputs)
        extras: Dict[str, Any] = {}
        if "inputs" in included:
            name = getattr(trainer.model, "main_input_name", "input_ids")
            extras["inputs"] = given(self._padded(trainer._prepare_input(inputs[name])))
        if "loss" in included and loss is not None:
            extras["losses"] = given(loss.repeat(share.rows or trainer.args.eval_batch_size))
        eval_prediction = EvalPrediction(predictions=logits, label_ids=labels, **extras)
        eval_prediction.gathered = gathered
        return eval_prediction

    def _check_result(self, batch_metrics: _BatchMetrics) -> None:
        problem = batch_metrics.problem(self._trainer.label_names)
        if problem and not (self._predicting and batch_metrics.never_labelled):
            warnings.warn(problem, stacklevel=5)
        result = batch_metrics.result
        if result is not None and not isinstance(result, MutableMapping):
            raise TypeError(
                "compute_metrics must return a dict of metrics for compute_result=True, "
                f"found {type(result).__qualname__}."
            )

    def _with_metrics(self, output: Any, batch_metrics: _BatchMetrics) -> Any:
        """`output` with the metrics put in, named and ordered as the stock loop does it in ordinary mode."""
        if batch_metrics.result is None:
            return output
        metrics = denumpify_detensorize(batch_metrics.result)
        metrics.update(output.metrics)
        for key in list(metrics):
            if not key.startswith(f"{self._prefix}_"):
                metrics[f"{self._prefix}_{key}"] = metrics.pop(key)
        return output._replace(metrics=metrics)


class _BatchMetrics:
    """Calls `compute_metrics` once per batch, and with `compute_result=True` exactly once: on the last.

    As a context manager it tells a `compute_metrics` that has a method `evaluation_aborted` when an exception has ended
    the evaluation.

    Args:
        compute_metrics: the user's.
        several_processes: whether there is anything to gather.
    """

    def __init__(self, compute_metrics: Callable[..., Any], several_processes: bool) -> None:
        self.result: Any = None
        # Without torch.distributed (TPUs) the states of a metric could not be combined.
        can_combine = several_processes and torch.distributed.is_available() and torch.distributed.is_initialized()
        self.gathers = getattr(compute_metrics, "gather", True) is not False or not can_combine
        self._compute_metrics = compute_metrics
        self._pending: Optional[EvalPrediction] = None
        self._taken = 0
        self._missed: List[str] = []
        self._finished = False
        reset = getattr(compute_metrics, "reset", None)
        if callable(reset):
            reset()

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_type: Any, error: Any, traceback: Any) -> None:
        aborted = getattr(self._compute_metrics, "evaluation_aborted", None)
        if error_type is not None and callable(aborted):
            self._pending = None
            aborted()

    def take(self, eval_prediction: EvalPrediction) -> None:
        self.hand_on(last=False)
        self._taken += 1
        self._pending = eval_prediction

    def miss(self, what: str) -> None:
        self._missed.append(what)

    def hand_on(self, last: bool) -> None:
        if self._pending is None:
            return
        eval_prediction, self._pending = self._pending, None
        result = self._compute_metrics(eval_prediction, compute_result=last)
        if last:
            self.result, self._finished = result, True

    @property
    def never_labelled(self) -> bool:
        return not self._taken and "labels" in self._missed

    def problem(self, label_names: List[str]) -> Optional[str]:
        """Why the metrics are missing or cover part of the set only, and what to do; None where all is well."""
        option = "batch_eval_metrics=True, but"
        remedy = {
            "labels": f"have the data collator give {' and '.join(label_names) or 'labels'} with every batch, "
            "or set TrainingArguments(label_names=[...])",
            "logits": "have prediction_step return logits (prediction_loss_only=True and keys_to_ignore_at_inference "
            "hold them back)",
        }
        if not self._taken and not self._missed:
            return f"{option} the evaluation set gave no batch: there are no metrics. Check the set and drop_last."
        if self._missed and not self._finished:
            lost = self._missed[-1]
            found = f"the last batch gave no {lost}" if self._taken else f"no batch gave {lost}"
            return f"{option} {found}: there are no metrics. To get them, {remedy[lost]}."
        if self._missed:
            lost, total = self._missed[0], self._taken + len(self._missed)
            return (
                f"{option} {len(self._missed)} of {total} batches gave no {lost}: the metrics cover the others only. "
                f"To get all, {remedy[lost]}."
            )
        if self.result is None:
            return (
                f"{option} compute_metrics returned None for compute_result=True: there are no metrics. "
                "Return a dict of them on that call."
            )
        return None


class _Gather:
    """Gathers a batch over all processes, without the rows that samplers repeat to even the ranks out, and only those.

    `Accelerator.gather_for_metrics` trims by whichever loader is active and trims every inner tensor. This trims only
    where the active loader is the one that is evaluated, and only tensors that have a row per sample. With one process
    there is nothing to gather and no row too many.
    """

    def __init__(self, trainer: Any, dataloader: Any) -> None:
        self.function = trainer.gather_function
        self._accelerator = trainer.accelerator
        self._is_upstreams = getattr(_unwrapped(self.function), "__self__", None) is trainer.accelerator
        self._dataloader = dataloader
        self._active_before = list(self._accelerator.gradient_state.dataloader_references)
        self._shard: Any = getattr(dataloader, "dataset", None)
        self._stream: Optional[_CountedStream] = None
        if isinstance(self._shard, IterableDatasetShard) and self._accelerator.num_processes > 1:
            self._stream = _CountedStream(self._shard.dataset)

    def stand_ins(self) -> Iterator[Shadow]:
        """What the loader has to see for the rows of a stream to be counted."""
        if self._stream is not None:
            yield Shadow(self._shard, "dataset", self._stream)

    def padded(self, nested: Any) -> Any:
        """`nested` with dimension 1 of each tensor padded by -100 to the longest of all processes."""
        if nested is None or self._accelerator.num_processes == 1:
            return nested
        return self._accelerator.pad_across_processes(nested, dim=1, pad_index=_PADDING_INDEX)

    def share(self, rows: Optional[int]) -> _Share:
        """This process's share of the batch that is being evaluated: so many rows."""
        remainder = self._remainder()
        samples = rows if remainder is None else self._samples_of_share() or rows
        share = _Share(rows, samples, remainder, self._accelerator.num_processes, self._accelerator.process_index)
        if share.mixes_repetitions_with_others:
            warnings.warn(
                f"The collator or model makes {rows} rows of {samples} samples, so that those of the samples that were "
                f"repeated to fill up the last batch cannot be told from the others of their process: the metrics "
                f"count some of them twice. Give the set a length that {samples} (per_device_eval_batch_size) divides.",
                stacklevel=2,
            )
        return share

    def _samples_of_share(self) -> Optional[int]:
        """How many samples a share of the last batch has; None where that is known from its rows only.

        Collators and models may make several rows of a sample: those of preference pairs stack the chosen answers and
        the rejected ones.
        """
        if self._stream is not None:
            return int(self._shard.batch_size) // (self._shard.num_processes if self._shard.split_batches else 1)
        loader = self._accelerator.gradient_state.active_dataloader
        sampler = getattr(loader, "batch_sampler", None)
        if not isinstance(sampler, BatchSamplerShard) or not sampler.even_batches or sampler.batch_size is None:
            return None
        return int(sampler.batch_size) // (sampler.num_processes if sampler.split_batches else 1)

    def __call__(self, nested: Any, share: _Share) -> Any:
        """Gather a nested structure of tensors, in the model's own structure; None stays None."""
        if nested is None:
            return None
        if not self._is_upstreams:
            return self.function(nested)
        if self._accelerator.num_processes == 1:
            return nested
        if self._wants_objects() or not _only_tensors(nested):
            return self.function(nested)
        return share.without_repetitions(self._accelerator.gather(nested))

    def _wants_objects(self) -> bool:
        return bool(getattr(self.function, "keywords", {}).get("use_gather_object"))

    def _remainder(self) -> Optional[int]:
        """Rows of the gathered batch that are no repetition, where it is the last one and has any; else None."""
        state = self._accelerator.gradient_state
        active = state.active_dataloader
        # A wrapper around a prepared loader is known by the loader that its iteration has made active.
        is_ours = active is self._dataloader or not any(active is other for other in self._active_before)
        if not is_ours or not state.end_of_dataloader:
            return None
        if state.remainder > 0:
            return int(state.remainder)
        return self._remainder_of_stream()

    def _remainder_of_stream(self) -> Optional[int]:
        """The same for a stream that each process reads whole and takes its share of (`dispatch_batches=False`)."""
        if self._stream is None or self._shard.drop_last:
            return None
        if not self._stream.rows:
            warnings.warn(
                "With dispatch_batches=False and worker processes, the rows that were repeated to fill up the last "
                "batch of a streamed set cannot be told from the others: the metrics may count them twice. Set "
                "dataloader_num_workers=0, or leave dispatch_batches at its default.",
                stacklevel=2,
            )
            return None
        share = 1 if self._shard.split_batches else self._shard.num_processes
        return self._stream.rows % (self._shard.batch_size * share) or None


class _Share(NamedTuple):
    """One process's share of a batch. All processes have shares of the same size, filled up with repetitions."""

    rows: Optional[int]
    """The rows in it, where the outputs or inputs tell."""
    samples: Optional[int]
    """The samples that these were made of: as many, as a rule."""
    remainder: Optional[int]
    """Samples of the gathered batch that are no repetition, where it has any repetitions; else None."""
    processes: int
    rank: int

    def without_repetitions(self, gathered: Any) -> Any:
        """The gathered batch without the repetitions; tensors that do not have a row per sample stay as they are."""
        if self.remainder is None:
            return gathered
        if self.samples is None:
            return recursively_apply(lambda tensor: tensor[: self.remainder], gathered)
        return recursively_apply(self._without_repetitions, gathered)

    def _without_repetitions(self, tensor: torch.Tensor) -> torch.Tensor:
        rows, rest = divmod(len(tensor), self.processes)
        if rest or not self._is_made_of_samples(rows):
            return tensor
        # Repetitions come last: a part of the gathered batch, and no copy of it.
        return tensor[: sum(self._kept(rank, rows) for rank in range(self.processes))]

    def own_rows(self, nested: Any) -> Any:
        """This process's share without the repetitions: none of it may be left."""
        if self.remainder is None or self.samples is None:
            return nested
        if isinstance(nested, list) and len(nested) == self.samples and all(map(_is_record, nested)):
            return nested[: self._kept(self.rank, self.samples)]
        return recursively_apply(self._own_rows, nested)

    def _own_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim or not self._is_made_of_samples(len(tensor)):
            return tensor
        return tensor[: self._kept(self.rank, len(tensor))]

    def _is_made_of_samples(self, rows: int) -> bool:
        return rows == self.samples or (rows == self.rows and self._has_more_rows)

    @property
    def _has_more_rows(self) -> bool:
        if not self.rows or not self.samples:
            return False
        return self.rows != self.samples and self.rows % self.samples == 0

    def _kept(self, rank: int, rows: int) -> int:
        """How many of its rows are no repetition. Which row is whose is only known of one row a sample."""
        assert self.remainder is not None
        assert self.samples is not None
        kept = min(max(self.remainder - rank * self.samples, 0), self.samples)
        return kept if rows == self.samples else rows * bool(kept)

    @property
    def mixes_repetitions_with_others(self) -> bool:
        """Whether some process has repetitions among its rows, and nothing tells which."""
        if self.processes == 1 or not self.remainder or not self.samples:
            return False
        return self._has_more_rows and self.remainder % self.samples > 0


class _CountedStream:
    """A streamed data set that counts the rows it gives. Worker processes count in a copy of their own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.rows = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what pickle asks of an object that has no attributes yet
            raise AttributeError(name)
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[Any]:
        self.rows = 0
        for row in self._stream:
            self.rows += 1
            yield row


def _unwrapped(function: Any) -> Any:
    return function.func if isinstance(function, functools.partial) else function


def _is_record(element: Any) -> bool:
    """Whether an element of a list is one sample's, as the boxes of a picture are, and no tensor with all of them."""
    return not isinstance(element, (torch.Tensor, list, tuple))


def _only_tensors(nested: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, nested, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _detached(nested: Any) -> Any:
    return recursively_apply(torch.Tensor.detach, nested)
