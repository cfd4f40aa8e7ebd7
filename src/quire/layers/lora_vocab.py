"""`LoRAVocabRows`: rows of an embedding or a head that belong to adapters, for tokens that they bring or
have trained by themselves."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.layers.lora import AdapterSlots, known_as
from quire.layers.scope import Scope

_NO_TOKEN = -1


class LoRAVocab(NamedTuple):
    """Of one adapter and one layer."""

    ids: Tensor
    """[k] int64; from the model's vocabulary on they are tokens that the model does not have."""
    rows: Tensor
    """[k, hidden]"""


class LoRAVocabRows:
    """Room for `slots.num_own` such rows in each slot, the same on all devices of a group. Looked at in steps
    of which some row has an adapter with any (`slots.is_wide`), and in no others."""

    rows: Tensor
    """[slots, room, hidden]"""

    def __init__(self, names: tuple[str, ...], slots: AdapterSlots, vocab: int, hidden: int) -> None:
        self.names = names
        self.slots, self.vocab, self.hidden = slots, vocab, hidden
        self.tied = ""
        """Of a head, the name of the embedding whose rows it has where it brings none."""
        self._ids = torch.full(
            (slots.max_slots, slots.num_own), _NO_TOKEN, dtype=torch.int64, device=slots.device
        )
        self._counts = [0] * slots.max_slots
        self._placed = self._by_rows if slots.device.type == "cpu" else self._by_slots

    @property
    def size(self) -> int:
        return self.slots.num_own * self.hidden

    def bind(self, memory: Tensor) -> None:
        self.rows = memory.unflatten(1, (self.slots.num_own, self.hidden))

    def unbind(self) -> None:
        self.__dict__.pop("rows", None)

    def put(self, slot: int, own: LoRAVocab | None) -> None:
        """None: the adapter of this slot has none."""
        count = self._counts[slot] = 0 if own is None else len(own.ids)
        self._ids[slot].fill_(_NO_TOKEN)
        if own is not None:
            self._ids[slot, :count].copy_(own.ids, non_blocking=True)
            self.rows[slot, :count].copy_(own.rows, non_blocking=True)

    def inside(self, token_ids: Tensor) -> Tensor:
        """The same ids, those that the model does not have being some that it has."""
        return token_ids.clamp(max=self.vocab - 1)

    def embed(self, out: Tensor, token_ids: Tensor) -> Tensor:
        """[T, hidden] of the model, and in their place those that adapters have of their own."""
        tokens = self.slots.tokens
        if tokens is None:
            return out
        slot_of = tokens.clamp(min=0).long()
        is_own = (self._ids[slot_of] == token_ids[:, None]) & (tokens >= 0)[:, None]
        rows = self.rows[slot_of, is_own.int().argmax(1)].to(out.dtype)
        return torch.where(is_own.any(1, keepdim=True), rows, out)

    def logits(self, out: Tensor, x: Tensor) -> Tensor:
        """[N, vocab] of the model -> [N, vocab + room]: nobody but those who bring a token say it."""
        wide = pad(out, (0, self.slots.num_own), value=-torch.inf)
        tokens = self.slots.logit_tokens
        return wide if tokens is None else self._placed(wide, x, tokens)

    def _by_rows(self, wide: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        """A row by itself has the same bits in any company."""
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0 and (count := self._counts[slot]):
                wide[row, self._ids[slot, :count]] = self.rows[slot, :count].to(x.dtype) @ x[row]
        return wide

    def _by_slots(self, wide: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        for slot, count in enumerate(self._counts):
            if count:
                ids, own = self._ids[slot, :count], x @ self.rows[slot, :count].to(x.dtype).t()
                wide[:, ids] = torch.where((slots == slot)[:, None], own, wide[:, ids])
        return wide


def own_of(kind: str, scope: Scope, vocab: int, hidden: int, tied: str = "") -> LoRAVocabRows | None:
    """Where adapters may have rows of this layer of their own; None: they may not."""
    slots = scope.adapters
    if slots is None or not slots.num_own:
        return None
    found = slots.owned[kind] = LoRAVocabRows(known_as(kind, scope.name), slots, vocab, hidden)
    found.tied = tied
    return found
