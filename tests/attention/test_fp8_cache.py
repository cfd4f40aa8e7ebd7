"""Tests of 8-bit caches: every kind of attention against transformers with rounded keys and values."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import CHUNKS, check
from oracle import BLOCK_SIZE, load_tiny, make_batch, make_tiny, on_rows, random_prompts, run_paged
from safetensors.torch import load_file, save_file
from tiny import generate, logits_of, open_tiny
from torch import Tensor
from transformers import DynamicCache

from quire.attention.backend import AttentionBackend, AttentionSpec, choose
from quire.attention.cpu_attn import CPUAttention
from quire.attention.torch_sdpa import TorchSDPA
from quire.config.machine import Machine
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.kernels.cpu.ops import CPUOps
from quire.kernels.cpu.tape import record
from quire.kernels.ops import HeadEntry
from quire.kernels.reference.ops import Reference
from quire.layers.attention import caching_layers

KINDS = (torch.float8_e4m3fn, torch.float8_e5m2)
NAMES = {
    "llama": ("k_scale", "v_scale"),
    "gemma3_text": ("attn.k_scale", "attn.v_scale"),
    "gpt_oss": ("k_proj.k_scale", "v_proj.v_scale"),
    "deepseek_v3": ("kv_scale",),
}
"""One model per kind of attention: full, windows, sinks, MLA; with the names of its scales."""
SCALES = 0.013, 0.021
needs_native = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")


def rounded(x: Tensor, scale: float, kind: torch.dtype) -> Tensor:
    limit = torch.finfo(kind).max
    return (x / scale).clamp(-limit, limit).to(kind).to(x.dtype) * scale


class Rounding(DynamicCache):
    """A cache that rounds keys and values, or MLA latents and RoPE keys, to 8 bits."""

    def __init__(self, kind: torch.dtype, scales: tuple[float, float]) -> None:
        super().__init__()
        self.kind, self.scales = kind, scales

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = rounded(keys, self.scales[0], self.kind), rounded(values, self.scales[1], self.kind)
        return super().update(keys, values, layer, *args, **kwargs)


@torch.inference_mode()
def run_rounded(hf_model: Any, ids: list[int], kind: torch.dtype, scales: tuple[float, float]) -> Tensor:
    cache = Rounding(kind, scales)
    logits: Tensor = hf_model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0]
    return logits


def with_scales(path: Path, names: tuple[str, ...]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    layers = {name.split(".self_attn.")[0] for name in tensors if ".self_attn." in name}
    for layer in layers:
        for name, scale in zip(names, SCALES, strict=False):
            tensors[f"{layer}.self_attn.{name}"] = torch.tensor([scale])
    save_file(tensors, file, {"format": "pt"})


def keep_in(model: Any, kind: torch.dtype, backend: AttentionBackend) -> None:
    """Allocate the cache of each layer, filled with zeros."""
    for layer in caching_layers(model.modules()):
        size = 64 * BLOCK_SIZE * layer.cache_spec.planes * layer.cache_spec.elements
        memory = torch.zeros(size, dtype=torch.uint8)
        layer.bind_memory(memory, block_size=BLOCK_SIZE, cache_dtype=kind, group=0)
        layer.backend = backend  # type: ignore[attr-defined]


@needs_native
@pytest.mark.parametrize("stored", [True, False], ids=["scales", "no scales"])
@pytest.mark.parametrize("family", NAMES)
def test_only_keys_and_values_are_rounded(family: str, stored: bool, tmp_path: Path) -> None:
    """Check that each scale is read, applied to its tensor in both directions, and that FP8 types are not
    confused.
    """
    path, hf_model = make_tiny(family, tmp_path)
    scales = (1.0, 1.0)
    if stored:
        names = NAMES[family]
        scales = SCALES if len(names) == 2 else (SCALES[0], SCALES[0])
        with_scales(path, names)
    model, prompts = load_tiny(path), random_prompts(17, 10)
    for kind in KINDS:
        expected = torch.cat([run_rounded(hf_model, ids, kind, scales) for ids in prompts])
        for backend in (TorchSDPA(), CPUAttention()):
            keep_in(model, kind, backend)
            actual = torch.cat(run_paged(model, prompts, [[9, 5], [1, 4], [7, 1]]))
            assert (actual - expected).norm() / expected.norm() < 1e-2


@needs_native
@pytest.mark.parametrize("family", NAMES)
@torch.inference_mode()
def test_decodes_with_an_8_bit_cache_are_taped(family: str, tmp_path: Path) -> None:
    """Check that no torch operation runs between the kernels."""
    model = load_tiny(make_tiny(family, tmp_path)[0])
    keep_in(model, KINDS[0], CPUAttention())
    batch = on_rows(make_batch([([5], 6), ([9], 2)], [[1, 2], [3]], BLOCK_SIZE), [4, 0])
    with record() as tape:
        model.logits(model(batch))
    assert tape.refused is None


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_engine_with_an_8_bit_cache(name: str, tmp_path: Path) -> None:
    path, hf_model = make_tiny("llama", tmp_path)
    with_scales(path, NAMES["llama"])
    kind = KINDS[name == "fp8_e5m2"]
    for output in generate(open_tiny(path, kv_cache_dtype=name), random_prompts(9, 14)):
        outputs = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        expected = run_rounded(hf_model, outputs, kind, SCALES)[len(output.prompt_token_ids) - 1 : -1]
        assert (logits_of(output) - expected).norm() / expected.norm() < 1e-2


@needs_native
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_code_is_read_and_the_nearest_is_written(kind: torch.dtype) -> None:
    """Check subnormal numbers, ties, and saturation, which never gives NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(kind)
    wide = codes.float()
    real = wide[wide.isfinite()]
    between = (real.sort().values[1:] + real.sort().values[:-1]) / 2
    random = torch.randn(700, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-7, 6, 700)
    x = torch.cat((real, between, between * 1.0001, random, torch.tensor([1e9, -1e9, 1e30, 0.0])))
    x = torch.nn.functional.pad(x, (0, -len(x) % 64)).view(-1, 64)
    for dtype in (torch.float32, torch.bfloat16):
        values = x.to(dtype)
        qkv = torch.cat((values, values, values / 3), 1)
        table = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1).to(dtype)
        slots, places = torch.arange(len(x)), torch.zeros(len(x), dtype=torch.int64)
        written = []
        for ops in (Reference(), CPUOps()):
            caches = [torch.zeros(len(x), 1, 1, 64, dtype=torch.uint8).view(kind) for _ in "kv"]
            ops.rotate_and_write(qkv, HeadEntry(1, table, places, slots, *caches, None, 0.5, 2.0))
            written.append([cache.view(torch.uint8) for cache in caches])
        assert all(torch.equal(*pair) for pair in zip(*written, strict=True))
        assert written[0][0].view(kind).float().isfinite().all()
    cache = codes[: 0x7B + 1].view(-1, 1, 1, 4).expand(-1, 1, 1, 4).contiguous()
    cache = torch.cat((cache, cache), -1)
    spec = AttentionSpec(1, 1, 8, torch.float32, v_scale=2.0)
    batch = make_batch([([0], 0)] * len(cache), [[i] for i in range(len(cache))], 1)
    actual = CPUAttention().forward(torch.zeros(len(cache), 1, 8), cache, cache, batch, spec)
    assert torch.equal(actual, 2 * cache[:, 0].float())


@needs_native
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("window", [None, 4])
def test_native_kernel_with_8_bit_cache(kind: torch.dtype, window: int | None) -> None:
    for heads, dim in (((4, 2), 24), ((3, 3), 64)):
        spec = AttentionSpec(*heads, dim, torch.float32, window, k_scale=0.5, v_scale=2.0)
        for chunks in CHUNKS.values():
            check(CPUAttention(), chunks, spec, cache_dtype=kind, sinks=heads[0] == 4)


def test_unsupported_backend_error_names_supported_ones() -> None:
    spec = AttentionSpec(4, 2, 64, torch.bfloat16, cache_dtype=torch.float8_e4m3fn)
    ampere = Machine("cuda", "a GPU", 1, 1, 1, 1, capability=(8, 0))
    with pytest.raises(ConfigError, match=r"8\.9 for fp8_e4m3, this is 8\.0; .* or use TORCH_SDPA"):
        choose("TRITON_ATTN", spec, ampere)
    if native.library():
        cpu = replace(ampere, device="cpu")
        for kind in KINDS:
            assert choose(None, replace(spec, cache_dtype=kind), cpu).name == "CPU_ATTN"
