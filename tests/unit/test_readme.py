"""Every code block of the README runs, here or where BLOCKS says; its tables are what the code does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer, TrainingArguments

import shim
from shim import compat
from tests.distributed.test_processes import LOOPBACK
from tests.fixtures import Count, Lin, Rows, logits_of, make_args, make_trainer, oracle
from tests.unit.test_cache_clear import TABLE
from tests.unit.test_import import on_releases

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TOX = (ROOT / "tox.ini").read_text()

# How each block begins, and what runs it: a test of this file, or a lane that CI runs.
BLOCKS = {
    "python3 -m venv .venv && .venv/bin/pip install --quiet tox && .venv/bin/tox run -e demo": "demo",
    "python3 -m venv .venv && .venv/bin/pip install --quiet tox && .venv/bin/tox run-parallel": ".ci/run",
    "pip install path/to/this/checkout": "release",
    "import shim": "test_the_quick_start_works",
    "python -m shim run train.py": "test_programs_run_as_the_readme_says",
    "3,000 rows, 78.1 KiB each": "test_the_table_of_an_estimate_is_what_it_prints",
    "class Accuracy": "test_the_example_of_a_metric_is_right",
    "import torch": "test_the_examples_of_ready_metrics_are_right",
}


def blocks():
    return re.findall(r"^```(?:bash|python)?\n(.*?)\n```$", README, re.S | re.M)


def block_of(test):
    (start,) = (start for start, runs in BLOCKS.items() if runs == test)
    (block,) = (block for block in blocks() if block.startswith(start))
    return block


def test_every_block_is_run_by_something():
    found = [[start for start in BLOCKS if block.startswith(start)] for block in blocks()]
    assert sorted(start for starts in found for start in starts) == sorted(BLOCKS)
    assert all(len(starts) == 1 for starts in found)
    assert README.count("```") == 2 * len(BLOCKS)
    lanes = re.search(r"env_list =\n((?:    .*\n)+)", TOX)[1].split()
    for runs in BLOCKS.values():
        assert runs in globals() or runs in lanes or (ROOT / runs).exists(), runs


@pytest.mark.stock
def test_the_quick_start_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(block_of("test_the_quick_start_works"), names)
    assert names["args"].cuda_cache_clear == "around_eval"
    assert names["args"].batch_eval_metrics is True
    assert isinstance(names["args"], TrainingArguments)
    names["shim"].revert()


PROGRAM = """
    import json, os, sys

    from transformers import HfArgumentParser, Trainer, TrainingArguments

    from tests.fixtures import Count, Lin, Rows

    def at_the_end(eval_pred):
        return {"rows": len(eval_pred.predictions)}

    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--output_dir", "out", *sys.argv[1:]])
    metrics = Trainer(Lin(), args, eval_dataset=Rows(10), compute_metrics=METRIC).evaluate()
    if args.process_index == 0:
        print("found", args.batch_eval_metrics, args.cuda_cache_clear, metrics["eval_rows"], flush=True)
    os._exit(0)  # threads of gloo may abort a process that ends
"""


@on_releases("4.40.2", "5.12.1")
def test_programs_run_as_the_readme_says(tmp_path):
    (tmp_path / "my_project").mkdir()
    for name, metric in (("train.py", "Count()"), ("my_project/train.py", "at_the_end")):
        (tmp_path / name).write_text(textwrap.dedent(PROGRAM).replace("METRIC", metric))
    found = []
    for command in block_of("test_programs_run_as_the_readme_says").splitlines():
        done = subprocess.run(
            # eight processes would import the Trainer on two cores
            command.replace("--nproc_per_node 8", "--standalone --nproc_per_node 2"),
            shell=True,
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "ACCELERATE_USE_CPU": "true",
                **LOOPBACK,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found += [line for line in done.stdout.splitlines() if line.startswith("found ")]
    assert found == [
        "found True eval 10",
        "found True None 10",
        "found False None 10",
        "found False None 10",
    ]


def test_the_example_of_a_metric_is_right():
    block = block_of("test_the_example_of_a_metric_is_right")
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
    block = block_of("test_the_examples_of_ready_metrics_are_right")
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
    assert str(shim.estimate_eval_memory(trainer)) == block_of("test_the_table_of_an_estimate_is_what_it_prints")


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
