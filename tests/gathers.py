"""What goes from rank to rank."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, List, NamedTuple, Tuple
from unittest import mock

import torch
import torch.distributed


class Handed(NamedTuple):
    """A tensor that this rank has handed to a gather; objects are sent as tensors of their pickles."""

    shape: Tuple[int, ...]
    size: int
    """Bytes."""


@contextlib.contextmanager
def handed_to_gather() -> Iterator[List[Handed]]:
    """Give the list to which each tensor is added that this rank hands to a gather of torch.distributed."""
    handed: List[Handed] = []

    def recording(gather: Any) -> Any:
        def recorded(output: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            handed.append(Handed(tuple(tensor.shape), tensor.numel() * tensor.element_size()))
            return gather(output, tensor, *args, **kwargs)

        return recorded

    with contextlib.ExitStack() as stack:
        for name in ("all_gather", "all_gather_into_tensor"):
            for module in (torch.distributed, torch.distributed.distributed_c10d):
                stack.enter_context(mock.patch.object(module, name, recording(getattr(module, name))))
        yield handed
