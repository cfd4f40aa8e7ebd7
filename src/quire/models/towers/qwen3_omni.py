"""Encoders of Qwen3-Omni: Qwen3-VL's vision encoder, and an audio encoder that Qwen3-ASR uses as well.

The audio encoder downsamples mel frames by 8.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.omni import OmniAudioFacts
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm
from quire.layers.scope import Scope
from quire.layers.vision import DownsamplingConv, VisionMLP, vision_layers
from quire.models.towers import Tower
from quire.models.towers.omni import Omni, sinusoids
from quire.models.towers.qwen_vl import Qwen3VL
from quire.models.towers.whisper import WHISPER

_EPS = 1e-5
_STYLE = replace(WHISPER, key_bias=True)
_AT_ONCE = 500
"""Maximum number of chunks that run through the convolutions in one batch."""


class Qwen3OmniVisionTower(Qwen3VL):
    """Qwen3-VL vision encoder with other checkpoint names."""

    norm_name, mlp_name, mlp_names, deep_name = "ln_q", "mlp", ("0", "2"), "merger_list"


class Qwen3OmniAudioTower(nn.Module):
    """Audio encoder over chunks of frames, with attention within groups of chunks. The last chunk is padded
    to full length; a single chunk only if `pads_alone`. `projector` is the scope of the output
    layers; None if they are in the encoder's scope."""

    def __init__(
        self, facts: OmniAudioFacts, scope: Scope, *, projector: Scope | None = None, pads_alone: bool = False
    ) -> None:
        super().__init__()
        self.facts, encoder, size = facts, facts.encoder, facts.channels
        self.pads_alone = pads_alone
        sizes = [(1, size), (size, size), (size, size)]
        self.halvings = nn.ModuleList(
            DownsamplingConv(*in_out, scope / f"conv2d{i}") for i, in_out in enumerate(sizes, start=1)
        )
        num_bins, hidden = -(-encoder.mels // 8), encoder.hidden
        self.flat = WholeLinear(size * num_bins, hidden, scope / "conv_out")
        self.places = sinusoids(-(-facts.window // 8), hidden).to(scope.device, scope.dtype)
        self.layers = vision_layers(encoder, encoder.layers, scope / "layers", _STYLE)
        self.norm = LayerNorm(hidden, _EPS, scope / "ln_post")
        self.out = VisionMLP(
            hidden,
            hidden,
            projector or scope,
            size_out=facts.size_out,
            names=("linear_1", "linear_2") if projector else ("proj1", "proj2"),
            activation=encoder.activation,
        )

    def forward(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """Encode the log-mel spectrogram [frames, mels] of each item to [vectors, size_out]."""
        states = [self._downsample(mel) for mel in mels]
        lens = [len(part) for x in states for part in x.split(self.facts.seen * len(self.places))]
        vectors: Tensor = self.out(self.norm.normalize(self.layers(torch.cat(states), lens)))
        return list(vectors.split([len(state) for state in states]))

    def _downsample(self, mel: Tensor) -> Tensor:
        """Return the hidden states [states, hidden] of a spectrogram [frames, mels], downsampled by 8 in
        time; positions restart in each chunk."""
        window, count = self.facts.window, len(mel)
        is_padded = count > window or self.pads_alone
        padded = F.pad(mel, (0, 0, 0, -count % window)) if is_padded else mel
        chunks = padded.view(-1, window if is_padded else count, mel.shape[1]).transpose(1, 2)[:, None]
        convolved = []
        for x in chunks.split(_AT_ONCE):
            for convolution in self.halvings:
                x = F.gelu(convolution(x))
            convolved.append(x)
        x = torch.cat(convolved).permute(0, 3, 1, 2).contiguous()
        states: Tensor = self.flat(x.flatten(2).flatten(0, 1)).view(len(x), x.shape[1], -1)
        states = states + self.places[: states.shape[1]]
        return states.flatten(0, 1)[: count // window * len(self.places) - (-(count % window) // 8)]


class Qwen3ASR(Tower):
    """Qwen3-ASR's encoder; `mel` of an audio item is [frames, mels]."""

    facts: OmniAudioFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        tower, projector = scope / "model" / "audio_tower", scope / "model" / "multi_modal_projector"
        is_first = scope.is_stored(f"{tower.name}.proj1.weight")  # the first checkpoints
        self.audio = Qwen3OmniAudioTower(
            self.facts, tower, projector=None if is_first else projector, pads_alone=True
        )

    @staticmethod
    def heads(facts: OmniAudioFacts) -> tuple[int, ...]:
        return (facts.encoder.heads,)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        vectors: list[Tensor] = self.audio([item["mel"] for item in items])
        return vectors

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        return _blank_audio(self.facts, num_vectors, self.device)

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        states = item["mel"][0] // 8
        return states * (6 * self.facts.encoder.hidden + self.facts.seen * self.facts.window // 8)


def _blank_audio(facts: OmniAudioFacts, num_vectors: int, device: torch.device) -> dict[str, Tensor]:
    num_frames = num_vectors * facts.window // -(-facts.window // 8)
    return {"mel": torch.zeros(num_frames, facts.encoder.mels, device=device)}


class Qwen3Omni(Omni):
    """Qwen3-Omni encoders. Audio vectors are zero for the deepstack levels."""

    Vision, Audio = Qwen3OmniVisionTower, Qwen3OmniAudioTower

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        assert facts.media is not None
        self.num_padding = self.facts.sound.size_out * facts.media.levels

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        encoded = super().encode(modality, items)
        return [F.pad(x, (0, self.num_padding)) for x in encoded] if modality == "audio" else encoded

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        if modality != "audio":
            return super().blank(modality, num_vectors)
        return _blank_audio(self.facts.sound, num_vectors, self.device)
