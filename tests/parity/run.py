"""Run every scenario in the given implementations: `python -m tests.parity.run FOLDER IMPLEMENTATION...`.

Each implementation, and each rank of a scenario over several processes, is a process of its own. They are forked from
this one, which has imported everything and run nothing, because the import takes longer than the scenarios.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch

import shim
from tests.parity.record import NotOffered
from tests.parity.scenarios import SCENARIOS, SHIM, Bench


def recorded(implementation: str, name: str) -> Optional[Dict[str, Any]]:
    """The record of a scenario, or None where the implementation does not offer what it is about."""
    bench = Bench(implementation)
    torch.manual_seed(0)
    try:
        with bench.record.watching():
            SCENARIOS[name].run(bench)
    except NotOffered:
        return None
    return bench.record.as_json()


def write_records(implementation: str, processes: int, output: Path, environment: Dict[str, str]) -> None:
    """Run the scenarios of so many processes, in this one."""
    os.environ.update(environment)
    if implementation == SHIM:
        shim.apply()
    names = [name for name, scenario in SCENARIOS.items() if scenario.processes == processes]
    output.write_text(json.dumps({name: recorded(implementation, name) for name in names}))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def forked(work: Callable[..., None], *arguments: Any) -> int:
    """Number of a child process that does `work` and leaves."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    # Not sys.exit: threads of gloo that still run when the interpreter is torn down abort the process now and then.
    sys.stderr.flush()
    os._exit(status)


def ranks_of(processes: int) -> List[Dict[str, str]]:
    """The environment that torchrun would give to each of so many processes; nothing for one that is alone."""
    if processes == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    common.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # gloo looks the host's name up, which a machine without a network may not know
    if Path("/sys/class/net/lo").exists():
        common["GLOO_SOCKET_IFNAME"] = "lo"
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def main(folder: Path, implementations: List[str]) -> int:
    """0 if every process has written its records to `folder`, as IMPLEMENTATION-PROCESSES-RANK.json."""
    statuses = []
    for implementation in implementations:
        for processes in sorted({scenario.processes for scenario in SCENARIOS.values()}):
            outputs = [folder / f"{implementation}-{processes}-{rank}.json" for rank in range(processes)]
            children = [
                forked(write_records, implementation, processes, output, environment)
                for output, environment in zip(outputs, ranks_of(processes))
            ]
            statuses += [os.waitpid(child, 0)[1] for child in children]
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
