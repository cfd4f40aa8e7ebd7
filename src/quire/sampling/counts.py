"""Token counts of rows with penalties, on the device: the host may not have the latest tokens yet."""

import numpy as np
import torch
from torch import Tensor

from quire.sampling.rows import PENALTIES, History, Ints, SamplingRows
from quire.sampling.transfer import to_device


class Counts:
    """Token counts for penalties, on the device: for each row (running sequence) whose request has penalties,
    which token ids its prompt contains, and how often its output contains each token id."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.device = device
        self.prompt_seen = torch.zeros((max_rows, vocab), dtype=torch.uint8, device=device)
        self.counts = torch.zeros((max_rows, vocab), dtype=torch.int32, device=device)
        self._admission_of = np.full(max_rows, -1, np.int64)

    @property
    def num_bytes(self) -> int:
        return self.prompt_seen.nbytes + self.counts.nbytes

    def forget(self) -> None:
        """Invalidate all counts: each row is counted again from its tokens on the host."""
        self._admission_of.fill(-1)

    def penalise(self, logits: Tensor, rows: Ints, state: SamplingRows, history: History) -> None:
        """Apply penalties to `logits` [N, V] in place, for the rows that have some."""
        from quire.kernels.triton.logits import apply_penalties

        tokens, num_tokens, prompt_lens = history
        penalised = (state.flags[rows] & PENALTIES) != 0
        for row in rows[penalised & (self._admission_of[rows] != state.admission[rows])].tolist():
            known = tokens[row, : num_tokens[row]]
            self._admit(row, state, known[: prompt_lens[row]], known[prompt_lens[row] :])
        lines = np.where(penalised, rows, -1)
        apply_penalties(
            logits,
            to_device(lines, self.device),
            self.prompt_seen,
            self.counts,
            *(
                to_device(column[rows], self.device)
                for column in (state.repetition, state.frequency, state.presence)
            ),
        )

    def add(self, rows: Ints, state: SamplingRows, token_ids: Tensor) -> None:
        """Add the new output tokens `token_ids` [N] of `rows` [N] to the counts of rows with penalties."""
        from quire.kernels.triton.logits import count_tokens

        lines = np.where(state.flags[rows] & PENALTIES, rows, -1)
        count_tokens(self.counts, to_device(lines, self.device), token_ids)

    def take_back(self, rows: Ints, state: SamplingRows, token_ids: Tensor, wrong: Tensor) -> None:
        """Subtract those of the counted tokens `token_ids` [N] of `rows` for which `wrong` [N] is true, such
        as rejected draft tokens."""
        penalised = to_device((state.flags[rows] & PENALTIES) != 0, self.device)
        places = to_device(rows.astype(np.int64), self.device) * self.vocab + token_ids
        self.counts.view(-1).index_add_(0, places, -(penalised & wrong).int())

    def _admit(self, row: int, state: SamplingRows, prompt: Ints, output: Ints) -> None:
        self._admission_of[row] = state.admission[row]
        self.prompt_seen[row].zero_()[self._ids(prompt)] = 1
        self.counts[row].zero_().index_put_(
            (self._ids(output),), torch.ones((), dtype=torch.int32, device=self.device), accumulate=True
        )

    def _ids(self, tokens: Ints) -> Tensor:
        return to_device(tokens[(tokens >= 0) & (tokens < self.vocab)].astype(np.int64), self.device)
