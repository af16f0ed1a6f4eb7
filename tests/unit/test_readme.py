"""The README's example works, its table is what the code does, and its test command is what CI runs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer

import shim
from shim import compat
from tests.fixtures import Count, Lin, Rows, logits_of, make_args, make_trainer, oracle
from tests.unit.test_cache_clear import TABLE

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_of_a_metric_is_right():
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "class Accuracy" in block)
    rows = Rows(10)
    names = {"Trainer": Trainer, "model": Lin(), "args": make_args(batch_eval_metrics=True), "rows": rows}
    exec(block, names)
    assert names["trainer"].evaluate()["eval_accuracy"] == oracle(Lin(), rows)["accuracy"]


class WordTokenizer:
    """As much of a tokenizer as the example needs."""

    pad_token_id = 0

    def batch_decode(self, ids, skip_special_tokens):
        words = ["", "to", "be", "or", "not"]
        return [" ".join(words[number] for number in row if number) for row in ids.tolist()]


def test_the_examples_of_ready_metrics_are_right():
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "from_torchmetrics" in block)
    names = {"tokenizer": WordTokenizer()}
    exec(block, names)
    rows = Rows(23)
    trained = {
        name: make_trainer(names[name], eval_rows=rows, batch_eval_metrics=True).evaluate()
        for name in ("f1", "exact", "binned", "top_3_accuracy", "spooled")
    }
    assert trained["f1"]["eval_accuracy"] == pytest.approx(oracle(Lin(), rows)["accuracy"])
    assert 0 < trained["f1"]["eval_f1"] < 1
    assert trained["exact"]["eval_auroc"] == pytest.approx(trained["binned"]["eval_auroc"], abs=0.05)
    assert trained["top_3_accuracy"]["eval_top_3"] == 1  # of three classes
    logits = logits_of(Lin(), rows)
    assert trained["spooled"]["eval_spread"] == pytest.approx(float(logits.max() - logits.min()))

    masks = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 255], [2, 2, 2, 2], [2, 2, 2, 2]])[None]
    small = torch.nn.functional.one_hot(torch.tensor([[0, 1], [2, 2]])[None], 3).movedim(-1, 1).float()
    assert names["mean_iou"](SimpleNamespace(predictions=small, label_ids=masks)) == {"mean_iou": 1}

    labels = torch.tensor([[0, 1, 2, -100]])
    shifted = torch.nn.functional.one_hot(torch.tensor([[1, 2, 0, 0]]), 3).float()
    assert names["token_accuracy"](SimpleNamespace(predictions=shifted, label_ids=labels)) == {"token_accuracy": 1}

    sentence = torch.tensor([[1, 2, 3, 4, 1, 2]])
    padded = torch.nn.functional.pad(sentence, (0, 2), value=-100)
    assert names["bleu"](SimpleNamespace(predictions=sentence, label_ids=padded)) == {"bleu": pytest.approx(1)}


def test_the_table_of_an_estimate_is_what_it_prints():
    trainer = make_trainer(Count(), model=Lin(wide=19_997), eval_rows=3000, per_device_eval_batch_size=50)
    assert f"```\n{shim.estimate_eval_memory(trainer)}\n```" in README


def test_the_table_names_every_value_of_cuda_cache_clear():
    section = README.split("## `cuda_cache_clear`")[1].split("\n\n")[1]
    named = set(
        re.findall(r"`(None|True|False|\"\w+\")`", "\n".join(row.split("|")[1] for row in section.splitlines()))
    )
    assert named == {"None"} | {f'"{value}"' if isinstance(value, str) else str(value) for value in TABLE}


def test_the_range_of_releases_is_that_of_the_code():
    assert f"from {compat.OLDEST_SUPPORTED[:4]} to {compat.NEWEST_TESTED[:4]}" in README
    assert f"than {compat.NEWEST_TESTED}" in README.replace("\n", " ")


def test_ci_runs_the_test_command_of_the_readme():
    commands = re.findall(r"```bash\n(python3 .*?)\n```", README)
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert len(commands) == 2
    assert script[-1] == commands[1]
