"""Memory that a model needs besides its cache, and the memory that remains for the cache."""

import math
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import psutil
import torch
from torch import Tensor

from quire.checkpoint.layout import INT8_CACHE, CacheLayout
from quire.config.machine import Machine
from quire.config.sections import CacheSection
from quire.errors import ConfigError
from quire.layers.attention import Caching, PagedAttention
from quire.layers.ssm import SSMMixer
from quire.memory import CacheRoom, CacheSize, human


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory in bytes that a worker needs besides the KV cache, by its use."""

    weights: int
    """Weights on the device, without those of offloaded layers."""
    activations: int
    """Peak of the largest step, with all sampling features in all rows."""
    graphs: int = 0
    """CUDA graphs; on a CPU, tapes of recorded kernel calls."""
    counts: int = 0
    """Token counts for penalties."""
    buffers: int = 0
    """Buffers of offloaded layers."""
    adapters: int = 0
    """LoRA adapter slots."""
    vectors: int = 0
    """Encoder cache: embeddings of images, videos and audio."""
    other: int = 0
    """Memory of the device's libraries, and of other processes on it."""

    def with_peak(self, activations: int) -> "Needs":
        """Return the needs for a second computation with the peak `activations` that follows the step: as
        they do not run at the same time, the larger of the two peaks counts."""
        return replace(self, activations=max(self.activations, activations))

    @property
    def total(self) -> int:
        return sum(getattr(self, term.name) for term in fields(self))

    def with_buffers(self, num_bytes: int) -> "Needs":
        """Return the needs with `num_bytes` bytes for the buffers of offloaded layers, which were counted as
        weights."""
        return replace(self, weights=self.weights - num_bytes, buffers=num_bytes)

    def with_slots(self, num_bytes: int, device: str) -> "Needs":
        """Return the needs with LoRA adapter slots; on a GPU they are part of the measured `other`."""
        other = self.other - num_bytes if device == "cuda" else self.other
        return replace(self, adapters=num_bytes, other=other)


def table(needs: Needs, cache: CacheSize) -> str:
    """Return a table of device memory for the log: one line per use, with its size."""
    parts = {
        "weights": needs.weights,
        "offload buffers": needs.buffers,
        "activations": needs.activations,
        "CUDA graphs or tapes": needs.graphs,
        "penalty counts": needs.counts,
        "LoRA adapter slots": needs.adapters,
        "encoder cache": needs.vectors,
        "libraries and other": needs.other,
        "state checkpoints": cache.all_checkpoint_bytes,
        "KV cache": cache.num_bytes,
    }
    lines = [f"  {name:<21}{human(size):>12}" for name, size in parts.items() if size]
    num_tokens, longest = cache.num_tokens, cache.max_model_len
    fit = f"{num_tokens:,} tokens fit, {num_tokens / longest:.2f} requests of {longest:,}"
    return "Memory:\n" + "\n".join(lines) + f"   {fit}"


def use_expandable_segments() -> None:
    """Use expandable segments against fragmented CUDA memory; settings of the user take precedence."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & {*os.environ}:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def free_bytes(machine: Machine) -> int:
    if machine.device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return min(psutil.virtual_memory().available, machine.free_bytes)


def measure_peak(run: Callable[[], object]) -> int:
    """Return the peak bytes that a run on a GPU allocates, beyond what was allocated before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def cache_room(cache: CacheSection, machine: Machine, *, other_bytes: int) -> CacheRoom:
    """Return the memory for the KV cache: kv_cache_memory_bytes if the user set it, otherwise what
    gpu_memory_utilization leaves beside `other_bytes`, the bytes of all other uses."""
    total = machine.total_bytes
    if cache.kv_cache_memory_bytes is not None:
        kv_bytes = cache.kv_cache_memory_bytes
        if cache.num_gpu_blocks_override is None and kv_bytes > (free := free_bytes(machine)):
            raise ConfigError(
                f"kv_cache_memory_bytes={kv_bytes} ({human(kv_bytes)}) is more than the {human(free)} "
                f"that are free on this {machine.device}: lower it to at most {free}"
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
    num_checkpoints: int = 0,
    block_size: int,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Allocate a cache of `num_blocks` blocks, assign a part of it to every layer, and return its bytes. A
    layer with pages shares its memory with one layer of each other group (see `CacheLayout.slabs`). Other
    layers get a state per row, and one for padding. SSM layers get `layout.states_per_row` states for each of
    these, followed by the states of checkpoints."""
    per_number = num_blocks * block_size * cache_dtype.itemsize
    ends = list(accumulate(layout.slabs, initial=0))
    pages = reserve(num_bytes := ends[-1] * per_number, device=device)
    specs = ((number, spec) for number, spec in enumerate(layout.specs) if spec is not None)
    cached = [(number, part) for number, spec in specs for part in spec.parts]
    for (number, spec), layer in zip(cached, layers, strict=True):
        cache_spec = layer.cache_spec.stored_as(INT8_CACHE) if cache_dtype == torch.int8 else layer.cache_spec
        assert spec == cache_spec, f"layer {number} has cache spec {cache_spec}, not {spec}"
        if not spec.is_paged:
            count = num_rows + 1
            if isinstance(layer, SSMMixer):
                layer.states_per_row = layout.states_per_row
                count = count * layout.states_per_row + num_checkpoints
            memory, group = reserve(count, spec.row_bytes(cache_dtype.itemsize), device=device), 0
            num_bytes += memory.nbytes
        else:
            group, slab = layout.places[number]
            memory = pages[ends[slab] * per_number : ends[slab + 1] * per_number]
            if (part := layout.parts[number]) != (0, 1):
                assert isinstance(layer, PagedAttention), "only paged attention shares a slab"
                layer.bind_memory(
                    memory, block_size=block_size, cache_dtype=cache_dtype, group=group, part=part
                )
                continue
        layer.bind_memory(memory, block_size=block_size, cache_dtype=cache_dtype, group=group)
    return num_bytes


def reserve(*shape: int, device: torch.device) -> Tensor:
    """Return contiguous zeroed bytes: kernels may read unwritten values and multiply them by 0. On a CPU,
    unused pages take no memory. Huge pages are off, since the first block of each layer would take two
    megabytes."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    size = math.prod(shape)
    memory = mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size].view(shape)
