"""What emptying the CUDA cache costs, on a GPU: one command, under 8 minutes.

    python -m benchmarks.cuda_cache

Two models are trained and evaluated twice under each policy, on a card with memory to spare, and with the process held
to just above what it needs. Writes cuda_cache.json and cuda_cache.png. Without a GPU it says so, and ends.

    python -m benchmarks.cuda_cache SUBJECT [BYTES]

is what the command runs for each of the two: one subject, on a card of which the process may have so many bytes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple
from unittest import mock

import torch
from torch.utils.data import Dataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex
from transformers import Trainer, TrainerCallback

import shim
from benchmarks.machine import versions
from benchmarks.processes import output_of
from examples.segmentation import CLASSES as SEGMENTS
from examples.segmentation import segformer
from shim.metrics import from_torchmetrics
from tests.fixtures import make_args, with_evaluation_every_step

HERE = Path(__file__).parent
RESULTS, CHART = HERE / "cuda_cache.json", HERE / "cuda_cache.png"
GIB = 2**30

STEPS = 24  # in training, before the first evaluation and after it
WARM_UP = 4  # of them are not counted
EVAL_BATCHES = 24
BUDGET = 100  # seconds for each subject and amount of memory: rounds are begun as long as they fit
TIGHT = 1.1  # of what the subject needs

POLICIES: Dict[str, Dict[str, Any]] = {
    "None (as installed)": {},
    "never": {"cuda_cache_clear": "never"},
    "around_eval": {"cuda_cache_clear": "around_eval"},
    "eval": {"cuda_cache_clear": "eval"},
    "train": {"cuda_cache_clear": "train"},
    "always": {"cuda_cache_clear": "always"},
    "always, every 10th step": {"cuda_cache_clear": "always", "cuda_cache_clear_steps": 10},
}
REFERENCE = "never"
# What is recorded of a run -> how it is headed
FIGURES = {
    "step before": "step before the first evaluation, ms",
    "step after": "step after it, ms",
    "first step after": "first step after it, ms",
    "evaluation": "evaluation, s",
    "peak reserved": "peak reserved, GiB",
    "mean reserved": "mean reserved, GiB",
    "peak allocated": "peak allocated, GiB",
    "mean allocated": "mean allocated, GiB",
    "retries": "allocator retries",
    "clears": "clears, that of accelerate included",
    "clearing": "in them, s",
}


class Sequences(Dataset):
    """Seeded sequences of tokens of 128 to 1,024 tokens."""

    def __init__(self, rows: int, vocabulary: int, longest: int = 1_024) -> None:
        generator = torch.Generator().manual_seed(rows)
        lengths = torch.randint(longest // 8, longest + 1, (rows,), generator=generator)
        self._rows = [torch.randint(vocabulary, (int(length),), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index]}


def padded(rows: List[Dict[str, torch.Tensor]]) -> Dict[str, torch.Tensor]:
    """A batch as long as its longest sequence."""
    ids = [row["input_ids"] for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad(ids, batch_first=True, padding_value=-100),
    }


class Pictures(Dataset):
    """Seeded pictures of noise, 512 x 512, with a class for each pixel. A few, again and again: they cost no time."""

    def __init__(self, rows: int, side: int = 512, different: int = 16) -> None:
        generator = torch.Generator().manual_seed(rows)
        self._rows = rows
        self._pictures = torch.randn(different, 3, side, side, generator=generator)
        self._masks = torch.randint(SEGMENTS, (different, side, side), generator=generator)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Dict[str, torch.Tensor]:
        number = index % len(self._pictures)
        return {"pixel_values": self._pictures[number], "labels": self._masks[number]}


def next_token(eval_pred: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    """Tokens that were predicted, and those that follow: classes, for the memory of a metric is not the subject."""
    classes, labels = eval_pred.predictions[:, :-1].argmax(-1), eval_pred.label_ids[:, 1:]
    return classes[labels != -100], labels[labels != -100]


def quarter_pixels(eval_pred: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    """A SegFormer has logits for every fourth pixel."""
    return eval_pred.predictions.argmax(1), eval_pred.label_ids[:, ::4, ::4]


VOCABULARY = 32_000


def language_model(layers: int = 24, width: int = 1_024, vocabulary: int = VOCABULARY) -> torch.nn.Module:
    """A Llama of 341 million random parameters, bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config).bfloat16()


class Subject(NamedTuple):
    """What is trained and evaluated."""

    model: Callable[[], torch.nn.Module]
    rows: Callable[[int], Dataset]
    metric: Callable[[], Any]
    batch: int
    collate: Optional[Callable[..., Any]] = None


