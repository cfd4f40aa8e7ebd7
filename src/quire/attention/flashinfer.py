"""FLASHINFER: attention by the package flashinfer, if installed. It plans on the host: no CUDA graphs."""

from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import AttentionSpec, named, why_no_gpu, why_no_package
from quire.attention.batch import Batch
from quire.config.machine import Machine

_WORKSPACE_BYTES = 256 << 20


@dataclass(slots=True)
class _Step:
    """flashinfer's wrappers that are planned for the current batch, by layer parameters, block size and cache
    dtype."""

    wrappers: dict[tuple[AttentionSpec, int, torch.dtype], Any] = field(default_factory=dict)


class FlashInfer:
    """Paged attention by flashinfer, planned on the host."""

    name = "FLASHINFER"
    capturable = captures_prompts = False

    def __init__(self) -> None:
        self._wrappers: dict[tuple[AttentionSpec, int, torch.dtype], Any] = {}

    def fits(self, spec: AttentionSpec, machine: Machine) -> str | None:
        if (why := why_no_gpu(machine)) is not None:
            return why
        if not find_spec("flashinfer"):
            return "the package flashinfer is not installed"
        if spec.head_dim not in (64, 128, 256):
            return f"needs a head size of 64, 128 or 256, not {spec.head_dim}"
        if spec.cache_dtype not in (None, spec.dtype, torch.float8_e4m3fn):
            return f"needs a KV cache of the model's dtype or float8_e4m3fn, not {named(spec.cache_dtype)}"
        return why_no_package(spec)

    def plan(self, batch: Batch) -> None:
        batch.attention = _Step()

    def forward(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        assert sinks is alibi_slopes is None, "sinks and ALiBi are not supported"
        key = (spec, k_cache.shape[1], k_cache.dtype)
        planned = batch.attention.wrappers
        if key not in planned:
            planned[key] = self._plan_wrapper(key, batch)
        return planned[key].run(q, (k_cache, v_cache), k_scale=spec.k_scale, v_scale=spec.v_scale)

    def _plan_wrapper(self, key: tuple[AttentionSpec, int, torch.dtype], batch: Batch) -> Any:
        spec, block_size, cache_dtype = key
        if key not in self._wrappers:
            workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=batch.seq_lens.device)
            make = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
            self._wrappers[key] = make(workspace, "NHD")
        self._wrappers[key].plan(
            batch.query_starts,
            *_pages(batch, block_size),
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            block_size,
            causal=True,
            sm_scale=spec.score_scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            logits_soft_cap=spec.softcap,
            q_data_type=spec.dtype,
            kv_data_type=cache_dtype,
        )
        return self._wrappers[key]


def _pages(batch: Batch, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cache blocks of all sequences in flashinfer's format: the start of each sequence in the list
    of block ids, this list, and the number of tokens in each sequence's last block."""
    lens = batch.seq_lens_host
    counts = -(-lens // block_size)
    starts = np.concatenate(([0], np.cumsum(counts)))
    seqs = np.repeat(np.arange(len(lens)), counts)
    device = batch.block_tables.device
    columns = torch.from_numpy(np.arange(starts[-1]) - starts[seqs]).to(device)
    blocks = batch.block_tables[batch.rows[torch.from_numpy(seqs).to(device)], columns]
    last = lens - np.maximum(counts - 1, 0) * block_size
    return (
        torch.from_numpy(starts.astype(np.int32)).to(device),
        blocks,
        torch.from_numpy(last.astype(np.int32)).to(device),
    )
