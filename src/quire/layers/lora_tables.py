"""Embeddings and LM heads of adapters: whole ones that replace the model's, and rows of single tokens."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels.library_matmul import linear
from quire.layers.lora_layers import LoRASlots
from quire.parallel.group import Group
from quire.quant.sharding import Shard

_NO_TOKEN = -1


class LoRAVocab(NamedTuple):
    """Rows of the tokens that one adapter adds or retrains, for the embedding or the LM head."""

    ids: Tensor
    """Token ids, [k] int64; ids from the model's vocabulary size on are new tokens."""
    rows: Tensor
    """Weight rows of these tokens, [k, hidden]."""


class _SlotRows:
    """Memory for `num_rows` rows of an embedding or head in each adapter slot. Adapters may use any of
    `names` for the layer."""

    rows: Tensor
    """Weight rows of all adapter slots, [slots, num_rows, hidden]."""
    _replace_by_rows: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Computes logits with adapter rows token by token, so that their bits do not depend on the batch."""
    _replace_by_slots: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Computes logits with adapter rows for all tokens, slot by slot, without branches on slots."""

    def __init__(self, names: tuple[str, ...], slots: LoRASlots, num_rows: int, hidden: int) -> None:
        self.names, self.slots, self.num_rows, self.hidden = names, slots, num_rows, hidden
        self._replace = self._replace_by_rows if slots.device.type == "cpu" else self._replace_by_slots

    @property
    def size(self) -> int:
        """Return the number of elements (not bytes) of these rows in one adapter slot."""
        return self.num_rows * self.hidden

    def bind(self, memory: Tensor) -> None:
        """Use `memory` [slots, size] for the rows."""
        self.rows = memory.unflatten(1, (self.num_rows, self.hidden))

    def unbind(self) -> None:
        self.__dict__.pop("rows", None)


class LoRATable(_SlotRows):
    """An embedding or LM head that an adapter replaces entirely (modules_to_save). Each device of the
    tensor-parallel group has a shard of the rows."""

    def __init__(
        self, names: tuple[str, ...], slots: LoRASlots, shard: Shard, hidden: int, group: Group
    ) -> None:
        super().__init__(names, slots, shard.size, hidden)
        self.shard, self.group = shard, group
        self.has_table = torch.zeros(slots.max_slots, dtype=torch.bool, device=slots.device)
        """Whether the adapter of each slot replaces this embedding or head."""

    def put(self, slot: int, table: Tensor | None) -> None:
        """Copy an adapter's whole embedding or head weight (`table`) into a slot; None if the adapter has
        none."""
        self.has_table[slot] = table is not None
        if table is not None:
            self.rows[slot].copy_(table, non_blocking=True)

    def embed(self, out: Tensor, token_ids: Tensor, slots: Tensor) -> Tensor:
        """Return the model's embeddings [T, hidden], replaced where the token's adapter has a table. `slots`
        are the adapter slots of the tokens."""
        local_ids = token_ids - self.shard.start
        is_elsewhere = (local_ids < 0) | (local_ids >= self.shard.size)
        rows = self.rows[slots.clamp(min=0).long(), local_ids.masked_fill(is_elsewhere, 0)].to(out.dtype)
        if self.group.size > 1:
            rows = self.group.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0))
        return torch.where(self._is_replaced(slots)[:, None], rows, out)

    def logits(self, out: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        """Return this device's logits [N, rows], replaced where the token's adapter has a table. `slots` are
        the adapter slots of the tokens."""
        return self._replace(out, x, torch.where(self._is_replaced(slots), slots, -1))

    def _replace_by_rows(self, out: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                out[row] = self.rows[slot].to(x.dtype) @ x[row]
        return out

    def _replace_by_slots(self, out: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        for slot, table in enumerate(self.rows):
            out = torch.where((slots == slot)[:, None], linear(x, table.to(x.dtype)), out)
        return out

    def _is_replaced(self, slots: Tensor) -> Tensor:
        return self.has_table[slots.clamp(min=0).long()] & (slots >= 0)


class LoRAVocabRows(_SlotRows):
    """Rows of an embedding or LM head for tokens that an adapter adds or retrains. Each slot has
    `slots.max_extra_vocab` such rows, replicated on all devices of a group. Kernels read them only in steps
    where the adapter of some token has any (`LoRATokens.uses_extra_vocab`). If an adapter has no head rows
    and the head is `tied`, the head uses the adapter's embedding rows."""

    def __init__(
        self, names: tuple[str, ...], slots: LoRASlots, vocab: int, hidden: int, *, tied: bool
    ) -> None:
        super().__init__(names, slots, slots.max_extra_vocab, hidden)
        self.vocab, self.tied = vocab, tied
        self._ids = torch.full(
            (slots.max_slots, slots.max_extra_vocab), _NO_TOKEN, dtype=torch.int64, device=slots.device
        )
        self._counts = [0] * slots.max_slots

    def put(self, slot: int, vocab: LoRAVocab | None) -> None:
        """Store the rows of a slot's adapter; `vocab` is None if the adapter has no such rows."""
        count = self._counts[slot] = 0 if vocab is None else len(vocab.ids)
        self._ids[slot].fill_(_NO_TOKEN)
        if vocab is not None:
            self._ids[slot, :count].copy_(vocab.ids, non_blocking=True)
            self.rows[slot, :count].copy_(vocab.rows, non_blocking=True)

    def num_new(self, vocab: LoRAVocab) -> int:
        """Return the number of tokens of `vocab` that the model does not have."""
        return int((vocab.ids >= self.vocab).sum())

    def inside(self, token_ids: Tensor) -> Tensor:
        """Return the token ids with those of new tokens replaced by the last id of the model's vocabulary, so
        that the model's own table can be read."""
        return token_ids.clamp(max=self.vocab - 1)

    def embed(self, out: Tensor, token_ids: Tensor, slots: Tensor) -> Tensor:
        """Return the model's embeddings [T, hidden], replaced where the token's adapter has a row. `slots`
        are the adapter slots of the tokens."""
        slot_of = slots.clamp(min=0).long()
        is_own = (self._ids[slot_of] == token_ids[:, None]) & (slots >= 0)[:, None]
        rows = self.rows[slot_of, is_own.int().argmax(1)].to(out.dtype)
        return torch.where(is_own.any(1, keepdim=True), rows, out)

    def logits(self, out: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        """Widen the model's logits [N, vocab] to [N, vocab + max_extra_vocab]; a new token is -inf for other
        adapters. `slots` are the adapter slots of the tokens."""
        return self._replace(pad(out, (0, self.slots.max_extra_vocab), value=-torch.inf), x, slots)

    def _replace_by_rows(self, wide: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0 and (count := self._counts[slot]):
                wide[row, self._ids[slot, :count]] = self.rows[slot, :count].to(x.dtype) @ x[row]
        return wide

    def _replace_by_slots(self, wide: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        for slot, count in enumerate(self._counts):
            if count:
                ids, logits = self._ids[slot, :count], linear(x, self.rows[slot, :count].to(x.dtype))
                wide[:, ids] = torch.where((slots == slot)[:, None], logits, wide[:, ids])
        return wide
