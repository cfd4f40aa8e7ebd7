"""FLASH_ATTN: attention by the package flash_attn or vllm_flash_attn, if installed."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.attention.backend import AttentionSpec, named, why_no_gpu, why_no_package
from quire.attention.batch import Batch
from quire.config.machine import Machine
from quire.errors import ConfigError

_PACKAGES = {"vllm_flash_attn": 16, "flash_attn": 256}
"""Packages in order of preference, with the number of tokens that the block size must be a multiple of."""


@dataclass(frozen=True, slots=True)
class _Step:
    tables: Tensor
    """[B, blocks], one row per sequence of the batch"""
    key_starts: Tensor
    """[B + 1] int32, first key of each sequence if all keys are concatenated"""
    max_query_len: int


class FlashAttention:
    """Paged attention by vllm_flash_attn or flash_attn, for both prompts and decodes."""

    name = "FLASH_ATTN"
    capturable = captures_prompts = False

    def fits(self, spec: AttentionSpec, machine: Machine) -> str | None:
        if (why := why_no_gpu(machine)) is not None:
            return why
        if not any(map(find_spec, _PACKAGES)):
            return f"none of the packages {', '.join(_PACKAGES)} is installed"
        if spec.head_dim > 256 or spec.head_dim % 8:
            return f"needs a head size up to 256 in steps of 8, not {spec.head_dim}"
        if spec.cache_dtype not in (None, spec.dtype):
            return f"needs a KV cache of the model's dtype, not {named(spec.cache_dtype)}"
        return why_no_package(spec)

    def plan(self, batch: Batch) -> None:
        key_starts = F.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        tables = batch.block_tables[batch.rows]
        batch.attention = _Step(tables, key_starts, batch.max_query_len)

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
        assert k_cache.dtype == q.dtype, "a KV cache of another dtype is not supported"
        step: _Step = batch.attention
        attend, by_lens, block_step = _package()
        block_size = k_cache.shape[1]
        if block_size % block_step:
            raise ConfigError(
                f"FLASH_ATTN needs a block size that is a multiple of {block_step}, not {block_size}"
            )
        lens = {"seqused_k": batch.seq_lens} if by_lens else {"cu_seqlens_k": step.key_starts}
        return attend(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=batch.query_starts,
            max_seqlen_q=step.max_query_len,
            # The upper bound, not the longest length: a captured graph keeps this value.
            max_seqlen_k=step.tables.shape[1] * block_size,
            softmax_scale=spec.score_scale,
            causal=True,
            window_size=(-1, -1) if spec.window is None else (spec.window - 1, 0),
            softcap=spec.softcap or 0.0,
            block_table=step.tables,
            **lens,
        )


@cache
def _package() -> tuple[Callable[..., Any], bool, int]:
    """Return the attention function of the installed package, whether it takes the number of keys per
    sequence (rather than cumulative numbers), and the number of tokens that the block size must be a multiple
    of. Raise a ConfigError if no package is installed."""
    for name, block_step in _PACKAGES.items():
        if find_spec(name):
            attend = import_module(name).flash_attn_varlen_func
            return attend, "seqused_k" in inspect.signature(attend).parameters, block_step
    raise ConfigError(f"FLASH_ATTN needs one of the packages {', '.join(_PACKAGES)}; none is installed")
