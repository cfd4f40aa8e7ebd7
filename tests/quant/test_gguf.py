"""Tests of layers with packed GGUF weights: their selection, and equal outputs of a model."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import make_tiny_gguf, write_gguf
from oracle import load_tiny, make_tiny, random_prompts, run_hf, run_paged
from packed import stored

from quire.kernels.cpu import native
from quire.kernels.cpu.gguf import unpack_reference
from quire.kernels.cpu.linear import linear_reference
from quire.kernels.reference.moe import ExpertWeights, mix
from quire.loader.gguf import GGUFSource
from quire.quant.experts import ExpertShape, StoredExperts
from quire.quant.gguf import GGUFFormat, GGUFWeight
from quire.quant.unquantized import PlainExperts, PlainFormat, PlainWeight
from quire.quant.weight import LinearShape, Weight

CPU = torch.device("cpu")
NEVER_PACKED = re.compile(r"norm|bias|sinks|router|shared_gate|before|after")
META_DEVICE = torch.device("meta")
needs_native = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")


def format_of(parts: list[tuple[Any, ...]]) -> GGUFFormat:
    """Return the format of a file with these parts, named by number."""
    return GGUFFormat({f"{i}.weight": part for i, part in enumerate(parts)}, PlainFormat())


def linear_of(parts: list[tuple[Any, ...]], device: torch.device = CPU, bias: bool = False) -> Weight:
    """Return the weight of a layer with these parts: (type, rows, columns)."""
    sizes = tuple(rows for _, rows, *_ in parts) or (16,)
    columns = parts[0][-1] if parts else 64
    names = tuple(str(i) for i in range(len(sizes)))
    return format_of(parts).linear(names, LinearShape(columns, sizes, bias, torch.float32, device))


def experts_of(parts: list[tuple[Any, ...]], shape: ExpertShape) -> StoredExperts:
    return format_of(parts).experts(tuple(str(i) for i in range(len(parts))), shape)


@needs_native
@pytest.mark.parametrize(
    ("parts", "packed"),
    [
        ([("Q4_1", 16, 64)], True),
        ([("Q4_0", 16, 64), ("Q4_0", 8, 64)], True),
        ([("Q4_0", 16, 64), ("Q8_0", 8, 64)], True),
        ([("Q4_K", 16, 256), ("Q4_K", 8, 256), ("Q6_K", 8, 256)], True),
        ([("Q8_0", 13, 64)], True),
        ([("F32", 16, 64)], False),
        ([("Q4_0", 16, 64), ("F16", 8, 64)], False),
        ([("IQ4_XS", 16, 256), ("MXFP4", 8, 256)], True),
        ([("IQ2_XS", 16, 256)], True),
        ([("IQ1_S", 16, 256)], False),
        ([("Q8_0", 64)], False),
        ([], False),
    ],
)
def test_layer_is_packed_only_if_every_part_can_be(parts: list[tuple[Any, ...]], packed: bool) -> None:
    """Check a type without a kernel."""
    assert isinstance(linear_of(parts), GGUFWeight if packed else PlainWeight)


def test_unpacked_without_kernels_for_device_or_type(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(linear_of([("Q4_1", 16, 64)], META_DEVICE), PlainWeight)
    half = LinearShape(64, (16,), False, torch.float16, CPU)
    assert isinstance(format_of([("Q4_1", 16, 64)]).linear(("0",), half), PlainWeight)
    monkeypatch.setattr(native, "library", lambda: None)
    assert isinstance(linear_of([("Q4_1", 16, 64)]), PlainWeight)


@needs_native
@pytest.mark.parametrize(
    "kinds",
    [
        ("Q4_K", "Q4_K", "Q6_K"),
        ("Q2_K", "Q3_K", "Q5_K"),
        ("Q4_1", "Q8_0", "Q5_0"),
        ("IQ4_XS", "IQ4_NL", "Q4_0"),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_layer_of_mixed_types(kinds: tuple[str, ...], bias: bool) -> None:
    """Check for swapped parts and misplaced biases."""
    generator = torch.Generator().manual_seed(0)
    sizes = (24, 8, 13)
    full = linear_of([(kind, size, 512) for kind, size in zip(kinds, sizes, strict=True)], bias=bias)
    parts, expected = [{name: piece.tensor for name, piece in part.items()} for part in full.parts()], []
    x = torch.randn(7, 512, generator=generator)
    for kind, part in zip(kinds, parts, strict=True):
        # Small bytes also give small scales, wherever they are stored.
        content = torch.randint(0, 30, part["weight"].shape, generator=generator)
        part["weight"].data = content.to(torch.uint8)
        weight = unpack_reference(part["weight"].clone(), kind)
        if bias:
            part["bias"].copy_(torch.randn(len(weight), generator=generator) * 1e-3)
        expected.append(linear_reference(x, weight, part.get("bias")))
    ids = torch.tensor([3, 0, 23])
    rows = unpack_reference(parts[0]["weight"].clone(), kinds[0])[ids]
    full.finish()
    for actual, reference in zip(full(x).split(list(sizes), 1), expected, strict=True):
        assert (actual - reference).norm() / reference.norm() < 2e-4
    assert full.rows is not None and torch.equal(full.rows(ids), rows)


@needs_native
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"moe_intermediate_size": 96, "num_experts_per_tok": 2}),
        ("mixtral", {}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 64}),
        ("gpt_oss", {}),
        ("gemma2", {}),
        ("gemma3_text", {}),
    ],
)
def test_logits_match_the_converted_model(
    family: str, overrides: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    """Check Llama's row permutation, the order of parts, biases and the tied head."""
    path, hf_model = make_tiny_gguf(family, tmp_path, kind, **overrides)
    model = load_tiny(path, packed=True)
    packed = [p.dtype for name, p in model.named_parameters() if not NEVER_PACKED.search(name)]
    assert set(packed) == {torch.uint8}
    prompts = random_prompts(17, 10)
    for actual, ids in zip(run_paged(model, prompts, [[9, 5], [1, 4], [7, 1]]), prompts, strict=True):
        expected = run_hf(hf_model, ids)
        assert (actual - expected).norm() / expected.norm() < 1e-3


