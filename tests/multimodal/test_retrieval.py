"""Tests of retrieval models with one vector per token of a page or of a query, against transformers."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from seeing import Twin as Seeing
from test_qwen import IMAGE_TOKENS, LARGE, SMALL, WIDE, Twin, request_of
from tiny_seeing import picture

from quire import LLM
from quire.checkpoint.model import read_checkpoint

SIZE = 12
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "max_num_seqs": 8,
    "max_model_len": 256,
    "num_gpu_blocks_override": 400,
    "max_num_batched_tokens": 48,
    "use_tqdm_on_load": False,
}


def saved(kind: str, path: Path, twin: Path, config: Any) -> Any:
    """Save a retrieval model with this projection in a copy of its base model."""
    import transformers as hf

    shutil.copytree(twin, path, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(2)
    made = getattr(hf, f"{kind}ForRetrieval")
    model = made(made.config_class(vlm_config=config, embedding_dim=SIZE)).float().eval()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point() and (tensor.ndim == 1 or not tensor.any()):
            tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(path)
    return model


def check(path: Path, prompts: list[Any], expected: list[Any]) -> None:
    """Compare the embedding of every token, twice: the prefix cache must not skip any token."""
    llm = LLM(str(path), **SETTINGS)
    for _ in range(2):
        for output, (ids, vectors) in zip(
            llm.encode(prompts, pooling_task="token_embed", use_tqdm=False), expected, strict=True
        ):
            assert output.prompt_token_ids == ids.tolist()
            assert output.outputs.data.shape == (len(ids), SIZE)
            assert np.abs(output.outputs.data - vectors.numpy()).max() < 1e-5


@torch.inference_mode()
def test_colqwen2_equals_transformers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Image tokens rotate by height and width, as in training; transformers gets the same setting."""
    twin = Twin("Qwen2VL", tmp_path_factory.getbasetemp())
    path = tmp_path_factory.mktemp("colqwen2") / "model"
    model = saved("ColQwen2", path, twin.path, twin.model.config)
    contents: list[Any] = [("Query: who is it?", [], [])]
    contents += [(f"user {IMAGE_TOKENS}Describe the image.", [image], []) for image in (SMALL, WIDE, LARGE)]
    expected = []
    for content in contents:
        inputs = twin.inputs(content)
        kinds = inputs.pop("mm_token_type_ids")
        if content[1]:
            places = model.vlm.get_rope_index(inputs["input_ids"], kinds, inputs["image_grid_thw"])[0]
            inputs |= {"pixel_values": inputs["pixel_values"][None], "position_ids": places}
        mask = torch.ones_like(inputs["input_ids"])
        expected.append((inputs["input_ids"][0], model(**inputs, attention_mask=mask).embeddings[0]))
    check(path, [request_of(content) for content in contents], expected)
    assert read_checkpoint(path).pooling.projection == SIZE


@torch.inference_mode()
@pytest.mark.parametrize("family", ["paligemma", "paligemma2"])
def test_colpali_equals_transformers(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Queries have bidirectional attention, as pages do."""
    twin = Seeing(tmp_path_factory.mktemp(family) / "twin", family)
    path = twin.path.parent / "colpali"
    model = saved("ColPali", path, twin.path, twin.model.config)
    prompts: list[Any] = ["<bos>Question: who is it?<unk><unk>\n"]
    ids = torch.tensor([twin.tokenizer.encode(prompts[0])])
    expected = [(ids[0], model(input_ids=ids, token_type_ids=torch.zeros_like(ids)).embeddings[0])]
    for image in (picture(30, 50), picture(90, 20)):
        inputs = twin.inputs("<image>Describe the image.", [image])
        inputs.pop("labels", None)
        expected.append((inputs["input_ids"][0], model(**inputs).embeddings[0]))
        prompts.append({"prompt": "Describe the image.", "multi_modal_data": {"image": [image]}})
    check(path, prompts, expected)
