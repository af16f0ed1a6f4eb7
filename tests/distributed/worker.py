"""Run by `torch.distributed.run`: evaluates each scenario on this rank and writes what the metric saw."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any, Dict, List

import torch
from transformers import TrainerCallback

import shim
from tests.distributed import metrics
from tests.fixtures import CLASSES, Count, Rows, Stream, has_losses, including, make_trainer, without_timing

warnings.simplefilter("ignore")
INCLUDED = ("inputs", "loss") if has_losses() else ("inputs",)


# How batches come to the processes, by the last word of a scenario's name
LOADING: Dict[str, Dict[str, Any]] = {
    "dispatched": {"accelerator_config": {"dispatch_batches": True}},
    "sharded": {"accelerator_config": {"dispatch_batches": False}},
    "split": {"accelerator_config": {"dispatch_batches": False, "split_batches": True}},
}


class Seen(Count):
    """Keeps which rows it saw, each as (its input's first number, its label, its logits' first number)."""

    def __call__(self, eval_pred: Any, compute_result: bool = True) -> Dict[str, float]:
        self.rows_seen: List[Any] = getattr(self, "rows_seen", [])
        losses = getattr(eval_pred, "losses", None)
        self.losses_match = losses is None or len(losses) == len(eval_pred.label_ids)
        for row in zip(eval_pred.inputs, eval_pred.label_ids, eval_pred.predictions):
            self.rows_seen.append([float(torch.as_tensor(part).flatten()[0]) for part in row])
        return super().__call__(eval_pred, compute_result)


class Failing(Seen):
    """Raises on its second call, on one rank only."""

    def __call__(self, eval_pred: Any, compute_result: bool = True) -> Dict[str, float]:
        if self.flags and torch.distributed.get_rank() == 1:
            raise ZeroDivisionError("on rank 1")
        return super().__call__(eval_pred, compute_result)


class RaggedWidths(torch.nn.Module):
    """Logits that are as wide as the longest row of this process's own batch."""

    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, CLASSES)

    def forward(self, x, labels=None):
        logits = self.linear(x)
        width = int(labels.max()) + CLASSES
        padded = torch.nn.functional.pad(logits, (0, width - CLASSES), value=-50.0)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": padded}


class Evaluating(TrainerCallback):
    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.results.append(without_timing(self.trainer.evaluate()))  # type: ignore[attr-defined]


def trainer_for(scenario: str, metric: Any, **options: Any) -> Any:
    kind, n = scenario.split("_")[:2]
    options.update(LOADING.get(scenario.split("_")[-1], {}))
    rows = Stream(int(n)) if kind == "stream" else Rows(int(n))
    trainer = make_trainer(
        metric, eval_rows=rows, batch_eval_metrics=True, ddp_backend="gloo", **including(*INCLUDED), **options
    )
    trainer.model.main_input_name = "x"
    return trainer


def run(scenario: str) -> Dict[str, Any]:
    if scenario.startswith("pairs"):
        return metrics.pairs(scenario)
    if scenario.startswith("metrics"):
        others = {
            "metrics_refusal": metrics.refusal,
            "metrics_elsewhere": metrics.elsewhere,
            "metrics_spooling": metrics.spooling,
        }
        return others[scenario]() if scenario in others else metrics.run(scenario)
    metric = Failing() if scenario.endswith("failing") else Seen()
    options: Dict[str, Any] = {"model": RaggedWidths()} if scenario.endswith("ragged") else {}
    if scenario.endswith("training"):
        callback = Evaluating()
        trainer = trainer_for(
            scenario, metric, train_dataset=Rows(16), max_steps=2, learning_rate=0.0, callbacks=[callback], **options
        )
        callback.trainer, callback.results = trainer, []  # type: ignore[attr-defined]
        trainer.train()
        results = callback.results  # type: ignore[attr-defined]
    elif scenario.endswith("predict"):
        trainer = trainer_for(scenario, metric, **options)
        output = trainer.predict(trainer.eval_dataset)
        results = [without_timing(output.metrics), len(output.predictions)]
    else:
        trainer = trainer_for(scenario, metric, **options)
        results = [without_timing(trainer.evaluate())]
    return {
        "flags": metric.flags,
        "rows": metric.rows_seen,
        "losses_match": metric.losses_match,
        "results": results,
    }


if __name__ == "__main__":
    directory, *scenarios = sys.argv[1:]
    shim.apply()
    found = {scenario: run(scenario) for scenario in scenarios}
    rank = torch.distributed.get_rank()
    Path(directory, f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    # Threads of gloo that still run when the interpreter is torn down abort the process, once in a while. In torch 2.2
    # `destroy_process_group` may wait forever for one of them, which waits for the interpreter.
    os._exit(0)
