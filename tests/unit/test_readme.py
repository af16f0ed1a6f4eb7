"""The README's example works, its table is what the code does, and its test command is what CI runs."""

from __future__ import annotations

import re
from pathlib import Path

from transformers import Trainer

from shim import compat
from tests.fixtures import Lin, Rows, make_args, oracle
from tests.unit.test_cache_clear import TABLE

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_of_a_metric_is_right():
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "class Accuracy" in block)
    rows = Rows(10)
    names = {"Trainer": Trainer, "model": Lin(), "args": make_args(batch_eval_metrics=True), "rows": rows}
    exec(block, names)
    assert names["trainer"].evaluate()["eval_accuracy"] == oracle(Lin(), rows)["accuracy"]


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
