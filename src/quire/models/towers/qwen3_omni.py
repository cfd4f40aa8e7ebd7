"""Qwen3-Omni's towers: Qwen3-VL's, and layers over pieces of a sound whose moments come together eight by
eight."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.omni import HearingFacts
from quire.kernels.reference.encoder import spans_of
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm
from quire.layers.scope import Scope
from quire.layers.vision import Learned, VisionMLP
from quire.models.towers import qwen3_vl, whisper
from quire.models.towers.omni import Omni, waves

_EPS = 1e-5
_AT_ONCE = 500
"""Pieces that go through convolutions together."""


class Qwen3OmniMerger(qwen3_vl.Qwen3VLMerger):
    """Qwen3-VL's, under other names."""

    norm_name, inner, names = "ln_q", "mlp", ("0", "2")


class Qwen3OmniVisionTower(qwen3_vl.Qwen3VL):
    """Qwen3-VL's."""

    merger_class, deep_name = Qwen3OmniMerger, "merger_list"


class Layer(whisper.Layer):
    """Keys have a bias."""

    key_bias = True


class AudioSubsampleConv(nn.Module):
    """A convolution over moments and pitches, of every second of both."""

    def __init__(self, size_in: int, size_out: int, scope: Scope) -> None:
        super().__init__()
        self.weight = Learned(scope / "weight", size_out, size_in, 3, 3)
        self.bias = Learned(scope / "bias", size_out)

    def forward(self, x: Tensor) -> Tensor:
        """[N, size_in, pitches, moments]"""
        return F.gelu(F.conv2d(x, self.weight.vectors, self.bias.vectors, stride=2, padding=1))


class Qwen3OmniAudioTower(nn.Module):
    """Pieces of a sound, some of which see each other. The last is as long as the others, unless it is the
    only one."""

    def __init__(self, facts: HearingFacts, scope: Scope) -> None:
        super().__init__()
        self.facts, own, size = facts, facts.encoder, facts.channels
        sizes = [(1, size), (size, size), (size, size)]
        self.halvings = nn.ModuleList(
            AudioSubsampleConv(*each, scope / f"conv2d{i}") for i, each in enumerate(sizes, start=1)
        )
        pitches = -(-own.mels // 8)
        self.flat = WholeLinear(size * pitches, own.hidden, scope / "conv_out")
        self.places = waves(-(-facts.window // 8), own.hidden).to(scope.device, scope.dtype)
        self.layers = nn.ModuleList(Layer(own, scope / "layers" / i) for i in range(own.layers))
        self.norm = LayerNorm(own.hidden, _EPS, scope / "ln_post")
        names, activation = ("proj1", "proj2"), own.activation
        self.out = VisionMLP(
            own.hidden, own.hidden, scope, size_out=facts.size_out, names=names, activation=activation
        )

    def forward(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """[moments, mels] of each sound -> [vectors, size_out]."""
        states = [self._begun(each) for each in mels]
        lens = [len(part) for each in states for part in each.split(self.facts.seen * len(self.places))]
        x = torch.cat(states)
        spans = spans_of(np.array(lens, np.int32), x.device)
        for layer in self.layers:
            x = layer(x, spans)
        vectors: Tensor = self.out(self.norm.alone(x))
        return list(vectors.split([len(each) for each in states]))

    def _begun(self, mel: Tensor) -> Tensor:
        """[moments, mels] -> [states, hidden], each piece with places of its own."""
        window, count = self.facts.window, len(mel)
        padded = F.pad(mel, (0, 0, 0, -count % window)) if count > window else mel
        pieces = padded.view(-1, min(window, count), mel.shape[1]).transpose(1, 2)[:, None]
        found = []
        for x in pieces.split(_AT_ONCE):
            for halving in self.halvings:
                x = halving(x)
            found.append(x)
        x = torch.cat(found).permute(0, 3, 1, 2).contiguous()
        states: Tensor = self.flat(x.flatten(2).flatten(0, 1)).view(len(x), x.shape[1], -1)
        states = states + self.places[: states.shape[1]]
        return states.flatten(0, 1)[: count // window * len(self.places) - (-(count % window) // 8)]


class Qwen3Omni(Omni):
    """A sound has vectors for the first layer alone."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        assert facts.media is not None
        self.beyond = self.facts.sound.size_out * facts.media.levels

    def seeing(self, facts: ArchFacts, scope: Scope) -> nn.Module:
        return Qwen3OmniVisionTower(facts, scope)

    def hearing(self, scope: Scope) -> nn.Module:
        return Qwen3OmniAudioTower(self.facts.sound, scope)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        found = super().encode(modality, items)
        return [F.pad(each, (0, self.beyond)) for each in found] if modality == "audio" else found

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        if modality != "audio":
            return super().blank(modality, num_vectors)
        sound, each = self.facts.sound, -(-self.facts.sound.window // 8)
        moments = num_vectors * sound.window // each
        return {"mel": torch.zeros(moments, sound.encoder.mels, device=self.device)}
