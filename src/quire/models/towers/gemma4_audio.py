"""Audio encoder of Gemma 4, a conformer whose attention is causal and reaches some states back; and both
encoders."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.gemma4 import Gemma4AudioFacts, Gemma4Facts
from quire.layers.linear import WholeLinear
from quire.layers.norm import RMSNorm
from quire.layers.scope import Scope
from quire.layers.vision import Learned
from quire.models.towers import Tower
from quire.models.towers.gemma3n import EPS, FeedForward, LightConvolution, SubsampleConv
from quire.models.towers.gemma4 import ClippedLinear, Gemma4VisionTower, unit_norm
from quire.models.towers.omni import sinusoids


class LayerNormedConv(SubsampleConv):
    """Convolution with stride 2 over frames and mel bins, and a layer norm over channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Convert [size_in, frames, bins] to [size_out, frames / 2, bins / 2]."""
        weight = self.weight.vectors
        convolved = F.conv2d(x[None].to(weight.dtype), weight, stride=2, padding=1)[0].permute(1, 2, 0)
        normed = F.layer_norm(convolved, convolved.shape[-1:], self.norm.vectors, None, self.eps)
        return F.relu(normed).permute(2, 0, 1)


class Attention(nn.Module):
    """Attention to the state itself and some earlier ones, in float32, with relative position embeddings and
    a soft cap on scores."""

    def __init__(self, facts: Gemma4AudioFacts, scope: Scope) -> None:
        super().__init__()
        self.facts, size = facts, facts.hidden
        linear = partial(ClippedLinear, is_clipped=facts.is_clipped)
        self.q, self.k, self.v = (linear(size, size, scope / f"{name}_proj") for name in "qkv")
        self.scale = Learned(scope / "per_dim_scale", size // facts.heads)
        self.places = WholeLinear(size, size, scope / "relative_k_proj")
        self.sinusoids = sinusoids(facts.left + 1, size).flip(0).to(scope.device, scope.dtype)
        self.out = linear(size, size, scope / "post")

    def forward(self, x: Tensor) -> Tensor:
        facts, heads = self.facts, self.facts.heads
        q, k, v = (project(x).float().view(len(x), heads, -1) for project in (self.q, self.k, self.v))
        size = q.shape[-1]
        q = q * (size**-0.5 / math.log(2)) * F.softplus(self.scale.vectors.float())
        k = k * (math.log(1 + math.e) / math.log(2))
        padding = (0, 0, 0, 0, facts.left, 0)
        k, v = (F.pad(part, padding).unfold(0, facts.left + 1, 1) for part in (k, v))
        relative = self.places(self.sinusoids).view(facts.left + 1, heads, size).float()
        scores = torch.einsum("thd,thdf->thf", q, k) + torch.einsum("thd,fhd->thf", q, relative)
        scores = torch.tanh(scores / facts.cap) * facts.cap
        keys = torch.arange(len(x), device=x.device)[:, None] + torch.arange(-facts.left, 1, device=x.device)
        weights = scores.masked_fill((keys < 0)[:, None], -torch.inf).softmax(-1)
        mixed = torch.einsum("thf,thdf->thd", weights, v).flatten(1)
        out: Tensor = self.out(mixed.to(x.dtype))
        return out


class Layer(nn.Module):
    """Conformer layer: feed-forward, attention, convolution, feed-forward, norm."""

    def __init__(self, facts: Gemma4AudioFacts, scope: Scope) -> None:
        super().__init__()
        self.clip = facts.clip
        linear = partial(ClippedLinear, is_clipped=facts.is_clipped)
        self.first = FeedForward(facts, scope / "feed_forward1", linear)
        self.before = RMSNorm(facts.hidden, EPS, scope / "norm_pre_attn")
        self.attention = Attention(facts, scope / "self_attn")
        self.after = RMSNorm(facts.hidden, EPS, scope / "norm_post_attn")
        self.near = LightConvolution(facts, scope / "lconv1d", linear)
        self.last = FeedForward(facts, scope / "feed_forward2", linear)
        self.norm = RMSNorm(facts.hidden, EPS, scope / "norm_out")

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        mixed = self.attention(self.before.normalize(x.clamp(-self.clip, self.clip)))
        x = x + self.after.normalize(mixed.clamp(-self.clip, self.clip))
        x = self.last(self.near(x))
        return self.norm.normalize(x.clamp(-self.clip, self.clip))


class Gemma4AudioTower(nn.Module):
    """Audio encoder; `scope` is that of the model."""

    def __init__(self, facts: Gemma4AudioFacts, scope: Scope) -> None:
        super().__init__()
        self.facts, tower = facts, scope / "audio_tower"
        first, sizes = tower / "subsample_conv_projection", (1, *facts.channels)
        self.halvings = nn.ModuleList(
            LayerNormedConv(sizes[i], sizes[i + 1], facts.norm_eps, first / f"layer{i}") for i in range(2)
        )
        flat = facts.channels[1] * (facts.mels // 4)
        self.flat = WholeLinear(flat, facts.hidden, first / "input_proj_linear")
        self.layers = nn.ModuleList(Layer(facts, tower / "layers" / i) for i in range(facts.layers))
        self.widen = WholeLinear(facts.hidden, facts.inner_out, tower / "output_proj", bias=True)
        self.project = WholeLinear(
            facts.inner_out, facts.size_out, scope / "embed_audio" / "embedding_projection"
        )

    def forward(self, mel: Tensor) -> Tensor:
        """Return the vectors of an audio item, [frames / 4, size_out], for its spectrogram [frames, mels]."""
        x = mel[None]
        for convolution in self.halvings:
            x = convolution(x)
        x = self.flat(x.permute(1, 2, 0).flatten(1))
        for layer in self.layers:
            x = layer(x)
        vectors: Tensor = self.project(unit_norm(self.widen(x), self.facts.norm_eps))
        return vectors


class Gemma4Tower(Tower):
    """Vision and audio encoders of Gemma 4; `mel` of an audio item is [frames, mels]."""

    facts: Gemma4Facts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        assert facts.media is not None
        media = replace(facts.media, tower=self.facts.vision)
        self.vision = Gemma4VisionTower(replace(facts, media=media), scope)
        sound = self.facts.sound
        self.audio = None if sound is None else Gemma4AudioTower(sound, scope / "model")

    @staticmethod
    def heads(facts: Gemma4Facts) -> tuple[int, ...]:
        return ()

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        if modality != "audio" or self.audio is None:
            return self.vision.encode(modality, items)
        return [self.audio(item["mel"]) for item in items]

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        if modality != "audio" or self.facts.sound is None:
            return self.vision.blank(modality, num_vectors)
        return {"mel": torch.zeros(4 * num_vectors, self.facts.sound.mels, device=self.device)}

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        return item["mel"][0] if modality == "audio" else self.vision.cost(modality, item)
