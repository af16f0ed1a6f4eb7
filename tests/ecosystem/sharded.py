"""Run by `torch.distributed.run`: a model whose weights lie on all ranks evaluates, and trains where it can.

    python -m tests.ecosystem.sharded DIRECTORY KIND...

A kind is "whole", "zero2", "zero3" (DeepSpeed), "fsdp" (the Trainer's option) or "fully_shard" (torch's function, which
the Trainer knows nothing of).
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any, Dict

import torch
import torch.distributed

import shim
from tests.distributed.metrics import sums
from tests.fixtures import Rows, make_trainer, without_timing
from tests.gathers import handed_to_gather

warnings.simplefilter("ignore")
ROWS = 11


def deepspeed(stage: int) -> Dict[str, Any]:
    automatic = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        **dict.fromkeys(automatic, "auto"),
    }


def sharded_by_torch(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))


def local_weights(model: torch.nn.Module) -> int:
    """Numbers of the weights that this rank holds."""
    return sum(_local(weight).numel() for weight in model.parameters())


def _local(weight: Any) -> Any:
    return weight.to_local() if hasattr(weight, "to_local") else getattr(weight, "ds_tensor", weight)


def trainer_for(kind: str, metric: Any, **options: Any) -> Any:
    if kind.startswith("zero"):
        options["deepspeed"] = deepspeed(stage=int(kind[-1]))
    if kind == "fsdp":
        options["fsdp"] = True
    trainer = make_trainer(
        metric,
        eval_rows=ROWS,
        train_dataset=Rows(16),
        max_steps=2,
        logging_strategy="steps",
        logging_steps=1,
        optim="sgd",
        ddp_backend="gloo",
        **options,
    )
    if kind == "fully_shard":
        sharded_by_torch(trainer.model)
    return trainer


def evaluated(kind: str, **options: Any) -> Dict[str, Any]:
    metric = sums()
    metric.gather = options.pop("gather", True)
    trainer = trainer_for(kind, metric, **options)
    if kind != "fully_shard":
        trainer.train()
    weights = local_weights(trainer.model)
    with handed_to_gather() as handed:
        metrics = without_timing(trainer.evaluate())
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "metrics": metrics,
        "wrapped": type(trainer.model_wrapped).__name__,
        "weights": weights,
        "widest": max(len(shape) for shape, _ in handed),
    }


def run(kind: str) -> Dict[str, Any]:
    found = {"stock": evaluated(kind)}
    with shim.applied():
        found["batches"] = evaluated(kind, batch_eval_metrics=True)
        found["own rows"] = evaluated(kind, batch_eval_metrics=True, gather=False)
    return found


if __name__ == "__main__":
    directory, *kinds = sys.argv[1:]
    reports = {kind: run(kind) for kind in kinds}
    Path(directory, f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(reports))
    torch.distributed.barrier()
    os._exit(0)  # as tests/distributed/worker.py does
