"""How much memory a model needs on this device beside its cache, and what that leaves for the cache."""

import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import psutil
import torch
from torch import Tensor

from quire.checkpoint.layout import CacheLayout
from quire.config.machine import Machine
from quire.config.sections import CacheSection
from quire.errors import ConfigError
from quire.layers.attention import Caching, PagedAttention
from quire.memory import CacheRoom, CacheSize, human


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes."""

    weights: int
    activations: int
    """The peak of the largest step, all of whose rows ask for everything."""
    graphs: int = 0
    """Of decodes that are played again: CUDA graphs, or tapes on a CPU."""
    counts: int = 0
    """Of tokens, for penalties."""
    adapters: int = 0
    """Their slots."""
    vectors: int = 0
    """Of images, videos and sounds, while they are kept."""
    other: int = 0
    """Taken by the device's own libraries, and by others on it."""

    def beside(self, activations: int) -> "Needs":
        """With room for another computation that comes after the step."""
        return replace(self, activations=max(self.activations, activations))

    @property
    def total(self) -> int:
        named = self.weights + self.activations + self.graphs + self.counts + self.adapters + self.vectors
        return named + self.other

    def with_slots(self, num_bytes: int, device: str) -> "Needs":
        """With the slots that a GPU counts among what others take."""
        other = self.other - num_bytes if device == "cuda" else self.other
        return replace(self, adapters=num_bytes, other=other)


def table(needs: Needs, cache: CacheSize) -> str:
    """What the memory is used for, one line each."""
    parts = {
        "weights": needs.weights,
        "activations": needs.activations,
        "graphs or tapes": needs.graphs,
        "penalty counts": needs.counts,
        "slots for adapters": needs.adapters,
        "vectors of media": needs.vectors,
        "libraries and others": needs.other,
        "KV cache": cache.num_bytes,
    }
    lines = [f"  {name:<21}{human(size):>12}" for name, size in parts.items() if size]
    num_tokens, longest = cache.num_tokens, cache.max_model_len
    fit = f"{num_tokens:,} tokens fit, {num_tokens / longest:.2f} requests of {longest:,}"
    return "Memory:\n" + "\n".join(lines) + f"   {fit}"


def unite_memory() -> None:
    """Have free memory of a CUDA device be one piece, whatever steps came before; what the user set stays."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & {*os.environ}:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def free_bytes(machine: Machine) -> int:
    if machine.device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return min(psutil.virtual_memory().available, machine.free_bytes)


def cache_room(cache: CacheSection, machine: Machine, *, other_bytes: int) -> CacheRoom:
    """The cache's share: a fixed number if the user gave one, else what utilization leaves beside
    `other_bytes`."""
    total = machine.total_bytes
    if cache.kv_cache_memory_bytes is not None:
        kv_bytes = cache.kv_cache_memory_bytes
        if cache.num_gpu_blocks_override is None and kv_bytes > (free := free_bytes(machine)):
            raise ConfigError(
                f"kv_cache_memory_bytes={kv_bytes} ({human(kv_bytes)}) is more than the {human(free)} "
                f"that are free on "
                f"this {machine.device}: lower it to at most {free}"
            )
    else:
        kv_bytes = min(int(total * cache.gpu_memory_utilization) - other_bytes, free_bytes(machine))
        if cache.kv_cache_memory_limit is not None:
            kv_bytes = min(kv_bytes, cache.kv_cache_memory_limit)
    return CacheRoom(
        kv_bytes=kv_bytes,
        other_bytes=other_bytes,
        total_bytes=total,
        num_blocks_override=cache.num_gpu_blocks_override,
        soft=cache.kv_cache_memory_limit is not None,
    )


def bind(
    layers: Sequence[Caching],
    layout: CacheLayout,
    *,
    num_blocks: int,
    num_rows: int,
    block_size: int,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Give every layer its part of a cache of so many blocks: pages in the slab that it shares with one layer
    of each other group, or what each row has of its own, and one more for padding. The bytes of all."""
    per_number = num_blocks * block_size * cache_dtype.itemsize
    ends = list(accumulate(layout.slabs, initial=0))
    pages = reserve(num_bytes := ends[-1] * per_number, device=device)
    specs = ((number, spec) for number, spec in enumerate(layout.specs) if spec is not None)
    keeping = [(number, part) for number, spec in specs for part in spec.parts]
    for (number, spec), layer in zip(keeping, layers, strict=True):
        assert spec == layer.keeps, f"layer {number} keeps {layer.keeps}"
        if not spec.is_paged:
            memory, group = reserve(num_rows + 1, spec.row_bytes(cache_dtype.itemsize), device=device), 0
            num_bytes += memory.nbytes
        else:
            group, slab = layout.places[number]
            memory = pages[ends[slab] * per_number : ends[slab + 1] * per_number]
            if (part := layout.parts[number]) != (0, 1):
                assert isinstance(layer, PagedAttention), "only keys and values lie side by side"
                layer.bind_memory(
                    memory, block_size=block_size, cache_dtype=cache_dtype, group=group, part=part
                )
                continue
        layer.bind_memory(memory, block_size=block_size, cache_dtype=cache_dtype, group=group)
    return num_bytes


def reserve(*shape: int, device: torch.device) -> Tensor:
    """Bytes in one piece, all zeros: kernels may read, and multiply by nothing, what nobody wrote. On a
    CPU what is not used takes no room: in pages of their usual size, since an allocator that likes large ones
    would give each layer's first block two megabytes."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    size = math.prod(shape)
    memory = mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size].view(shape)
