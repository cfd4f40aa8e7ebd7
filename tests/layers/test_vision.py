"""Tests of vision encoder layers against transformers and torch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quire.kernels.reference.encoder import spans_of
from quire.layers.scope import Loads, Scope
from quire.layers.vision import Learned, PatchEmbedding, VisionAttention, VisionMLP, VisionStyle, patches_of
from quire.loader.source import put
from quire.parallel.group import Group

HIDDEN, HEADS = 48, 4
LENS = np.array([9, 4, 4, 1, 13], np.int32)
CPU = torch.device("cpu")
_FUSED = VisionStyle(qkv=("qkv",), out="proj")


def fill(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Fill all parameters of the module, and check that there are no others."""
    wanted = set()
    for layer in module.modules():
        if isinstance(layer, Loads):
            for target in layer.targets():
                wanted.add(target.name)
                assert target.shape == tuple(tensors[target.name].shape)
                put(tensors[target.name], target)
            layer.finish()
    assert wanted == set(tensors)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


def test_fused_attention_with_rope(scope: Scope) -> None:
    """Check for patches of other items, swapped query and key, and angles of another patch."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import VisionAttention as Theirs

    torch.manual_seed(0)
    config = Qwen2VLVisionConfig(embed_dim=HIDDEN, num_heads=HEADS)
    config._attn_implementation = "sdpa"
    reference = Theirs(config)
    actual = VisionAttention(HIDDEN, HEADS, scope, _FUSED)
    fill(actual, state_of(reference))
    x, angles = torch.randn(LENS.sum(), HIDDEN), torch.randn(LENS.sum(), HIDDEN // HEADS // 2)
    full = torch.cat((angles, angles), -1)
    ends = torch.tensor([0, *np.cumsum(LENS)], dtype=torch.int32)
    expected = reference(x, ends, position_embeddings=(full.cos(), full.sin()))
    result = actual(x, spans_of(LENS, CPU), (angles.cos(), angles.sin()))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_attention_with_norms(scope: Scope) -> None:
    """Check per-head norms against norms over all heads."""
    from transformers.models.internvl.configuration_internvl import InternVLVisionConfig
    from transformers.models.internvl.modeling_internvl import InternVLVisionAttention

    torch.manual_seed(1)
    config = InternVLVisionConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, use_qk_norm=True)
    config._attn_implementation = "sdpa"
    expected = InternVLVisionAttention(config)
    style = VisionStyle(out="projection_layer", bias=config.attention_bias, qk_norms=("q_norm", "k_norm"))
    actual = VisionAttention(HIDDEN, HEADS, scope, style)
    fill(actual, state_of(expected))
    x = torch.randn(2, 7, HIDDEN)
    result = actual(x.flatten(0, 1), spans_of(np.array([7, 7], np.int32), CPU))
    torch.testing.assert_close(result.view_as(x), expected(x)[0], rtol=1e-4, atol=1e-5)


def test_keys_without_a_bias(scope: Scope) -> None:
    from transformers.models.whisper.configuration_whisper import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperAttention

    torch.manual_seed(2)
    expected = WhisperAttention(HIDDEN, HEADS, config=WhisperConfig(attn_implementation="sdpa"))
    actual = VisionAttention(HIDDEN, HEADS, scope, VisionStyle(key_bias=False))
    fill(actual, state_of(expected))
    x = torch.randn(1, 11, HIDDEN)
    result = actual(x[0], spans_of(np.array([11], np.int32), CPU))
    torch.testing.assert_close(result, expected(x)[0][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pairs", [False, True])
def test_interleaved_and_half_split_rope(pairs: bool, scope: Scope) -> None:
    torch.manual_seed(3)
    actual = VisionAttention(HIDDEN, HEADS, scope, VisionStyle(bias=False, out_bias=False, pairs=pairs))
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    weights = {f"{name}.weight": torch.randn(HIDDEN, HIDDEN) / 7 for name in names}
    fill(actual, weights)
    x, angles = torch.randn(10, HIDDEN), torch.randn(10, 6)
    q, k, v = ((x @ weights[f"{name}.weight"].T).view(10, HEADS, 12) for name in names[:3])

    def turned(x: Tensor) -> Tensor:
        left, right = (x[..., ::2], x[..., 1::2]) if pairs else x.chunk(2, -1)
        return torch.view_as_real(torch.complex(left, right) * torch.polar(torch.ones(()), angles)[:, None])

    scores = torch.einsum("qhdi,khdi->hqk", turned(q), turned(k)) / 12**0.5
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    result = actual(x, spans_of(np.array([10], np.int32), CPU), (angles.cos(), angles.sin()))
    torch.testing.assert_close(result, mixed @ weights["out_proj.weight"].T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("activation", "gated"),
    [*((name, False) for name in ("gelu", "quick_gelu", "gelu_pytorch_tanh", "silu"))]
    + [(name, True) for name in ("gelu", "gelu_pytorch_tanh", "silu")],
)
def test_feed_forward(activation: str, gated: bool, scope: Scope) -> None:
    from transformers.activations import ACT2FN

    torch.manual_seed(4)
    names = ("gate_proj", "up_proj", "down_proj") if gated else ("fc1", "fc2")
    expected = nn.ModuleDict({name: nn.Linear(HIDDEN, 64) for name in names[:-1]})
    expected[names[-1]] = nn.Linear(64, 20)
    actual = VisionMLP(HIDDEN, 64, scope, size_out=20, names=names, activation=activation)
    fill(actual, state_of(expected))
    x, act = torch.randn(9, HIDDEN), ACT2FN[activation]
    inner = act(expected[names[0]](x)) * (expected[names[1]](x) if gated else 1)
    torch.testing.assert_close(actual(x), expected[names[-1]](inner), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_tensor_parallel_shards_add_up(size: int, scope: Scope) -> None:
    """Check that biases are added once, and that heads not divisible by three are replicated."""

    class Split(nn.Module):
        def __init__(self, scope: Scope) -> None:
            super().__init__()
            self.attention = VisionAttention(HIDDEN, HEADS, scope / "attn", _FUSED)
            self.mlp = VisionMLP(HIDDEN, 60, scope / "mlp")

    torch.manual_seed(5)
    alone = Split(scope)
    layers = [layer for layer in alone.modules() if isinstance(layer, Loads)]
    stored = {target.name: torch.randn(target.shape) / 7 for layer in layers for target in layer.targets()}
    fill(alone, stored)
    x, spans = torch.randn(LENS.sum(), HIDDEN), spans_of(LENS, CPU)
    found_attention, found_mlp = [], []
    for rank in range(size):
        share = Split(replace(scope, group=Group(rank, size)))
        fill(share, stored)
        found_attention.append(share.attention(x, spans))
        found_mlp.append(share.mlp(x))
    if HEADS % size:
        found_attention = found_attention[:1]
    torch.testing.assert_close(sum(found_attention), alone.attention(x, spans), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sum(found_mlp), alone.mlp(x), rtol=1e-4, atol=1e-5)


def test_patches_of_images_and_videos(scope: Scope) -> None:
    """Check row and channel order."""
    torch.manual_seed(6)
    flat, deep = nn.Conv2d(3, 20, 4, 4), nn.Conv3d(3, 20, (2, 4, 4), (2, 4, 4), bias=False)
    image = PatchEmbedding((3, 4, 4), 20, scope)
    fill(image, {f".{name}": tensor for name, tensor in flat.state_dict().items()})
    pixels = torch.randn(2, 3, 12, 8)
    expected = flat(pixels).flatten(2).transpose(1, 2)
    torch.testing.assert_close(image(patches_of(pixels, 4)), expected, rtol=1e-4, atol=1e-5)
    video = PatchEmbedding((3, 2, 4, 4), 20, scope / "proj", bias=False)
    fill(video, {f"proj.{name}": tensor for name, tensor in deep.state_dict().items()})
    patches = torch.randn(5, 3 * 2 * 4 * 4, dtype=torch.float64)
    expected = deep(patches.float().view(5, 3, 2, 4, 4)).flatten(1)
    torch.testing.assert_close(video(patches), expected, rtol=1e-4, atol=1e-5)


def test_learned_vectors_have_their_stored_shape(scope: Scope) -> None:
    cls = Learned(scope / "cls_token", 1, 1, 6)
    stored = torch.randn(1, 1, 6)
    fill(cls, {"cls_token": stored})
    assert torch.equal(cls.vectors, stored)
