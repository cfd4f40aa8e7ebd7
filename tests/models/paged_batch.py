"""Handmade batches over a paged cache, without a model."""

import numpy as np
import torch

from quire.attention.batch import Batch

BLOCK_SIZE = 4
MAX_ROWS = 8


def make_batch(chunks: list[tuple[list[int], int]], tables: list[list[int]], block_size: int) -> Batch:
    """Build a batch from each sequence's new token ids, number of previous tokens and block ids."""
    query_lens = np.array([len(ids) for ids, _ in chunks], np.int32)
    seq_lens = np.array([len(ids) + before for ids, before in chunks], np.int32)
    positions = np.concatenate([np.arange(before, before + len(ids)) for ids, before in chunks])
    rows = np.repeat(np.arange(len(chunks)), query_lens)
    width = -(-int(seq_lens.max()) // block_size)
    block_tables = np.zeros((len(chunks), width), np.int32)
    for row, blocks in enumerate(tables):
        used = blocks[:width]
        block_tables[row, : len(used)] = used
    slots = block_tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return Batch(
        token_ids=torch.tensor([i for ids, _ in chunks for i in ids]),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        query_starts=torch.from_numpy(np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)),
        seq_lens=torch.from_numpy(seq_lens),
        rows=torch.arange(len(chunks), dtype=torch.int32),
        block_tables=torch.from_numpy(block_tables),
        logit_tokens=torch.from_numpy(np.cumsum(query_lens) - 1),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )


def on_rows(batch: Batch, rows: list[int]) -> Batch:
    """Return the same batch for these rows of a worker."""
    tables = torch.zeros(MAX_ROWS + 1, batch.block_tables.shape[1], dtype=torch.int32)
    tables[rows] = batch.block_tables
    batch.rows, batch.block_tables = torch.tensor(rows, dtype=torch.int32), tables
    return batch
