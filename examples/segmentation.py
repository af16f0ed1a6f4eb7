"""Evaluate one SegFormer on photographs three times, and watch the memory.

The model has random weights; the pictures are tiles of the photographs that scikit-learn ships, and the mask of a tile
is the colour class of each pixel: 150 classes, so that the logits are as dense as those of ADE20K. Each evaluation runs
in a process of its own, whose resident memory is sampled from outside:

    python examples/segmentation.py [--chart build/segmentation.png]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

CLASSES, TILE, STRIDE, BATCH = 150, 128, 28, 4
SAMPLE_EVERY, DRAWN_EVERY = 0.02, 0.4  # seconds
MIB = 2**20

# name -> (label in the chart, options of TrainingArguments)
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "stock": ("stock", {}),
    "accumulate": ("stock, eval_accumulation_steps=1", {"eval_accumulation_steps": 1}),
    "batched": ("shim, batch_eval_metrics=True", {"batch_eval_metrics": True}),
}
# name -> (colour, line style, where its peak is labelled)
STYLES = {
    "stock": ("#b23a2a", "-", "right"),
    "accumulate": ("#d98e04", "--", "left"),
    "batched": ("#1b6ca8", "-", "center"),
}


class Tiles:
    """Overlapping tiles of the photographs, each with the colour class of its pixels."""

    def __init__(self) -> None:
        import numpy as np
        from matplotlib.colors import rgb_to_hsv
        from sklearn.datasets import load_sample_images

        self._photographs = []
        for photograph in load_sample_images().images:
            rgb = photograph.astype(np.float32) / 255
            hsv = np.minimum((rgb_to_hsv(rgb) * (10, 3, 5)).astype(int), (9, 2, 4))
            self._photographs.append((rgb.transpose(2, 0, 1), (hsv[..., 0] * 3 + hsv[..., 1]) * 5 + hsv[..., 2]))
        self._corners = [
            (number, top, left)
            for number, (_, mask) in enumerate(self._photographs)
            for top in range(0, mask.shape[0] - TILE + 1, STRIDE)
            for left in range(0, mask.shape[1] - TILE + 1, STRIDE)
        ]

    def __len__(self) -> int:
        return len(self._corners)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        number, top, left = self._corners[index]
        rgb, mask = self._photographs[number]
        window = (slice(top, top + TILE), slice(left, left + TILE))
        return {"pixel_values": torch.tensor(rgb[(slice(None), *window)]), "labels": torch.tensor(mask[window])}


class MeanIoU:
    """Mean intersection over union, from running sums: the same number for one call or for many."""

    def __init__(self) -> None:
        from torchmetrics.classification import MulticlassJaccardIndex

        self._metric = MulticlassJaccardIndex(CLASSES)

    def reset(self) -> None:
        self._metric.reset()

    def __call__(self, eval_pred: Any, compute_result: bool = True) -> dict[str, float] | None:
        import torch

        classes = torch.as_tensor(eval_pred.predictions).argmax(1)
        labels = torch.as_tensor(eval_pred.label_ids)
        scale = labels.shape[-1] // classes.shape[-1]
        self._metric.update(classes.repeat_interleave(scale, 1).repeat_interleave(scale, 2), labels)
        return {"mean_iou": self._metric.compute()} if compute_result else None


def segformer() -> Any:
    """A small SegFormer with random weights."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    sizes = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 128], "decoder_hidden_size": 64}
    return SegformerForSemanticSegmentation(SegformerConfig(num_labels=CLASSES, **sizes))


def evaluate(run: str) -> None:
    """In the process under observation: evaluate, and print when it began, when it ended, and the result."""
    import torch
    from transformers import Trainer, TrainingArguments

    options = RUNS[run][1]
    if run == "batched":
        import shim

        shim.apply()
    torch.manual_seed(0)
    trainer = Trainer(
        segformer(),
        TrainingArguments(tempfile.mkdtemp(), per_device_eval_batch_size=BATCH, report_to=[], use_cpu=True, **options),
        eval_dataset=Tiles(),
        compute_metrics=MeanIoU(),
    )
    begin = time.time()
    metrics = trainer.evaluate()
    print(json.dumps({"begin": begin, "end": time.time(), "mean_iou": metrics["eval_mean_iou"]}))


