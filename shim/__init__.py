"""`batch_eval_metrics` and `cuda_cache_clear` for `transformers.Trainer`, on every release from 4.39.

    import shim

    shim.apply()

Importing this package patches nothing and imports neither torch nor transformers.
"""

from shim.compat import UnsupportedVersionError
from shim.patching import Status, applied, apply, revert, status

__all__ = ["Status", "UnsupportedVersionError", "applied", "apply", "revert", "status"]
