"""Metrics that need the whole set at once, without the whole set in RAM: batches go to disk and come back mapped."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

import numpy as np
import torch
from accelerate.utils import recursively_apply
from transformers.trainer_pt_utils import nested_numpify
from transformers.trainer_utils import EvalPrediction

from shim.metrics import ranks
from shim.metrics.streaming import StreamingMetric
from shim.nested import tensors

logger = logging.getLogger(__name__)

_PADDING_INDEX = -100
_REMEDY = (
    "With eval_do_concat_batches=False and spool(..., concatenate=False) they stay lists of batches. "
    "(An ordinary evaluation fails here too, or mixes them up.)"
)
_FIELDS = ("predictions", "label_ids", "inputs", "losses")


def spool(
    compute_metrics: Callable[[Any], Dict[str, Any]],
    directory: Optional[str | os.PathLike[str]] = None,
    *,
    concatenate: bool = True,
) -> Spool:
    """A `compute_metrics` for `batch_eval_metrics=True` from one that takes the whole evaluation set.

    Every batch is written to disk. At the end `compute_metrics` is called once, with what an ordinary evaluation would
    have given it: numpy arrays of the same dtypes, shapes, padding (-100) and order, `inputs` and `losses` included.
    They are mapped from the files, so that only the parts in use take memory; they can be written to. With several
    processes the main one writes and computes, and all get its result. The files are gone when the evaluation is over.

    Args:
        compute_metrics: takes an `EvalPrediction`, returns a dict.
        directory: where a private folder for the files is made. Default: that for temporary files, which may be held
            in RAM (`/tmp` is on some machines).
        concatenate: False where the arguments have `eval_do_concat_batches=False`: lists of batches, not padded.

    Raises:
        OSError: `directory` cannot be written to. In an evaluation: the disk is full, or failed otherwise.
    """
    return Spool(compute_metrics, directory, concatenate)


class Spool(StreamingMetric):
    """What `spool` returns."""

    bytes_written = 0
    """By this process in the last evaluation, or so far in this one. It is also logged, at level INFO."""

    def __init__(
        self,
        compute_metrics: Callable[[Any], Dict[str, Any]],
        directory: Optional[str | os.PathLike[str]],
        concatenate: bool,
    ) -> None:
        self._compute_metrics = compute_metrics
        self._directory = directory
        self._concatenate = concatenate
        self._remove_folder: Callable[[], Any] = _nothing
        self._folder: Optional[Path] = None
        self._whole: Any = None  # what an ordinary evaluation gives: it is in RAM already
        self._fields: Dict[str, _Concatenated | _Listed] = {}
        self._batches = 0
        if ranks.is_main_process():
            self._make_folder()  # better an error now than after an epoch of training
            self.reset()

    def reset(self) -> None:
        for field in self._fields.values():
            with contextlib.suppress(OSError):  # a full disk once more, and the file goes anyway
                field.close()
        self._fields = {}
        self._batches = 0
        self._whole = self._folder = None
        self._remove_folder()

    def update(self, eval_pred: Any) -> None:
        if not ranks.is_main_process():
            return
        if not tensors(eval_pred.predictions):
            self._whole = eval_pred
            return
        folder = self._folder or self._make_folder()
        for name in _FIELDS:
            nested = getattr(eval_pred, name, None)
            if nested is None:
                continue
            if name not in self._fields:
                self._fields[name] = (_Concatenated if self._concatenate else _Listed)(folder, name)
            with self._explained(f"write the {name} to {folder}"):
                self.bytes_written += self._fields[name].append(nested)
        self._batches += 1

    def compute(self) -> Dict[str, Any]:
        return ranks.on_main_process(self._compute)

    def _compute(self) -> Dict[str, Any]:
        if self._whole is not None:
            return self._compute_metrics(self._whole)
        mapped = {}
        for name, field in self._fields.items():
            with self._explained(f"prepare the {name}"):
                mapped[name], written = field.mapped()
                self.bytes_written += written
        logger.info("spool() wrote %.1f MiB in %d batches.", self.bytes_written / 2**20, self._batches)
        return self._compute_metrics(EvalPrediction(**mapped))

    def _make_folder(self) -> Path:
        self.bytes_written = 0
        with self._explained("make a folder"):
            self._folder = Path(tempfile.mkdtemp(prefix="shim-spool-", dir=self._directory))
        # Also when this object goes, or Python ends. Where a mapped file cannot be removed, it stays until then.
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    @contextlib.contextmanager
    def _explained(self, attempt: str) -> Iterator[None]:
        """An OSError within the block gets a message that says what to do."""
        try:
            yield
        except OSError as error:
            place = self._directory or tempfile.gettempdir()
            try:
                free = f"{shutil.disk_usage(place).free / 2**20:,.0f} MiB are free there"
            except OSError:
                free = "it is not there"
            raise OSError(
                error.errno,
                f"spool() could not {attempt}, after {self.bytes_written / 2**20:,.1f} MiB: {error.strerror or error}. "
                f"The folder is in {os.fspath(place)}; {free}. Give spool(..., directory=) one that exists, can be "
                "written to and has room for all logits of the evaluation set",
            ) from error


class _File:
    """Arrays, one after another in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._arrays: List[Any] = []  # (shape, dtype, offset)
        self.size = 0

    def append(self, array: np.ndarray[Any, Any]) -> int:
        """Returns how many bytes that took."""
        padding = -self.size % array.itemsize
        self._file.write(b"\0" * padding)
        self._arrays.append((array.shape, array.dtype, self.size + padding))
        self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        self.size += padding + array.nbytes
        return int(padding + array.nbytes)

    def close(self) -> None:
        self._file.close()

    def arrays(self) -> List[np.ndarray[Any, Any]]:
        """The arrays, mapped."""
        buffer = self._mapped()
        return [np.ndarray(shape, dtype, buffer, offset) for shape, dtype, offset in self._arrays]

    def joined(self, shape: Any, dtype: np.dtype[Any]) -> tuple[np.ndarray[Any, Any], int]:
        """The arrays as one of this shape and dtype, mapped; and how many bytes had to be written for that.

        Each has its own rows, and in dimension 1 its own length; what is missing there is filled up.
        """
        if all(found[1:] == shape[1:] and kind == dtype for found, kind, _ in self._arrays):
            return np.ndarray(shape, dtype, self._mapped()), 0
        widened = _File(self._path.with_suffix(".widened"))
        try:
            for array in self.arrays():
                rows = np.full((len(array), *shape[1:]), _PADDING_INDEX, dtype)
                rows[tuple(slice(length) for length in array.shape)] = array
                widened.append(rows)
            return widened.joined(shape, dtype)[0], widened.size
        finally:
            widened.close()

    def _mapped(self) -> np.ndarray[Any, Any]:
        self._file.close()
        if not self.size:
            return np.empty(0, np.uint8)  # an empty file cannot be mapped
        return np.memmap(self._path, np.uint8, "r+").view(np.ndarray)


