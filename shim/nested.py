"""Nested structures of tensors: lists, tuples and mappings, as models return them."""

from __future__ import annotations

from typing import Any, List

import torch
from accelerate.utils import recursively_apply


def tensors(nested: Any) -> List[torch.Tensor]:
    """The tensors of a nested structure, in its order; what is no tensor is left out."""
    found: List[torch.Tensor] = []
    recursively_apply(found.append, nested)
    return found
