"""Random PEFT adapters on disk, and a driver for batches with several adapters."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle import load_tiny, run_paged
from torch import Tensor, nn

from quire.attention.batch import Batch, LoRATokens
from quire.layers.lora import AdapterSlots
from quire.loader.lora import LoRAReader, LoRAWeights

PLAIN = -1
"""Slot of a row without adapter."""


def save_adapter(hf_model: Any, path: Path, seed: int, **settings: Any) -> Any:
    """Wrap `hf_model` with a random PEFT adapter and save it at `path`; call `unload()` before the next."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(hf_model, LoraConfig(lora_dropout=0.0, **settings))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        adapted.save_pretrained(path)
    return adapted.eval()


def slots_for(max_slots: int, max_rank: int, **options: Any) -> AdapterSlots:
    device = torch.device("cpu")
    return AdapterSlots(max_slots=max_slots, max_rank=max_rank, dtype=torch.float32, device=device, **options)


class Adapted:
    """A model whose rows have adapters; `slot_of` gives the slot by row."""

    def __init__(self, path: Path, slots: AdapterSlots, **options: Any) -> None:
        self.slots = slots
        self.model: Any = load_tiny(path, adapters=slots, **options)
        slots.allocate()
        self.reader = LoRAReader(slots)
        self.slot_of: list[int] = []

    def put(self, slot: int, path: Path) -> LoRAWeights:
        adapter = self.reader.read("one", path)
        self.slots.put(slot, adapter.factors, adapter.tables)
        return adapter

    def modules(self) -> Iterator[nn.Module]:
        return iter(self.model.modules())

    def __call__(self, batch: Batch) -> Tensor:
        of_rows = np.array(self.slot_of, np.int32)[batch.rows.numpy()]
        tokens = torch.from_numpy(np.repeat(of_rows, batch.query_lens_host))
        self.lora = self.slots.plan(LoRATokens(tokens)) if (tokens >= 0).any() else None
        for group in batch.groups:
            group.lora = self.lora
        hidden: Tensor = self.model(batch)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.model.logits(hidden, self.lora)
        return out

    def run(self, prompts: list[list[int]], slot_of: list[int]) -> list[Tensor]:
        """Return logits of every position: all prompts at once, in two chunks and a decode."""
        self.slot_of = slot_of
        lens = [len(ids) for ids in prompts]
        first = [size // 2 for size in lens]
        rest = [size - 1 - done for size, done in zip(lens, first, strict=True)]
        return run_paged(self, prompts, [first, rest, [1] * len(prompts)])
