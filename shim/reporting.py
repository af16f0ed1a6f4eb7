"""What is installed, what it offers itself, and what the shim has patched: for people and for tools."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any, Dict, List, NamedTuple, Optional

from shim import bypass, compat, patching

_ADDED = {
    "batch_eval_metrics": "one contract for any loader, any place and number of processes",
    "cuda_cache_clear": "when the cache of args.device is emptied",
}


class Status(NamedTuple):
    """What `shim.status()` reports. What is about the Trainer is empty where nothing has imported it yet."""

    applied: bool
    transformers: Optional[str]
    """The installed release; None where transformers is not installed."""
    tested: bool
    """Whether the shim's test matrix covers that release."""
    accelerate: Optional[str]
    torch: Optional[str]
    problem: Optional[str]
    """Why `shim.apply()` would refuse this transformers; None where it would not."""
    options: Dict[str, Dict[str, str]]
    """For each option: "native", what transformers has of it, and "shim", what the shim gives."""
    patches: Dict[str, str]
    """Each place that is patched, or would be, and its state: "ours", "stock", and who has wrapped it."""
    bypassing: List[str]
    """Methods of loaded subclasses of Trainer that do not call `super()`: the options have no effect there."""

    def __str__(self) -> str:
        release = f"transformers {self.transformers or 'not installed'}{'' if self.tested else ' (not tested)'}"
        others = f"accelerate {self.accelerate or 'not installed'}, torch {self.torch or 'not installed'}"
        lines = [f"shim {'applied' if self.applied else 'not applied'}, {release}, {others}"]
        if self.problem is not None:
            return "\n".join([*lines, self.problem])
        for option, of in self.options.items():
            lines += ["", option, *_columns({"  in transformers itself": of["native"], "  with the shim": of["shim"]})]
        if self.patches:
            lines += ["", *_columns({"place": "state", **self.patches})]
        if self.bypassing:
            lines += ["", "without super(), so that the options have no effect there:"]
            lines += [f"  {method}" for method in self.bypassing]
        return "\n".join(lines)


def status() -> Status:
    """What is installed, what is patched, and by whom. Patches nothing, and does not import the Trainer."""
    version = compat.installed_version()
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    problem = compat.problem() if version is None or trainer is not None else None
    known = trainer is not None and problem is None
    return Status(
        applied=patching.is_applied(),
        transformers=version,
        tested=version is not None and compat.is_tested(version),
        accelerate=_version_of("accelerate"),
        torch=_version_of("torch"),
        problem=problem,
        options=_options(trainer) if known else {},
        patches=patching.places() if known else {},
        bypassing=bypass.bypassing_methods_below(trainer) if known else [],
    )


def _version_of(distribution: str) -> Optional[str]:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _options(trainer: Any) -> Dict[str, Dict[str, str]]:
    return {
        option: {"native": native, "shim": _ADDED[option]} for option, native in compat.native_options(trainer).items()
    }


def _columns(rows: Dict[str, str]) -> List[str]:
    width = max(map(len, rows))
    return [f"{name:<{width}}  {text}" for name, text in rows.items()]
