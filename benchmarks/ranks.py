"""Bytes that the processes of an evaluation hand to gathers, with logits that are gathered and with those that are not.

    torchrun --standalone --nproc_per_node N -m benchmarks.ranks

prints them, on the first of N processes.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any, Dict

import torch
import torch.distributed
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

import shim
from benchmarks.processes import output_of, progress
from benchmarks.ways import WIDTH
from shim.metrics import from_torchmetrics
from tests.fixtures import CLASSES, Lin, Rows, make_trainer
from tests.gathers import handed_to_gather

PROCESSES = (1, 2, 4)
ROWS, BATCH = 2_000, 50


def accuracy(gather: bool) -> Any:
    """The same metric for an ordinary evaluation and a batched one."""
    return from_torchmetrics(MetricCollection({"accuracy": MulticlassAccuracy(WIDTH, average="micro")}), gather=gather)


def bytes_of(gather: bool, **options: Any) -> int:
    """Bytes that all ranks together hand to gathers, in one evaluation."""
    trainer = make_trainer(
        accuracy(gather),
        model=Lin(wide=WIDTH - CLASSES),
        eval_rows=Rows(ROWS),
        per_device_eval_batch_size=BATCH,
        ddp_backend="gloo",
        **options,
    )
    with handed_to_gather() as handed:
        trainer.evaluate()
    total = torch.tensor(sum(size for _, size in handed))
    torch.distributed.all_reduce(total)
    return int(total)


def measure() -> Dict[str, Dict[str, int]]:
    """Bytes for each number of processes."""
    # gloo looks the host's name up, which a machine without a network may not know
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in dict(map(reversed, socket.if_nameindex())) else {}
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
    outputs = (output_of(*launcher, str(n), "-m", "benchmarks.ranks", environment=loopback) for n in PROCESSES)
    return dict(zip(map(str, PROCESSES), progress("processes", len(PROCESSES), outputs)))


if __name__ == "__main__":
    found = {"stock": bytes_of(gather=True)}
    with shim.applied():
        found["shim"] = bytes_of(gather=True, batch_eval_metrics=True)
        found["shim, gather = False"] = bytes_of(gather=False, batch_eval_metrics=True)
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # threads of gloo that still run when the interpreter is torn down abort the process, once in a while
