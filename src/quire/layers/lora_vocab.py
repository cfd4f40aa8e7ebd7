"""`LoRAVocabRows`: extra embedding or LM-head rows of adapters, for tokens that they add or retrain."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.layers.lora import AdapterSlots, known_as
from quire.layers.scope import Scope

_NO_TOKEN = -1


class LoRAVocab(NamedTuple):
    """Extra vocabulary rows of one adapter for one layer."""

    ids: Tensor
    """[k] int64; ids from the model's vocabulary size on are new tokens."""
    rows: Tensor
    """[k, hidden]"""


class LoRAVocabRows:
    """Memory for `slots.max_extra_vocab` such rows in each slot, replicated on all devices of a group. Read
    only in steps in which some row has an adapter with extra rows (`LoRAStep.is_wide`)."""

    rows: Tensor
    """[slots, max_extra_vocab, hidden]"""

    def __init__(self, names: tuple[str, ...], slots: AdapterSlots, vocab: int, hidden: int) -> None:
        self.names = names
        self.slots, self.vocab, self.hidden = slots, vocab, hidden
        self.tied = ""
        """For a tied head: name of the embedding that provides the rows the adapter does not have."""
        self._ids = torch.full(
            (slots.max_slots, slots.max_extra_vocab), _NO_TOKEN, dtype=torch.int64, device=slots.device
        )
        self._counts = [0] * slots.max_slots
        self._replace = self._replace_by_rows if slots.device.type == "cpu" else self._replace_by_slots

    @property
    def size(self) -> int:
        return self.slots.max_extra_vocab * self.hidden

    def bind(self, memory: Tensor) -> None:
        self.rows = memory.unflatten(1, (self.slots.max_extra_vocab, self.hidden))

    def unbind(self) -> None:
        self.__dict__.pop("rows", None)

    def put(self, slot: int, vocab: LoRAVocab | None) -> None:
        """Store the extra rows of a slot's adapter; None if it has none."""
        count = self._counts[slot] = 0 if vocab is None else len(vocab.ids)
        self._ids[slot].fill_(_NO_TOKEN)
        if vocab is not None:
            self._ids[slot, :count].copy_(vocab.ids, non_blocking=True)
            self.rows[slot, :count].copy_(vocab.rows, non_blocking=True)

    def inside(self, token_ids: Tensor) -> Tensor:
        """Return the ids clamped to the model's vocabulary."""
        return token_ids.clamp(max=self.vocab - 1)

    def embed(self, out: Tensor, token_ids: Tensor) -> Tensor:
        """Return the model's embeddings [T, hidden], replaced where the token's adapter has a row."""
        tokens = self.slots.step.tokens
        if tokens is None:
            return out
        slot_of = tokens.clamp(min=0).long()
        is_own = (self._ids[slot_of] == token_ids[:, None]) & (tokens >= 0)[:, None]
        rows = self.rows[slot_of, is_own.int().argmax(1)].to(out.dtype)
        return torch.where(is_own.any(1, keepdim=True), rows, out)

    def logits(self, out: Tensor, x: Tensor) -> Tensor:
        """Widen the model's logits [N, vocab] to [N, vocab + max_extra_vocab]; a new token is -inf for other
        adapters."""
        wide = pad(out, (0, self.slots.max_extra_vocab), value=-torch.inf)
        tokens = self.slots.step.logit_tokens
        return wide if tokens is None else self._replace(wide, x, tokens)

    def _replace_by_rows(self, wide: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        """Compute each row by itself, so that its bits do not depend on the batch."""
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0 and (count := self._counts[slot]):
                wide[row, self._ids[slot, :count]] = self.rows[slot, :count].to(x.dtype) @ x[row]
        return wide

    def _replace_by_slots(self, wide: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        for slot, count in enumerate(self._counts):
            if count:
                ids, logits = self._ids[slot, :count], x @ self.rows[slot, :count].to(x.dtype).t()
                wide[:, ids] = torch.where((slots == slot)[:, None], logits, wide[:, ids])
        return wide


def vocab_rows_of(kind: str, scope: Scope, vocab: int, hidden: int, tied: str = "") -> LoRAVocabRows | None:
    """Build the memory for extra rows of this layer; None if adapters may not have any."""
    slots = scope.adapters
    if slots is None or not slots.max_extra_vocab:
        return None
    rows = slots.vocab_rows[kind] = LoRAVocabRows(known_as(kind, scope.name), slots, vocab, hidden)
    rows.tied = tied
    return rows