SUBJECTS = {
    "language model": Subject(
        language_model,
        lambda rows: Sequences(rows, VOCABULARY),
        lambda: from_torchmetrics(
            MetricCollection({"accuracy": MulticlassAccuracy(VOCABULARY, average="micro")}), next_token
        ),
        batch=8,
        collate=padded,
    ),
    "SegFormer": Subject(
        segformer,
        Pictures,
        lambda: from_torchmetrics(MetricCollection({"mean_iou": MulticlassJaccardIndex(SEGMENTS)}), quarter_pixels),
        batch=8,
    ),
}


class Watch(TrainerCallback):
    """Times each training step, and looks at the memory after it and after each batch of an evaluation."""

    def __init__(self) -> None:
        self.steps: List[float] = []
        self.reserved: List[int] = []
        self.allocated: List[int] = []
        self._begin = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self._begin = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self.steps.append(time.perf_counter() - self._begin)
        self._look()

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        self._look()

    def _look(self) -> None:
        self.reserved.append(torch.cuda.memory_reserved())
        self.allocated.append(torch.cuda.memory_allocated())


class TimedTrainer(Trainer):
    """Times its evaluations."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Dict[str, float]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        metrics: Dict[str, float] = super().evaluate(*args, **kwargs)
        torch.cuda.synchronize()
        self.evaluations = [*getattr(self, "evaluations", []), time.perf_counter() - start]
        return metrics


@contextlib.contextmanager
def timed_clears() -> Iterator[List[float]]:
    """Give the list to which the seconds of each `torch.cuda.empty_cache()` are added.

    They include the wait for the kernels that were launched before it, where it has anything to give back.
    """
    seconds: List[float] = []
    empty_cache = torch.cuda.empty_cache

    def timed() -> None:
        start = time.perf_counter()
        empty_cache()
        seconds.append(time.perf_counter() - start)

    with mock.patch.object(torch.cuda, "empty_cache", timed):
        yield seconds


def run(subject: Subject, policy: str, steps: int = STEPS, eval_batches: int = EVAL_BATCHES) -> Dict[str, Any]:
    """Train, evaluate, train, evaluate under a policy.

    Returns:
        A figure for each of `FIGURES`; or, where the memory did not suffice, "out of memory after": steps.
    """
    torch.manual_seed(0)
    watch = Watch()
    trainer = TimedTrainer(
        subject.model(),
        make_args(
            use_cpu=not torch.cuda.is_available(),
            batch_eval_metrics=True,
            max_steps=2 * steps,
            per_device_train_batch_size=subject.batch,
            per_device_eval_batch_size=subject.batch,
            learning_rate=1e-5,
            dataloader_pin_memory=True,
            **{**with_evaluation_every_step(), "eval_steps": steps},
            **POLICIES[policy],
        ),
        data_collator=subject.collate,
        train_dataset=subject.rows(2 * steps * subject.batch),
        eval_dataset=subject.rows(eval_batches * subject.batch),
        compute_metrics=subject.metric(),
        callbacks=[watch],
    )
    with timed_clears() as clears:
        retries = _retries()
        try:
            trainer.train()
        except torch.cuda.OutOfMemoryError:
            return {"out of memory after": len(watch.steps)}
        retries = _retries() - retries
    counted, after = watch.steps[min(WARM_UP, steps - 1) : steps], watch.steps[steps + 1 :] or watch.steps[steps:]
    return {
        "step before": 1000 * statistics.median(counted),
        "step after": 1000 * statistics.median(after),
        "first step after": 1000 * watch.steps[steps],
        "evaluation": statistics.median(trainer.evaluations),
        "peak reserved": torch.cuda.max_memory_reserved() / GIB,
        "mean reserved": statistics.fmean(watch.reserved) / GIB,
        "peak allocated": torch.cuda.max_memory_allocated() / GIB,
        "mean allocated": statistics.fmean(watch.allocated) / GIB,
        "retries": retries,
        "clears": len(clears),
        "clearing": sum(clears),
    }


def _retries() -> int:
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def in_rounds(subject: Subject, budget: float = BUDGET, **sizes: int) -> Dict[str, List[Dict[str, Any]]]:
    """The runs of each policy: one a round, in a different order each round, as many rounds as the budget allows."""
    found: Dict[str, List[Dict[str, Any]]] = {policy: [] for policy in POLICIES}
    begin, rounds = time.perf_counter(), 0
    while not rounds or (time.perf_counter() - begin) * (rounds + 1) / rounds < budget:
        for policy in list(POLICIES)[:: -1 if rounds % 2 else 1]:
            print(f"round {rounds + 1}: {policy}", file=sys.stderr, flush=True)
            found[policy].append(run(subject, policy, **sizes))
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        rounds += 1
    return found


def medians(runs: List[Dict[str, Any]]) -> Dict[str, Any]:
    """One figure of each kind for the runs of a policy; a run that went out of memory stands for all."""
    failed = [of for of in runs if "out of memory after" in of]
    return failed[0] if failed else {name: statistics.median(of[name] for of in runs) for name in FIGURES}


def measure() -> Dict[str, Any]:
    """Both subjects, with memory to spare and with just enough.

    Raises:
        SystemExit: the card has not even enough.
    """
    found: Dict[str, Any] = {"device": torch.cuda.get_device_name(), "versions": versions(), "cases": {}}
    for name in SUBJECTS:
        spare = output_of("-m", "benchmarks.cuda_cache", name)
        if any("out of memory after" in of for of in spare[REFERENCE]):
            sys.exit(f"The {name} does not fit on {found['device']}: a card with more memory is needed.")
        need = max(of["peak allocated"] for of in spare[REFERENCE])
        tight = output_of("-m", "benchmarks.cuda_cache", name, str(int(TIGHT * need * GIB)))
        found["cases"][f"{name}, memory to spare"] = {policy: medians(runs) for policy, runs in spare.items()}
        found["cases"][f"{name}, {TIGHT} x {need:.1f} GiB"] = {policy: medians(runs) for policy, runs in tight.items()}
        found["rounds"] = {**found.get("rounds", {}), name: [len(of[REFERENCE]) for of in (spare, tight)]}
    return found


def table(found: Dict[str, Any]) -> str:
    """The figures, as Markdown."""
    measured_with = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    parts = [f"{found['device']}; {measured_with}; rounds: {json.dumps(found['rounds'])}."]
    for title, policies in found["cases"].items():
        lines = [f"{title}", "", f"| policy | {' | '.join(FIGURES.values())} |", "|---|" + "---:|" * len(FIGURES)]
        for policy, of in policies.items():
            if "out of memory after" in of:
                cells = [f"out of memory after {of['out of memory after']} steps", *["-"] * (len(FIGURES) - 1)]
            else:
                cells = [
                    f"{of[figure]:,.0f}" if figure in ("retries", "clears") else f"{of[figure]:,.2f}"
                    for figure in FIGURES
                ]
            lines.append(f"| {policy} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def draw(found: Dict[str, Any], path: Path = CHART) -> None:
    """For each case: step time and evaluation time as ratios to `never`, and the memory reserved."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = found["cases"]
    figure, axes = plt.subplots(len(cases), 2, figsize=(10, 3 * len(cases)), layout="constrained", squeeze=False)
    for (title, policies), (left, right) in zip(cases.items(), axes):
        left.set_title(title, fontsize=10)
        _draw_times(left, policies)
        _draw_memory(right, policies)
        for axis in (left, right):
            axis.set_yticks(range(len(policies)), policies if axis is left else [""] * len(policies), fontsize=8)
            axis.invert_yaxis()
            axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)
    figure.savefig(path, dpi=110)


