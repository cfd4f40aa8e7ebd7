"""Tests of the int8 KV cache with a scale per token and head, against transformers with rounded heads."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from by_hand import CHUNKS, check, in_int8
from oracle import BLOCK_SIZE, load_tiny, make_batch, make_tiny, on_rows, random_prompts, run_paged
from tiny import generate, logits_of, open_tiny
from torch import Tensor
from transformers import DynamicCache

from quire.attention.backend import AttentionBackend, AttentionSpec
from quire.attention.cpu_attn import CPUAttention
from quire.attention.torch_sdpa import TorchSDPA
from quire.checkpoint.layout import INT8_CACHE, cache_specs, layout
from quire.checkpoint.model import read_checkpoint
from quire.checkpoint.tensor_parallel import shard_facts
from quire.config.cache_dtype import resolve_cache_dtype
from quire.config.machine import Machine
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.kernels.cpu.ops import CPUOps
from quire.kernels.cpu.tape import record
from quire.kernels.ops import HeadEntry
from quire.kernels.reference.ops import Reference, dequantize_heads
from quire.layers.attention import caching_layers

FAMILIES = ("llama", "gemma3_text", "gpt_oss")
"""Full attention, windows, and sinks."""
needs_native = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")


class Rounding(DynamicCache):
    """A cache that rounds every head of every token to 8 bits."""

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        return super().update(in_int8(keys)[0], in_int8(values)[0], layer, *args, **kwargs)


@torch.inference_mode()
def run_rounded(hf_model: Any, ids: list[int]) -> Tensor:
    logits: Tensor = hf_model(torch.tensor([ids]), past_key_values=Rounding(), use_cache=True).logits[0]
    return logits


def keep_in_int8(model: Any, backend: AttentionBackend) -> None:
    for layer in caching_layers(model.modules()):
        keeps = layer.cache_spec.stored_as(INT8_CACHE)
        memory = torch.full((64 * BLOCK_SIZE * keeps.planes * keeps.elements,), 255, dtype=torch.uint8)
        layer.bind_memory(memory, block_size=BLOCK_SIZE, cache_dtype=torch.int8, group=0)
        layer.backend = backend  # type: ignore[attr-defined]


@needs_native
@pytest.mark.parametrize("family", FAMILIES)
def test_only_keys_and_values_are_rounded(family: str, tmp_path: Path) -> None:
    path, hf_model = make_tiny(family, tmp_path)
    model, prompts = load_tiny(path), random_prompts(17, 10)
    expected = torch.cat([run_rounded(hf_model, ids) for ids in prompts])
    for backend in (TorchSDPA(), CPUAttention()):
        keep_in_int8(model, backend)
        actual = torch.cat(run_paged(model, prompts, [[9, 5], [1, 4], [7, 1]]))
        assert (actual - expected).norm() / expected.norm() < 3e-3


@needs_native
@torch.inference_mode()
def test_decodes_are_taped(tmp_path: Path) -> None:
    model = load_tiny(make_tiny("llama", tmp_path)[0])
    keep_in_int8(model, CPUAttention())
    batch = on_rows(make_batch([([5], 6), ([9], 2)], [[1, 2], [3]], BLOCK_SIZE), [4, 0])
    with record() as tape:
        model.logits(model(batch))
    assert tape.refused is None


@needs_native
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_kernel(dtype: torch.dtype, window: int | None) -> None:
    for heads, dim in (((4, 2), 24), ((3, 3), 64)):
        spec = AttentionSpec(*heads, dim, dtype, window)
        for chunks in CHUNKS.values():
            check(CPUAttention(), chunks, spec, cache_dtype=torch.int8, sinks=heads[0] == 4)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bytes_are_written(dtype: torch.dtype) -> None:
    """Check ties, zeros, tiny and huge numbers, and that NaN and infinity are not lost."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, 24, generator=generator) * 10 ** torch.linspace(-35, 30, 40)[:, None, None]
    x[1], x[2, 0], x[3, 1, :5] = 0, torch.arange(24) / 2, 0
    x[4, :, 0], x[5, :, 3] = torch.inf, torch.nan
    qkv = x.to(dtype).flatten(1)
    table = torch.cat((torch.ones(1, 12), torch.zeros(1, 12)), 1).to(dtype)
    slots, places = torch.arange(len(x)), torch.zeros(len(x), dtype=torch.int64)
    slots[7] = -1
    written = []
    for ops in (Reference(), CPUOps()):
        caches = [torch.zeros(len(x), 1, 1, 28, dtype=torch.int8) for _ in "kv"]
        ops.rotate_and_write(qkv, HeadEntry(1, table, places, slots, *caches))
        written.append(torch.cat(caches, 2)[:, 0])
    finite = [i for i in range(len(x)) if i not in (4, 5)]
    assert torch.equal(written[0][finite], written[1][finite])
    kept = dequantize_heads(written[1])
    assert not kept[[4, 5]].isfinite().any() and kept[finite].isfinite().all() and not kept[7].any()
    others = [i for i in finite if i != 7]
    rounded = in_int8(x.to(dtype).float()[others, 1:])[0].nan_to_num(0)
    torch.testing.assert_close(kept[others], rounded, rtol=1e-5, atol=1e-30)


