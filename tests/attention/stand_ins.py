"""Torch versions of the functions of optional attention packages."""

from types import ModuleType
from typing import Any

import torch
from by_hand import by_hand
from torch import Tensor

from quire.attention.backend import AttentionSpec


def _attend(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    starts: Tensor,
    tables: list[Tensor],
    lens: list[int],
    scale: float,
    left: int,
    softcap: float,
) -> Tensor:
    k_cache, v_cache = caches
    window = None if left < 0 else left + 1
    spec = AttentionSpec(
        q.shape[1], k_cache.shape[2], q.shape[2], q.dtype, window, scale, softcap if softcap > 0 else None
    )
    out = torch.empty_like(q)
    for seq, (table, length) in enumerate(zip(tables, lens, strict=True)):
        tokens = slice(int(starts[seq]), int(starts[seq + 1]))
        keys, values = (cache[table.long()].flatten(0, 1)[:length] for cache in caches)
        out[tokens] = by_hand(q[tokens], keys, values, spec)
    return out


def by_lens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    seqused_k: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    block_table: Tensor,
) -> Tensor:
    assert causal and window_size[1] in (-1, 0) and max_seqlen_k >= int(seqused_k.max())
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    lens = seqused_k.tolist()
    return _attend(q, (k, v), cu_seqlens_q, list(block_table), lens, softmax_scale, window_size[0], softcap)


def by_starts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    block_table: Tensor,
) -> Tensor:
    assert k.shape[1] % 256 == 0 and cu_seqlens_k.dtype == torch.int32
    return by_lens(
        q,
        k,
        v,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        cu_seqlens_k.diff(),
        softmax_scale,
        causal,
        window_size,
        softcap,
        block_table,
    )


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal and paged_kv_indices.dtype == torch.int32
        self.starts = qo_indptr
        pages = paged_kv_indptr.diff()
        self.tables = list(paged_kv_indices.split(pages.tolist()))
        self.lens = ((pages - 1).clamp(min=0) * page_size + paged_kv_last_page_len).tolist()
        self.rest = (sm_scale, window_left, logits_soft_cap or 0.0)
        self.facts = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type, kv_data_type)

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, k_scale: float, v_scale: float
    ) -> Tensor:
        k, v = paged_kv_cache
        assert self.facts == (*q.shape[1:2], *k.shape[2:], k.shape[1], q.dtype, k.dtype)
        caches = (k.float() * k_scale, v.float() * v_scale)
        return _attend(q, caches, self.starts, self.tables, self.lens, *self.rest)


def package(name: str, **contents: Any) -> ModuleType:
    from importlib.machinery import ModuleSpec

    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(contents)
    return module
