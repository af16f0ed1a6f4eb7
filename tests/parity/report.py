"""The matrix as people read it: a summary, docs/parity.json, and the tables that are made from that file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

from packaging.version import Version

from patches.series import known_series
from tests.markdown import with_made
from tests.parity.differences import DIFFERENCES
from tests.parity.matrix import Disagreement, Records
from tests.parity.scenarios import NATIVE, PATCH, SCENARIOS, SHIM, STOCK

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "parity.json"
PAGE = ROOT / "docs" / "parity.md"
README = ROOT / "README.md"
BEGIN = "<!-- made by tests/parity/report.py -->"
REFRESH = "tox run -e LANE -- tests/parity --refresh-parity"

Result = Dict[str, Dict[str, List[int]]]  # implementation -> group -> [scenarios as in the contract, scenarios offered]


def result_of(records: Dict[str, Records], found: List[Disagreement]) -> Result:
    """How many scenarios of each group an implementation handles as the contract says."""
    differing = {(disagreement.implementation, disagreement.scenario) for disagreement in found}
    result: Result = {}
    for implementation, own in records.items():
        groups: Dict[str, List[int]] = {}
        for name, scenario in SCENARIOS.items():
            if own[name] is None:
                continue
            same_and_all = groups.setdefault(scenario.group, [0, 0])
            same_and_all[0] += (implementation, name) not in differing
            same_and_all[1] += 1
        result[implementation] = groups
    return result


def summary(release: str, result: Result) -> str:
    """A table for the terminal: a line for each group, a column for each implementation."""
    columns = [implementation for implementation in (STOCK, NATIVE, PATCH, SHIM) if implementation in result]
    groups = list(dict.fromkeys(scenario.group for scenario in SCENARIOS.values()))
    lines = [f"transformers {release}: scenarios as in the contract, of those that are offered"]
    lines.append(f"{'':26}" + "".join(f"{column:>12}" for column in columns))
    for group in groups:
        cells = [_of(result[column].get(group)) for column in columns]
        lines.append(f"{group:26}" + "".join(f"{cell:>12}" for cell in cells))
    cells = [_of(_total(result[column])) for column in columns]
    return "\n".join([*lines, f"{'all':26}" + "".join(f"{cell:>12}" for cell in cells)])


def _of(same_and_all: Any) -> str:
    return "-" if not same_and_all else "{} of {}".format(*same_and_all)


def _total(groups: Dict[str, List[int]]) -> List[int]:
    return [sum(counts[index] for counts in groups.values()) for index in (0, 1)]


def recorded_results() -> Dict[str, Result]:
    """docs/parity.json: the result of each release that has a lane."""
    results: Dict[str, Result] = json.loads(RESULTS.read_text())
    return results


def record(release: str, result: Result) -> None:
    """Put the result of a release into docs/parity.json, and make the tables anew."""
    results = recorded_results() if RESULTS.exists() else {}
    results[release] = result
    ordered = {release: results[release] for release in sorted(results, key=Version)}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(page(ordered))
    README.write_text(with_made(README.read_text(), BEGIN, support_table(ordered)))


def support_table(results: Dict[str, Result]) -> str:
    """For the README: a line for each release."""
    lines = ["| transformers | stock, at the end | stock, by batch | patched | shim |", "|---|---:|---:|---:|---:|"]
    for release, result in results.items():
        cells = [_of(_total(result[column]) if column in result else None) for column in (STOCK, NATIVE, PATCH, SHIM)]
        lines.append(f"| {release} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(results: Dict[str, Result]) -> str:
    """docs/parity.md: the counts of each release by group, and the table of differences with their reasons."""
    groups = list(dict.fromkeys(group for result in results.values() for group in result[SHIM]))
    text = [
        "# Parity",
        "",
        "Made by `tests/parity/report.py` from `docs/parity.json`; do not edit. Every lane of `tox` runs the same",
        "scenarios (`tests/parity/scenarios.py`) in processes of their own: the Trainer as released with its metrics",
        f"computed once at the end, its `{_OPTION}` (from 4.41), the patched tree, and the shim. Compared to the bit",
        "are metrics, keys, `compute_result` flags, what `compute_metrics` is given, predictions, the order of steps",
        "and cache clears, warnings and error types; for metrics at the end: metrics, keys, predictions and errors.",
        f"Series of patches exist for {', '.join(map(str, known_series()))}.",
        "",
        "A cell says how many scenarios of a group are handled as the contract says, of those that are offered.",
    ]
    for implementation, title in (
        (SHIM, "The shim, and the patched tree where there is a series"),
        (NATIVE, f"`{_OPTION}` as released"),
        (STOCK, "Metrics computed once, at the end"),
    ):
        text += ["", f"## {title}", "", f"| transformers | {' | '.join(groups)} |", f"|---|{'---:|' * len(groups)}"]
        for release, result in results.items():
            if implementation in result:
                cells = [_of(result[implementation].get(group)) for group in groups]
                text.append(f"| {release} | {' | '.join(cells)} |")
    text += ["", "## Where the Trainer as released differs on purpose of ours", ""]
    text += ["| what | scenarios | in | reason |", "|---|---|---|---|"]
    for difference in DIFFERENCES:
        what = {NATIVE: "by batch", STOCK: "at the end"}[difference.implementation]
        scenarios = ", ".join(f"`{pattern}`" for pattern in difference.scenarios)
        text.append(f"| {what} | {scenarios} | {', '.join(difference.aspects)} | {difference.reason} |")
    return "\n".join(text) + "\n"


_OPTION = "batch_eval_metrics"