def test_engine(tmp_path: Path) -> None:
    """Check prompts that share a prefix, whose blocks are read from the prefix cache."""
    path, hf_model = make_tiny("llama", tmp_path)
    prompts = random_prompts(40, 9)
    prompts.append([*prompts[0][:33], 7])
    llm = open_tiny(path, kv_cache_dtype="fp8_per_token_head")  # read as int8_per_token_head
    for output in [*generate(llm, prompts[:2]), *generate(llm, prompts[2:])]:
        outputs = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        expected = run_rounded(hf_model, outputs)[len(output.prompt_token_ids) - 1 : -1]
        assert (logits_of(output) - expected).norm() / expected.norm() < 5e-3


def test_layout_has_the_scales(tmp_path: Path) -> None:
    path, _ = make_tiny("gemma3_text", tmp_path)
    specs = cache_specs(read_checkpoint(path).facts)
    whole, scaled = layout(specs, 64), layout(specs, 64, kv_dtype=INT8_CACHE)
    (spec,) = {spec for spec in specs if spec is not None and spec.window is None}
    factor = (spec.elements + 4 * spec.heads) / spec.elements
    assert scaled.block_bytes(16, 1) == factor * whole.block_bytes(16, 1)
    half = cache_specs(shard_facts(read_checkpoint(path).facts, 2))
    assert [kept.heads for kept in half if kept] == [max(1, kept.heads // 2) for kept in specs if kept]


def test_caches_without_heads_are_refused(tmp_path: Path) -> None:
    path, _ = make_tiny("deepseek_v3", tmp_path)
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype='int8' has a scale .* has MLA, which caches latents"
    ):
        open_tiny(path, kv_cache_dtype="int8")
    machine, checkpoint = Machine("cpu", "a CPU", 1, 1, 1, 1), read_checkpoint(path)
    whisper_facts = replace(
        checkpoint.facts, mla=None, encoder=None, layers=(), media=Mock(num_cross_states=3)
    )
    with pytest.raises(ConfigError, match="has cross-attention states"):
        resolve_cache_dtype("int8", "float32", machine, replace(checkpoint, facts=whisper_facts))
    odd = read_checkpoint(make_tiny("llama", tmp_path)[0])
    odd = replace(odd, facts=replace(odd.facts, head_dim=6))
    with pytest.raises(ConfigError, match="head size that is not a multiple of 4; use auto or fp8"):
        resolve_cache_dtype("int8", "float32", machine, odd)
    assert resolve_cache_dtype("int8", "float32", machine, read_checkpoint(tmp_path / "llama")) == INT8_CACHE