class _Concatenated:
    """A nested structure of tensors whose batches become one, padded as the stock Trainer pads them."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._outline: Any = None
        self._columns: List[_Column] = []

    def append(self, nested: Any) -> int:
        outline, leaves = _outline(nested), tensors(nested)
        if not self._columns:
            self._outline = outline
            self._columns = [_Column(self._folder / f"{self._name}-{number}") for number in range(len(leaves))]
        if outline != self._outline:
            raise ValueError(
                f"spool() expected the {self._name} of each batch to have the structure of the first, {self._outline}, "
                f"found {outline}. {_REMEDY}"
            )
        try:
            return sum(column.append(tensor) for column, tensor in zip(self._columns, leaves))
        except ValueError as error:
            raise ValueError(f"spool() cannot join the {self._name} of all batches: {error}. {_REMEDY}") from error

    def mapped(self) -> tuple[Any, int]:
        joined = [column.joined() for column in self._columns]
        return _filled(self._outline, iter(array for array, _ in joined)), sum(written for _, written in joined)

    def close(self) -> None:
        for column in self._columns:
            column.close()


class _Column:
    """One tensor of the structure, and what concatenating it over all batches gives."""

    def __init__(self, path: Path) -> None:
        self._file = _File(path)
        self._shape: tuple[int, ...] = ()
        self._dtype: Any = None

    def append(self, tensor: torch.Tensor) -> int:
        tensor = tensor if tensor.ndim else tensor[None]
        if self._dtype is None:
            self._shape, self._dtype = tuple(tensor.shape), tensor.dtype
        else:
            self._join(tuple(tensor.shape), tensor.dtype)
        return self._file.append(nested_numpify(tensor))

    def _join(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """As `nested_concat` of transformers does it: rows add up, and dimension 1 is that of the longest."""
        if len(shape) != len(self._shape) or shape[2:] != self._shape[2:]:
            raise ValueError(f"found one of shape {shape} after {self._shape}")
        if shape[1:] == self._shape[1:]:
            self._dtype = torch.promote_types(self._dtype, dtype)
        self._shape = (self._shape[0] + shape[0], *map(max, self._shape[1:], shape[1:]))

    def joined(self) -> tuple[np.ndarray[Any, Any], int]:
        return self._file.joined(self._shape, nested_numpify(torch.empty(0, dtype=self._dtype)).dtype)

    def close(self) -> None:
        self._file.close()


class _Listed:
    """A nested structure of tensors whose batches become a list."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = _File(folder / name)
        self._outlines: List[Any] = []

    def append(self, nested: Any) -> int:
        self._outlines.append(_outline(nested))
        return sum(self._file.append(nested_numpify(tensor)) for tensor in tensors(nested))

    def mapped(self) -> tuple[Any, int]:
        arrays = iter(self._file.arrays())
        return [_filled(outline, arrays) for outline in self._outlines], 0

    def close(self) -> None:
        self._file.close()


def _outline(nested: Any) -> Any:
    """The structure without its tensors: None for each. (Neither the stock Trainer nor this has a use for others.)"""
    return recursively_apply(lambda tensor: None, nested, error_on_other_type=True)


def _filled(outline: Any, arrays: Iterator[Any]) -> Any:
    return recursively_apply(lambda _: next(arrays), outline, test_type=lambda leaf: leaf is None)


def _nothing() -> None:
    pass
