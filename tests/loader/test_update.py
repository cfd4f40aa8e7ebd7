"""Updates of weights in place: an engine gives the logits of one that started with the new weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from group_files import quantize_files
from oracle import make_tiny
from safetensors.torch import load_file, save_file
from tiny import generate, logits_of, open_tiny, prompts_of
from torch import Tensor

from quire import LLM
from quire.checkpoint.quant.schemes import Grouped
from quire.errors import RequestError

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


def are_near(a: Tensor, b: Tensor) -> bool:
    """Return whether logits differ by rounding only: torch rounds by the number of rows."""
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4)


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


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", QUANTIZABLE, {"quantization": "fp8"}),
    ("qwen2", {}, {"dtype": "bfloat16"}),
    ("gemma2", {}, {}),
    ("qwen3_moe", QUANTIZABLE | {"moe_intermediate_size": 128}, {"quantization": "int8"}),
    ("deepseek_v3", {}, {}),
    ("mamba2", {}, {}),
]
MORE_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {}),
    ("llama", {"tie_word_embeddings": True}, {}),
    ("llama", QUANTIZABLE, {"quantization": "int8"}),
    ("qwen2", QUANTIZABLE, {"quantization": "int8", "dtype": "bfloat16"}),
    ("gpt_neox", {}, {}),
    ("gpt2", {}, {}),
    ("mixtral", {}, {}),
    ("qwen3_moe", {}, {}),
    ("qwen3_moe", QUANTIZABLE | {"moe_intermediate_size": 128}, {"quantization": "fp8"}),
    ("gpt_oss", {}, {"dtype": "bfloat16"}),
    ("falcon_h1", {}, {}),
    ("lfm2", {}, {}),
]


@pytest.mark.parametrize(
    ("family", "overrides", "settings"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CASES)],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())) or "plain",
)
def test_updated_engine_equals_a_new_one(
    tmp_path: Path, family: str, overrides: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Catches a layer that keeps old values: in repacked weights, scales, biases or recorded kernels."""
    path, _ = make_tiny(family, tmp_path, **overrides)
    check_update(path, tmp_path / "new", **settings)


def test_part_of_a_quantized_fused_layer_is_refused(tmp_path: Path) -> None:
    """Catches a fused layer that is made of new and of undefined values."""
    path, _ = make_tiny("llama", tmp_path, **QUANTIZABLE)
    llm, new = open_tiny(path, quantization="fp8"), changed(weights_of(path))
    before, name = logits(llm), "model.layers.1.self_attn.q_proj.weight"
    with pytest.raises(RequestError, match=r"all its tensors are needed: send .*k_proj.*v_proj.* as well"):
        load(llm, {name: new[name], "model.norm.weight": new["model.norm.weight"]})
    assert all(map(are_near, before, logits(llm)))
    names = [name.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
    parts = {name: new[name] for name in names}
    assert load(llm, parts) == set(parts)
    assert not any(map(are_near, before, logits(llm)))


def test_weight_that_is_sent_twice_is_refused(tmp_path: Path) -> None:
    path, _ = make_tiny("llama", tmp_path)
    llm, norm = open_tiny(path), weights_of(path)["model.norm.weight"]
    before = logits(llm)

    def load_twice(worker: Any) -> None:
        worker.get_model().load_weights([("model.norm.weight", 2 * norm), ("model.norm.weight", norm)])

    with pytest.raises(RequestError, match=r"model\.norm\.weight is sent twice"):
        llm.collective_rpc(load_twice)
    assert all(map(are_near, before, logits(llm)))


def test_quantized_checkpoint_is_refused_with_the_reason(tmp_path: Path) -> None:
    path, model = make_tiny("llama", tmp_path, **QUANTIZABLE)
    new = weights_of(path)
    scheme = Grouped(bits=4, group=32, layout="awq", symmetric=False, act_order=False)
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    quantize_files(path, model, scheme, config)
    llm = open_tiny(path)
    with pytest.raises(
        RequestError, match=r"Int4Linear cannot be updated: the checkpoint stores them quantized"
    ):
        load(llm, new)


def test_gguf_and_other_formats_are_refused(tmp_path: Path) -> None:
    path, _ = make_tiny("llama", tmp_path)
    llm = open_tiny(path, model_impl="transformers")
    with pytest.raises(RequestError, match="cannot be updated with GGUF files, sharded_state"):
        load(llm, weights_of(path))
