"""`LoRATable`: an embedding or LM head that an adapter replaces entirely (modules_to_save)."""

import torch
from torch import Tensor

from quire.layers.lora import AdapterSlots, known_as
from quire.layers.scope import Scope
from quire.parallel.group import Group
from quire.quant.sharding import Shard


class LoRATable:
    """Memory for one such table in each slot; each device of a group has a shard of the rows."""

    table: Tensor
    """[slots, rows of this device, hidden]"""

    def __init__(
        self, names: tuple[str, ...], slots: AdapterSlots, shard: Shard, hidden: int, group: Group
    ) -> None:
        self.names = names
        self.slots, self.shard, self.hidden, self.group = slots, shard, hidden, group
        self.brought = torch.zeros(slots.max_slots, dtype=torch.bool, device=slots.device)
        """Whether the adapter of each slot has such a table."""
        self._replace = self._replace_by_rows if slots.device.type == "cpu" else self._replace_by_slots

    @property
    def size(self) -> int:
        return self.shard.size * self.hidden

    def bind(self, memory: Tensor) -> None:
        self.table = memory.unflatten(1, (self.shard.size, self.hidden))

    def unbind(self) -> None:
        self.__dict__.pop("table", None)

    def put(self, slot: int, table: Tensor | None) -> None:
        self.brought[slot] = table is not None
        if table is not None:
            self.table[slot].copy_(table, non_blocking=True)

    def rows(self, out: Tensor, token_ids: Tensor) -> Tensor:
        """Return the model's embeddings [T, hidden], replaced where the token's adapter has a table."""
        tokens = self.slots.step.tokens
        if tokens is None:
            return out
        local_ids = token_ids - self.shard.start
        is_elsewhere = (local_ids < 0) | (local_ids >= self.shard.size)
        rows = self.table[tokens.clamp(min=0).long(), local_ids.masked_fill(is_elsewhere, 0)].to(out.dtype)
        if self.group.size > 1:
            rows = self.group.all_reduce(rows.masked_fill_(is_elsewhere[:, None], 0))
        return torch.where(self._is_replaced(tokens)[:, None], rows, out)

    def logits(self, out: Tensor, x: Tensor) -> Tensor:
        """Return this device's logits [N, rows], replaced where the token's adapter has a table."""
        tokens = self.slots.step.logit_tokens
        if tokens is None:
            return out
        return self._replace(out, x, torch.where(self._is_replaced(tokens), tokens, -1))

    def _replace_by_rows(self, out: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        """Compute each row by itself, so that its bits do not depend on the batch."""
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                out[row] = self.table[slot].to(x.dtype) @ x[row]
        return out

    def _replace_by_slots(self, out: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        """Compute every slot, used or not: a CUDA graph cannot branch on the slots."""
        for slot, table in enumerate(self.table):
            out = torch.where((slots == slot)[:, None], x @ table.to(x.dtype).t(), out)
        return out

    def _is_replaced(self, tokens: Tensor) -> Tensor:
        return self.brought[tokens.clamp(min=0).long()] & (tokens >= 0)


def table_of(kind: str, scope: Scope, shard: Shard, hidden: int) -> LoRATable | None:
    """Build the memory for adapters that replace this layer; None if they may not."""
    slots = scope.adapters
    if slots is None or kind not in slots.whole:
        return None
    table = LoRATable(known_as(kind, scope.name), slots, shard, hidden, scope.group)
    slots.tables[scope.name] = table
    return table
