"""`batch_eval_metrics` and `cuda_cache_clear` for `transformers.Trainer`, on every release from 4.39.

    import shim

    shim.apply()

Importing this package patches nothing and imports neither torch nor transformers.
"""

import importlib as _importlib
from types import ModuleType as _ModuleType

from shim.compat import UnsupportedVersionError
from shim.patching import Status, applied, apply, revert, status

__all__ = ["Status", "UnsupportedVersionError", "applied", "apply", "revert", "status"]


def __getattr__(name: str) -> _ModuleType:
    """`shim.metrics`, which imports torch and transformers, is imported when it is asked for."""
    if name == "metrics":
        return _importlib.import_module("shim.metrics")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
