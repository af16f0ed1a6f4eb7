"""Runs the scenarios in every implementation that the installed release has, and compares what they recorded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

from transformers import TrainingArguments

from tests.parity.record import ASPECTS
from tests.parity.scenarios import NATIVE, PATCH, SCENARIOS, SHIM, STOCK

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 600
# What a call with all predictions at once has in common with calls batch by batch
_OF_ONE_SHOT = ("metrics", "keys", "predictions", "error")

Aspects = Dict[Tuple[str, str], Tuple[str, ...]]  # (implementation, scenario) -> in what it differs from the shim
Records = Dict[str, Dict[str, Any]]  # scenario -> its record, or None where it is not offered


class Disagreement(NamedTuple):
    """What an implementation does otherwise than the shim."""

    implementation: str
    scenario: str
    aspects: Tuple[str, ...]


def run_all(patched_tree: Optional[Path]) -> Dict[str, Records]:
    """The records of each implementation.

    Args:
        patched_tree: folder to import the patched transformers from, where the release has a series.

    Raises:
        RuntimeError: a process has failed, with the end of what it wrote.
    """
    unpatched = [STOCK, SHIM, *([NATIVE] if "batch_eval_metrics" in TrainingArguments.__dataclass_fields__ else [])]
    with tempfile.TemporaryDirectory(prefix="shim-parity-") as name:
        folder = Path(name)
        started = [_start(folder, unpatched, [])]
        if patched_tree is not None:
            started.append(_start(folder, [PATCH], [str(patched_tree)]))
        try:
            for process, log in started:
                if process.wait(TIMEOUT_SECONDS):
                    raise RuntimeError(f"{log.stem} failed:\n{log.read_text()[-4000:]}")
        finally:
            for process, _ in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # ranks that wait for one that has failed, too
        return {
            implementation: _merged(folder, implementation)
            for implementation in (*unpatched, *([PATCH] if patched_tree else []))
        }


def _start(folder: Path, implementations: List[str], path: List[str]) -> Tuple[subprocess.Popen[bytes], Path]:
    log = folder / f"{implementations[0]}.log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.parity.run", str(folder), *implementations]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    return process, log


def _merged(folder: Path, implementation: str) -> Records:
    """The records of all scenarios; those of several processes as one, with a list of all ranks for each aspect."""
    records: Records = {}
    for processes in {scenario.processes for scenario in SCENARIOS.values()}:
        files = [folder / f"{implementation}-{processes}-{rank}.json" for rank in range(processes)]
        ranks = [json.loads(file.read_text()) for file in files]
        for name, first in ranks[0].items():
            if processes == 1 or first is None:
                records[name] = first
            else:
                records[name] = {aspect: [rank[name][aspect] for rank in ranks] for aspect in ASPECTS}
    return records


def disagreements(records: Dict[str, Records]) -> List[Disagreement]:
    """Where an implementation that offers a scenario does not do what the shim does, and in what."""
    found = []
    for implementation, own in records.items():
        for name, scenario in SCENARIOS.items():
            if own[name] is None:
                continue
            compared = _OF_ONE_SHOT if implementation == STOCK and scenario.group != "off" else ASPECTS
            aspects = tuple(aspect for aspect in compared if own[name][aspect] != records[SHIM][name][aspect])
            if aspects:
                found.append(Disagreement(implementation, name, aspects))
    return found


def unannounced(found: List[Disagreement], announced: Aspects) -> Aspects:
    """Disagreements that the table does not have, or has with other aspects."""
    return {
        (implementation, scenario): aspects
        for implementation, scenario, aspects in found
        if aspects != announced.get((implementation, scenario))
    }


def unexpectedly_alike(found: List[Disagreement], announced: Aspects) -> Set[Tuple[str, str]]:
    """Entries of the table that are not true."""
    return set(announced) - {(implementation, scenario) for implementation, scenario, _ in found}
