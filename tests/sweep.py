"""The core scenarios on every transformers release on the index, each in an environment of its own.

    tox run -e sweep

runs those that docs/sweep.json does not have yet, or has from other sources than these: it can be interrupted, and goes
on where it was. What goes with a release (accelerate, numpy, torch) is what the lane of tox.ini next to it has.
`tox run -e sweep -- 4.44.0 5.1.0` runs these, whatever is recorded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Set

from packaging.version import Version

from shim.compat import OLDEST_SUPPORTED
from tests.markdown import with_made

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "sweep.json"
README = ROOT / "README.md"
BEGIN = "<!-- made by tests/sweep.py -->"
ENVIRONMENTS = ROOT / "build" / "sweep"
AT_A_TIME = 2
PYTHON = "3.11"
CORE = tuple(
    f"tests/unit/test_{name}.py" for name in ("batched_evaluation", "cache_clear", "off", "arguments", "interruptions")
)

# Where the accelerate of the lane below is too old for the stock Trainer: 4.45 trains with none below 1.0, and the
# arguments of 4.56 name a class of 1.10.
BETWEEN_LANES = {"4.45": "accelerate==1.0.1", "4.56": "accelerate==1.10.1"}
# What fails without the shim as well: the test, and the reason.
UPSTREAM = {
    "5.2.0": (
        "tests.unit.test_arguments.Forms.test_help_of_the_parser_can_be_printed",
        "its own HfArgumentParser cannot print its help, with the shim or without",
    )
}

Result = Dict[str, Any]


class Lane(NamedTuple):
    """A line of tox.ini."""

    release: Version
    requirements: List[str]


def lanes(tox: str) -> List[Lane]:
    """The lanes of tox.ini and what they install beside transformers, the oldest release first."""
    deps = re.search(r"^deps =\n((?:    .*\n)+)", tox[tox.index("[testenv]") :], re.M)
    assert deps, "tox.ini: [testenv] has no deps"
    common, by_factor = [], {}
    for line in deps[1].splitlines():
        factor, colon, requirement = line.partition(": ")
        if colon:
            by_factor[factor.strip()] = requirement.strip()
        elif not line.strip().startswith("#"):
            common.append(line.strip())
    named = re.findall(r"^    tf([\d.]+)-(acc[\d.]+)-(np\d)$", tox, re.M)
    return sorted(
        Lane(Version(release), [*common, by_factor[accelerate], by_factor[numpy], by_factor["!torch2.2"]])
        for release, accelerate, numpy in named
    )


def requirements_for(release: str, of: Iterable[Lane]) -> List[str]:
    """What is installed with a release: as in the nearest lane of its minor release, or else in that below it."""
    version, known = Version(release), list(of)
    same_minor = [lane for lane in known if lane.release.release[:2] == version.release[:2]]
    nearest = max(lane for lane in known if lane.release <= version or lane in same_minor)
    beside = BETWEEN_LANES.get(".".join(release.split(".")[:2]))
    kept = [name for name in nearest.requirements if not (beside and name.startswith("accelerate=="))]
    return [f"transformers=={release}", *kept, *([beside] if beside else [])]


def releases() -> List[str]:
    """Those on the index that are final and supported, the oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "transformers", "--json"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        sys.exit(f"The index did not list the releases of transformers. {' '.join(command)} says:\n{listed.stderr}")
    versions = map(Version, json.loads(listed.stdout)["versions"])
    oldest = Version(OLDEST_SUPPORTED)
    return [str(version) for version in sorted(versions) if version >= oldest and not version.is_prerelease]


