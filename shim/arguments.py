"""The fields that the shim adds to `TrainingArguments`, in place, and their validation.

`TrainingArguments` stays the same class object, so that pickles keep working in both directions. Fields that the
installed release has already (`batch_eval_metrics` from transformers 4.41, #28769) are left to it.
"""

import dataclasses
import functools
import inspect
import warnings
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from transformers.training_args import TrainingArguments

from shim import cache

# New fields come after all others, so that nobody's positional arguments move: wrapped `__init__`s take them by
# keyword, and so do those that dataclasses generate for subclasses declared later (which Python 3.9 cannot express).
_KEYWORD_ONLY = {"kw_only": True} if "kw_only" in inspect.signature(dataclasses.field).parameters else {}


def _field(default: Any, description: str) -> Any:
    make: Any = dataclasses.field
    return make(default=default, metadata={"help": description}, **_KEYWORD_ONLY)


@dataclasses.dataclass
class _Added:
    """Templates of the fields. `HfArgumentParser` reads type, default and help from them."""

    batch_eval_metrics: bool = _field(
        False,
        "Call compute_metrics(eval_pred, compute_result) once per evaluation batch, with compute_result=True on the "
        "last one, instead of keeping the logits of the whole evaluation set.",
    )
    # Bools are accepted as well. They are not in the type, since HfArgumentParser takes one type per argument.
    cuda_cache_clear: Optional[str] = _field(
        None,
        "When the device cache is emptied: never (or false), around_eval, eval (after evaluation batches), train (in "
        "training steps), always (or true). Unset: what the installed Trainer does.",
    )
    cuda_cache_clear_steps: int = _field(
        1, "With cuda_cache_clear eval, train or always: empty the cache at every N-th step only."
    )


class AddedField:
    """One field, added to `TrainingArguments` and to the dataclasses that derive from it."""

    def __init__(self, field: "dataclasses.Field[Any]") -> None:
        self._field = field

    def __str__(self) -> str:
        return f"TrainingArguments.{self._field.name}"

    def install(self) -> None:
        name = self._field.name
        TrainingArguments.__annotations__[name] = self._field.type
        # The class attribute gives objects that were made or pickled without the field its default.
        setattr(TrainingArguments, name, self._field.default)
        for cls in _dataclasses_below(TrainingArguments):
            _fields_of(cls).setdefault(name, self._field)

    def restore(self) -> bool:
        """Take the field away, also from subclasses that were declared since; nothing can keep it in place."""
        name = self._field.name
        for cls in _dataclasses_below(TrainingArguments):
            if _fields_of(cls).get(name) is self._field:
                del _fields_of(cls)[name]
        TrainingArguments.__annotations__.pop(name, None)
        if name in vars(TrainingArguments):
            delattr(TrainingArguments, name)
        return True

    def state(self) -> str:
        return "ours" if _fields_of(TrainingArguments).get(self._field.name) is self._field else "stock"


def added_fields() -> List[AddedField]:
    """The fields that the installed `TrainingArguments` lacks."""
    return [AddedField(field) for field in _missing_from(TrainingArguments)]


def wrappers() -> Iterator[Tuple[type, str, Callable[..., Any]]]:
    """(class, attribute, function that makes the wrapper) for each method of the arguments that the shim wraps."""
    for cls in _dataclasses_below(TrainingArguments):
        missing = _missing_from(cls)
        if missing and _is_generated(cls, "__init__"):
            yield cls, "__init__", functools.partial(_make_init, fields=missing)
        if missing and _is_generated(cls, "__eq__"):
            yield cls, "__eq__", functools.partial(_make_eq, fields=missing)
    yield TrainingArguments, "__post_init__", _make_post_init


def _dataclasses_below(cls: type) -> Iterator[type]:
    if "__dataclass_fields__" in vars(cls):
        yield cls
    subclasses: List[type] = cls.__subclasses__()
    for subclass in subclasses:
        yield from _dataclasses_below(subclass)


def _fields_of(cls: type) -> Dict[str, "dataclasses.Field[Any]"]:
    fields: Dict[str, dataclasses.Field[Any]] = vars(cls)["__dataclass_fields__"]
    return fields


def _missing_from(cls: type) -> List["dataclasses.Field[Any]"]:
    return [field for field in dataclasses.fields(_Added) if field.name not in _fields_of(cls)]


def _is_generated(cls: type, method: str) -> bool:
    """Whether `dataclasses` wrote the method: one that a user wrote decides itself what it passes on to ours."""
    function = vars(cls).get(method)
    return function is not None and inspect.unwrap(function).__code__.co_filename == "<string>"


def _make_init(
    original: Callable[..., None], patch: Any, fields: List["dataclasses.Field[Any]"]
) -> Callable[..., None]:
    signature = inspect.signature(original)
    # A subclass that was declared while the shim was applied takes them already.
    fields = [field for field in fields if field.name not in signature.parameters]
    defaults = {field.name: field.default for field in fields}

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if patch.active:
            for name, default in defaults.items():
                setattr(self, name, kwargs.pop(name, default))
        original(self, *args, **kwargs)

    keyword_only = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields
    ]
    __init__.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *keyword_only]
    )
    return __init__


def _make_eq(original: Callable[..., Any], patch: Any, fields: List["dataclasses.Field[Any]"]) -> Callable[..., Any]:
    names = [field.name for field in fields]

    @functools.wraps(original)
    def __eq__(self: Any, other: Any) -> Any:
        equal = original(self, other)
        if equal is not True or not patch.active:
            return equal
        return all(getattr(self, name) == getattr(other, name) for name in names)

    return __eq__


def _warn_of_idle_cadence(args: Any, policy: Optional[cache.ClearPolicy]) -> None:
    if args.cuda_cache_clear_steps != 1 and not (policy and policy.has_cadence):
        warnings.warn(
            f"cuda_cache_clear_steps={args.cuda_cache_clear_steps} has no effect with "
            f"cuda_cache_clear={args.cuda_cache_clear!r}: it counts steps for 'eval', 'train' and 'always'.",
            stacklevel=5,
        )


def _make_post_init(original: Callable[..., None], patch: Any) -> Callable[..., None]:
    @functools.wraps(original)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if patch.active:
            self.cuda_cache_clear = cache.canonical_value(self.cuda_cache_clear)
            _warn_of_idle_cadence(self, cache.policy_of(self))
        original(self, *args, **kwargs)

    return __post_init__
