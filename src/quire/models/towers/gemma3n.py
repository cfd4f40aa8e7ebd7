"""Encoders of Gemma 3n: MobileNet-V5, and the conformer of the Universal Speech Model (arXiv 2303.01037)."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.gemma3n import Gemma3nAudioFacts, Gemma3nFacts, Gemma3nVisionFacts
from quire.checkpoint.multimodal.gemma4 import Gemma4AudioFacts
from quire.layers.linear import WholeLinear
from quire.layers.norm import RMSNorm
from quire.layers.scope import Scope
from quire.layers.vision import Learned
from quire.models.towers import Tower
from quire.models.towers.gemma4 import unit_norm
from quire.models.towers.mobilenet import MobileNet
from quire.models.towers.omni import sinusoids

EPS = 1e-6
"""Epsilon of most norms."""
ConformerFacts = Gemma3nAudioFacts | Gemma4AudioFacts


class SubsampleConv(nn.Module):
    """Convolution with stride 2 over frames and mel bins, and a cumulative group norm over time."""

    def __init__(self, size_in: int, size_out: int, eps: float, scope: Scope) -> None:
        super().__init__()
        self.eps = eps
        self.weight = Learned(scope / "conv" / "weight", size_out, size_in, 3, 3)
        self.norm = Learned(scope / "norm" / "weight", size_out)

    def forward(self, x: Tensor) -> Tensor:
        """Convert [size_in, frames, bins] to [size_out, frames / 2, bins / 2]."""
        weight = self.weight.vectors
        x = x.to(weight.dtype)
        convolved = F.conv2d(F.pad(x, (1, 1, 0, 2))[None], weight, stride=2)[0]
        wide = convolved.float().permute(1, 2, 0)
        count = torch.arange(1, len(wide) + 1, device=x.device)[:, None, None] * wide[0].numel()
        mean = wide.sum((1, 2), keepdim=True).cumsum(0) / count
        variance = (wide - mean).square().sum((1, 2), keepdim=True).cumsum(0) / count
        normed = (wide - mean) * (variance + self.eps).rsqrt() * self.norm.vectors.float()
        return F.relu(normed).to(x.dtype).permute(2, 0, 1)


class Attention(nn.Module):
    """Local attention with relative position embeddings and a soft cap on scores."""

    def __init__(self, facts: Gemma3nAudioFacts, scope: Scope) -> None:
        super().__init__()
        self.facts, size = facts, facts.hidden
        self.before = RMSNorm(size, EPS, scope / "pre_attn_norm")
        inner = scope / "attn"
        self.q, self.k, self.v = (WholeLinear(size, size, inner / f"{name}_proj") for name in "qkv")
        self.scale = Learned(inner / "per_dim_scale", size // facts.heads)
        self.places = WholeLinear(size, size, inner / "relative_position_embedding" / "pos_proj")
        positive = sinusoids(max(facts.left, facts.right) + 1, size)
        negative = torch.cat((-positive[:, : size // 2], positive[:, size // 2 :]), 1)
        offsets = range(facts.left, -facts.right - 1, -1)
        rows = [positive[offset] if offset >= 0 else negative[-offset] for offset in offsets]
        self.sinusoids = torch.stack(rows).to(scope.device, scope.dtype)
        self.out = WholeLinear(size, size, scope / "post")
        self.after = RMSNorm(size, EPS, scope / "post_norm")

    def forward(self, x: Tensor) -> Tensor:
        facts, heads, clip = self.facts, self.facts.heads, self.facts.clip
        normed = self.before.normalize(x.clamp(-clip, clip))
        q, k, v = (project(normed).view(len(x), heads, -1) for project in (self.q, self.k, self.v))
        unit = F.softplus(torch.zeros((), device=x.device, dtype=x.dtype))
        q = q * (F.softplus(self.scale.vectors) * q.shape[-1] ** -0.5 / unit)
        padding = (0, 0, 0, 0, facts.left, facts.right)
        k, v = (F.pad(part, padding).unfold(0, len(self.sinusoids), 1) for part in (k, v))
        relative = self.places(self.sinusoids).view(len(self.sinusoids), heads, -1)
        scores = torch.einsum("thd,thdf->thf", q, k) + torch.einsum("thd,fhd->thf", q, relative)
        scores = torch.tanh(scores / facts.cap) * facts.cap
        queries = torch.arange(len(x), device=x.device)[:, None]
        keys = queries + torch.arange(-facts.left, facts.right + 1, device=x.device)
        is_valid = (keys >= 0) & (keys < len(x))
        weights = scores.masked_fill(~is_valid[:, None], -torch.inf).softmax(-1, dtype=torch.float32)
        mixed = torch.einsum("thf,thdf->thd", weights.to(v.dtype), v).flatten(1)
        return x + self.after.normalize(self.out(mixed).clamp(-clip, clip))


class FeedForward(nn.Module):
    """Feed-forward block with a scaled residual (half a step in a conformer). `linear` builds its linear
    layers."""

    def __init__(
        self, facts: ConformerFacts, scope: Scope, linear: Callable[..., nn.Module] = WholeLinear
    ) -> None:
        super().__init__()
        self.facts, size = facts, facts.hidden
        self.before = RMSNorm(size, EPS, scope / "pre_layer_norm")
        self.up = linear(size, 4 * size, scope / "ffw_layer_1")
        self.down = linear(4 * size, size, scope / "ffw_layer_2")
        self.after = RMSNorm(size, EPS, scope / "post_layer_norm")

    def forward(self, x: Tensor) -> Tensor:
        clip = self.facts.clip
        projected = self.down(F.silu(self.up(self.before.normalize(x.clamp(-clip, clip)))))
        return x + self.after.normalize(projected.clamp(-clip, clip)) * self.facts.residual


class LightConvolution(nn.Module):
    """Gated causal depthwise convolution over time. `linear` builds the linear layers."""

    def __init__(
        self, facts: ConformerFacts, scope: Scope, linear: Callable[..., nn.Module] = WholeLinear
    ) -> None:
        super().__init__()
        self.facts, size, eps = facts, facts.hidden, facts.norm_eps
        self.before = RMSNorm(size, eps, scope / "pre_layer_norm")
        self.start = linear(size, 2 * size, scope / "linear_start")
        self.weight = Learned(scope / "depthwise_conv1d" / "weight", size, 1, facts.kernel)
        self.norm = RMSNorm(size, eps, scope / "conv_norm")
        self.end = linear(size, size, scope / "linear_end")

    def forward(self, x: Tensor) -> Tensor:
        clip = self.facts.clip
        gated = F.glu(self.start(self.before.normalize(x))).T
        mixed = F.conv1d(F.pad(gated, (self.facts.kernel - 1, 0)), self.weight.vectors, groups=len(gated))
        return x + self.end(F.silu(self.norm.normalize(mixed.T.contiguous().clamp(-clip, clip))))


class Layer(nn.Module):
    """Conformer layer: feed-forward, attention, convolution, feed-forward, norm."""

    def __init__(self, facts: Gemma3nAudioFacts, scope: Scope) -> None:
        super().__init__()
        self.clip = facts.clip
        self.first = FeedForward(facts, scope / "ffw_layer_start")
        self.attention = Attention(facts, scope / "attention")
        self.near = LightConvolution(facts, scope / "lconv1d")
        self.last = FeedForward(facts, scope / "ffw_layer_end")
        self.norm = RMSNorm(facts.hidden, EPS, scope / "norm")

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.near(self.attention(self.first(x))))
        return self.norm.normalize(x.clamp(-self.clip, self.clip))


class Embedder(nn.Module):
    """Projection of hidden states, and of the embeddings of marker tokens, to the decoder's size."""

    def __init__(self, facts: Gemma3nAudioFacts | Gemma3nVisionFacts, scope: Scope) -> None:
        super().__init__()
        self.facts = facts
        self.table = Learned(scope / "embedding" / "weight", facts.vocab, facts.hidden)
        self.hard = RMSNorm(facts.hidden, facts.norm_eps, scope / "hard_embedding_norm")
        self.soft = RMSNorm(facts.hidden, facts.norm_eps, scope / "soft_embedding_norm")
        self.product = WholeLinear(facts.hidden, facts.size_out, scope / "embedding_projection")

    def forward(self, states: Tensor) -> Tensor:
        """Return the vectors of hidden states [T, hidden]."""
        return unit_norm(self.product(self.soft.normalize(states)), self.facts.norm_eps)

    def marks(self, *rows: int) -> tuple[Tensor, ...]:
        """Return the vectors [1, size_out] of these tokens, counted from the first one of the encoder."""
        normed = self.hard.normalize(self.table.vectors[list(rows)])
        return unit_norm(self.product(normed), self.facts.norm_eps).split(1)


