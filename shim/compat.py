"""What the installed transformers offers: the tested range, the seams that the shim needs, and differences of releases.

This is the only module that knows version numbers or that asks which release is installed. Everything else of the shim
behaves the same on every release. Each fact names the upstream change it comes from and when it can be deleted.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Tuple

OLDEST_SUPPORTED = "4.39.0"
NEWEST_TESTED = "5.24.0"

# The loops through which `evaluate()` and `predict()` run. `prediction_loop` (`use_legacy_prediction_loop`) was removed
# in transformers 5.0: https://github.com/huggingface/transformers/pull/41123. Delete its name, and every mention of
# "legacy" in shim/evaluation.py, when 5.0 is the oldest supported release.
EVALUATION_LOOPS = ("evaluation_loop", "prediction_loop")
LEGACY_LOOP = "prediction_loop"


class UnsupportedVersionError(RuntimeError):
    """The installed transformers is too old, is not installed, or lacks a place that the shim has to patch."""


class _Seam(NamedTuple):
    """A place in transformers that the shim patches or calls, and the parameters it relies on there."""

    module: str
    path: str
    parameters: Tuple[str, ...] = ()


_SEAMS = (
    _Seam("transformers.trainer", "Trainer.__init__", ("args", "compute_metrics")),
    _Seam("transformers.trainer", "Trainer.evaluation_loop", ("dataloader", "description", "prediction_loss_only")),
    _Seam("transformers.trainer", "Trainer.prediction_step", ("model", "inputs", "prediction_loss_only")),
    _Seam("transformers.trainer", "Trainer.training_step", ("model", "inputs")),
    _Seam("transformers.trainer", "Trainer.compute_loss", ("model", "inputs")),
    _Seam("transformers.trainer", "torch.cuda.empty_cache"),
    _Seam("transformers.trainer_callback", "CallbackHandler.on_prediction_step", ("args", "state", "control")),
    _Seam("transformers.trainer_pt_utils", "find_batch_size"),
    _Seam("transformers.trainer_utils", "EvalPrediction", ("predictions", "label_ids", "inputs")),
    _Seam("transformers.trainer_utils", "denumpify_detensorize"),
    _Seam("transformers.training_args", "TrainingArguments.__init__"),
    _Seam("transformers.training_args", "TrainingArguments.__post_init__"),
    _Seam("transformers.training_args", "TrainingArguments.__dataclass_fields__"),
    _Seam("transformers.training_args", "TrainingArguments.device"),
)


def installed_version() -> Optional[str]:
    """Version of the transformers that this process imports, or None where there is none."""
    try:
        return str(importlib.import_module("transformers").__version__)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        return None


def is_tested(version: str) -> bool:
    """Whether `version` lies in the range that the test matrix covers."""
    from packaging.version import Version

    return Version(OLDEST_SUPPORTED) <= Version(Version(version).base_version) <= Version(NEWEST_TESTED)


def require_supported(strict: bool) -> None:
    """Refuse a transformers that the shim cannot serve, before anything is patched.

    Args:
        strict: raise, instead of warning once, where the release is newer than the newest tested one.

    Raises:
        UnsupportedVersionError: transformers is missing, too old, lacks a seam, or is untested and `strict` is set.
    """
    from packaging.version import Version

    remedy = f"install transformers {OLDEST_SUPPORTED} to {NEWEST_TESTED}, or a newer transformers-trainer-shim"
    version = installed_version()
    if version is None:
        raise UnsupportedVersionError(
            f"shim.apply() expected transformers >= {OLDEST_SUPPORTED}, but transformers is not installed: {remedy}."
        )
    if Version(Version(version).base_version) < Version(OLDEST_SUPPORTED):
        raise UnsupportedVersionError(
            f"shim.apply() expected transformers >= {OLDEST_SUPPORTED}, but found {version}: {remedy}."
        )
    missing = [problem for problem in map(_problem_with, _SEAMS) if problem]
    if missing:
        raise UnsupportedVersionError(
            f"shim.apply() cannot patch transformers {version}; nothing was changed. "
            f"{' '.join(missing)} To go on, {remedy}."
        )
    if not is_tested(version):
        message = (
            f"transformers {version} is newer than {NEWEST_TESTED}, the newest release that shim was tested with. "
            "Every place it patches is there"
        )
        if strict:
            raise UnsupportedVersionError(f"{message}, but strict=True asks for a tested release: {remedy}.")
        warnings.warn(
            f"{message}, so it was applied; compare one evaluation with the options off, or {remedy}.",
            stacklevel=3,
        )


def _problem_with(seam: _Seam) -> Optional[str]:
    module = importlib.import_module(seam.module)
    found: Any = module
    for name in seam.path.split("."):
        found = getattr(found, name, None)
        if found is None:
            return f"Expected {seam.module}.{seam.path}, found no such attribute."
    if not seam.parameters:
        return None
    parameters = inspect.signature(found).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None  # another library's wrapper that hides the signature
    lost = [name for name in seam.parameters if name not in parameters]
    if lost:
        return (
            f"Expected {seam.module}.{seam.path} to take {', '.join(lost)}, found it takes ({', '.join(parameters)})."
        )
    return None


def problem() -> Optional[str]:
    """Why `apply()` would refuse the installed transformers; None where it would not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            require_supported(strict=False)
    except UnsupportedVersionError as error:
        return str(error)
    return None


