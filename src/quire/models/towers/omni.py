"""Encoders of Qwen2.5-Omni: Qwen2.5-VL's vision encoder, and Whisper layers over chunks of audio."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import log

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.omni import OmniAudioFacts, OmniFacts
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm
from quire.layers.scope import Scope
from quire.layers.vision import vision_layers
from quire.models.towers import Tower
from quire.models.towers.grid import QWEN2_5
from quire.models.towers.qwen_vl import Qwen2_5VL
from quire.models.towers.whisper import WHISPER, Convolution

_EPS = 1e-5
_SLOWEST = 10000


class OmniVisionTower(Qwen2_5VL):
    """Qwen2.5-VL vision encoder with separate query, key and value projections."""

    style = replace(QWEN2_5, qkv=("q", "k", "v"))


class OmniAudioTower(nn.Module):
    """Audio encoder of Qwen2.5-Omni: Whisper layers with attention within chunks of frames, and at the end
    the mean of each pair of states."""

    def __init__(self, facts: OmniAudioFacts, scope: Scope) -> None:
        super().__init__()
        self.facts, encoder = facts, facts.encoder
        hidden = encoder.hidden
        self.conv1 = Convolution(encoder.mels, hidden, 1, scope / "conv1")
        self.conv2 = Convolution(hidden, hidden, 2, scope / "conv2")
        self.places = sinusoids(-(-facts.window // 2), hidden).to(scope.device, scope.dtype)
        self.layers = vision_layers(encoder, encoder.layers, scope / "layers", WHISPER)
        self.norm = LayerNorm(hidden, _EPS, scope / "ln_post")
        self.out = WholeLinear(hidden, facts.size_out, scope / "proj", bias=True)

    def forward(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """Encode the log-mel spectrogram [frames, mels] of each item to [vectors, size_out]."""
        chunks = [chunk for mel in mels for chunk in mel.split(self.facts.window)]
        convolved = self.conv1([F.pad(chunk, (0, 0, 0, 1)) for chunk in chunks])
        states = self.conv2([F.pad(x, (0, 0, 0, len(x) % 2)) for x in convolved])
        x = torch.cat([state + self.places[: len(state)] for state in states])
        x = self.layers(x, [len(state) for state in states])
        items = x.split([-(-len(mel) // 2) for mel in mels])
        pairs = [item[: len(item) // 2 * 2].unflatten(0, (-1, 2)).mean(1) for item in items]
        vectors: Tensor = self.out(self.norm.normalize(torch.cat(pairs)))
        return list(vectors.split([len(pair) for pair in pairs]))


def sinusoids(count: int, size: int) -> Tensor:
    """Return sinusoidal position embeddings [count, size]: sines, then cosines."""
    frequencies = torch.exp(-log(_SLOWEST) / (size // 2 - 1) * torch.arange(size // 2).float())
    angles = torch.arange(count)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), 1)


class Omni(Tower):
    """Vision and audio encoders of Qwen2.5-Omni; `mel` of an audio item is [frames, mels]."""

    facts: OmniFacts
    Vision: Callable[[ArchFacts, Scope], Tower] = OmniVisionTower
    Audio: Callable[[OmniAudioFacts, Scope], nn.Module] = OmniAudioTower

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        assert facts.media is not None
        grid = replace(facts, media=replace(facts.media, tower=self.facts.grid))
        self.vision = self.Vision(grid, scope)
        self.audio = self.Audio(self.facts.sound, scope / "model" / "audio_tower")

    @staticmethod
    def heads(facts: OmniFacts) -> tuple[int, ...]:
        return facts.grid.heads, facts.sound.encoder.heads

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        if modality != "audio":
            return self.vision.encode(modality, items)
        vectors: list[Tensor] = self.audio([item["mel"] for item in items])
        return vectors

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        if modality != "audio":
            return self.vision.blank(modality, num_vectors)
        mels = self.facts.sound.encoder.mels
        return {"mel": torch.zeros(4 * num_vectors, mels, device=self.device)}

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        if modality != "audio":
            return self.vision.cost(modality, item)
        states = item["mel"][0] // 2
        return states * (6 * self.facts.sound.encoder.hidden + self.facts.sound.window // 2)
