"""Several gloo processes on the CPU: each row counts once, alike on every rank. Case C06."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Dict, Sequence
from unittest import TestCase

import torch
import transformers
from parameterized import parameterized

from tests.distributed import metrics as metric_scenarios
from tests.fixtures import CLASSES, EVAL_BATCH, Lin, Pictures, Rows, Segmenter, logits_of, once, oracle
from tests.unit.test_import import on_releases

ROOT = Path(__file__).parents[2]
# gloo looks the host's name up, which a machine without a network may not know
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
# --multi_gpu is how `accelerate launch` is asked for several processes; they run on the CPU, as the arguments say
LAUNCHERS = {
    "torchrun": "torch.distributed.run --standalone --nproc_per_node={ranks}",
    "accelerate launch": "accelerate.commands.launch --multi_gpu --num_processes={ranks} --num_machines=1 "
    "--mixed_precision=no --dynamo_backend=no --main_process_port={port}",
}


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


# kind of loading, rows, batch size: uneven ends, and ranks without any row
METRIC_SCENARIOS = [
    *(f"metrics_{kind}_23_{size}" for kind in ("sized", "stream") for size in (1, 2, 3, 4, 7, 10)),
    *(f"metrics_{kind}_23_4" for kind in ("dispatched", "sharded")),
    # accelerate gives the last rank no row at all of a stream that has one row for three: stock fails there too
    *("metrics_sized_1_2", "metrics_sharded_1_2", "metrics_stream_2_2"),
]

# Collators that make two rows of a sample. The first have no repetition in a share with other rows, the last has.
PAIRED = ["pairs_sized_8", "pairs_sized_12", "pairs_sharded_12", "pairs_sharded_4", "pairs_sized_10"]


def expected_metrics(rows: int) -> Dict[str, float]:
    """What one process gets that sees the whole set at once."""
    metrics: Dict[str, float] = {}
    for name in ("sums", "auroc", "jaccard", "mean", "spool", "boxes"):
        case = metric_scenarios.CASES[name]
        data = case.data(rows)
        if name == "boxes":
            labels = [data[row]["labels"] for row in range(rows)]
            whole = SimpleNamespace(label_ids=labels, predictions=torch.zeros(rows, 7, 3))
        else:
            whole = SimpleNamespace(label_ids=data.labels, predictions=logits_of(case.model(), data))
        metrics.update(case.metric()(whole))
    return {f"eval_{name}": value for name, value in metrics.items()}


def metrics_of_scikit(rows: int) -> Dict[str, float]:
    """The same from scikit-learn, where it is installed."""
    if not importlib.util.find_spec("sklearn"):
        return {}
    from sklearn import metrics

    labels, scores = Rows(rows).labels.numpy(), logits_of(Lin(), Rows(rows)).softmax(-1).numpy()
    pictures = Pictures(rows)
    kept, classes = pictures.labels != -100, logits_of(Segmenter(), pictures).argmax(1)
    return {
        "eval_accuracy": metrics.accuracy_score(labels, scores.argmax(-1)),
        "eval_f1": metrics.f1_score(labels, scores.argmax(-1), average="macro"),
        "eval_auroc": metrics.roc_auc_score(labels, scores, multi_class="ovr", average="macro"),
        "eval_mean_iou": metrics.jaccard_score(pictures.labels[kept], classes[kept], average="macro"),
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
    metrics_with: Sequence[str] = ()
    """The releases whose lanes run the scenarios of ready metrics as well."""

    @classmethod
    def setUpClass(cls):
        directory = Path(tempfile.mkdtemp(prefix="shim-test-"))
        done = launched(cls.launcher, cls.number, str(directory), *cls.scenarios())
        assert done.returncode == 0, done.stderr[-4000:]
        cls.ranks = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(cls.number)]

    @classmethod
    def scenarios(cls):
        """Batches of four cannot be split over three processes."""
        evaluations = [name for name in SCENARIOS if not name.endswith("split") or EVAL_BATCH % cls.number == 0]
        if transformers.__version__ not in cls.metrics_with:
            return evaluations
        if metric_scenarios.ALWAYS_GATHERS:  # where metrics are as in one process
            return [*evaluations, "metrics_sized_23_4", "metrics_stream_23_4", "metrics_elsewhere"]
        return [*evaluations, *METRIC_SCENARIOS, "metrics_elsewhere", "metrics_spooling", "metrics_refusal"]

    def require(self, scenario):
        if scenario not in self.scenarios():
            self.skipTest(f"not with {self.number} processes and transformers {transformers.__version__}")

    @parameterized.expand([(scenario,) for scenario in SCENARIOS])
    def test_every_row_once_paired_with_its_input_and_alike_on_all_ranks_c06(self, scenario):
        self.require(scenario)
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

    @parameterized.expand([(scenario,) for scenario in METRIC_SCENARIOS])
    def test_metrics_are_those_of_the_whole_set_and_alike_in_two_evaluations_on_all_ranks(self, scenario):
        self.require(scenario)
        rows = int(scenario.split("_")[2])
        expected = expected_metrics(rows)
        if rows == 23:  # a set with all classes
            for metric, value in metrics_of_scikit(rows).items():
                self.assertAlmostEqual(self.found_on_main(scenario)[metric], value, delta=1e-6, msg=metric)
        for name, found in self.ranks[0][scenario].items():
            if name == "own rows":
                continue
            for rank in self.ranks:
                self.assertEqual(rank[scenario][name]["results"], found["results"])
            first, second = found["results"]
            self.assertEqual(first, second)
            for metric, value in first.items():
                self.assertAlmostEqual(value, expected[metric], delta=1e-6, msg=f"{name}: {metric}")

    def found_on_main(self, scenario):
        names = ("sums", "auroc", "jaccard")
        return {key: value for name in names for key, value in self.ranks[0][scenario][name]["results"][0].items()}

    def test_metrics_that_do_not_gather_are_right_in_training_and_in_predict(self):
        self.require("metrics_elsewhere")
        expected = expected_metrics(23)
        for rank in self.ranks:
            found = rank["metrics_elsewhere"]
            self.assertEqual(len(found["predictions"]), 23)
            self.assertEqual(found["estimate"], [23, CLASSES * 4 + 8 + 4])  # each rank keeps all rows
            self.assertEqual(len(found["results"]), 3)
            for result in found["results"]:
                self.assertEqual(set(result), {"eval_accuracy", "eval_f1"})
                for metric, value in result.items():
                    self.assertAlmostEqual(value, expected[metric], delta=1e-6, msg=metric)

    def test_only_the_main_process_spools_and_its_error_ends_all(self):
        self.require("metrics_spooling")
        main, *others = (rank["metrics_spooling"] for rank in self.ranks)
        self.assertEqual(main["right"][1], 23 * (CLASSES * 4 + 8))
        self.assertEqual(main["failing"], ["ZeroDivisionError", "on the main process"])
        for other in others:
            self.assertEqual(other["right"], [main["right"][0], 0])
            kind, message = other["failing"]
            self.assertEqual(kind, "RuntimeError")
            self.assertIn("failed there: ZeroDivisionError: on the main process", message)

    @parameterized.expand([(scenario,) for scenario in METRIC_SCENARIOS])
    def test_without_gathering_no_logits_go_from_rank_to_rank_and_each_row_is_on_one(self, scenario):
        self.require(scenario)
        if metric_scenarios.ALWAYS_GATHERS:
            self.skipTest("this transformers has the options itself, and gathers always")
        _, _, rows, batch = scenario.split("_")
        found = self.ranks[0][scenario]
        self.assertEqual(found["gathered sums"]["dimensions"], 2)  # rows and classes
        for name in {"sums", "torcheval", "mean", "boxes", "own rows"} & set(found):
            self.assertEqual(found[name]["dimensions"], 1, name)
        self.assertEqual(found["jaccard"]["dimensions"], 2)  # the confusion matrix; logits of pictures have 4
        sizes = found["own rows"]["results"][0]["eval_sizes"]
        self.assertEqual(len(sizes), self.number)
        self.assertEqual(sum(map(sum, sizes)), int(rows))
        self.assertLessEqual(max(map(max, filter(None, sizes))), int(batch))

    def test_states_that_torchmetrics_would_wait_for_are_refused_on_all_ranks(self):
        self.require("metrics_refusal")
        for rank in self.ranks:
            self.assertRegex(rank["metrics_refusal"]["False"], r"ByRow.rows .* found 2, 1.* elements.*gather=True")
            self.assertEqual(rank["metrics_refusal"]["True"], int(Rows(3).labels.sum()))


class TwoProcesses(Processes, TestCase):
    metrics_with = ("4.40.0", "4.46.3", "5.0.0")


@on_releases("4.39.0", "5.24.0")
class ThreeProcesses(Processes, TestCase):
    number = 3
    metrics_with = ("4.39.0", "5.24.0")


@on_releases("4.39.3", "5.12.1")
class TwoProcessesOfAccelerateLaunch(Processes, TestCase):
    launcher = "accelerate launch"


@on_releases("4.39.3", "5.24.0")
class TwoRowsOfASample(TestCase):
    @classmethod
    def setUpClass(cls):
        directory = Path(tempfile.mkdtemp(prefix="shim-test-"))
        done = launched("torchrun", 2, str(directory), *PAIRED)
        assert done.returncode == 0, done.stderr[-4000:]
        cls.ranks = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)]

    @parameterized.expand([(scenario, gather) for scenario in PAIRED for gather in ("True", "False")])
    def test_no_row_is_lost_and_each_counts_once_unless_a_warning_says_so(self, scenario, gather):
        if metric_scenarios.ALWAYS_GATHERS and gather == "False":
            self.skipTest("this transformers has the options itself, and gathers always")
        every = sorted(number + half for number in range(int(scenario.split("_")[2])) for half in (0, 0.5))
        for rank in self.ranks:
            found = rank[scenario][gather]
            if scenario == "pairs_sized_10":
                self.assertEqual(sorted(set(found["seen"])), every)
                self.assertEqual(len(found["seen"]), 24)  # the two samples that fill up the first process's four
                self.assertIn("8 rows of 4 samples", found["said"][0])
            else:
                self.assertEqual((found["seen"], found["said"]), (every, []))


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
