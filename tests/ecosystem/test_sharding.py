"""DeepSpeed and FSDP over two gloo processes: the same losses and metrics, and nothing gathered that need not be."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import TestCase

import pytest
from packaging.version import Version
from parameterized import parameterized

from tests.distributed.test_processes import LOOPBACK, ROOT
from tests.ecosystem.trainers import CLASSES
from tests.fixtures import FEATURES

WEIGHTS = FEATURES * CLASSES + CLASSES
IS_OLD = Version(importlib.metadata.version("transformers")) < Version("5.0")
# Kind -> why it cannot be tried here, if it cannot. DeepSpeed's come last: a process that has used it stays with it.
KINDS = {
    "whole": None,
    "fully_shard": None,
    "fsdp": "FSDP of transformers 4 asks for an accelerator" if IS_OLD else None,
    "zero2": None if importlib.util.find_spec("deepspeed") else "deepspeed is not installed",
    "zero3": None if importlib.util.find_spec("deepspeed") else "deepspeed is not installed",
}


class TwoProcesses(TestCase):
    @classmethod
    def setUpClass(cls):
        directory = Path(tempfile.mkdtemp(prefix="shim-test-"))
        kinds = [kind for kind, problem in KINDS.items() if problem is None]
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "tests.ecosystem.sharded"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", **LOOPBACK}
        done = subprocess.run(
            [sys.executable, *command, str(directory), *kinds],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        cls.ranks = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)]

    def reports(self, kind):
        if KINDS[kind] is not None:
            pytest.skip(KINDS[kind])
        reports = [rank[kind] for rank in self.ranks]
        if kind == "fsdp" and reports[0]["stock"]["wrapped"] == "DistributedDataParallel":
            pytest.skip("accelerate shards on accelerators only: on a CPU its FSDP leaves the model whole, in DDP")
        return reports

    @parameterized.expand([(kind,) for kind in KINDS])
    def test_losses_and_metrics_are_those_of_the_stock_trainer_on_all_ranks(self, kind):
        first, second = self.reports(kind)
        for way in ("stock", "batches", "own rows"):
            for what in ("losses", "metrics"):
                self.assertEqual(first[way][what], second[way][what])
                self.assertEqual(first[way][what], first["stock"][what], way)
            self.assertEqual(len(first[way]["losses"]), 0 if kind == "fully_shard" else 2)

    @parameterized.expand([("zero3",), ("fsdp",), ("fully_shard",)])
    def test_each_rank_holds_a_part_of_the_weights(self, kind):
        held = [report["batches"]["weights"] for report in self.reports(kind)]
        self.assertLess(max(held), WEIGHTS)
        self.assertGreaterEqual(sum(held), WEIGHTS)  # with what fills the parts up

    @parameterized.expand([(kind,) for kind in KINDS])
    def test_logits_of_one_batch_are_gathered_or_none(self, kind):
        report, _ = self.reports(kind)
        self.assertEqual(report["batches"]["widest"], 2)  # rows and classes
        self.assertEqual(report["own rows"]["widest"], 1)  # losses and counts
