"""What a process keeps of the last batch, which samplers fill up with repetitions, when rows and samples differ."""

from __future__ import annotations

from typing import List, Optional
from unittest import TestCase

import torch
from parameterized import parameterized

from shim.evaluation import _Share

RANKS = 3
# name -> (rows of a share, samples in it, samples that are no repetition, rows kept of each rank)
CASES = {
    "as_many_rows_as_samples": (4, 4, 6, [4, 2, 0]),
    "one_rank_has_repetitions_only": (4, 4, 8, [4, 4, 0]),
    "two_rows_of_a_sample": (8, 4, 8, [8, 8, 0]),
    "two_rows_of_a_sample_and_a_mixed_rank": (8, 4, 6, [8, 8, 0]),
    "no_remainder": (4, 4, None, [4, 4, 4]),
    "rows_that_have_nothing_to_do_with_samples": (7, 4, 6, [7, 7, 7]),
}


def share(rows: Optional[int], samples: Optional[int], remainder: Optional[int], rank: int = 0) -> _Share:
    return _Share(rows, samples, remainder, RANKS, rank)


class Kept(TestCase):
    @parameterized.expand([(name, *case) for name, case in CASES.items()])
    def test_gathered_and_own_rows_agree(self, _, rows, samples, remainder, kept):
        parts = [rank * 100 + torch.arange(rows) for rank in range(RANKS)]
        expected: List[int] = [row for part, number in zip(parts, kept) for row in part[:number].tolist()]
        gathered = share(rows, samples, remainder).without_repetitions(torch.cat(parts))
        self.assertEqual(gathered.tolist(), expected)
        own = [share(rows, samples, remainder, rank).own_rows(part) for rank, part in enumerate(parts)]
        self.assertEqual(torch.cat(own).tolist(), expected)

    @parameterized.expand([(name, *case[:3]) for name, case in CASES.items()])
    def test_gathered_logits_are_cut_without_a_copy(self, _, rows, samples, remainder):
        gathered = torch.zeros(rows * RANKS, 5)
        self.assertEqual(share(rows, samples, remainder).without_repetitions(gathered).data_ptr(), gathered.data_ptr())

    def test_what_has_a_row_a_sample_is_cut_beside_what_has_two(self):
        cut = share(8, 4, 6).without_repetitions({"logits": torch.zeros(24, 5), "labels": torch.arange(12)})
        self.assertEqual((len(cut["logits"]), cut["labels"].tolist()), (16, list(range(6))))

    def test_other_tensors_and_lists_stay(self):
        scales = torch.zeros(5)
        self.assertIs(share(4, 4, 6).without_repetitions(scales), scales)
        records = [{"boxes": torch.zeros(row, 4)} for row in range(4)]
        self.assertEqual(len(share(4, 4, 6, rank=1).own_rows(records)), 2)

    @parameterized.expand([(8, 4, 6, True), (8, 4, 8, False), (4, 4, 6, False), (8, 4, None, False), (7, 4, 6, False)])
    def test_a_mixed_rank_is_known(self, rows, samples, remainder, mixed):
        self.assertEqual(share(rows, samples, remainder).mixes_repetitions_with_others, mixed)
