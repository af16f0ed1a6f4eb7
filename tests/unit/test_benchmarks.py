"""The benchmarks run, what they promise holds in what was recorded, and the pages show what was recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torchmetrics import MetricCollection, SumMetric

from benchmarks import cuda_cache, memory, off, report, seconds
from benchmarks.turns import Turns, in_turns
from benchmarks.ways import BATCH, WAYS, WIDTH, offered
from shim.metrics import from_torchmetrics
from tests.fixtures import CLASSES, Lin, Rows, device_called, has_batch_eval_metrics
from tests.markdown import with_made
from tests.unit.test_import import on_releases

ROOT = Path(__file__).parents[2]
TOX = (ROOT / "tox.ini").read_text()
RESULTS = report.recorded()


@pytest.mark.parametrize("limit", report.limits(RESULTS), ids=lambda limit: f"{limit.what}, {limit.release}")
def test_what_was_measured_holds_what_is_promised(limit):
    assert limit.holds, limit


def test_a_broken_promise_would_be_found():
    worse = json.loads(json.dumps(RESULTS))
    newest = next(iter(worse.values()))
    newest["memory"]["shim"]["32000"] += 31
    newest["off"]["added calls"]["evaluation"]["100"] += 90
    broken = {limit.what for limit in report.limits(worse) if not limit.holds}
    assert broken >= {"off: added calls a batch", "peak, 32,000 rows: shim to native"}
    assert "memory a row, 3,000 to 32,000 rows: shim, batch_eval_metrics (bytes)" in broken


@pytest.mark.parametrize("path", report.PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_pages_show_what_was_recorded(path):
    text = path.read_text()
    assert report.page(text, RESULTS) == text, "stale tables: python -m benchmarks.report"
    assert set(re.findall(r"made by benchmarks/report.py: (\w+) ", text)) <= set(report.MADE)


@pytest.mark.parametrize("chart", [report.MEMORY_CHART, report.TIME_CHART], ids=lambda path: path.name)
def test_the_charts_are_drawn_from_what_was_recorded(chart):
    assert report.digest().encode() in chart.read_bytes(), "stale chart: python -m benchmarks.report"


def test_the_releases_measured_are_those_of_the_environment():
    environment = TOX.split("[testenv:bench]")[1]
    (demo,) = re.findall(r"transformers==([\d.]+)", TOX.split("[testenv:demo]")[1].split("[testenv:")[0])
    assert set(RESULTS) == {demo, *re.findall(r"-e tf([\d.]+)-", environment)}


def test_the_report_and_the_measurements_mean_the_same():
    assert list(report.LABELS) == list(WAYS) == list(report.STYLES)
    assert {name: way.label for name, way in WAYS.items()} == report.LABELS
    assert (report.BATCH, report.ROW_BYTES) == (BATCH, 4 * WIDTH)


@pytest.mark.stock
class TestMeasurements:
    """Each of them, on this release, as small as it can be."""

    @on_releases("4.49.0")
    def test_a_peak_is_a_figure_for_each_way(self):
        with mock.patch.object(memory, "offered", lambda: ["stock", "shim"]):
            peaks = memory.measure([3 * BATCH])
        assert list(peaks) == ["stock", "shim"]
        assert peaks["stock"][str(3 * BATCH)] > 1.5 * peaks["shim"][str(3 * BATCH)] > 0

    def test_a_time_is_a_ratio_for_each_way_but_the_reference(self):
        with mock.patch.multiple(seconds, BUDGET=0, LEAST=dict.fromkeys(WAYS, 2)):
            found = seconds.ratios(rows=12, width=CLASSES, batch=4)
        assert sorted(found) == sorted(offered())
        reference = "native" if has_batch_eval_metrics() else "shim"
        assert [way for way, case in found.items() if "ratios" not in case] == [reference]
        assert all(case["turns"] == 2 for way, case in found.items() if way != reference)

    def test_the_ways_that_keep_all_rows_are_left_out_where_they_are_many(self):
        with mock.patch.multiple(seconds, BUDGET=0, LEAST=dict.fromkeys(WAYS, 1), MOST_ROWS_KEPT=11):
            assert {"stock", "accumulate"}.isdisjoint(seconds.ratios(rows=12, width=CLASSES, batch=4))

    def test_a_cost_is_counted_and_timed(self):
        with mock.patch.multiple(off, BUDGET=0, LEAST=2):
            found = off.costs()
        assert report.calls_a_batch(found["added calls"]["evaluation"]) == 0
        assert found["time"]["evaluation"]["turns"] == found["time"]["training"]["turns"] == 2
        assert list(found["calls"]) == list(offered())

    def test_a_way_that_loses_rows_is_told(self):
        evaluation = seconds.Evaluation("stock", rows=4, width=CLASSES)
        evaluation._trainer.eval_dataset = Rows(3)
        with pytest.raises(AssertionError, match="counted 3 of 4 rows"):
            evaluation.run()


class TestTurns:
    def test_the_order_changes_and_the_first_of_each_does_not_count(self):
        order = []

        def work(name):
            return lambda: order.append(name) or len(order)

        turns = in_turns(work("ours"), work("reference"), budget=0, least=2)
        assert order == ["ours", "reference", "reference", "ours", "ours", "reference"]
        assert turns == Turns([4, 5], [3, 6])

    def test_ratios_are_those_of_pairs(self):
        turns = Turns([1.0, 4.0, 9.0], [1.0, 2.0, 3.0])
        assert turns.ratios() == [1.5, 2.0, 2.5]
        assert turns.ratio_of_lower_quartiles() == pytest.approx(2.5 / 1.5, abs=1e-4)


def test_a_mark_that_is_missing_in_a_page_is_told():
    with pytest.raises(ValueError, match="expected the marks"):
        with_made("text", "<!-- begin -->", "made")
    with pytest.raises(ValueError, match="only the first"):
        with_made("text <!-- begin --> text", "<!-- begin -->", "made")


class TestCudaCache:
    """What measures the clears, on a CPU with stand-ins for the device and for what torch.cuda tells."""

    STEPS, EVAL_BATCHES = 3, 5

    @pytest.fixture(autouse=True)
    def card(self):
        told = {
            "synchronize": lambda: None,
            "memory_reserved": lambda: 3 * 2**30,
            "memory_allocated": lambda: 2**30,
            "max_memory_reserved": lambda: 4 * 2**30,
            "max_memory_allocated": lambda: 2 * 2**30,
            "reset_peak_memory_stats": lambda: None,
            "memory_stats": lambda: {"num_alloc_retries": 7},
        }
        with device_called("cuda") as self.clears, mock.patch.multiple(torch.cuda, **told):
            yield

    def subject(self, model=Lin):
        metric = MetricCollection({"rows": SumMetric()})
        return cuda_cache.Subject(
            model, Rows, lambda: from_torchmetrics(metric, lambda p: (torch.ones(len(p.label_ids)),)), batch=2
        )

    def run(self, policy, subject=None):
        sizes = {"steps": self.STEPS, "eval_batches": self.EVAL_BATCHES}
        return cuda_cache.run(subject or self.subject(), policy, **sizes)

    @pytest.mark.parametrize(
        ("policy", "clears"),
        [
            ("around_eval", 4),
            ("eval", 2 * EVAL_BATCHES),
            ("train", 2 * STEPS),
            ("always", 2 * STEPS + 2 * EVAL_BATCHES),
            ("always, every 10th step", 0),
        ],
    )
    def test_a_run_clears_as_its_policy_says(self, policy, clears):
        by_accelerate = self.run("never")["clears"]  # as training begins, on some of its releases
        assert by_accelerate <= 1
        found = self.run(policy)
        assert list(found) == list(cuda_cache.FIGURES)
        assert found["clears"] == clears + by_accelerate
        assert set(self.clears) <= {"cuda"}
        assert (found["peak reserved"], found["mean allocated"], found["retries"]) == (4, 1, 0)

    def test_a_run_that_goes_out_of_memory_is_a_finding(self):
        class Hungry(Lin):
            def forward(self, x, labels=None):
                if self.training:
                    raise torch.cuda.OutOfMemoryError("stand-in")
                return super().forward(x, labels)

        assert self.run("never", self.subject(Hungry)) == {"out of memory after": 0}

    def test_the_table_and_the_chart_show_every_policy(self, tmp_path):
        sizes = {"steps": self.STEPS, "eval_batches": self.EVAL_BATCHES}
        runs = cuda_cache.in_rounds(self.subject(), budget=0, **sizes)
        assert all(len(of_policy) == 1 for of_policy in runs.values())
        case = {policy: cuda_cache.medians(of_policy) for policy, of_policy in runs.items()}
        case["eval"] = cuda_cache.medians([case["eval"], {"out of memory after": 2}])
        found = {"device": "a stand-in", "versions": {"torch": "2"}, "rounds": {}, "cases": {"small": case}}
        table = cuda_cache.table(found)
        assert all(f"| {policy} | " in table for policy in cuda_cache.POLICIES)
        assert "| eval | out of memory after 2 steps | -" in table
        pytest.importorskip("matplotlib")
        cuda_cache.draw(found, tmp_path / "chart.png")
        assert (tmp_path / "chart.png").stat().st_size > 10_000

    @on_releases("5.12.1", "5.24.0")
    def test_the_models_are_what_they_are_said_to_be(self):
        with torch.device("meta"):
            model = cuda_cache.language_model()
        assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(341e6, rel=0.01)
        small = cuda_cache.language_model(layers=1, width=64, vocabulary=50)
        batch = cuda_cache.padded([cuda_cache.Sequences(3, 50, longest=16)[row] for row in range(3)])
        logits = small(**batch).logits
        predicted, labels = cuda_cache.next_token(SimpleNamespace(predictions=logits, label_ids=batch["labels"]))
        assert len(predicted) == len(labels) == int(batch["attention_mask"].sum()) - 3
        pictures = [cuda_cache.Pictures(5, side=32, different=2)[row] for row in range(2)]
        batch = {name: torch.stack([picture[name] for picture in pictures]) for name in pictures[0]}
        output = cuda_cache.segformer()(**batch)
        classes, masks = cuda_cache.quarter_pixels(
            SimpleNamespace(predictions=output.logits, label_ids=batch["labels"])
        )
        assert classes.shape == masks.shape == (2, 8, 8)


def test_without_a_gpu_the_benchmark_of_clears_says_so_and_measures_nothing(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    cuda_cache.main([])
    assert "No CUDA device was found" in capsys.readouterr().out