def digest() -> str:
    """Of the sources that a result depends on."""
    sources = [*sorted((ROOT / "shim").rglob("*.py")), ROOT / "tests/fixtures.py", *(ROOT / path for path in CORE)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def run(release: str, requirements: List[str]) -> Result:
    """Build the environment, run the core scenarios in it, and remove it.

    Returns:
        "passed", "skipped": how many; "failed": the names of those that did; "installed": what went with the release;
        "error": what kept them from running at all; "seconds".
    """
    start, folder = time.monotonic(), ENVIRONMENTS / release
    try:
        result = _run_in(folder, requirements)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {**result, "seconds": round(time.monotonic() - start)}


def _run_in(folder: Path, requirements: List[str]) -> Result:
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    for command in (
        ["uv", "venv", "--quiet", "--clear", "--python", PYTHON, str(folder)],
        ["uv", "pip", "install", "--quiet", "--python", str(python), *requirements],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"error": f"not installed: {done.stderr.strip()[-500:]}"}
    report = folder / "report.xml"
    done = subprocess.run(
        [str(python), "-m", "pytest", *CORE, f"--junitxml={report}", "-p", "no:warnings"],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    if not report.exists():
        return {"error": f"not run: {(done.stdout + done.stderr).strip()[-500:]}"}
    names = ("accelerate", "torch", "numpy")
    versions = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    installed = subprocess.run([str(python), "-c", versions], capture_output=True, text=True, check=True)
    return {**outcome(report.read_text()), "installed": json.loads(installed.stdout)}


def outcome(report: str) -> Result:
    """What a report of pytest's, in the format of JUnit, says."""
    counts: Result = {"passed": 0, "skipped": 0, "failed": []}
    for case in ElementTree.fromstring(report).iter("testcase"):
        kinds = {element.tag for element in case}
        if kinds & {"failure", "error"}:
            counts["failed"].append(f"{case.get('classname')}.{case.get('name')}")
        else:
            counts["skipped" if "skipped" in kinds else "passed"] += 1
    return counts


def is_green(result: Result) -> bool:
    """Whether everything ran that is offered, and nothing failed."""
    return "error" not in result and not result["failed"] and result["passed"] > 0


def in_order(results: Dict[str, Result]) -> Dict[str, Result]:
    """The oldest release first."""
    return {release: results[release] for release in sorted(results, key=Version)}


def table(results: Dict[str, Result]) -> str:
    """For the README: a line for each minor release, and what is not green."""
    by_minor: Dict[str, List[str]] = {}
    for release in in_order(results):
        by_minor.setdefault(".".join(release.split(".")[:2]), []).append(release)
    lines = ["| transformers | releases | core scenarios passed | not offered there | |", "|---|---|---:|---:|---|"]
    for minor, of in by_minor.items():
        span = of[0] if len(of) == 1 else f"{of[0]} to {of[-1]}: {len(of)}"
        broken = [
            f"{release}: {_reason(release, results[release])}" for release in of if not is_green(results[release])
        ]
        counts = [_span({results[release].get(kind, 0) for release in of}) for kind in ("passed", "skipped")]
        lines.append(f"| {minor} | {span} | {' | '.join(counts)} | {'; '.join(broken) or 'all green'} |")
    green = sum(map(is_green, results.values()))
    return "\n".join([*lines, "", f"{green} of {len(results)} releases are green."])


def _span(counts: Set[int]) -> str:
    return str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def reason_of_upstream(release: str, result: Result) -> str:
    """Why a release fails without the shim as well; empty where that is not known, or something else has failed."""
    test, reason = UPSTREAM.get(release, ("", ""))
    return reason if result.get("failed") == [test] else ""


def _reason(release: str, result: Result) -> str:
    known = reason_of_upstream(release, result)
    return known or result.get("error") or f"{len(result['failed'])} failed, {result['failed'][0]} for one"


class Record:
    """docs/sweep.json, written after each release."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.results: Dict[str, Result] = json.loads(path.read_text()) if path.exists() else {}

    def lacks(self, release: str, sources: str) -> bool:
        """Whether there is no result of a release, made from these sources."""
        return self.results.get(release, {}).get("sources") != sources

    def put(self, release: str, result: Result) -> None:
        with self._lock:
            self.results[release] = result
            lines = [f" {json.dumps(name)}: {json.dumps(of)}" for name, of in in_order(self.results).items()]
            self._path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def sweep(wanted: List[str], record: Record, sources: str) -> Iterator[str]:
    """Run the releases, some at a time; a line to show for each that is done."""
    known = lanes((ROOT / "tox.ini").read_text())

    def one(release: str) -> str:
        result = {**run(release, requirements_for(release, known)), "sources": sources}
        record.put(release, result)
        found = result.get("error") or f"{result['passed']} passed, {result['skipped']} skipped"
        failed = "".join(f"\n    failed: {name}" for name in result.get("failed", []))
        return f"{release}: {'green' if is_green(result) else 'NOT GREEN'}, {found}, {result['seconds']} s{failed}"

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        yield from pool.map(one, wanted)


def main(named: List[str]) -> None:
    record, sources = Record(RESULTS), digest()
    wanted = named or [release for release in releases() if record.lacks(release, sources)]
    begin = time.monotonic()
    try:
        for number, line in enumerate(sweep(wanted, record, sources), start=1):
            left = (time.monotonic() - begin) / number * (len(wanted) - number) / 60
            print(f"[{number} of {len(wanted)}, {left:.0f} min left] {line}", flush=True)
    finally:  # also where it is interrupted
        README.write_text(with_made(README.read_text(), BEGIN, table(record.results)))
    broken = {release: result for release, result in record.results.items() if not is_green(result)}
    print(f"{len(record.results)} releases recorded, {len(record.results) - len(broken)} of them green.")
    for release in list(broken):
        reason = reason_of_upstream(release, broken[release])
        if reason:
            print(f"{release}: {reason}")
            del broken[release]
    if broken:
        sys.exit(f"Not green: {', '.join(broken)}. {RESULTS} says what failed.")


if __name__ == "__main__":
    main(sys.argv[1:])
