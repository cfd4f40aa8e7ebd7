"""Audio encoder of Qwen2-Audio, Audio Flamingo 3 and Voxtral: Whisper's encoder, pooling, projector."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.qwen_audio import QwenAudioFacts
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm
from quire.layers.scope import Scope
from quire.layers.vision import VisionMLP
from quire.models.towers import Tower
from quire.models.towers.whisper import WhisperEncoder

_EPS = 1e-5


class QwenAudio(Tower):
    """Qwen2-Audio encoder. `mel` of an item is [frames, mels] (see `WhisperEncoder`), encoded in chunks."""

    facts: QwenAudioFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        tower, hidden = scope / "model" / "audio_tower", self.facts.encoder.hidden
        self.encoder = WhisperEncoder(self.facts.encoder, tower)
        self.norm = LayerNorm(hidden, _EPS, tower / "layer_norm")
        self.projector = _build_projector(self.facts, scope / "model" / "multi_modal_projector")

    @staticmethod
    def heads(facts: QwenAudioFacts) -> tuple[int, ...]:
        return (facts.encoder.heads,)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        mels = [item["mel"].split(self.facts.moments + 1) for item in items]
        states = self.encoder([chunk for chunks in mels for chunk in chunks])
        count = self.facts.states
        groups = [state[: len(state) // count * count].unflatten(0, (-1, count)) for state in states]
        vectors: Tensor = self.projector(self._pool(torch.cat(groups)))
        counts = iter([len(group) for group in groups])
        return list(vectors.split([sum(next(counts) for _ in chunks) for chunks in mels]))

    def _pool(self, groups: Tensor) -> Tensor:
        """Pool groups of states [vectors, states, hidden] by concatenation or by their mean, with a norm."""
        if self.facts.stack:
            return self.norm.alone(groups.flatten(0, 1)).view(len(groups), -1)
        return self.norm.alone(groups.mean(1))

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        whole, rest = divmod(num_vectors, self.facts.tokens)
        num_frames = whole * (self.facts.moments + 1) + (2 * self.facts.states * rest + 1 if rest else 0)
        return {"mel": torch.zeros(num_frames, self.facts.encoder.mels, device=self.device)}

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        states = item["mel"][0] // 2
        return states * (6 * self.facts.encoder.hidden + min(states, self.facts.encoder.positions))


def _build_projector(facts: QwenAudioFacts, scope: Scope) -> nn.Module:
    hidden, size_out = facts.encoder.hidden * (facts.stack or 1), facts.size_out
    if not facts.activation:
        return WholeLinear(hidden, size_out, scope / "linear", bias=facts.bias)
    names = ("linear_1", "linear_2")
    return VisionMLP(
        hidden, size_out, scope, size_out=size_out, names=names, activation=facts.activation, bias=facts.bias
    )
