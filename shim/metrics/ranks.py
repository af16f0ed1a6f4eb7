"""What metrics of several processes tell each other. Without torch.distributed there is one process."""

from __future__ import annotations

import os
from typing import Any, Callable, List, TypeVar

import torch.distributed as dist

_Value = TypeVar("_Value")


def is_main_process() -> bool:
    """Whether this is the process that writes and reports. Before the processes know each other, the launcher tells."""
    rank = dist.get_rank() if _are_several() else int(os.environ.get("RANK", 0))
    return rank == 0


def from_all(value: _Value) -> List[_Value]:
    """The value of each process, in the order of their ranks. All of them have to call this.

    Args:
        value: anything that can be pickled.
    """
    if not _are_several():
        return [value]
    values: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_main_process(compute: Callable[[], _Value]) -> _Value:
    """What `compute` returns on the main process, which alone calls it, on all of them. All have to call this.

    Raises:
        RuntimeError: on the others, where `compute` has raised on the main process; there the error itself.
    """
    if not _are_several():
        return compute()
    told: List[Any] = [None, None]
    try:
        if is_main_process():
            told[0] = compute()
    except BaseException as error:
        told[1] = f"{type(error).__name__}: {error}"
        raise
    finally:
        dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise RuntimeError(f"The metrics are computed on the main process, and that has failed there: {told[1]}")
    result: _Value = told[0]
    return result


def _are_several() -> bool:
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
