"""Tests of copies of KV cache entries to and from host memory that is pinned part by part."""

import torch

from quire.worker.cuda.block_copies import _joined, _runs


def test_copies_to_the_host_end_with_a_part_of_its_memory() -> None:
    """CUDA refuses a copy to several parts that were pinned one by one."""
    assert [*_runs([1, 2, 3, 4, 5, 0, 6, 9], part_rows=4)] == [(0, 1, 3), (3, 4, 2), (6, 6, 1), (7, 9, 1)]


def test_copies_from_the_host_end_with_a_part_of_its_memory() -> None:
    slots = torch.arange(80, dtype=torch.uint8).view(10, 8)
    rows = [slots[row] for row in (1, 2, 3, 4, 5, 8)] + [torch.zeros(8, dtype=torch.uint8)]
    joined = [*_joined(rows, part_rows=4)]
    assert [(at, len(run)) for at, run in joined] == [(0, 3), (3, 2), (5, 1), (6, 1)]
    assert torch.equal(torch.cat([run for _, run in joined]), torch.stack(rows))
