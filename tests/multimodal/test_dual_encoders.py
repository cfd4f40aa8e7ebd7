"""Tests of CLIP and SigLIP against transformers: embeddings of texts and of images in one space."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tiny_seeing import VISION, make_tokenizer, part, picture, save_tiny, url_of
from tokenizers.processors import TemplateProcessing

from quire import LLM
from quire.configure import configure
from quire.entrypoints.child_cores import private_engine
from quire.errors import ConfigError, RequestError
from quire.server.app import Application
from quire.server.settings import make_settings

TOLERANCE = 1e-4
TEXT = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 160,
    "max_position_embeddings": 12,
    "pad_token_id": 3,
    "bos_token_id": 4,
    "eos_token_id": 106,
}
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "use_tqdm_on_load": False}
IMAGES = [picture(30, 40), picture(28, 28), picture(70, 20)]
TEXTS = ["abc", "what is it?", "x"]


class Pair:
    """A tiny checkpoint, transformers' model, and its tokenizer and image processor."""

    def __init__(self, family: str, path: Path) -> None:
        import transformers as hf

        self.path, self.family = path, family
        self.tokenizer = make_tokenizer(["<end>"])
        end = self.tokenizer.convert_tokens_to_ids("<end>")
        self.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="$A <end>", special_tokens=[("<end>", end)]
        )
        square = {"height": 28, "width": 28}
        if family == "clip":
            module = hf.models.clip.image_processing_pil_clip
            self.images: Any = module.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=square)
            config: Any = hf.CLIPConfig(
                text_config=TEXT,
                vision_config=VISION | {"image_size": 28, "patch_size": 14},
                projection_dim=20,
            )
        else:
            self.images = hf.models.siglip.image_processing_pil_siglip.SiglipImageProcessorPil(size=square)
            text = TEXT | {"projection_size": 32}
            vision = VISION | {"image_size": 28, "patch_size": 14}
            config = hf.SiglipConfig(text_config=text, vision_config=vision)
        self.model = save_tiny(path, "CLIPModel" if family == "clip" else "SiglipModel", config, self.images)
        self.tokenizer.save_pretrained(path)

    @torch.inference_mode()
    def text(self, text: str) -> Any:
        ids = self.tokenizer(text)["input_ids"]
        if self.family == "siglip":
            ids = ids + [3] * (12 - len(ids))
        out = self.model.get_text_features(torch.tensor([ids])).pooler_output
        return normalised(out)

    @torch.inference_mode()
    def image(self, image: Any) -> Any:
        pixels = torch.from_numpy(np.stack(self.images([image])["pixel_values"]))
        return normalised(self.model.get_image_features(pixels).pooler_output)


def normalised(values: torch.Tensor) -> Any:
    return torch.nn.functional.normalize(values, dim=-1)[0].numpy()


@pytest.fixture(scope="module", params=["clip", "siglip"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_texts_and_images_equal_transformers(pair: Pair, size: int) -> None:
    llm = LLM(str(pair.path), tensor_parallel_size=size, **SETTINGS)
    wanted = [pair.text(text) for text in TEXTS] + [pair.image(image) for image in IMAGES]
    prompts = [*TEXTS, *({"prompt": "", "multi_modal_data": {"image": image}} for image in IMAGES)]
    mixed = [0, 3, 1, 4, 5, 2]
    outputs = llm.embed([prompts[i] for i in mixed], use_tqdm=False)
    for place, output in zip(mixed, outputs, strict=True):
        assert np.abs(output.outputs.embedding - wanted[place]).max() < TOLERANCE
    only = llm.embed(prompts[3:], use_tqdm=False)
    for vector, output in zip(wanted[3:], only, strict=True):
        assert np.abs(output.outputs.embedding - vector).max() < TOLERANCE
    if size == 1:
        image = {"content": [{"type": "image", "image": IMAGES[0]}]}
        (score,) = llm.score(TEXTS[1], image, use_tqdm=False)  # type: ignore[arg-type]
        assert abs(score.outputs.score - wanted[1] @ wanted[3]) < TOLERANCE


def test_a_prompt_is_a_text_or_one_image(pair: Pair) -> None:
    llm = LLM(str(pair.path), **SETTINGS)
    for images, text, message in (
        (IMAGES[:1], "text", "a text or an image, not both"),
        (IMAGES[:2], "", "one image at a time, got 2"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.embed({"prompt": text, "multi_modal_data": {"image": images}}, use_tqdm=False)


def test_images_over_http(pair: Pair) -> None:
    """Covers Cohere's images and texts, and scores of images for a text."""
    text, image = pair.text(TEXTS[0]), pair.image(IMAGES[0])

    async def go() -> list[Any]:
        config = configure({"model": str(pair.path), "dtype": "float32", "max_num_seqs": 4})
        async with private_engine(config) as engine:
            transport = httpx.ASGITransport(Application(engine, make_settings({})).asgi)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
                bodies = {
                    "images": await client.post("/v2/embed", json={"images": [url_of(IMAGES[0])]}),
                    "texts": await client.post("/v2/embed", json={"texts": TEXTS[:1]}),
                }
                vectors = [reply.json()["embeddings"]["float"][0] for reply in bodies.values()]
                body = {"text_1": TEXTS[0], "text_2": [{"content": [part(IMAGES[0])]}]}
                score = (await client.post("/score", json=body)).json()["data"][0]["score"]
                return [*vectors, score]

    first, second, score = asyncio.run(go())
    assert np.abs(first - image).max() < TOLERANCE and np.abs(second - text).max() < TOLERANCE
    assert abs(score - text @ image) < TOLERANCE


def test_configurations_are_checked(pair: Pair, tmp_path: Path) -> None:
    config = json.loads((pair.path / "config.json").read_text())
    config["text_config"]["hidden_act"] = "tanh"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="hidden_act is 'tanh', expected one of quick_gelu"):
        LLM(str(tmp_path), **SETTINGS)
    if pair.family == "siglip":
        with pytest.raises(ConfigError, match="vision_use_head is False, expected true"):
            LLM(str(pair.path), hf_overrides={"vision_config": {"vision_use_head": False}}, **SETTINGS)
        with pytest.raises(ConfigError, match="texts have embeddings of size 8, and images of size 32"):
            LLM(str(pair.path), hf_overrides={"text_config": {"projection_size": 8}}, **SETTINGS)
