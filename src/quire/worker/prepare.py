"""prepare: a plan and the rows become the tensors of one forward pass. Pure, and no loop over tokens."""

import numpy as np
import torch

from quire.attention.batch import Batch
from quire.data.plan import StepPlan
from quire.worker.slots import Slots


def prepare(plan: StepPlan, slots: Slots, device: torch.device) -> Batch:
    rows, query_lens = plan.rows, plan.num_tokens
    computed = slots.num_computed[rows]
    query_starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(query_lens, out=query_starts[1:])
    row_of_token = np.repeat(rows, query_lens)
    positions = np.arange(query_starts[-1]) + np.repeat(computed - query_starts[:-1], query_lens)
    blocks = slots.block_tables[row_of_token, positions // slots.block_size].astype(np.int64)
    seq_lens = computed + query_lens

    def to_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Batch(
        token_ids=to_device(slots.tokens[row_of_token, positions].astype(np.int64)),
        positions=to_device(positions.astype(np.int64)),
        slots=to_device(blocks * slots.block_size + positions % slots.block_size),
        query_starts=to_device(query_starts),
        seq_lens=to_device(seq_lens),
        rows=to_device(rows),
        block_tables=to_device(slots.block_tables),
        logit_tokens=to_device(query_starts[1:][plan.samples].astype(np.int64) - 1),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )
