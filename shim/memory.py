"""How much memory an evaluation that keeps all logits is going to take: asked for, or told before it is gone."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
import weakref
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from tqdm.auto import tqdm

from shim.nested import tensors
from shim.shadow import Shadow

WARNING_SETTING = "SHIM_MEMORY_WARNING"
"""Environment variable: with "0", no evaluation is watched."""

_MIB = 2**20
# The tensors of a nested structure: shape, and bytes of an element
_Structure = List[Tuple[Tuple[int, ...], int]]


class Held(NamedTuple):
    """What one evaluation holds at its most."""

    device: int
    """Bytes on the accelerator; 0 on a CPU."""
    host: int
    """Bytes of RAM."""
    disk: int = 0


class MemoryEstimate(NamedTuple):
    """What `estimate_eval_memory` returns. Sizes are in bytes, for each process, beyond what the model itself takes."""

    rows: int
    """In the whole set, over all processes: each of them keeps all."""
    bytes_per_row: int
    """Of predictions, labels, losses, and inputs where they are asked for; padded to the longest row."""
    device: str
    strategies: Dict[str, Held]
    """By what has to be set: "as it is", "eval_accumulation_steps=1", "batch_eval_metrics=True", "spool"."""

    def __str__(self) -> str:
        table: List[Tuple[str, ...]] = [("to set", self.device, "RAM", "disk")]
        table += [(name, *map(_size, held)) for name, held in self.strategies.items()]
        if self.device == "cpu":
            table = [(name, *others) for name, _, *others in table]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table]
        return "\n".join([f"{self.rows:,} rows, {_size(self.bytes_per_row)} each", *lines])


def estimate_eval_memory(trainer: Any, dataset: Any = None) -> MemoryEstimate:
    """What `trainer.evaluate(dataset)` would keep, in the ways there are. Runs the model on one batch.

    The loader is gone through once, for the length of the longest row: that is what an evaluation pads all rows to.

    Args:
        trainer: a Trainer; the shim need not be applied.
        dataset: an evaluation set; by default the Trainer's own.

    Raises:
        ValueError: the set has no length, or no batch.
    """
    loader = trainer.get_eval_dataloader(dataset)
    rows = _rows_of(loader)
    if not rows:
        raise ValueError(
            "estimate_eval_memory expected an evaluation set with a length and at least one row, found "
            f"{type(getattr(loader, 'dataset', loader)).__name__}: give dataset=, a part of it with a known length."
        )
    first: Any = None
    longest: Dict[int, int] = {}
    for batch in tqdm(loader, desc="Lengths of the rows", leave=False, disable=trainer.args.disable_tqdm):
        if first is None:
            first = batch
            lengths = [_length(tensor) for tensor in tensors(batch)]
        for length, now in zip(lengths, map(_length, tensors(batch))):
            longest[length] = max(longest.get(length, 0), now)
    watch = _Watch(trainer)
    batched = [Shadow(trainer.args, "batch_eval_metrics", False)] if hasattr(trainer.args, "batch_eval_metrics") else []
    with contextlib.ExitStack() as stack:
        # The stock loop may put another in place of it.
        stack.callback(setattr, trainer, "gather_function", trainer.gather_function)
        for shadow in (
            *batched,
            Shadow(trainer, "compute_metrics", None),
            Shadow(trainer.callback_handler, "on_prediction_step", lambda args, state, control: control),
            watch.shadow,
        ):
            shadow.put_on()
            stack.callback(shadow.take_off)
        trainer.evaluation_loop([first], description="Memory estimate", prediction_loss_only=False)
    return _estimate(trainer, rows, watch.kept, longest)


class Forecast:
    """Warns after the first batch of an evaluation that keeps all of them, where that will be too much.

    Args:
        trainer: the Trainer.
        rows: how many there are to evaluate.
    """

    def __init__(self, trainer: Any, rows: int) -> None:
        self._trainer, self._rows = trainer, rows
        self._watch = _Watch(trainer)
        self.shadow = self._watch.shadow
        """What the loop has to see until the first batch is through."""

    def conclude(self) -> None:
        """To be called when the first batch is through."""
        self._watch.is_over = True
        problem = None
        with contextlib.suppress(Exception):  # an evaluation never fails for what is only a forecast
            problem = _problem(self._trainer, _estimate(self._trainer, self._rows, self._watch.kept, {}))
        if problem is not None:
            warnings.warn(problem, stacklevel=6)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block the stock evaluation loop runs, and nothing else of the shim's."""
        handler = self._trainer.callback_handler

        def on_prediction_step(*positional: Any, **keywords: Any) -> Any:
            heard.take_off()
            self.shadow.take_off()
            self.conclude()
            return handler.on_prediction_step(*positional, **keywords)

        heard = Shadow(handler, "on_prediction_step", on_prediction_step)
        self.shadow.put_on()
        heard.put_on()
        try:
            yield
        finally:
            heard.take_off()
            self.shadow.take_off()


# Not a WeakSet: a Trainer may have an `__eq__` of its user's, and no hash.
_told: Dict[int, weakref.ref[Any]] = {}


def is_told(trainer: Any) -> bool:
    """Whether there has been a forecast for this Trainer: there is one, at its first evaluation."""
    known = _told.get(id(trainer))
    return known is not None and known() is trainer


def forecast_for(trainer: Any, dataloader: Any) -> Optional[Forecast]:
    """A forecast; None where it is turned off, or the number of rows is not known."""
    key = id(trainer)
    _told[key] = weakref.ref(trainer, lambda _: _told.pop(key, None))
    rows = None if os.environ.get(WARNING_SETTING) == "0" else _rows_of(dataloader)
    return Forecast(trainer, rows) if rows else None


