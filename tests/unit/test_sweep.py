"""The sweep over all releases: what it installs, what it makes of a report, and that it goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
from packaging.version import Version

from shim.compat import NEWEST_TESTED, OLDEST_SUPPORTED
from tests import sweep
from tests.markdown import END, with_made

TOX = (Path(__file__).parents[2] / "tox.ini").read_text()
REPORT = """
<testsuites><testsuite>
  <testcase classname="tests.unit.test_a" name="passes"/>
  <testcase classname="tests.unit.test_a" name="skips"><skipped message="why"/></testcase>
  <testcase classname="tests.unit.test_a" name="fails"><failure message="why"/></testcase>
  <testcase classname="tests.unit.test_a" name="breaks"><error message="why"/></testcase>
</testsuite></testsuites>
"""


def test_the_lanes_span_the_supported_range():
    lanes = sweep.lanes(TOX)
    assert (lanes[0].release, lanes[-1].release) == (Version(OLDEST_SUPPORTED), Version(NEWEST_TESTED))
    assert all("pytest>=8" in lane.requirements for lane in lanes)


@pytest.mark.parametrize(
    ("release", "companions"),
    [
        ("4.39.0", {"transformers==4.39.0", "accelerate==0.28.0", "numpy<2"}),
        ("4.44.2", {"transformers==4.44.2", "accelerate==0.33.0", "numpy<2"}),
        ("4.45.1", {"transformers==4.45.1", "accelerate==1.0.1", "numpy<2"}),
        ("4.46.0", {"transformers==4.46.0", "accelerate==1.1.1", "numpy>=2"}),
        ("5.30.0", {"transformers==5.30.0", "accelerate==1.15.0", "numpy>=2", "torch>=2.13,<2.14"}),
    ],
)
def test_a_release_gets_what_the_lane_next_to_it_has(release, companions):
    requirements = sweep.requirements_for(release, sweep.lanes(TOX))
    assert companions <= set(requirements)
    assert len([name for name in requirements if name.startswith("accelerate")]) == 1


def test_a_report_is_counted_and_its_failures_are_named():
    assert sweep.outcome(REPORT) == {
        "passed": 1,
        "skipped": 1,
        "failed": ["tests.unit.test_a.fails", "tests.unit.test_a.breaks"],
    }


@pytest.mark.parametrize(
    ("result", "green"),
    [
        ({"passed": 3, "skipped": 1, "failed": []}, True),
        ({"passed": 3, "skipped": 1, "failed": ["x"]}, False),
        ({"passed": 0, "skipped": 4, "failed": []}, False),
        ({"error": "not installed"}, False),
    ],
)
def test_green_is_what_ran_and_did_not_fail(result, green):
    assert sweep.is_green(result) is green


def test_the_table_names_what_is_not_green():
    green = {"passed": 5, "skipped": 1, "failed": []}
    results = {"5.0.0": green, "4.40.1": {**green, "failed": ["a.b", "c.d"]}, "4.40.0": {**green, "passed": 6}}
    lines = sweep.table(results).splitlines()[2:]
    assert lines == [
        "| 4.40 | 4.40.0 to 4.40.1: 2 | 5 to 6 | 1 | 4.40.1: 2 failed, a.b for one |",
        "| 5.0 | 5.0.0 | 5 | 1 | all green |",
        "",
        "2 of 3 releases are green.",
    ]


def test_the_table_of_the_readme_is_made_from_what_is_recorded():
    text = sweep.README.read_text()
    recorded = json.loads(sweep.RESULTS.read_text())
    assert with_made(text, sweep.BEGIN, sweep.table(recorded)) == text, "stale table: tox run -e sweep"


class TestResuming:
    @pytest.fixture(autouse=True)
    def runs(self, tmp_path):
        self.path, self.ran = tmp_path / "sweep.json", []

        def run(release, requirements):
            self.ran.append(release)
            failed = ["a.b"] if release == "4.40.0" else []
            return {"passed": 5, "skipped": 0, "failed": failed, "seconds": 1}

        index = ["4.39.0", "4.40.0", "5.10.0"]
        readme = tmp_path / "README.md"
        readme.write_text(f"{sweep.BEGIN}{END}")
        stand_ins = {"run": run, "RESULTS": self.path, "releases": lambda: index, "digest": lambda: self.sources}
        stand_ins["README"] = readme
        self.sources = "one"
        with mock.patch.multiple(sweep, **stand_ins):
            yield

    def sweep(self, *named):
        self.ran.clear()
        with pytest.raises(SystemExit, match=r"Not green: 4\.40\.0"):
            sweep.main(list(named))
        return sorted(self.ran)

    def test_what_fails_without_the_shim_as_well_is_told_and_is_no_failure(self, capsys):
        with mock.patch.dict(sweep.UPSTREAM, {"4.40.0": ("a.b", "it cannot count")}):
            sweep.main([])
        assert "4.40.0: it cannot count" in capsys.readouterr().out

    def test_what_is_recorded_is_not_run_again_unless_named_or_changed(self):
        assert self.sweep() == ["4.39.0", "4.40.0", "5.10.0"]
        assert list(json.loads(self.path.read_text())) == ["4.39.0", "4.40.0", "5.10.0"]
        assert self.sweep() == []
        assert self.sweep("4.39.0") == ["4.39.0"]
        self.sources = "two"
        assert self.sweep() == ["4.39.0", "4.40.0", "5.10.0"]