def watch(run: str) -> dict[str, Any]:
    """Evaluate in a process of its own and sample its resident memory.

    Returns:
        The run's result, with `samples`: (seconds since the evaluation began, MiB).
    """
    import psutil

    process = subprocess.Popen([sys.executable, __file__, "--run", run], stdout=subprocess.PIPE, text=True)
    observed, samples, done = psutil.Process(process.pid), [], threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_EVERY):
            try:
                samples.append((time.time(), observed.memory_info().rss / MIB))
            except psutil.Error:
                return

    sampler = threading.Thread(target=sample)
    sampler.start()
    printed, _ = process.communicate()
    done.set()
    sampler.join()
    if process.returncode:
        sys.exit(f"The evaluation {run!r} failed with exit code {process.returncode}; its message is above.")
    result = json.loads(printed.splitlines()[-1])
    result["samples"] = [(at - result["begin"], mib) for at, mib in samples if result["begin"] <= at <= result["end"]]
    result["seconds"] = result["end"] - result["begin"]
    result["peak"] = max(mib for _, mib in result["samples"])
    result["grown"] = result["peak"] - result["samples"][0][1]
    return result


def table(results: dict[str, dict[str, Any]]) -> str:
    """The figures, as a Markdown table."""
    lines = ["| evaluation | peak MiB | of it for the evaluation | seconds | mean IoU |", "|---|---:|---:|---:|---:|"]
    for run, result in results.items():
        lines.append(
            f"| {RUNS[run][0]} | {result['peak']:.0f} | {result['grown']:.0f} | {result['seconds']:.1f} "
            f"| {result['mean_iou']:.6f} |"
        )
    return "\n".join(lines)


def highest(samples: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The highest sample of each short stretch of time: the line without the ups and downs of each batch."""
    stretches: dict[int, tuple[float, float]] = {}
    for at, mib in samples:
        stretch = int(at / DRAWN_EVERY)
        stretches[stretch] = max(stretches.get(stretch, (at, mib)), (at, mib), key=lambda sample: sample[1])
    return list(stretches.values())


def draw(results: dict[str, dict[str, Any]], rows: int, path: Path) -> None:
    """One line a run, its peak marked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for run, result in results.items():
        colour, line, side = STYLES[run]
        seconds, mib = zip(*highest(result["samples"]))
        axes.plot(seconds, mib, line, color=colour, linewidth=2, label=RUNS[run][0])
        at, peak = max(zip(seconds, mib), key=lambda point: point[1])
        axes.plot(at, peak, "o", color=colour)
        offset = {"right": (-8, 6), "left": (8, 6), "center": (0, 8)}[side]
        axes.annotate(f"{peak:,.0f} MiB", (at, peak), xytext=offset, textcoords="offset points", ha=side, color=colour)
    axes.set(
        xlabel="seconds since the evaluation began",
        ylabel=f"resident memory, highest in {DRAWN_EVERY} s (MiB)",
        title=f"SegFormer, {rows:,} tiles, {CLASSES} classes: one model, three evaluations, the same mean IoU",
    )
    axes.title.set_fontsize(11)
    axes.set_ylim(0, 1.12 * max(result["peak"] for result in results.values()))
    axes.set_xlim(0, 1.15 * max(result["seconds"] for result in results.values()))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chart", type=Path, default=Path("build/segmentation.png"), help="where the chart goes")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        evaluate(arguments.run)
        return
    results = {}
    for number, (run, (label, _)) in enumerate(RUNS.items(), start=1):
        print(f"{number} of {len(RUNS)}: {label}", file=sys.stderr, flush=True)
        results[run] = watch(run)
    if len({result["mean_iou"] for result in results.values()}) != 1:
        sys.exit(f"The evaluations disagree:\n{table(results)}")
    draw(results, len(Tiles()), arguments.chart)
    print(f"\n{table(results)}\n\nThe chart is {arguments.chart}.")


if __name__ == "__main__":
    main()
