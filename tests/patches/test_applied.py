"""The series of the installed release, applied: the same diff again, the same fields, the same contract."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any, Dict, List

import pytest
from transformers import TrainingArguments

from patches.series import export, hashes, installed_release, series_for
from shim.arguments import _Added

ROOT = Path(__file__).parents[2]
CONTRACT = (
    "tests/unit/test_batched_evaluation.py",
    "tests/unit/test_cache_clear.py",
    "tests/unit/test_properties.py",
    "tests/distributed/test_processes.py",
    # what starts the processes, and what becomes of a metric that fails, has nothing to do with the tree
    "-k=not AccelerateLaunch and not FailingMetric",
)

LEFT_ALONE_WITH_ITS_FIELDS = """
import json
import shim
from transformers import Trainer, TrainingArguments
from tests.patches.test_applied import fields_of
fields = fields_of(TrainingArguments)
before = [dict(vars(cls)) for cls in (Trainer, TrainingArguments)]
shim.apply()
assert shim.status().patches == {"TrainingArguments": "has both options itself, nothing is patched"}, shim.status()
assert before == [dict(vars(cls)) for cls in (Trainer, TrainingArguments)]
shim.revert()
assert not shim.status().applied
print(json.dumps(fields))
"""


def fields_of(cls: Any) -> Dict[str, List[str]]:
    """Type, default and help of the fields of a dataclass."""
    types = typing.get_type_hints(cls)
    return {
        field.name: [str(typing.Optional[types[field.name]]), str(field.default), str(field.metadata.get("help"))]
        for field in dataclasses.fields(cls)
    }


@pytest.fixture
def series(patched_tree):
    return series_for(installed_release())


def run(*arguments: str, tree: Path, cwd: Path = ROOT) -> str:
    """Output of a Python process that imports the patched transformers."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_the_hashes_of_the_targets_are_those_of_the_wheel(series):
    recorded = series.sha256.get(installed_release())
    if recorded is None:
        pytest.skip(f"transformers {installed_release()} is inside the range of {series}")
    assert hashes(series.touched()) == recorded


def test_applying_and_exporting_gives_the_same_diff(series, patched_tree, tmp_path):
    assert export(patched_tree.parent, tmp_path) == [patch.name for patch in series.patches()]
    for patch in series.patches():
        again, before = (tmp_path / patch.name).read_text(), patch.read_text()
        if installed_release() != series.last:
            again, before = without_position(again), without_position(before)
        assert again == before


def without_position(patch: str) -> str:
    """Without what depends on lines that the patch does not touch, in releases other than the one it was made from."""
    return re.sub(r"^(index .*|@@ -.* @@)", "", patch, flags=re.M)


@pytest.mark.stock
def test_the_shim_leaves_a_patched_tree_alone_whose_fields_are_like_its_own(patched_tree):
    installed, ours = fields_of(TrainingArguments), fields_of(_Added)
    patched = json.loads(run("-c", LEFT_ALONE_WITH_ITS_FIELDS, tree=patched_tree).splitlines()[-1])
    added = {name: field for name, field in patched.items() if name not in installed}
    assert added == {name: field for name, field in ours.items() if name not in installed}
    assert "cuda_cache_clear" in added
    # the others are untouched, and in their places for positional arguments
    assert list(patched)[: len(installed)] == list(installed)


def test_the_patched_tree_passes_the_tests_of_the_contract(series, patched_tree):
    if installed_release() != series.last:
        pytest.skip(f"runs with {series.last}; the other end of the range is compared to the shim in tests/parity")
    run("-m", "pytest", "--quiet", *CONTRACT, tree=patched_tree)


def test_the_tests_that_a_series_brings_pass(series, patched_tree):
    brought = sorted((patched_tree.parent / "tests").rglob("test_*.py"))
    if not brought:
        pytest.skip(f"{series} brings no tests of its own")
    run("-m", "pytest", "--quiet", *map(str, brought), tree=patched_tree, cwd=patched_tree.parent)
