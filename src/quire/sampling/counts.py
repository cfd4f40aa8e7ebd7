"""Counts: which tokens the penalised rows have, kept on the device, which alone knows the latest of them."""

import numpy as np
import torch
from torch import Tensor

from quire.sampling.rows import PENALTIES, Ints, SamplingRows
from quire.sampling.transfer import to_device

_FIRST_LINES = 16


class Counts:
    """A line for each row with penalties, from its first sample on; those of past requests are used again."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.device = device
        self.prompt_seen = torch.zeros((0, vocab), dtype=torch.uint8, device=device)
        self.counts = torch.zeros((0, vocab), dtype=torch.int32, device=device)
        self._line_of: Ints = np.full(max_rows, -1, np.int32)
        self._admission_of = np.full(max_rows, -1, np.int64)
        self._free: list[int] = []

    def penalise(
        self,
        logits: Tensor,
        rows: Ints,
        state: SamplingRows,
        tokens: Ints,
        num_tokens: Ints,
        prompt_lens: Ints,
    ) -> None:
        """Change `logits` [N, V] in place, for those of `rows` that ask for it."""
        from quire.kernels.triton.logits import apply_penalties

        penalised = (state.flags[rows] & PENALTIES) != 0
        for row in rows[penalised & (self._admission_of[rows] != state.admission[rows])].tolist():
            known = tokens[row, : num_tokens[row]]
            self._admit(row, state, known[: prompt_lens[row]], known[prompt_lens[row] :])
        lines = np.where(penalised, self._line_of[rows], -1)
        apply_penalties(
            logits,
            to_device(lines, self.device),
            self.prompt_seen,
            self.counts,
            *(
                to_device(each[rows], self.device)
                for each in (state.repetition, state.frequency, state.presence)
            ),
        )

    def add(self, rows: Ints, state: SamplingRows, token_ids: Tensor) -> None:
        """`token_ids` [N] are the new tokens of `rows`."""
        from quire.kernels.triton.logits import count_tokens

        lines = np.where(state.flags[rows] & PENALTIES, self._line_of[rows], -1)
        count_tokens(self.counts, to_device(lines, self.device), token_ids)

    def _admit(self, row: int, state: SamplingRows, prompt: Ints, output: Ints) -> None:
        line = self._line_of[row] if self._line_of[row] >= 0 else self._take(state)
        self._line_of[row], self._admission_of[row] = line, state.admission[row]
        self.prompt_seen[line].zero_()[self._ids(prompt)] = 1
        self.counts[line].zero_().index_put_(
            (self._ids(output),), torch.ones((), dtype=torch.int32, device=self.device), accumulate=True
        )

    def _ids(self, tokens: Ints) -> Tensor:
        return to_device(tokens[(tokens >= 0) & (tokens < self.vocab)].astype(np.int64), self.device)

    def _take(self, state: SamplingRows) -> int:
        if not self._free:
            past = np.flatnonzero((self._line_of >= 0) & (self._admission_of != state.admission))
            self._free = self._line_of[past].tolist()
            self._line_of[past] = -1
        if not self._free:
            size = len(self.counts)
            more = max(size, _FIRST_LINES)
            self._free = list(range(size, size + more))
            self.prompt_seen = torch.cat((self.prompt_seen, self.prompt_seen.new_zeros(more, self.vocab)))
            self.counts = torch.cat((self.counts, self.counts.new_zeros(more, self.vocab)))
        return self._free.pop()