class _Watch:
    """Notes the shapes of what the loop gathers: that is what it keeps."""

    def __init__(self, trainer: Any) -> None:
        self.kept: List[_Structure] = []
        self.is_over = False
        self._gather = trainer.gather_function
        self.shadow = Shadow(trainer, "gather_function", self._noting)

    def _noting(self, nested: Any, *positional: Any, **keywords: Any) -> Any:
        gathered = self._gather(nested, *positional, **keywords)
        if not self.is_over:
            self.kept.append([(tuple(tensor.shape), tensor.element_size()) for tensor in tensors(gathered)])
        return gathered


def _rows_of(dataloader: Any) -> Optional[int]:
    """How many rows there are to evaluate; None where that is not known."""
    try:
        return len(dataloader.dataset)
    except Exception:  # whatever a data set's own `__len__` raises
        return None


def _length(tensor: torch.Tensor) -> int:
    return tensor.shape[1] if tensor.ndim > 1 else 0


def _estimate(trainer: Any, rows: int, kept: List[_Structure], longest: Dict[int, int]) -> MemoryEstimate:
    """From the shapes of one gathered batch.

    Args:
        trainer: the Trainer.
        rows: in the whole set.
        kept: the structures that were gathered.
        longest: for each length of a row in that batch, the length in the whole set.
    """
    args = trainer.args
    batch_rows = max((shape[0] for structure in kept for shape, _ in structure if shape), default=1)
    batches = max(1, -(-rows // batch_rows))
    of_batch = [sum(_bytes(shape, element) for shape, element in structure) for structure in kept]
    of_set = [
        sum(_bytes(_lengthened(shape, longest), element) for shape, element in structure) * rows // batch_rows
        for structure in kept
    ]
    batch, whole = sum(of_batch), sum(of_set)
    # While a batch is joined to those before it, what is joined is there twice.
    joins = getattr(args, "eval_do_concat_batches", True) and batches > 1
    peak = whole + batch + (max(of_set, default=0) * (batches - 1) // batches if joins else 0)

    def accumulated(steps: int) -> Held:
        return Held(2 * min(steps, batches) * batch, peak)

    batched = Held(2 * batch, 0)
    unchanged = Held(peak, whole)  # it comes to RAM at the end
    if getattr(args, "batch_eval_metrics", False):
        unchanged = batched
    elif args.eval_accumulation_steps:
        unchanged = accumulated(args.eval_accumulation_steps)
    strategies = {
        "as it is": unchanged,
        "eval_accumulation_steps=1": accumulated(1),
        "batch_eval_metrics=True": batched,
        "spool": Held(2 * batch, batch, whole),
    }
    if args.device.type == "cpu":  # where both are the same memory
        strategies = {name: Held(0, max(of.device, of.host), of.disk) for name, of in strategies.items()}
    return MemoryEstimate(rows, whole // rows, args.device.type, strategies)


def _lengthened(shape: Tuple[int, ...], longest: Dict[int, int]) -> Tuple[int, ...]:
    return shape if len(shape) < 2 else (shape[0], longest.get(shape[1], shape[1]), *shape[2:])


def _bytes(shape: Tuple[int, ...], element: int) -> int:
    return int(torch.Size(shape).numel()) * element


def _problem(trainer: Any, estimate: MemoryEstimate) -> Optional[str]:
    needed = estimate.strategies["as it is"]
    free = Held(_free_on(trainer.args.device), _free_host())
    lacking = [
        f"{_size(need)} {where}, where {_size(there)} are free"
        for need, there, where in zip(needed, free, (f"on {estimate.device}", "of RAM"))
        if need > there >= 0
    ]
    if not lacking:
        return None
    accumulating = estimate.strategies["eval_accumulation_steps=1"]
    helps = [
        "batch_eval_metrics=True keeps one batch, with a compute_metrics that takes compute_result",
        "shim.metrics.spool(compute_metrics) with it keeps the rest on disk, for one that takes all rows at once",
        "preprocess_logits_for_metrics can shrink the logits, to classes for one",
    ]
    if needed.device and not trainer.args.eval_accumulation_steps and accumulating.host <= free.host:
        helps.append("eval_accumulation_steps moves them to RAM")
    return (
        f"This evaluation keeps what it gathers of all {estimate.rows:,} rows, {_size(estimate.bytes_per_row)} each: "
        f"that needs {' and '.join(lacking)}. What helps: {'; '.join(helps)}. ({WARNING_SETTING}=0 in the environment "
        "turns this forecast off.)"
    )


def _free_on(device: Any) -> int:
    """Bytes that are free on an accelerator, in its allocator's cache included; -1 where that is not known."""
    if device.type != "cuda":
        return -1
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _free_host() -> int:
    """Bytes of RAM that are free, to this machine and to this container; -1 where that is not known."""
    found = [value for value in (_available(), _free_in_container()) if value is not None]
    return min(found, default=-1)


def _available() -> Optional[int]:
    try:
        import psutil  # accelerate brings it
    except ImportError:
        return None
    return int(psutil.virtual_memory().available)


def _free_in_container() -> Optional[int]:
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        of_files = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.M)
    except (OSError, ValueError):  # no limit ("max"), or no control groups
        return None
    return max(0, limit - used + (int(of_files[1]) if of_files else 0))


def _size(count: int) -> str:
    if count < _MIB:
        return f"{count / 1024:,.1f} KiB" if count >= 1024 else f"{count} B"
    return f"{count / _MIB:,.1f} MiB" if count < 100 * 1024 * _MIB else f"{count / _MIB / 1024:,.0f} GiB"
