"""A patch of one method, the set of them that `apply()` installs, and the way back."""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import Any, Callable, Dict, Iterator, List

from shim import compat


class Patch:
    """One method of a class, replaced by a wrapper.

    Args:
        owner: the class that the method is patched on.
        name: the method's name.
        make: given the raw original and this patch, makes the wrapper. The wrapper goes straight to the original while
            `active` is False: it may be called after `restore`, by whoever kept a reference to it.
    """

    def __init__(self, owner: type, name: str, make: Callable[..., Any]) -> None:
        self._owner = next(cls for cls in owner.__mro__ if name in vars(cls))
        self._name = name
        self._original = vars(self._owner)[name]
        self._wrapper = make(self._original, self)
        self.active = False

    def __str__(self) -> str:
        return f"{self._owner.__name__}.{self._name}"

    def install(self) -> None:
        setattr(self._owner, self._name, self._wrapper)
        self.active = True

    def restore(self) -> bool:
        """Put the identical original back. False, and the wrapper inert, where somebody has wrapped it since."""
        self.active = False
        if vars(self._owner).get(self._name) is not self._wrapper:
            return False
        setattr(self._owner, self._name, self._original)
        return True

    def state(self) -> str:
        current = vars(self._owner).get(self._name)
        if current is self._wrapper:
            return "ours"
        # wrapt's wrappers show the attributes of what they wrap; the function that wraps is kept in this one.
        theirs = getattr(current, "_self_wrapper", current)
        # Not `__module__`: functools.wraps copies that one.
        module: str = getattr(theirs, "__globals__", {}).get("__name__", type(theirs).__module__)
        if self.active:
            return f"ours, wrapped since by {module}"
        is_of_the_owners_package = module.split(".")[0] == self._owner.__module__.split(".")[0]
        return "stock" if is_of_the_owners_package else f"stock, wrapped by {module}"


class NothingToPatch:
    """Stands for the patches where upstream has both options itself."""

    def __str__(self) -> str:
        return "TrainingArguments"

    def install(self) -> None:
        pass

    def restore(self) -> bool:
        return True

    def state(self) -> str:
        return "has both options itself, nothing is patched"


_lock = threading.RLock()
_installed: List[Any] = []


def apply(strict: bool = False) -> None:
    """Give the installed transformers the options `batch_eval_metrics` and `cuda_cache_clear`.

    Does nothing where it is applied already. Either every place is patched, or none.

    Args:
        strict: raise, instead of warning, where transformers is newer than the newest release that was tested.

    Raises:
        UnsupportedVersionError: transformers is missing, older than 4.39, or lacks a place that has to be patched.
    """
    with _lock:
        if _installed:
            return
        compat.require_supported(strict)
        patches = _patches()
        try:
            for patch in patches:
                _installed.append(patch)
                patch.install()
        except BaseException:
            _restore_all()
            raise


def revert() -> None:
    """Take every patch away, and leave the identical objects behind that were there before.

    A method that somebody else has wrapped since keeps their wrapper: ours inside it becomes inert, and a warning says
    so. Does nothing where the shim is not applied.
    """
    with _lock:
        kept = _restore_all()
    if kept:
        warnings.warn(
            f"shim.revert() left wrappers of others in place around its own, which do nothing from now on: "
            f"{'; '.join(kept)}. To have the stock methods back, undo those wrappers as well.",
            stacklevel=2,
        )


@contextlib.contextmanager
def applied(strict: bool = False) -> Iterator[None]:
    """Apply the shim within a `with` block; where it was applied before, it stays so afterwards.

    Args and Raises: as `apply`.
    """
    with _lock:
        was_applied = bool(_installed)
        apply(strict)
    try:
        yield
    finally:
        if not was_applied:
            revert()


def places() -> Dict[str, str]:
    """Each place that is patched, or would be, and its state."""
    with _lock:
        return {str(patch): patch.state() for patch in _installed or _patches()}


def is_applied() -> bool:
    """Whether `apply` has been called, and not `revert` since."""
    with _lock:
        return bool(_installed)


def _patches() -> List[Any]:
    # These import torch and transformers, which `import shim` does not.
    from transformers.training_args import TrainingArguments

    if compat.has_both_options(TrainingArguments):
        return [NothingToPatch()]
    from shim import arguments, evaluation, training

    wrappers = [*arguments.wrappers(), *evaluation.wrappers(), *training.wrappers()]
    return [*arguments.added_fields(), *(Patch(*wrapper) for wrapper in wrappers)]


def _restore_all() -> List[str]:
    """Restore in reverse order; returns the places that somebody else has wrapped, and by what."""
    kept = []
    while _installed:
        patch = _installed.pop()
        state = patch.state()
        if not patch.restore():
            kept.append(f"{patch} ({state})")
    return kept
