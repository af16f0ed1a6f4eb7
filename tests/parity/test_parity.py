"""The matrix: shim, patched tree and stock Trainer over the same scenarios, compared to the bit."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

from patches.series import SeriesError, installed_release, series_for
from tests.markdown import with_made
from tests.parity import report
from tests.parity.differences import announced
from tests.parity.matrix import Disagreement, disagreements, run_all, unannounced, unexpectedly_alike
from tests.parity.record import ASPECTS
from tests.parity.scenarios import NATIVE, PATCH, SCENARIOS, SHIM, STOCK

TOX = Path(__file__).parents[2] / "tox.ini"


def has_series() -> bool:
    try:
        series_for(installed_release())
    except SeriesError:
        return False
    return True


@pytest.fixture(scope="module")
def records(request):
    tree = request.getfixturevalue("patched_tree") if has_series() else None
    return run_all(tree)


@pytest.fixture(scope="module")
def result(records, request):
    found = report.result_of(records, disagreements(records))
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n" + report.summary(installed_release(), found))
    if request.config.getoption("--refresh-parity"):
        report.record(installed_release(), found)
    return found


def test_the_shim_offers_every_scenario(records):
    assert [name for name, record in records[SHIM].items() if record is None] == []


def test_the_patched_tree_offers_every_scenario(records):
    if PATCH not in records:
        pytest.skip(f"transformers {installed_release()} has no series of patches")
    assert [name for name, record in records[PATCH].items() if record is None] == []


def test_implementations_differ_where_that_is_announced_and_nowhere_else(records):
    found = disagreements(records)
    expected = {place: aspects for place, aspects in announced().items() if place[0] in records}
    assert unannounced(found, expected) == {}, "not in tests/parity/differences.py, or there with other aspects"
    assert unexpectedly_alike(found, expected) == set(), "take these out of tests/parity/differences.py"


class TestTheComparison:
    """It would find what it is for."""

    @pytest.mark.parametrize("aspect", ASPECTS)
    @pytest.mark.parametrize("implementation", [PATCH, NATIVE, STOCK])
    def test_a_difference_in_any_aspect_is_found(self, implementation, aspect):
        ours = {name: {aspect: [1.0] for aspect in ASPECTS} for name in SCENARIOS}
        theirs = copy.deepcopy(ours)
        theirs["prepared_sized"][aspect] = [1.0 + 2**-52]
        found = disagreements({SHIM: ours, implementation: theirs})
        of_one_shot = aspect in ("metrics", "keys", "predictions", "error")
        if implementation == STOCK and not of_one_shot:
            assert found == []
        else:
            assert found == [(implementation, "prepared_sized", (aspect,))]

    def test_with_everything_off_stock_is_compared_in_all_aspects(self):
        ours = {name: {aspect: [] for aspect in ASPECTS} for name in SCENARIOS}
        theirs = copy.deepcopy(ours)
        theirs["off, train"]["events"] = ["clear cuda"]
        assert disagreements({SHIM: ours, STOCK: theirs}) == [(STOCK, "off, train", ("events",))]

    def test_the_table_must_be_true(self):
        found = [Disagreement(NATIVE, "detection", ("metrics",))]
        assert unannounced(found, {(NATIVE, "detection"): ("metrics",)}) == {}
        assert unannounced(found, {}) == unannounced(found, {(NATIVE, "detection"): ("keys",)}) != {}
        assert unexpectedly_alike(found, {(NATIVE, "detection"): ("metrics",)}) == set()
        assert unexpectedly_alike([], {(NATIVE, "detection"): ("metrics",)}) == {(NATIVE, "detection")}


def test_the_recorded_result_of_this_release_is_fresh(result):
    recorded = report.recorded_results().get(installed_release())
    if recorded is None and f"tf{installed_release()}-" not in TOX.read_text():
        pytest.skip(f"transformers {installed_release()} has no lane: its result is not recorded")
    assert recorded == result, f"docs/parity.json is stale: {report.REFRESH}"


def test_every_lane_has_a_recorded_result():
    lanes = set(re.findall(r"^    tf([\d.]+)-", TOX.read_text(), re.M))
    assert lanes == set(report.recorded_results())


def test_the_tables_are_made_from_the_recorded_results():
    results = report.recorded_results()
    readme = report.README.read_text()
    assert with_made(readme, report.BEGIN, report.support_table(results)) == readme, f"stale table: {report.REFRESH}"
    assert report.PAGE.read_text() == report.page(results), f"stale page: {report.REFRESH}"
