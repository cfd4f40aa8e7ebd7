"""Slots of LoRA adapters: device memory for several adapters, all of which one batch can use."""

import contextlib
import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.attention.batch import LoRATokens
from quire.layers.lora_layers import LoRAFactors, LoRALayer, LoRAStack, LoRATarget
from quire.layers.lora_tables import LoRATable, LoRAVocab, LoRAVocabRows
from quire.parallel.group import Group
from quire.quant.sharding import Shard


class AdapterSlots:
    """Adapter slots of a device, each with memory for one adapter in every LoRA layer."""

    def __init__(
        self,
        *,
        max_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        only: Collection[str] = (),
        fully_sharded: bool = False,
        whole_modules: Collection[str] = (),
        max_extra_vocab: int = 0,
        no_extra_vocab: str = "",
    ) -> None:
        self.max_slots = max_slots
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = device
        self.only = frozenset(only)
        """Last name parts of the layers that support LoRA (lora_target_modules); empty for all layers."""
        self.fully_sharded = fully_sharded
        """Whether LoRA is fully sharded over the tensor-parallel group."""
        self.whole_modules = frozenset(whole_modules)
        """Layers (embed_tokens, lm_head) that an adapter may replace entirely."""
        self.tables: dict[str, LoRATable] = {}
        """Embeddings and heads that an adapter may replace entirely, by layer name."""
        self.max_extra_vocab = max_extra_vocab
        """Maximum number of tokens that an adapter may add or retrain; see `LoRAVocabRows`."""
        self.no_extra_vocab = no_extra_vocab or "--lora-extra-vocab-size is 0"
        """Reason why no adapter may add or retrain tokens, for error messages."""
        self.vocab_rows: dict[str, LoRAVocabRows] = {}
        """Rows of tokens that adapters add or retrain, by the kind of layer: embed_tokens or lm_head."""
        self.has_extra_vocab = np.zeros(max_slots + 1, np.bool_)
        """Whether the adapter in each slot adds or retrains tokens; the last entry stands for no adapter."""
        self.num_new = np.zeros(max_slots + 1, np.int32)
        """Number of new tokens, beyond the model's vocabulary, of the adapter in each slot."""
        self.layers: dict[str, LoRALayer] = {}
        self.stacks: dict[str, LoRAStack] = {}
        """Experts of each MoE layer, for adapters that store one matrix for all experts. The keys are all
        names that adapters may use for the layer."""
        self.refused: dict[str, str] = {}
        """Layers without LoRA support although similar layers have it: name -> reason."""
        self.unused = ""
        """Regular expression of names of layers that are not computed; their adapter weights are ignored."""
        self._memory: Tensor | None = None
        self._spares: deque[Tensor] = deque()

    def plan(self, lora: LoRATokens | None) -> LoRATokens | None:
        """Return `lora`, the adapter slots of a batch's tokens, with the metadata that LoRA kernels need;
        None if there are no tokens."""
        if lora is None or not len(lora.slots):
            return None
        layer = next(iter(self.layers.values()), None)
        return (
            lora if layer is None else lora._replace(assigned=layer.ops.assigned(lora.slots, self.max_slots))
        )

    def takes(self, *names: str) -> bool:
        """Return whether a layer supports LoRA. `names` are the names that adapters may use for it."""
        return not self.only or any(name.rpartition(".")[2] in self.only for name in names)

    def add_table(self, kind: str, name: str, shard: Shard, hidden: int, group: Group) -> LoRATable | None:
        """Add slots for adapters that replace this embedding or head (`kind`) entirely; return None if
        adapters may not replace it."""
        if kind not in self.whole_modules:
            return None
        table = self.tables[name] = LoRATable(_known_as(kind, name), self, shard, hidden, group)
        return table

    def add_vocab_rows(
        self, kind: str, name: str, vocab: int, hidden: int, *, tied: bool = False
    ) -> LoRAVocabRows | None:
        """Add slots for embedding or head rows of tokens that adapters add or retrain; return None if LoRA
        extra vocabulary is off."""
        if not self.max_extra_vocab:
            return None
        rows = self.vocab_rows[kind] = LoRAVocabRows(_known_as(kind, name), self, vocab, hidden, tied=tied)
        return rows

    @property
    def slot_size(self) -> int:
        """Return the number of elements (not bytes) of a slot: the adapter weights of all LoRA layers."""
        return sum(part.size for part in self._parts)

    @property
    def _parts(self) -> list[Any]:
        return [*self.layers.values(), *self.tables.values(), *self.vocab_rows.values()]

    @property
    def num_bytes(self) -> int:
        return self.max_slots * self.slot_size * self.dtype.itemsize

    def allocate(self) -> None:
        """Allocate the memory of all LoRA layers after the model is built; each slot is contiguous."""
        memory = torch.zeros(self.max_slots, self.slot_size, dtype=self.dtype, device=self.device)
        self._memory, at = memory, 0
        for part in self._parts:
            part.bind(memory[:, at : at + part.size])
            at += part.size

    def release(self) -> None:
        self._memory = None
        for part in self._parts:
            part.unbind()

    def pin_spares(self, count: int, size: int) -> None:
        """Pin host memory for `count` adapters of `size` elements in advance, because pinning is slow."""
        while len(self._spares) < count:
            self._spares.append(torch.empty(size, dtype=self.dtype, pin_memory=True))

    def _host_memory(self, size: int) -> Tensor:
        with contextlib.suppress(IndexError):
            spare = self._spares.pop()
            if size <= len(spare) < 2 * size:
                return spare[:size]
        return torch.empty(size, dtype=self.dtype, pin_memory=self.device.type == "cuda")

    def room(self, ranks: Mapping[str, int]) -> dict[str, LoRAFactors]:
        """Allocate contiguous host memory for an adapter, and return the A and B matrices to fill, by layer
        name. `ranks` holds the adapter's rank by the name of the LoRA layer."""
        shapes = {name: self.layers[name].shapes(rank) for name, rank in ranks.items()}
        size = sum(math.prod(shape) for both in shapes.values() for shape in both)
        memory, factors, at = self._host_memory(size), {}, 0
        for name, (a, b) in shapes.items():
            middle, end = at + math.prod(a), at + math.prod(a) + math.prod(b)
            factors[name] = LoRAFactors(memory[at:middle].view(a), memory[middle:end].view(b))
            at = end
        return factors

    def table_room(self, name: str) -> Tensor:
        """Return uninitialized host memory for this device's rows, [rows, hidden], of an adapter's embedding
        or head."""
        table, pins = self.tables[name], self.device.type == "cuda"
        return torch.empty(table.num_rows, table.hidden, dtype=self.dtype, pin_memory=pins)

    def put(
        self,
        slot: int,
        factors: Mapping[str, LoRAFactors],
        tables: Mapping[str, Tensor] | None = None,
        vocab_rows: Mapping[str, LoRAVocab] | None = None,
    ) -> None:
        """Copy an adapter's tensors, by layer name, into a slot, and overwrite the adapter there. Copies from
        pinned memory are asynchronous."""
        assert self._memory is not None, "allocate() comes first"
        self._memory[slot, : sum(lora_layer.size for lora_layer in self.layers.values())].zero_()
        for name, layer_factors in factors.items():
            self.layers[name].put(slot, layer_factors)
        for name, table in self.tables.items():
            table.put(slot, (tables or {}).get(name))
        extra = vocab_rows or {}
        for name, room in self.vocab_rows.items():
            room.put(slot, extra.get(name))
        self.has_extra_vocab[slot] = bool(extra)
        self.num_new[slot] = self.count_new(extra)

    def count_new(self, vocab_rows: Mapping[str, LoRAVocab]) -> int:
        """Return the number of tokens that an adapter adds to the model's vocabulary."""
        return max((self.vocab_rows[name].num_new(rows) for name, rows in vocab_rows.items()), default=0)


def lora_targets(slots: AdapterSlots) -> Iterator[tuple[str, LoRATarget]]:
    """Yield the name and target of every checkpoint matrix with LoRA support."""
    for lora_layer in slots.layers.values():
        yield from lora_layer.targets.items()


def _known_as(kind: str, name: str) -> tuple[str, ...]:
    """Return the names that adapters use for an embedding or head; transformers saves a head as lm_head."""
    return (name, kind) if kind == "lm_head" else (name,)
