"""`LoRATable`: an embedding or a head that adapters may bring as a whole, in place of the model's."""

import torch
from torch import Tensor

from quire.layers.lora import AdapterSlots, known_as
from quire.layers.scope import Scope
from quire.parallel.group import Group
from quire.quant.sharding import Shard


class LoRATable:
    """Room for one such table in each slot: of each device of a group its own rows."""

    table: Tensor
    """[slots, own rows, hidden]"""

    def __init__(
        self, names: tuple[str, ...], slots: AdapterSlots, own: Shard, hidden: int, group: Group
    ) -> None:
        self.names = names
        self.slots, self.own, self.hidden, self.group = slots, own, hidden, group
        self.brought = torch.zeros(slots.max_slots, dtype=torch.bool, device=slots.device)
        """Whether the adapter of a slot has one."""
        self._replaced = self._by_rows if slots.device.type == "cpu" else self._by_slots

    @property
    def size(self) -> int:
        return self.own.size * self.hidden

    def bind(self, memory: Tensor) -> None:
        self.table = memory.unflatten(1, (self.own.size, self.hidden))

    def unbind(self) -> None:
        self.__dict__.pop("table", None)

    def put(self, slot: int, table: Tensor | None) -> None:
        self.brought[slot] = table is not None
        if table is not None:
            self.table[slot].copy_(table, non_blocking=True)

    def rows(self, out: Tensor, token_ids: Tensor) -> Tensor:
        """[T, hidden] of the model, and in their place those of adapters that bring their own."""
        tokens = self.slots.tokens
        if tokens is None:
            return out
        own = token_ids - self.own.start
        is_elsewhere = (own < 0) | (own >= self.own.size)
        rows = self.table[tokens.clamp(min=0).long(), own.masked_fill(is_elsewhere, 0)].to(out.dtype)
        if self.group.size > 1:
            rows = self.group.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0))
        return torch.where(self._has(tokens)[:, None], rows, out)

    def logits(self, out: Tensor, x: Tensor) -> Tensor:
        """[N, own rows] of the model, and in their place those of adapters that bring their own."""
        tokens = self.slots.logit_tokens
        if tokens is None:
            return out
        return self._replaced(out, x, torch.where(self._has(tokens), tokens, -1))

    def _by_rows(self, out: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        """A row by itself has the same bits in any company."""
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                out[row] = self.table[slot].to(x.dtype) @ x[row]
        return out

    def _by_slots(self, out: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        """Without asking which slots there are: a graph cannot."""
        for slot, table in enumerate(self.table):
            out = torch.where((slots == slot)[:, None], x @ table.to(x.dtype).t(), out)
        return out

    def _has(self, tokens: Tensor) -> Tensor:
        return self.brought[tokens.clamp(min=0).long()] & (tokens >= 0)


def whole_of(kind: str, scope: Scope, own: Shard, hidden: int) -> LoRATable | None:
    """Where adapters may bring the whole of this layer; None: they may not."""
    slots = scope.adapters
    if slots is None or kind not in slots.whole:
        return None
    slots.tables[scope.name] = found = LoRATable(known_as(kind, scope.name), slots, own, hidden, scope.group)
    return found