def _draw_times(axis: Any, policies: Dict[str, Dict[str, Any]]) -> None:
    base = policies[REFERENCE]
    times = {"step before": "#9ecae1", "step after": "#1b6ca8", "evaluation": "#d98e04"}
    for number, (name, colour) in enumerate(times.items(), start=-1):
        ratios = [of[name] / base[name] if name in of and name in base else 0 for of in policies.values()]
        label = f"{name} the first evaluation" if name.startswith("step") else name
        bars = axis.barh(
            [place + 0.27 * number for place in range(len(policies))], ratios, 0.25, color=colour, label=label
        )
        axis.bar_label(bars, [f"{ratio:.2f}" if ratio else "out of memory" for ratio in ratios], fontsize=7, padding=2)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlabel(f"time, to {REFERENCE}", fontsize=8)


def _draw_memory(axis: Any, policies: Dict[str, Dict[str, Any]]) -> None:
    for name, colour, height in (("peak reserved", "#cccccc", 0.7), ("mean reserved", "#2a9d74", 0.3)):
        axis.barh(range(len(policies)), [of.get(name, 0) for of in policies.values()], height, color=colour, label=name)
    axis.set_xlabel("GiB", fontsize=8)


def main(arguments: List[str]) -> None:
    command = "python -m benchmarks.cuda_cache"
    if not torch.cuda.is_available():
        print(f"No CUDA device was found, so nothing is measured. Run {command} on a machine that has one.")
        return
    if not arguments:
        found = measure()
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        draw(found)
        print(
            f"{table(found)}\n\nWritten: {RESULTS} and {CHART}. To put them into README.md: python -m benchmarks.report"
        )
        return
    subject, *limit = arguments
    if limit:
        torch.cuda.set_per_process_memory_fraction(int(limit[0]) / torch.cuda.get_device_properties(0).total_memory)
    with shim.applied():
        print(json.dumps(in_rounds(SUBJECTS[subject])))


if __name__ == "__main__":
    main(sys.argv[1:])
