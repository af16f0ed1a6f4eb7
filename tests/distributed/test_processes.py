"""Several gloo processes on the CPU: each row counts once, alike on every rank. Case C06."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import TestCase

import torch
import transformers
from parameterized import parameterized

from tests.fixtures import EVAL_BATCH, Lin, Rows, once, oracle

ROOT = Path(__file__).parents[2]
# gloo looks the host's name up, which a machine without a network may not know
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
# --multi_gpu is how `accelerate launch` is asked for several processes; they run on the CPU, as the arguments say
LAUNCHERS = {
    "torchrun": "torch.distributed.run --standalone --nproc_per_node={ranks}",
    "accelerate launch": "accelerate.commands.launch --multi_gpu --num_processes={ranks} --num_machines=1 "
    "--mixed_precision=no --dynamo_backend=no --main_process_port={port}",
}


def on_releases(*releases: str) -> Any:
    """Each start takes as long as the import of transformers on every rank: spread over lanes, old and new."""
    return unittest.skipUnless(transformers.__version__ in releases, f"runs with transformers {' and '.join(releases)}")


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


def launched(launcher: str, ranks: int, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """The worker with these arguments, in so many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        options = LAUNCHERS[launcher].format(ranks=ranks, port=free.getsockname()[1]).split()
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # a patched transformers, for one
    return subprocess.run(
        [sys.executable, "-m", *options, "-m", "tests.distributed.worker", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", **LOOPBACK},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


class Processes:
    """What holds for any launcher and number of processes."""

    launcher = "torchrun"
    number = 2

    @classmethod
    def setUpClass(cls):
        directory = Path(tempfile.mkdtemp(prefix="shim-test-"))
        done = launched(cls.launcher, cls.number, str(directory), *cls.scenarios())
        assert done.returncode == 0, done.stderr[-4000:]
        cls.ranks = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(cls.number)]

    @classmethod
    def scenarios(cls):
        """Batches of four cannot be split over three processes."""
        return [name for name in SCENARIOS if not name.endswith("split") or EVAL_BATCH % cls.number == 0]

    @parameterized.expand([(scenario,) for scenario in SCENARIOS])
    def test_every_row_once_paired_with_its_input_and_alike_on_all_ranks_c06(self, scenario):
        if scenario not in self.scenarios():
            self.skipTest(f"batches of {EVAL_BATCH} cannot be split over {self.number} processes")
        evaluations, n = SCENARIOS[scenario], int(scenario.split("_")[1])
        first, *others = (rank[scenario] for rank in self.ranks)
        for other in others:
            self.assertEqual(first, other)
        batch = EVAL_BATCH if scenario.endswith("split") else EVAL_BATCH * self.number
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


class TwoProcesses(Processes, TestCase):
    pass


@on_releases("4.39.0", "5.24.0")
class ThreeProcesses(Processes, TestCase):
    number = 3


@on_releases("4.39.3", "5.12.1")
class TwoProcessesOfAccelerateLaunch(Processes, TestCase):
    launcher = "accelerate launch"


@on_releases("4.40.0", "5.0.0")
class FailingMetric(TestCase):
    def test_a_metric_that_fails_on_one_rank_ends_all_soon_and_with_its_own_error(self):
        # The other rank waits in a gather. It would do so for the half hour of gloo's default.
        done = launched("torchrun", 2, tempfile.mkdtemp(prefix="shim-test-"), "sized_10_failing", timeout=120)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("ZeroDivisionError: on rank 1", done.stderr)


def _split(rows, parts):
    size = len(rows) // parts
    return [rows[start : start + size] for start in range(0, len(rows), size)]
