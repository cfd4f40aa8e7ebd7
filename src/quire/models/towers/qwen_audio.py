"""Qwen2-Audio's tower: Whisper's encoder, whose states are averaged by two, and one product."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from quire.config.facts import ArchFacts, MediaFacts
from quire.config.media.qwen_audio import QwenAudioFacts
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm
from quire.layers.scope import Scope
from quire.models.towers.whisper import Encoder

_EPS = 1e-5


class QwenAudio(nn.Module):
    """`mel` of an item are [moments, mels], see `Encoder`."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        assert facts.media is not None
        self.facts: QwenAudioFacts = facts.media.tower
        self.device = scope.device
        tower, hidden = scope / "model" / "audio_tower", self.facts.encoder.hidden
        self.encoder = Encoder(self.facts.encoder, tower)
        self.norm = LayerNorm(hidden, _EPS, tower / "layer_norm")
        product = scope / "model" / "multi_modal_projector" / "linear"
        self.projector = WholeLinear(hidden, self.facts.size_out, product, bias=True)

    @staticmethod
    def divides(media: MediaFacts, count: int) -> bool:
        """Whether so many devices can share its layers."""
        return bool(media.tower.encoder.heads % count == 0)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        states = self.encoder([item["mel"] for item in items])
        means = [each[: len(each) // 2 * 2].unflatten(0, (-1, 2)).mean(1) for each in states]
        vectors: Tensor = self.projector(self.norm.alone(torch.cat(means)))
        return list(vectors.split([len(each) for each in means]))

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        moments = 2 * min(2 * num_vectors, self.facts.encoder.positions) + 1
        return {"mel": torch.zeros(moments, self.facts.encoder.mels, device=self.device)}

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        states = item["mel"][0] // 2
        return states * (6 * self.facts.encoder.hidden + states)