class Gemma3nAudioEncoder(nn.Module):
    """Audio encoder. Every item has a fixed number of vectors: shorter items are padded with a padding
    embedding, and an end embedding follows."""

    def __init__(self, facts: Gemma3nAudioFacts, scope: Scope) -> None:
        super().__init__()
        self.facts, tower = facts, scope / "audio_tower"
        first = tower / "subsample_conv_projection"
        sizes = (1, *facts.channels)
        self.halvings = nn.ModuleList(
            SubsampleConv(sizes[i], sizes[i + 1], facts.group_eps, first / f"conv_{i}") for i in range(2)
        )
        num_bins = -(-facts.mels // 4)
        self.flat = WholeLinear(facts.channels[1] * num_bins, facts.hidden, first / "input_proj_linear")
        self.layers = nn.ModuleList(Layer(facts, tower / "conformer" / i) for i in range(facts.layers))
        self.embed = Embedder(facts, scope / "embed_audio")

    def _encode_one(self, mel: Tensor) -> Tensor:
        x = mel[None]
        for convolution in self.halvings:
            x = convolution(x)
        x = self.flat(x.permute(1, 2, 0).flatten(1))
        for layer in self.layers:
            x = layer(x)
        vectors: Tensor = self.embed(x[:: self.facts.every].contiguous())
        return vectors[: self.facts.tokens]

    def forward(self, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        facts = self.facts
        end, padding = self.embed.marks(facts.end_id - facts.first, facts.vocab - 1)
        encoded = [self._encode_one(item["mel"]) for item in items]
        return [torch.cat((x, padding.expand(facts.tokens - len(x), -1), end)) for x in encoded]


class Gemma3nVisionEncoder(nn.Module):
    """Vision encoder; an end embedding follows the vectors of an image."""

    def __init__(self, facts: Gemma3nVisionFacts, scope: Scope) -> None:
        super().__init__()
        self.facts = facts
        self.net = MobileNet(facts, scope / "vision_tower" / "timm_model")
        self.embed = Embedder(facts, scope / "embed_vision")

    def forward(self, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        facts = self.facts
        (end,) = self.embed.marks(facts.end_id - facts.first)
        states = self.net(torch.stack([item["pixels"] for item in items])) * facts.hidden**0.5
        vectors = self.embed(states.flatten(0, 1)).view(len(items), facts.tokens, -1)
        return [torch.cat((part, end)) for part in vectors]


class Gemma3nTower(Tower):
    """Gemma 3n encoders. `pixels` of an image is [3, side, side], `mel` of an audio item [frames, mels]."""

    facts: Gemma3nFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        vision, sound, scope = self.facts.vision, self.facts.sound, scope / "model"
        self.vision = None if vision is None else Gemma3nVisionEncoder(vision, scope)
        self.audio = None if sound is None else Gemma3nAudioEncoder(sound, scope)

    @staticmethod
    def heads(facts: Gemma3nFacts) -> tuple[int, ...]:
        return ()

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        encoder = self.audio if modality == "audio" else self.vision
        assert encoder is not None
        vectors: list[Tensor] = encoder(items)
        return vectors

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        vision, sound = self.facts.vision, self.facts.sound
        if modality == "audio" and sound is not None:
            num_frames = 4 * sound.every * sound.tokens
            return {"mel": torch.zeros(num_frames, sound.mels, device=self.device)}
        assert vision is not None
        return {"pixels": torch.zeros(3, vision.image, vision.image, device=self.device)}

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        return item["mel"][0] if modality == "audio" else 1
