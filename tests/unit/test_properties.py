"""Any evaluation: flags, rows and metrics equal the oracle, for whatever hypothesis thinks of."""

from __future__ import annotations

import math
import warnings
from typing import Any, Dict, List, NamedTuple, Optional

import accelerate
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from tests.fixtures import Count, Evaluating, Lin, Rows, Stream, loading, make_trainer, once, oracle

# Below 1.8, accelerate hands the loop a batch None for an empty loader: the stock Trainer fails there in any mode.
GIVES_EMPTY_LOADERS = Version(accelerate.__version__) >= Version("1.8")


class Nested(Lin):
    """Its logits are a structure, and so are its labels for the loss."""

    def forward(self, x: torch.Tensor, labels: Optional[torch.Tensor] = None) -> Dict[str, Any]:
        outputs = super().forward(x, labels)
        # as wide as the batch is long: nothing can be concatenated without padding
        outputs["ragged"] = {"x": x.sum(-1, keepdim=True).repeat(1, len(x)), "y": (x[:, 0],)}
        return outputs


class CountNested(Count):
    def __call__(self, eval_pred: Any, compute_result: bool = True) -> Dict[str, float]:
        logits, ragged = eval_pred.predictions
        assert ragged["x"].shape == (len(logits), len(logits))
        assert ragged["y"][0].shape == (len(logits),)
        return super().__call__(type(eval_pred)(predictions=logits, label_ids=eval_pred.label_ids), compute_result)


class Evaluation(NamedTuple):
    rows: int
    batch: int
    loader: str
    drop_last: bool
    workers: int
    nested_outputs: bool
    accumulation: Optional[int]
    where: str

    @property
    def seen(self) -> int:
        """The rows that are evaluated. The Trainer passes drop_last on for sets with a length only."""
        drops = self.drop_last and self.loader != "stream"
        return self.rows - self.rows % self.batch if drops else self.rows

    def trainer(self, metric: Any, **options: Any) -> Any:
        data = Stream(self.rows) if "stream" in self.loader else Rows(self.rows)
        loader = {"batch_size": self.batch, "drop_last": self.drop_last, "num_workers": self.workers}
        cls = Trainer
        if self.loader.startswith("plain"):
            cls = loading(lambda: DataLoader(data, **loader))
        elif self.loader == "list":
            cls = loading(lambda: list(DataLoader(data, **loader)))
        return make_trainer(
            metric,
            cls=cls,
            model=Nested() if self.nested_outputs else Lin(),
            eval_rows=data,
            per_device_eval_batch_size=self.batch,
            dataloader_drop_last=self.drop_last,
            dataloader_num_workers=self.workers,
            eval_accumulation_steps=self.accumulation,
            batch_eval_metrics=True,
            **options,
        )


evaluations = st.builds(
    Evaluation,
    rows=st.integers(0, 60),
    batch=st.integers(1, 9),
    loader=st.sampled_from(["sized", "stream", "plain", "plain stream", "list"]),
    drop_last=st.booleans(),
    workers=st.sampled_from([0] * 9 + [2]),  # each worker is a process
    nested_outputs=st.booleans(),
    accumulation=st.sampled_from([None, 1, 3]),
    where=st.sampled_from(["standalone", "in training", "in an evaluation", "predict"]),
)


class EvaluatingInside(TrainerCallback):
    """Evaluates the whole set, with a metric of its own, in the middle of another evaluation."""

    def __init__(self, metric: Any) -> None:
        self.trainer: Any = None
        self.results: List[Any] = []
        self._metric = metric

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        if self.results:
            return
        self.results.append(None)
        own, self.trainer.compute_metrics = self.trainer.compute_metrics, self._metric
        self.results[0] = self.trainer.evaluate()
        self.trainer.compute_metrics = own


@given(evaluations)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # no shrinking: an example takes a tenth of a second
    suppress_health_check=list(HealthCheck),
)
def test_flags_rows_and_metrics_equal_the_oracle(evaluation):
    prepared = evaluation.loader in ("sized", "stream")
    assume(evaluation.seen or not prepared or GIVES_EMPTY_LOADERS)
    assume(not evaluation.workers or "stream" not in evaluation.loader)  # each worker would give the whole stream
    metric = CountNested() if evaluation.nested_outputs else Count()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        results = evaluated(evaluation, metric)
    calls = math.ceil(evaluation.seen / evaluation.batch)
    assert metric.flags == len(results) * (once(calls) if calls else [])
    expected = oracle(Lin(), Rows(evaluation.rows), first=evaluation.seen) if evaluation.seen else None
    for result in results:
        found = {name: result[key] for key in result for name in ("accuracy", "rows") if key.endswith(f"_{name}")}
        assert found == (expected or {})
    unfinished = [warning for warning in told if "gave no batch" in str(warning.message)]
    assert bool(unfinished) == (calls == 0)


def evaluated(evaluation: Evaluation, metric: Any) -> List[Dict[str, float]]:
    """The results of the evaluations that `metric` was called for."""
    if evaluation.where == "in training":
        callback = Evaluating()
        # 14 rows leave a remainder at the end of the epoch, by which another loader could be trimmed
        training = {"train_dataset": Rows(14), "num_train_epochs": 1, "learning_rate": 0.0}
        callback.trainer = evaluation.trainer(metric, callbacks=[callback], **training)
        callback.trainer.train()
        return callback.results
    if evaluation.where == "in an evaluation":
        inside = EvaluatingInside(metric)
        inside.trainer = evaluation.trainer(type(metric)(), callbacks=[inside])
        inside.trainer.evaluate()
        return inside.results
    trainer = evaluation.trainer(metric)
    if evaluation.where == "predict":
        output = trainer.predict(trainer.eval_dataset)
        return [output.metrics]
    return [trainer.evaluate() for _ in range(2)]
