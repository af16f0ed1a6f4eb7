"""Ready metrics for `batch_eval_metrics`, and the means to write one: exact for any batch size and number of processes.

See the README, "Which metric do I take".
"""

from shim.metrics.adapters import from_evaluate, from_torcheval, from_torchmetrics
from shim.metrics.preprocessing import counted
from shim.metrics.spooling import spool
from shim.metrics.streaming import StreamingMetric, per_sample_mean

__all__ = [
    "StreamingMetric",
    "counted",
    "from_evaluate",
    "from_torcheval",
    "from_torchmetrics",
    "per_sample_mean",
    "spool",
]
