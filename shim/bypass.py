"""Which Trainer classes by-pass the shim: those that replace a method it wraps and do not call `super()`."""

from __future__ import annotations

import contextlib
import warnings
from types import CodeType, FunctionType
from typing import Any, Iterator, List, Set, Tuple

from shim import compat

_PASSED_ON = (*compat.EVALUATION_LOOPS, "training_step")
_named: Set[str] = set()


def bypassing_methods(cls: type, base: type) -> List[str]:
    """The methods with which a class by-passes the shim, as "module.Class.method".

    Args:
        cls: a Trainer class.
        base: `transformers.Trainer`, whose methods the shim wraps.

    A method that the class inherits, from a mixin as well, counts like one of its own. What is no Python function is
    not named, for nothing is known of it.
    """
    own = cls.__mro__[: cls.__mro__.index(base)]
    return [
        f"{ancestor.__module__}.{ancestor.__qualname__}.{name}"
        for name in _PASSED_ON
        for ancestor in own
        if name in vars(ancestor) and not _reaches(vars(ancestor)[name], name, base)
    ]


def bypassing_methods_below(base: Any) -> List[str]:
    """The same for all loaded subclasses of `transformers.Trainer`, each method once."""
    return list(dict.fromkeys(method for cls in _below(base) for method in bypassing_methods(cls, base)))


def warn_of_bypass(cls: type, base: type, args: Any) -> None:
    """Warn, once for each method in this process, where the options that are set have no effect in `cls`.

    Args:
        cls, base: as `bypassing_methods`.
        args: the `TrainingArguments` of the Trainer.
    """
    loop = compat.LEGACY_LOOP if getattr(args, "use_legacy_prediction_loop", False) else "evaluation_loop"
    options = {loop: _those_set(args, "batch_eval_metrics", "cuda_cache_clear")}
    options["training_step"] = _those_set(args, "cuda_cache_clear")
    for method in bypassing_methods(cls, base):
        idle = options.get(method.rpartition(".")[2])
        if not idle or method in _named:
            continue
        _named.add(method)
        warnings.warn(
            f"{method} does not call super(), and so by-passes the shim: there, {' and '.join(idle)} "
            f"{'does' if len(idle) == 1 else 'do'} only what that method does itself. Have it call "
            f"super().{method.rpartition('.')[2]}(...), or leave the option at its default for this Trainer.",
            stacklevel=4,
        )


def _those_set(args: Any, *names: str) -> List[str]:
    return [f"{name}={getattr(args, name)!r}" for name in names if getattr(args, name) not in (None, False)]


def _below(base: type) -> Iterator[type]:
    subclasses: List[type] = base.__subclasses__()
    for cls in subclasses:
        yield cls
        yield from _below(cls)


def _reaches(method: Any, name: str, base: type, seen: Tuple[Any, ...] = ()) -> bool:
    """Whether a method names what it replaces, or is or keeps a reference to what `base` has now."""
    while method is not None:
        if not isinstance(method, FunctionType) or method is vars(base).get(name) or _mentions(method.__code__, name):
            return True
        seen = (*seen, method)
        kept = [reference for reference in _references(method) if getattr(reference, "__name__", None) == name]
        if any(_reaches(reference, name, base, seen) for reference in kept if reference not in seen):
            return True
        method = getattr(method, "__wrapped__", None)
    return False


def _references(function: FunctionType) -> Iterator[Any]:
    """What a function uses of the scopes around it."""
    for used in function.__code__.co_names:
        yield function.__globals__.get(used)
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            yield cell.cell_contents


def _mentions(code: CodeType, name: str) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return name in code.co_names or any(_mentions(constant, name) for constant in inner)
