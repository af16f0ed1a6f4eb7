"""Two gloo processes on the CPU: each row counts once, alike on every rank. Case C06."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import TestCase

import torch
from parameterized import parameterized

from tests.fixtures import EVAL_BATCH, Lin, Rows, once, oracle

RANKS = 2
ROOT = Path(__file__).parents[2]
# gloo looks the host's name up, which a machine without a network may not know
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
SCENARIOS = {
    "sized_10": 1,
    "sized_9": 1,
    "sized_8": 1,
    "sized_1": 1,
    "stream_10": 1,
    "sized_10_ragged": 1,
    "sized_10_training": 2,
    "stream_10_training": 2,
    "sized_9_predict": 1,
    "sized_10_dispatched": 1,
    "sized_10_sharded": 1,
    "sized_10_split": 1,
    "stream_10_dispatched": 1,
    "stream_10_sharded": 1,
    "stream_8_sharded": 1,
    "stream_3_sharded": 1,
    "stream_10_split": 1,
}


class TwoProcesses(TestCase):
    @classmethod
    def setUpClass(cls):
        directory = Path(tempfile.mkdtemp(prefix="shim-test-"))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
        done = subprocess.run(
            [*command, "-m", "tests.distributed.worker", str(directory), *SCENARIOS],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **LOOPBACK},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        cls.ranks = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(RANKS)]

    @parameterized.expand([(scenario,) for scenario in SCENARIOS])
    def test_every_row_once_paired_with_its_input_and_alike_on_all_ranks_c06(self, scenario):
        evaluations, n = SCENARIOS[scenario], int(scenario.split("_")[1])
        first, second = (rank[scenario] for rank in self.ranks)
        self.assertEqual(first, second)
        batch = EVAL_BATCH if scenario.endswith("split") else EVAL_BATCH * RANKS
        self.assertEqual(first["flags"], evaluations * once(-(-n // batch)))
        self.assertTrue(first["losses_match"])
        rows = Rows(n)
        with torch.no_grad():
            logits = Lin()(rows.x)["logits"]
        expected = sorted(
            [float(x[0]), float(label), float(row[0])] for x, label, row in zip(rows.x, rows.labels, logits)
        )
        seen = [sorted(part) for part in _split(first["rows"], evaluations)]
        for rows_of_one_evaluation in seen:
            self.assertEqual(len(rows_of_one_evaluation), n)
            torch.testing.assert_close(torch.tensor(rows_of_one_evaluation), torch.tensor(expected))
        for result in first["results"][:evaluations]:
            accuracy = next(value for key, value in result.items() if key.endswith("_accuracy"))
            self.assertEqual(accuracy, oracle(Lin(), rows)["accuracy"])
        if scenario.endswith("predict"):
            self.assertEqual(first["results"][1], n)


def _split(rows, parts):
    size = len(rows) // parts
    return [rows[start : start + size] for start in range(0, len(rows), size)]
