"""A vision model family for tests: a tiny Llama behind a vision encoder of two linear layers over patches.
Each embedding of an image depends on all of its patches, so that an incomplete image changes the output."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from oracle import make_tiny
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts, MediaFacts
from quire.checkpoint.multimodal import MEDIA_FAMILIES
from quire.checkpoint.reader import ConfigReader
from quire.data.multimodal import Array, Media, MediaItem
from quire.frontend.multimodal import TEXT_ONLY
from quire.layers.linear import ColumnLinear, RowLinear
from quire.layers.scope import Scope
from quire.models.towers import TOWERS
from quire.multimodal.processors import PROCESSORS

ARCHITECTURE = "FakeForConditionalGeneration"
PATCH, WIDTH, MOST = 6, 8, 24
"""Size of a patch, size of the hidden layer, and number of patches of the largest image."""
MARK = 2
"""Token of a patch."""


@dataclass(frozen=True)
class FakeFacts:
    patch: int
    width: int
    num_weights: int = 0


def read(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    facts = MediaFacts("fake", ("image",), FakeFacts(PATCH, WIDTH), is_whole=bool(keys.get("whole")))
    return keys.but(architectures=["LlamaForCausalLM"]), facts


class FakeTower(nn.Module):
    """Vision encoder: the embedding of a patch is up(patch) + down(gelu) + the mean of all patches."""

    batches: list[int] = []
    """Number of items in each call of `encode`."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        self.up = ColumnLinear(PATCH, WIDTH, scope / "eye.up", bias=True)
        self.down = RowLinear(WIDTH, facts.hidden, scope / "eye.down", bias=True)

    @staticmethod
    def can_shard(media: MediaFacts, count: int) -> bool:
        return WIDTH % count == 0

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        self.batches.append(len(items))
        pixels = [item["pixels"] for item in items]
        if any(bool((pixel > 1e6).any()) for pixel in pixels):
            raise ValueError("too bright")
        out = self.down(torch.nn.functional.gelu(self.up(torch.cat(pixels))))
        return [part + part.mean(0) for part in out.split([len(pixel) for pixel in pixels])]

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        return {"pixels": torch.zeros(num_vectors, PATCH)}

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        return item["pixels"][0] ** 2


class FakeProcessor:
    """The parts of a processor that an engine uses."""

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Any) -> None:
        pass

    def max_vectors(self, modality: str) -> int:
        return MOST


def register(monkeypatch: Any) -> None:
    monkeypatch.setitem(MEDIA_FAMILIES, ARCHITECTURE, read)
    monkeypatch.setitem(TOWERS.entries, "fake", "fake:FakeTower")
    monkeypatch.setitem(PROCESSORS.entries, "fake", "fake:FakeProcessor")
    monkeypatch.setattr(FakeTower, "batches", [])
    # Requests have their media here; nothing has to be read.
    monkeypatch.setattr(
        "quire.entrypoints.in_process.media_reader", lambda config, tokenizer, cache: TEXT_ONLY
    )


class Fake(NamedTuple):
    """A checkpoint of the family, with a reference implementation that computes its answers."""

    path: Path
    hf: Any
    weights: dict[str, Tensor]
    is_whole: bool = False
    """Whether the tokens of an image have bidirectional attention."""

    def vectors(self, pixels: NDArray[Any]) -> Tensor:
        w = self.weights
        up = torch.nn.functional.gelu(torch.from_numpy(pixels) @ w["eye.up.weight"].T + w["eye.up.bias"])
        out = up @ w["eye.down.weight"].T + w["eye.down.bias"]
        return out + out.mean(0)

    @torch.no_grad()
    def embedded(self, prompt: "ImagePrompt") -> Tensor:
        """Return [T, hidden], the input of the first layer."""
        x: Tensor = self.hf.get_input_embeddings()(torch.tensor(prompt.tokens))
        for item, pixels in zip(prompt.media.items, prompt.pixels, strict=True):
            places = [at for first, size in item.places() for at in range(first, first + size)]
            x[places] = self.vectors(pixels)
        return x

    @torch.inference_mode()
    def greedy(self, prompt: "ImagePrompt", count: int) -> tuple[list[int], Tensor]:
        """Return the greedy tokens and the logits of each."""
        embed, logits = self.hf.get_input_embeddings(), []
        x, token_ids = self.embedded(prompt), list[int]()
        for _ in range(count):
            mask = self._mask(prompt, len(x)) if self.is_whole else None
            logits.append(self.hf(inputs_embeds=x[None], attention_mask=mask).logits[0, -1])
            token_ids.append(int(logits[-1].argmax()))
            x = torch.cat([x, embed(torch.tensor(token_ids[-1:]))])
        return token_ids, torch.stack(logits)

    def _mask(self, prompt: "ImagePrompt", length: int) -> Tensor:
        seen = torch.ones(length, length).tril()
        for first, size in (run for item in prompt.media.items for run in item.places()):
            seen[first : first + size, first : first + size] = 1
        return (1 - seen)[None, None] * torch.finfo(torch.float32).min


class ImagePrompt(NamedTuple):
    """A prompt of tokens with images."""

    tokens: list[int]
    media: Media
    pixels: list[NDArray[Any]]


def make_fake(path: Path, *, whole: bool = False) -> Fake:
    made, hf = make_tiny("llama", path)
    weights = {
        "eye.up.weight": torch.randn(WIDTH, PATCH),
        "eye.up.bias": torch.randn(WIDTH),
        "eye.down.weight": torch.randn(hf.config.hidden_size, WIDTH),
        "eye.down.bias": torch.randn(hf.config.hidden_size),
    }
    file = made / "model.safetensors"
    save_file(load_file(file) | weights, file)
    config = json.loads((made / "config.json").read_text()) | {
        "architectures": [ARCHITECTURE],
        "whole": whole,
    }
    (made / "config.json").write_text(json.dumps(config))
    return Fake(made, hf, weights, whole)


def image(num_patches: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(num_patches, PATCH)).astype(np.float32)


def image_prompt(*parts: list[int] | NDArray[Any], split: bool = False) -> ImagePrompt:
    """Build a prompt of texts and images in this order. With `split`, a text token divides each image in two
    halves."""
    tokens, items, images = list[int](), list[MediaItem](), list[NDArray[Any]]()
    for part in parts:
        if isinstance(part, list):
            tokens += part
            continue
        count, half = len(part), len(part) // 2
        runs = [(0, half), (half + 1, count - half)] if split else []
        span = [MARK] * half + [1] * split + [MARK] * (count - half)
        arrays = {"pixels": Array.of(part)}
        key = hashlib.sha256(part.tobytes()).digest()
        items.append(
            MediaItem(
                modality="image", key=key, offset=len(tokens), length=len(span), runs=runs, arrays=arrays
            )
        )
        tokens += span
        images.append(part)
    return ImagePrompt(tokens, Media(items), images)