def native_options(trainer_class: Any) -> Dict[str, str]:
    """What the installed transformers has itself of each option, in words.

    Told from the code of the stock methods, also where the shim has wrapped them: `batch_eval_metrics` came in 4.41
    (https://github.com/huggingface/transformers/pull/28769), with a clear at each training step that 4.42 took out
    (https://github.com/huggingface/transformers/issues/31372). Delete this with the shim.
    """
    loop = inspect.unwrap(trainer_class.evaluation_loop)
    step = set(inspect.unwrap(trainer_class.training_step).__code__.co_names)
    clears = []
    if "torch_empty_cache_steps" in step:
        clears.append("torch_empty_cache_steps in training")
    elif "empty_cache" in step:
        clears.append("clears at each training step, unasked")
    if clears_in_batch_mode(loop):
        clears.append("clears after each batched evaluation step, unasked")
    return {
        "batch_eval_metrics": "yes" if "batch_eval_metrics" in loop.__code__.co_names else "no",
        "cuda_cache_clear": "no" + "".join(f"; {clear}" for clear in clears),
    }


def has_both_options(arguments_class: type) -> bool:
    """Whether `TrainingArguments` has the options itself, so that there is nothing to patch.

    No release does: it is so in a tree with the patches of patches/. When a release does, and is the oldest supported
    one, this project can be deleted.
    """
    fields = vars(arguments_class)["__dataclass_fields__"]
    return "batch_eval_metrics" in fields and "cuda_cache_clear" in fields


def evaluation_loops(trainer_class: type) -> List[str]:
    """Names of the evaluation loops that `trainer_class` has."""
    return [name for name in EVALUATION_LOOPS if hasattr(trainer_class, name)]


def clears_in_batch_mode(loop: Callable[..., Any]) -> bool:
    """Whether the stock evaluation loop empties the CUDA cache after every batch in batch mode, unasked.

    It does from transformers 4.41 on (https://github.com/huggingface/transformers/pull/28769). Delete this, and
    `cache.clear_as_installed`, when no supported release does.
    """
    code = getattr(inspect.unwrap(loop), "__code__", None)
    return code is not None and "empty_cache" in code.co_names


def batch_size_for_legacy_loop(dataloader: Any) -> Optional[int]:
    """The batch size that the legacy loop misses in a prepared loader, or None where it finds one.

    Before transformers 4.47 it reads `batch_size`, which accelerate leaves None, and fails in `loss.repeat`; since then
    it reads `total_batch_size` (https://github.com/huggingface/transformers/pull/34343). Delete this when 4.47 is the
    oldest supported release.
    """
    if getattr(dataloader, "batch_size", None) is not None:
        return None
    return getattr(dataloader, "total_batch_size", None)


def included_for_metrics(args: Any) -> FrozenSet[str]:
    """What the arguments ask to hand to `compute_metrics` besides predictions and labels.

    Args:
        args: the `TrainingArguments` of a Trainer.

    Returns:
        A subset of {"inputs", "loss"}.

    `include_for_metrics` came in transformers 4.46 (https://github.com/huggingface/transformers/pull/33088), and with
    it `EvalPrediction.losses`; 5.0 removed `include_inputs_for_metrics`. Keep only the first line when 4.46 is the
    oldest supported release.
    """
    if hasattr(args, "include_for_metrics"):
        return frozenset(args.include_for_metrics)
    return frozenset(["inputs"]) if args.include_inputs_for_metrics else frozenset()


def nothing_included(args: Any) -> Tuple[str, Any]:
    """Name and value of the argument that keeps a loop of the installed release from collecting inputs.

    Delete the second case together with that of `included_for_metrics`.
    """
    if hasattr(args, "include_for_metrics"):
        return "include_for_metrics", []
    return "include_inputs_for_metrics", False