@needs_native
@pytest.mark.parametrize(
    ("kinds", "sizes"),
    [
        (("Q4_K", "Q5_K", "Q6_K"), (256, 512)),
        (("Q2_K", "Q3_K", "IQ4_XS"), (256, 256)),
        (("Q8_0", "Q4_0", "Q4_1"), (96, 32)),
        (("Q5_0", "Q5_1", "IQ4_NL"), (32, 64)),
        (("MXFP4", "MXFP4", "MXFP4"), (32, 64)),
    ],
)
def test_experts_of_mixed_types(kinds: tuple[str, ...], sizes: tuple[int, int]) -> None:
    """Check for swapped experts or types, and lost biases."""
    torch.manual_seed(0)
    hidden, inner = sizes
    shape = ExpertShape(3, hidden, inner, "silu", True, torch.float32, CPU)
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    experts = experts_of([(kind, 3, *of) for kind, of in zip(kinds, shapes, strict=True)], shape)
    parts, values = {name: part["weight"].tensor for name, part in experts.parts().items()}, []
    for kind, name, of in zip(kinds, ("gate", "up", "down"), shapes, strict=True):
        assert parts[name].dtype == torch.uint8
        parts[name].data = stored(kind, 3 * of[0], of[1], len(values)).view(3, of[0], -1)
        values.append(unpack_reference(parts[name].view(3 * of[0], -1), kind).view(3, *of))
    biases = [piece.tensor.copy_(torch.randn_like(piece.tensor)) for piece in experts.bias_parts().values()]
    experts.finish()
    x, ids = torch.randn(5, hidden), torch.tensor([[0, 2], [1, 0], [2, 1], [1, 2], [0, 1]], dtype=torch.int32)
    weights = torch.rand(5, 2)
    expected = mix(
        x, ids, weights, ExpertWeights(torch.cat(values[:2], 1), values[2], *biases), shape.activation
    )
    actual = experts(x, ids, weights)
    assert (actual - expected).norm() / expected.norm() < 1e-3


def test_experts_are_packed_only_if_every_part_can_be() -> None:
    """Check gate and up in one tensor, and a type without a kernel."""
    three = [("Q8_0", 4, 32, 64), ("Q8_0", 4, 32, 64), ("Q4_K", 4, 256, 256)]
    shape = ExpertShape(4, 64, 32, "silu", False, torch.float32, CPU)
    assert isinstance(experts_of([("Q8_0", 4, 64, 64), three[1]], shape), PlainExperts)
    assert isinstance(experts_of([*three[:2], ("F16", 4, 64, 32)], shape), PlainExperts)
    assert isinstance(experts_of([*three[:2], ("Q8_0", 64, 32)], shape), PlainExperts)
    assert isinstance(experts_of(list(three), replace(shape, device=META_DEVICE)), PlainExperts)


def test_unsupported_types_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """Check the warning about a file that takes four times its size in memory."""
    for _ in range(2):
        linear_of([("IQ1_M", 16, 256)])
        linear_of([("F16", 16, 256)])
    output = [record.getMessage() for record in caplog.records]
    if native.library() is not None:
        assert output == ["Weights of the type IQ1_M are dequantized: no cpu kernel supports them"]


@needs_native
def test_layer_is_repacked_before_the_next_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that loading does not need twice the model's memory."""
    _, hf_model = make_tiny("llama", tmp_path, num_hidden_layers=4)
    events: list[str] = []

    def noted(kind: type, name: str, event: str) -> None:
        real = getattr(kind, name)

        def note(*args: Any) -> None:
            events.append(event)
            real(*args)

        monkeypatch.setattr(kind, name, note)

    noted(GGUFSource, "fill", "read")
    noted(GGUFWeight, "finish", "repacked")
    load_tiny(write_gguf(tmp_path / "m.gguf", hf_model, "Q8_0"), packed=True)
    runs = "".join("r" if event == "read" else " " for event in events).split()
    assert events.count("repacked") >= 4 * 4 + 1 and max(map(len, runs)) < 8
