"""LoRA: adapters beside the weights of a model, many of them in one batch."""

import contextlib
import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.layers.lora_layers import LoRAFactors, LoRALayer, LoRAStack, LoRATarget
from quire.quant.sharding import Shard


class SlotTable(Protocol):
    """A table that adapters may bring as a whole; see `layers/lora_tables.py`."""

    names: tuple[str, ...]
    """Of its layer."""
    own: Shard
    """The rows of it that are here."""
    hidden: int

    @property
    def size(self) -> int:
        """Numbers of a slot."""
        ...

    def bind(self, memory: Tensor) -> None:
        """[slots, size]"""
        ...

    def unbind(self) -> None: ...

    def put(self, slot: int, table: Tensor | None) -> None:
        """None: the adapter of this slot has none."""
        ...


class AdapterSlots:
    """The slots of a device, each with room for one adapter at every point of the model, and the slots that
    the tokens of the current step use."""

    def __init__(
        self,
        *,
        max_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        only: Collection[str] = (),
        divides: bool = False,
        whole: Collection[str] = (),
        num_own: int = 0,
        no_own: str = "",
    ) -> None:
        self.max_slots = max_slots
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = device
        self.only = frozenset(only)
        """The last names of layers that take adapters; empty: all."""
        self.divides = divides
        """Whether devices that share a layer share all that adapters add to it."""
        self.whole = frozenset(whole)
        """Which of embed_tokens and lm_head adapters may bring as a whole."""
        self.tables: dict[str, SlotTable] = {}
        """Those, by the name of their layer."""
        self.num_own = num_own
        """Rows of embedding and head that an adapter may have of its own; see `layers/lora_vocab.py`."""
        self.no_own = no_own or "--lora-extra-vocab-size is 0"
        """Why it can have none."""
        self.owned: dict[str, Any] = {}
        """The room for them: of embed_tokens and lm_head."""
        self.has_own = np.zeros(max_slots + 1, np.bool_)
        """By slot; the last stands for no adapter."""
        self.num_new = np.zeros(max_slots + 1, np.int32)
        """Tokens beyond the model's vocabulary that the adapter of each has."""
        self.is_wide = False
        """Whether some row of the step has an adapter with rows of its own."""
        self.points: dict[str, LoRALayer] = {}
        self.stacks: dict[str, LoRAStack] = {}
        """Experts whose matrices some checkpoints have in one, by its name."""
        self.refused: dict[str, str] = {}
        """Layers that take none although others like them do, and why."""
        self.unused = ""
        """A pattern of the names of layers that compute nothing here: what is there for them is left out."""
        self.tokens: Tensor | None = None
        """[T] int32, the slot of each token of the step, -1 without; None: no token has an adapter."""
        self.logit_tokens: Tensor | None = None
        """[N] int32, the same of those whose logits are wanted."""
        self.assigned: Any = None
        """What kernels want to know of `tokens`."""
        self.logit_assigned: Any = None
        self._memory: Tensor | None = None
        self._spares: deque[Tensor] = deque()

    def use(
        self, tokens: Tensor | None = None, logit_tokens: Tensor | None = None, *, is_wide: bool = False
    ) -> None:
        """The slots of what is computed next; None: nothing of it has an adapter."""
        logit_tokens = None if logit_tokens is None or not len(logit_tokens) else logit_tokens
        self.is_wide, self.tokens, self.logit_tokens = is_wide, tokens, logit_tokens
        self.assigned, self.logit_assigned = self._assigned(tokens), self._assigned(logit_tokens)

    def _assigned(self, tokens: Tensor | None) -> Any:
        if tokens is None or not self.points:
            return None
        return next(iter(self.points.values())).ops.assigned(tokens, self.max_slots)

    def takes(self, *names: str) -> bool:
        """Whether a layer of one of these names takes adapters."""
        return not self.only or any(name.rpartition(".")[2] in self.only for name in names)

    @property
    def slot_size(self) -> int:
        """Numbers of a slot."""
        return sum(part.size for part in self._parts)

    @property
    def _parts(self) -> list[Any]:
        return [*self.points.values(), *self.tables.values(), *self.owned.values()]

    @property
    def _points_size(self) -> int:
        return sum(point.size for point in self.points.values())

    @property
    def num_bytes(self) -> int:
        return self.max_slots * self.slot_size * self.dtype.itemsize

    def allocate(self) -> None:
        """Once the model is built: the memory of all points, a slot in one piece."""
        memory = torch.zeros(self.max_slots, self.slot_size, dtype=self.dtype, device=self.device)
        self._memory, at = memory, 0
        for each in self._parts:
            each.bind(memory[:, at : at + each.size])
            at += each.size

    def release(self) -> None:
        """Give the memory back."""
        self._memory = None
        for each in self._parts:
            each.unbind()

    def keep_spares(self, count: int, size: int) -> None:
        """Pinned memory for the next adapters, if they have so many numbers: to pin it takes longer than to
        read one."""
        while len(self._spares) < count:
            self._spares.append(torch.empty(size, dtype=self.dtype, pin_memory=True))

    def _host_memory(self, size: int) -> Tensor:
        with contextlib.suppress(IndexError):
            spare = self._spares.pop()
            if size <= len(spare) < 2 * size:
                return spare[:size]
        return torch.empty(size, dtype=self.dtype, pin_memory=self.device.type == "cuda")

    def room(self, ranks: Mapping[str, int]) -> dict[str, LoRAFactors]:
        """Host memory, in one piece, for an adapter of these ranks, by point."""
        shapes = {name: self.points[name].shapes(rank) for name, rank in ranks.items()}
        size = sum(math.prod(shape) for both in shapes.values() for shape in both)
        memory, found, at = self._host_memory(size), {}, 0
        for name, (a, b) in shapes.items():
            middle, end = at + math.prod(a), at + math.prod(a) + math.prod(b)
            found[name] = LoRAFactors(memory[at:middle].view(a), memory[middle:end].view(b))
            at = end
        return found

    def table_room(self, name: str) -> Tensor:
        """Host memory for what of a table is here."""
        table, pins = self.tables[name], self.device.type == "cuda"
        return torch.empty(table.own.size, table.hidden, dtype=self.dtype, pin_memory=pins)

    def put(
        self,
        slot: int,
        factors: Mapping[str, LoRAFactors],
        tables: Mapping[str, Tensor] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        """An adapter takes the place of what was there; pinned memory is read when the device comes to it."""
        assert self._memory is not None, "allocate() comes first"
        self._memory[slot, : self._points_size].zero_()
        for name, each in factors.items():
            self.points[name].put(slot, each)
        for name, table in self.tables.items():
            table.put(slot, (tables or {}).get(name))
        for name, room in self.owned.items():
            room.put(slot, (own or {}).get(name))
        self.has_own[slot] = bool(own)
        news = (int((each.ids >= self.owned[name].vocab).sum()) for name, each in (own or {}).items())
        self.num_new[slot] = max(news, default=0)


def places(slots: AdapterSlots) -> Iterator[tuple[str, LoRATarget]]:
    """All matrices of a model that take adapters, by name."""
    for point in slots.points.values():
        yield from point.places.items()


def known_as(kind: str, name: str) -> tuple[str, ...]:
    """What adapters call an embedding or a head of this name: transformers has one for all heads, whatever
    the checkpoint says."""
    return (name, kind) if kind == "lm_head" else (name,)
