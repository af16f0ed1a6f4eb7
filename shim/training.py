"""`training_step` with the cache policy."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, Callable, Iterator, Tuple

from transformers.trainer import Trainer

from shim import cache
from shim.shadow import Shadow


def wrappers() -> Iterator[Tuple[type, str, Callable[..., Any]]]:
    """(class, attribute, function that makes the wrapper) for each method of the Trainer that is wrapped here."""
    yield Trainer, "training_step", _make_training_step


def _make_training_step(original: Callable[..., Any], patch: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not patch.active or self.args.cuda_cache_clear is None:
            return original(self, *args, **kwargs)
        return _training_step(original, self, args, kwargs)

    return training_step


def _training_step(original: Callable[..., Any], trainer: Any, args: Tuple[Any, ...], kwargs: Any) -> Any:
    policy = cache.policy_of(trainer.args)
    count = _micro_steps.next_of(trainer)
    with contextlib.ExitStack() as stack:
        # Any clear that nobody asked for through `torch_empty_cache_steps` is one that the Trainer does by itself
        # (transformers 4.41, https://github.com/huggingface/transformers/issues/31372).
        if getattr(trainer.args, "torch_empty_cache_steps", None) is None:
            stack.enter_context(cache.upstream_clears_muted())
        if policy is not None and policy.due_in_training_step(count):
            shadow = _clear_after_forward(trainer)
            shadow.put_on()
            stack.callback(shadow.take_off)
        return original(trainer, *args, **kwargs)


def _clear_after_forward(trainer: Any) -> Shadow:
    """A stand-in for `compute_loss` that clears between forward and backward, where transformers #28769 placed it.

    It takes itself off, so that a step that computes two losses clears once.
    """
    compute_loss = trainer.compute_loss

    @functools.wraps(compute_loss)
    def compute_loss_and_clear(*positional: Any, **keywords: Any) -> Any:
        shadow.take_off()
        loss = compute_loss(*positional, **keywords)
        cache.clear(trainer.args)
        return loss

    shadow = Shadow(trainer, "compute_loss", compute_loss_and_clear)
    return shadow


class _MicroSteps:
    """Counts the micro-steps of each Trainer from the start of its training run, alike on every rank."""

    def __init__(self) -> None:
        # trainer -> (the state object that `train()` made for this run, micro-steps so far)
        self._counts: weakref.WeakKeyDictionary[Any, Tuple[weakref.ref[Any], int]] = weakref.WeakKeyDictionary()

    def next_of(self, trainer: Any) -> int:
        run, count = self._counts.get(trainer, (None, 0))
        if run is None or run() is not trainer.state:
            run, count = weakref.ref(trainer.state), 0
        self._counts[trainer] = (run, count + 1)
        return count + 1


_micro_steps = _MicroSteps()
