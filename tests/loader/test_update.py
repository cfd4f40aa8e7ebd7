"""Updates of weights in place: an engine gives the logits of one that started with the new weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import make_tiny
from safetensors.torch import load_file, save_file
from tiny import generate, logits_of, open_tiny, prompts_of
from torch import Tensor

from quire import LLM

Weights = dict[str, Tensor]
QUANTIZABLE = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}


def weights_of(path: Path) -> Weights:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def changed(weights: Weights, seed: int = 5) -> Weights:
    """Return other weights of the same size."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: (x.float() + 0.5 * x.float().std() * torch.randn(x.shape, generator=random)).to(x.dtype)
        for name, x in weights.items()
    }


def logits(llm: LLM) -> list[Tensor]:
    return [logits_of(output) for output in generate(llm, prompts_of(3, 9), 4)]


def load(llm: LLM, weights: Weights) -> set[str]:
    (names,) = llm.collective_rpc(lambda worker: worker.model_runner.model.load_weights(weights.items()))
    assert llm.reset_prefix_cache()
    return set(names)


def check_update(path: Path, folder: Path, **settings: Any) -> None:
    """Compare an engine with updated weights to one that starts with them, bit by bit."""
    new = changed(weights_of(path))
    folder.mkdir()
    for file in path.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            (folder / file.name).symlink_to(file)
    save_file(new, folder / "model.safetensors", metadata={"format": "pt"})
    updated = open_tiny(path, **settings)
    before = logits(updated)  # tapes are recorded with the old weights
    assert load(updated, new) == set(new)
    after, expected = logits(updated), logits(open_tiny(folder, **settings))
    assert all(map(torch.equal, after, expected))
    assert not any(map(torch.equal, before, after))


@pytest.mark.parametrize(
    ("family", "overrides", "settings"),
    [
        ("llama", {}, {}),
        ("llama", {"tie_word_embeddings": True}, {}),
        ("llama", QUANTIZABLE, {"quantization": "fp8"}),
        ("llama", QUANTIZABLE, {"quantization": "int8"}),
        ("qwen2", {}, {"dtype": "bfloat16"}),
        ("qwen2", QUANTIZABLE, {"quantization": "int8", "dtype": "bfloat16"}),
        ("gemma2", {}, {}),
        ("gpt_neox", {}, {}),
        ("gpt2", {}, {}),
        ("mixtral", {}, {}),
        ("qwen3_moe", {}, {}),
        ("qwen3_moe", QUANTIZABLE | {"moe_intermediate_size": 128}, {"quantization": "fp8"}),
        ("qwen3_moe", QUANTIZABLE | {"moe_intermediate_size": 128}, {"quantization": "int8"}),
        ("gpt_oss", {}, {"dtype": "bfloat16"}),
        ("deepseek_v3", {}, {}),
        ("mamba2", {}, {}),
        ("falcon_h1", {}, {}),
        ("lfm2", {}, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())) or "plain",
)
def test_updated_engine_equals_a_new_one(
    tmp_path: Path, family: str, overrides: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Catches a layer that keeps old values: in repacked weights, scales, biases or recorded kernels."""
    path, _ = make_tiny(family, tmp_path, **overrides)
    check_update(path, tmp_path / "new", **settings)
