"""Qwen2.5-Omni's towers: Qwen2.5-VL's, and Whisper's layers over pieces of a sound."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts, MediaFacts
from quire.checkpoint.multimodal.omni import HearingFacts, OmniFacts
from quire.checkpoint.multimodal.qwen import GridFacts
from quire.kernels.reference.encoder import spans_of
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm
from quire.layers.scope import Scope
from quire.layers.vision import VisionAttention
from quire.models.towers import qwen2_5_vl
from quire.models.towers.whisper import Convolution, Layer

_EPS = 1e-5
_SLOWEST = 10000


class SeeingLayer(qwen2_5_vl.Layer):
    """Queries, keys and values have a product each."""

    def mixer(self, facts: GridFacts, scope: Scope) -> VisionAttention:
        return VisionAttention(facts.hidden, facts.heads, scope, names=("q", "k", "v"), out="proj")


class OmniVisionTower(qwen2_5_vl.Qwen2_5VL):
    """Qwen2.5-VL's."""

    Layer = SeeingLayer


class OmniAudioTower(nn.Module):
    """A sound in pieces, whose moments see each other; the means of two states each, across pieces."""

    def __init__(self, facts: HearingFacts, scope: Scope) -> None:
        super().__init__()
        self.facts, own = facts, facts.encoder
        self.near = Convolution(own.mels, own.hidden, 1, scope / "conv1")
        self.halved = Convolution(own.hidden, own.hidden, 2, scope / "conv2")
        self.places = waves(-(-facts.window // 2), own.hidden).to(scope.device, scope.dtype)
        self.layers = nn.ModuleList(Layer(own, scope / "layers" / i) for i in range(own.layers))
        self.norm = LayerNorm(own.hidden, _EPS, scope / "ln_post")
        self.out = WholeLinear(own.hidden, facts.size_out, scope / "proj", bias=True)

    def forward(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """[moments, mels] of each sound -> [vectors, size_out]."""
        pieces = [piece for each in mels for piece in each.split(self.facts.window)]
        near = self.near([F.pad(piece, (0, 0, 0, 1)) for piece in pieces])
        states = self.halved([F.pad(each, (0, 0, 0, len(each) % 2)) for each in near])
        x = torch.cat([each + self.places[: len(each)] for each in states])
        spans = spans_of(np.array([len(each) for each in states], np.int32), x.device)
        for layer in self.layers:
            x = layer(x, spans)
        sounds = x.split([-(-len(each) // 2) for each in mels])
        pairs = [each[: len(each) // 2 * 2].unflatten(0, (-1, 2)).mean(1) for each in sounds]
        vectors: Tensor = self.out(self.norm.alone(torch.cat(pairs)))
        return list(vectors.split([len(each) for each in pairs]))


def waves(count: int, size: int) -> Tensor:
    """[count, size]: sines of places, from fast to slow, then cosines."""
    slower = torch.exp(-log(_SLOWEST) / (size // 2 - 1) * torch.arange(size // 2).float())
    turns = torch.arange(count)[:, None] * slower
    return torch.cat((turns.sin(), turns.cos()), 1)


class Omni(nn.Module):
    """What sees, and what hears: `mel` of a sound are [moments, mels]."""

    sees: Any
    """A tower over grids."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        media = facts.media
        assert media is not None
        self.facts: OmniFacts = media.tower
        self.device = scope.device
        self.sees = self.seeing(replace(facts, media=replace(media, tower=self.facts.grid)), scope)
        self.hears = self.hearing(scope / "model" / "audio_tower")

    def seeing(self, facts: ArchFacts, scope: Scope) -> nn.Module:
        return OmniVisionTower(facts, scope)

    def hearing(self, scope: Scope) -> nn.Module:
        return OmniAudioTower(self.facts.sound, scope)

    @staticmethod
    def divides(media: MediaFacts, count: int) -> bool:
        """Whether so many devices can share its layers."""
        return bool(media.tower.grid.heads % count == 0 and media.tower.sound.encoder.heads % count == 0)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        if modality != "audio":
            found: list[Tensor] = self.sees.encode(modality, items)
            return found
        heard: list[Tensor] = self.hears([item["mel"] for item in items])
        return heard

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        if modality != "audio":
            seen: dict[str, Tensor] = self.sees.blank(modality, num_vectors)
            return seen
        mels = self.facts.sound.encoder.mels
        return {"mel": torch.zeros(4 * num_vectors, mels, device=self.device)}

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        if modality != "audio":
            return int(self.sees.cost(modality, item))
        states = item["mel"][0] // 2
        return states * (6 * self.facts.sound.encoder.hidden + self.facts.sound.window // 2)
