"""Tests of layers with packed GGUF weights on a GPU, or in Triton's interpreter."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf_files import make_tiny_gguf
from oracle import load_tiny, random_prompts, run_hf, run_paged
from packed import stored

from quire.kernels.cpu.gguf import unpack_reference
from quire.kernels.cpu.linear import linear_reference
from quire.quant import gguf
from quire.quant.experts import ExpertShape
from quire.quant.gguf import GGUFExpertsOnGPU, GGUFFormat, GGUFWeightOnGPU
from quire.quant.weight import LinearShape

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "Q5_0", "Q5_0")])
def test_layer_of_mixed_types(kinds: tuple[str, ...], bias: bool) -> None:
    """Check for swapped parts and misplaced biases."""
    torch.manual_seed(0)
    sizes, columns = (8, 5, 7), 256
    weight = GGUFWeightOnGPU(kinds, LinearShape(columns, sizes, bias, torch.float16, DEVICE))
    x, expected = torch.randn(2, columns, device=DEVICE).half(), []
    for i, (kind, size, part) in enumerate(zip(kinds, sizes, weight.parts(), strict=True)):
        part["weight"].tensor.data = stored(kind, size, columns, i)
        if bias:
            part["bias"].tensor.copy_(torch.randn(size))
        values = unpack_reference(stored(kind, size, columns, i), kind).to(DEVICE)
        expected.append(linear_reference(x, values, part["bias"].tensor if bias else None))
    weight.finish()
    actual, reference = weight(x), torch.cat(expected, 1)
    assert (actual - reference).norm() / reference.norm() < 2e-3
    assert len(weight.planes) == 2 and weight.gated is None


def test_layer_is_packed_only_if_every_part_can_be() -> None:
    """Check layers and experts with types that no kernel reads, or not together."""
    plain: Any = SimpleNamespace(linear=lambda parts, shape: "plain", experts=lambda parts, shape: "plain")

    def layer(*kinds: str) -> Any:
        format = GGUFFormat({f"{i}.weight": (kind, 8, 256) for i, kind in enumerate(kinds)}, plain)
        shape = LinearShape(256, (8,) * len(kinds), False, torch.float16, torch.device("cuda"))
        return format.linear(tuple(str(i) for i in range(len(kinds))), shape)

    def experts(inner: int, *kinds: str) -> Any:
        format = GGUFFormat({f"{i}.weight": (kind, 2, inner, 32) for i, kind in enumerate(kinds)}, plain)
        shape = ExpertShape(2, 32, inner, "silu", False, torch.float16, torch.device("cuda"))
        return format.experts(("0", "1", "2"), shape)

    assert all(
        isinstance(layer(*kinds), GGUFWeightOnGPU) for kinds in (("Q4_K",), ("IQ4_XS", "Q6_K"), ("IQ2_XS",))
    )
    assert layer("IQ1_S") == layer("Q4_K", "F16") == layer() == "plain"
    assert isinstance(experts(32, "Q4_0", "Q4_0", "Q8_0"), GGUFExpertsOnGPU)
    assert experts(32, "Q4_0", "Q4_1", "Q8_0") == experts(34, "Q4_0", "Q4_0", "Q8_0") == "plain"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), [("llama", "Q5_1"), ("qwen3_moe", "Q8_0")])
def test_logits_match_the_converted_model(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check for swapped gate and up, experts, and rows of the embedding or head."""
    monkeypatch.setattr(gguf, "GGUFWeight", GGUFWeightOnGPU)
    monkeypatch.setattr(gguf, "GGUFExperts", GGUFExpertsOnGPU)
    overrides: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 64, "tie_word_embeddings": True}
    path, hf_model = make_tiny_gguf(family, tmp_path, kind, **overrides)
    model = load_tiny(path, packed=True)
    assert any(isinstance(module, GGUFWeightOnGPU) for module in model.modules())
    ids = random_prompts(3, vocab=64)[0]
    actual, expected = run_paged(model, [ids], [[2], [1]])[0], run_hf(hf_model, ids)
    assert (actual - expected).norm() / expected.norm() < 1e-2
