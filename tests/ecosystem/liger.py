"""Run in a process of its own: trains with liger-kernel's and the shim's patches, in the order of the arguments.

TRITON_INTERPRET=1 python -m tests.ecosystem.liger liger shim
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any, Dict
from unittest import mock

import shim


def patch_llama() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    # The interpreter of triton 3.9 cannot run the kernels for norms and activations.
    apply_liger_kernel_to_llama(rms_norm=False, swiglu=False)


def trained(**options: Any) -> Dict[str, Any]:
    from triton.runtime.interpreter import GridExecutor

    from tests.ecosystem.test_trainers import Sums, history
    from tests.ecosystem.trainers import causal

    with mock.patch.object(GridExecutor, "__call__", autospec=True, side_effect=GridExecutor.__call__) as run:
        logged = history(causal(Sums(), **options))
    return {"logged": logged, "kernels": Counter(call.args[0].fn.__name__ for call in run.call_args_list)}


if __name__ == "__main__":
    for step in sys.argv[1:]:
        {"liger": patch_llama, "shim": shim.apply}[step]()
    print(json.dumps(trained(**({"batch_eval_metrics": True} if "shim" in sys.argv else {}))))
