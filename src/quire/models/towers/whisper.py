"""Whisper's audio encoder: two convolutions over mel frames, and layers of bidirectional attention.

With pooling and a projector after it: Qwen2-Audio, Audio Flamingo 3, Voxtral and GLM-ASR.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.qwen_audio import QwenAudioFacts
from quire.checkpoint.multimodal.whisper import WhisperFacts
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm
from quire.layers.scope import Scope
from quire.layers.vision import Angles, Learned, PatchEmbedding, VisionMLP, VisionStyle, vision_layers
from quire.models.towers import Tower

_EPS = 1e-5
WHISPER = VisionStyle(norms=("self_attn_layer_norm", "final_layer_norm"), mlp="", eps=_EPS, key_bias=False)
ROTARY = VisionStyle(
    norms=("input_layernorm", "post_attention_layernorm"), out="o_proj", eps=_EPS, key_bias=False
)
"""The layers of GLM-ASR, which have rotary embedding."""
_WIDTH = 3
"""Kernel size of the convolutions in frames."""


class Convolution(nn.Module):
    """Convolution over time with stride `step` and GELU, computed as a GEMM, with zero padding before the
    first frame."""

    def __init__(self, size_in: int, size_out: int, step: int, scope: Scope) -> None:
        super().__init__()
        self.step = step
        self.product = PatchEmbedding((size_in, _WIDTH), size_out, scope)

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Compute the convolution of the frames [frames, size_in] of each item; the last frame is padding."""
        patches = [F.pad(x, (0, 0, 1, 0)).unfold(0, _WIDTH, self.step).flatten(1) for x in inputs]
        convolved: Tensor = F.gelu(self.product(torch.cat(patches)))
        return list(convolved.split([len(patch) for patch in patches]))


class WhisperEncoder(nn.Module):
    """Convolutions and layers of Whisper's encoder, without the final norm. With `rotary_dim` it has rotary
    embedding with the base `theta` in place of learned positions."""

    def __init__(
        self, facts: WhisperFacts, scope: Scope, *, rotary_dim: int = 0, theta: float = 10000.0
    ) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            (
                Convolution(facts.mels, facts.hidden, 1, scope / "conv1"),
                Convolution(facts.hidden, facts.hidden, 2, scope / "conv2"),
            )
        )
        self.places: Learned | None = None
        self.angles: Angles | None = None
        if rotary_dim:
            powers = torch.arange(0, rotary_dim, 2, device=scope.device, dtype=torch.float32) / rotary_dim
            angles = torch.arange(facts.positions, device=scope.device)[:, None] / theta**powers
            self.angles = angles.cos(), angles.sin()
        else:
            self.places = Learned(scope / "embed_positions" / "weight", facts.positions, facts.hidden)
        style = ROTARY if rotary_dim else WHISPER
        self.layers = vision_layers(facts, facts.layers, scope / "layers", style)

    def forward(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """Encode the log-mel spectrogram of each item, [2 * states + 1, mels] with one padding frame at the
        end, to hidden states [states, hidden]."""
        states: Sequence[Tensor] = mels
        for convolution in self.convolutions:
            states = convolution(states)
        lens = [len(state) for state in states]
        if self.angles is not None:
            cos, sin = (torch.cat([part[:length] for length in lens]) for part in self.angles)
            return list(self.layers(torch.cat(list(states)), lens, (cos, sin)).split(lens))
        assert self.places is not None
        x = torch.cat([state + self.places.vectors[: len(state)] for state in states])
        return list(self.layers(x, lens).split(lens))


class WhisperTower(Tower):
    """Whisper encoder with its final norm. `mel` of every item is [frames + 1, mels]."""

    facts: WhisperFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        scope = scope / "model" / "encoder"
        self.encoder = WhisperEncoder(self.facts, scope)
        self.norm = LayerNorm(self.facts.hidden, _EPS, scope / "layer_norm")

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        states = self.norm.normalize(torch.cat(self.encoder([item["mel"] for item in items])))
        return list(states.split(self.facts.positions))

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        return {"mel": torch.zeros(self.facts.num_frames + 1, self.facts.mels, device=self.device)}

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        return 1


class QwenAudio(Tower):
    """Qwen2-Audio encoder. `mel` of an item is [frames, mels] (see `WhisperEncoder`), encoded in chunks."""

    facts: QwenAudioFacts
    norm_name = "layer_norm"

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        audio, tower = self.facts, scope / "model" / "audio_tower"
        self.encoder = WhisperEncoder(audio.encoder, tower, rotary_dim=audio.rotary_dim, theta=audio.theta)
        self.norm = LayerNorm(audio.encoder.hidden, _EPS, tower / self.norm_name)
        self.projector = _build_projector(self.facts, scope / "model" / "multi_modal_projector")

    @staticmethod
    def heads(facts: QwenAudioFacts) -> tuple[int, ...]:
        return (facts.encoder.heads,)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        mels = [item["mel"].split(self.facts.num_frames + 1) for item in items]
        states = self.encoder([chunk for chunks in mels for chunk in chunks])
        count = self.facts.states
        groups = [state[: len(state) // count * count].unflatten(0, (-1, count)) for state in states]
        vectors: Tensor = self.projector(self._pool(torch.cat(groups)))
        counts = iter([len(group) for group in groups])
        return list(vectors.split([sum(next(counts) for _ in chunks) for chunks in mels]))

    def _pool(self, groups: Tensor) -> Tensor:
        """Pool each group of hidden states, [vectors, states per group, hidden], to one vector: by
        concatenation, or by their mean with a norm."""
        if self.facts.stack:
            return self.norm.normalize(groups.flatten(0, 1)).view(len(groups), -1)
        return self.norm.normalize(groups.mean(1))

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        full, rest = divmod(num_vectors, self.facts.tokens)
        num_frames = full * (self.facts.num_frames + 1) + (2 * self.facts.states * rest + 1 if rest else 0)
        return {"mel": torch.zeros(num_frames, self.facts.encoder.mels, device=self.device)}

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        states = item["mel"][0] // 2
        return states * (6 * self.facts.encoder.hidden + min(states, self.facts.encoder.positions))


class GlmAsr(QwenAudio):
    """GLM-ASR encoder. The encoder reads whole inputs, with silence after the audio; `count` of an item is
    the number of vectors to keep."""

    norm_name = "norm"

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        vectors = super().encode(modality, items)
        return [part[: int(item["count"])] for part, item in zip(vectors, items, strict=True)]

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        num_frames = -(-num_vectors // self.facts.tokens) * (self.facts.num_frames + 1)
        mel = torch.zeros(num_frames, self.facts.encoder.mels, device=self.device)
        return {"mel": mel, "count": torch.tensor([num_vectors], dtype=torch.int32)}


def _build_projector(facts: QwenAudioFacts, scope: Scope) -> nn.Module:
    hidden, size_out = facts.encoder.hidden * (facts.stack or 1), facts.size_out
    inner = facts.inner or size_out
    if not facts.activation:
        return WholeLinear(hidden, size_out, scope / "linear", bias=facts.bias)
    names = ("linear_1", "linear_2")
    return VisionMLP(
        hidden, inner, scope, size_out=size_out, names=names, activation=facts.activation, bias=facts.bias
    )
