"""`batch_eval_metrics` and `cuda_cache_clear` for `transformers.Trainer`, on every release from 4.39.

    import shim

    shim.apply()

Importing this package patches nothing and imports neither torch nor transformers.
"""

import importlib as _importlib
from typing import Any as _Any

from shim.compat import UnsupportedVersionError
from shim.patching import applied, apply, revert
from shim.reporting import Status, status

__all__ = ["Status", "UnsupportedVersionError", "applied", "apply", "revert", "status"]


def __getattr__(name: str) -> _Any:
    """`shim.metrics` and `shim.estimate_eval_memory` import torch and transformers: only when they are asked for."""
    if name == "metrics":
        return _importlib.import_module("shim.metrics")
    if name == "estimate_eval_memory":
        return _importlib.import_module("shim.memory").estimate_eval_memory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
