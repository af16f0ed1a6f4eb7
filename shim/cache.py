"""When the device cache is emptied, and of which device.

`policy_of(args)` reads the two options, `clear(args)` empties the cache of the device that the arguments name, and
`upstream_clears_muted()` keeps the Trainer's own `torch.cuda.empty_cache()` calls from happening meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Dict, FrozenSet, Iterator, NamedTuple, Optional, Union

import torch
import transformers.trainer as trainer_module

# The backends of torch with a caching allocator that can be emptied; `torch.<name>.empty_cache` is looked up when it is
# called. Gaudi (hpu) has no such call, and on a CPU there is nothing to empty.
_CLEARABLE_DEVICES = frozenset(["cuda", "xpu", "npu", "mlu", "musa", "mps"])

_MEANINGS: Dict[Union[bool, str], FrozenSet[str]] = {
    "never": frozenset(),
    "around_eval": frozenset(["around_eval"]),
    "eval": frozenset(["eval"]),
    "train": frozenset(["train"]),
    "always": frozenset(["eval", "train"]),
}
_MEANINGS[False] = _MEANINGS["never"]
_MEANINGS[True] = _MEANINGS["always"]
_ALLOWED = ", ".join(map(repr, [None, *_MEANINGS]))
_SPELLED_OUT = {"true": True, "false": False, "none": None}


class ClearPolicy(NamedTuple):
    """When the shim empties the device cache, for a value of `cuda_cache_clear` other than None."""

    when: FrozenSet[str]
    every: int

    @property
    def around_eval(self) -> bool:
        """Whether to clear before an evaluation's first batch and after its last."""
        return "around_eval" in self.when

    @property
    def has_cadence(self) -> bool:
        """Whether `every` matters."""
        return bool(self.when & {"eval", "train"})

    def due_after_eval_batch(self, count: int) -> bool:
        """Whether to clear after evaluation batch number `count` (the first is 1)."""
        return "eval" in self.when and count % self.every == 0

    def due_in_training_step(self, count: int) -> bool:
        """Whether to clear in micro-step number `count` (the first is 1)."""
        return "train" in self.when and count % self.every == 0


def canonical_value(value: Any) -> Any:
    """`cuda_cache_clear` as the user meant it: a command line can only spell True, False and None as words."""
    return _SPELLED_OUT.get(value.lower(), value) if isinstance(value, str) else value


def policy_of(args: Any) -> Optional[ClearPolicy]:
    """The policy that `args` asks for; None leaves the installed Trainer as it is.

    Args:
        args: the `TrainingArguments`.

    Raises:
        ValueError: an option of the shim is not one of its allowed values, or contradicts another option.
    """
    if not isinstance(args.batch_eval_metrics, bool):
        raise ValueError(f"batch_eval_metrics must be True or False, found {args.batch_eval_metrics!r}.")
    every = args.cuda_cache_clear_steps
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(
            f"cuda_cache_clear_steps must be a whole number of steps, 1 or more, found {every!r}; "
            "to empty the cache at no step, set cuda_cache_clear='never'."
        )
    value = args.cuda_cache_clear
    if value is None:
        return None
    when = _MEANINGS.get(value) if isinstance(value, (bool, str)) else None
    if when is None:
        raise ValueError(f"cuda_cache_clear must be one of {_ALLOWED}; found {value!r}.")
    if not when and getattr(args, "torch_empty_cache_steps", None) is not None:
        raise ValueError(
            f"cuda_cache_clear={value!r} says that the cache is never emptied, but "
            f"torch_empty_cache_steps={args.torch_empty_cache_steps!r} asks to empty it in training: "
            "set one of the two."
        )
    return ClearPolicy(when, every)


def clear(args: Any) -> None:
    """Empty the cache of `args.device`; nothing is called, and no backend initialised, where it has none."""
    device_type = args.device.type
    if device_type not in _CLEARABLE_DEVICES:
        return
    empty_cache = getattr(getattr(torch, device_type, None), "empty_cache", None)
    if empty_cache is not None:
        empty_cache()


def clear_as_installed() -> None:
    """The clear that the stock loop does by itself after each batch in batch mode: of CUDA, whatever the device."""
    torch.cuda.empty_cache()


class _Muting(threading.local):
    """Whether this thread is inside a loop whose own clears are muted."""

    on = False


_muting = _Muting()


class _CudaOfTheTrainer:
    def __getattr__(self, name: str) -> Any:
        if name == "empty_cache" and _muting.on:
            return _do_nothing
        return getattr(torch.cuda, name)


class _TorchOfTheTrainer:
    """Stands in for the global `torch` of transformers.trainer, and for nobody else's, while a clear is muted.

    Only calls that the code of transformers.trainer itself makes go through it: those of users, of accelerate and of
    the shim reach torch directly.
    """

    cuda = _CudaOfTheTrainer()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _do_nothing() -> None:
    return None


class _TrainerModule:
    """Keeps the stand-in for `torch` in transformers.trainer as long as any thread needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._stand_in = _TorchOfTheTrainer()
        self._saved: Any = None

    def acquire(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._saved = trainer_module.torch
                trainer_module.torch = self._stand_in

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and trainer_module.torch is self._stand_in:
                trainer_module.torch = self._saved


_trainer_module = _TrainerModule()


@contextlib.contextmanager
def upstream_clears_muted() -> Iterator[None]:
    """Within the block and this thread, transformers.trainer's own `torch.cuda.empty_cache()` does nothing."""
    outer = _muting.on
    _trainer_module.acquire()
    _muting.on = True
    try:
        yield
    finally:
        _muting.on = outer
        _trainer_module.release()


@contextlib.contextmanager
def upstream_clears_heard() -> Iterator[None]:
    """Within the block, undo `upstream_clears_muted`: for user code that runs inside a muted loop."""
    outer, _muting.on = _muting.on, False
    try:
        yield
    finally:
        _muting.on = outer
