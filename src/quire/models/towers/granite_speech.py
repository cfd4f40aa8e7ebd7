"""Audio encoder of Granite Speech: a conformer with attention in blocks, and a Q-Former over windows."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.granite_speech import GraniteSpeechFacts, QFormerFacts
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm
from quire.layers.scope import Scope
from quire.layers.vision import Learned, VisionMLP
from quire.models.towers import Tower

_EPS = 1e-5
"""Epsilon of the norms of the conformer."""


class HalfStep(nn.Module):
    """Feed-forward block with half a residual step."""

    def __init__(self, facts: GraniteSpeechFacts, scope: Scope) -> None:
        super().__init__()
        self.norm = LayerNorm(facts.hidden, _EPS, scope / "pre_norm")
        names = "up_proj", "down_proj"
        self.mlp = VisionMLP(facts.hidden, facts.intermediate, scope, names=names, activation="silu")

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.mlp(self.norm.normalize(x))


class BlockAttention(nn.Module):
    """Attention within blocks of consecutive states, with learned embeddings of relative positions."""

    def __init__(self, facts: GraniteSpeechFacts, scope: Scope) -> None:
        super().__init__()
        self.facts, width = facts, facts.heads * facts.head_dim
        self.norm = LayerNorm(facts.hidden, _EPS, scope / "pre_norm")
        self.q = WholeLinear(facts.hidden, width, scope / "to_q")
        self.kv = WholeLinear(facts.hidden, 2 * width, scope / "to_kv")
        self.out = WholeLinear(width, facts.hidden, scope / "to_out", bias=True)
        self.places = Learned(scope / "rel_pos_emb" / "weight", 2 * facts.reach + 1, facts.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        facts, size = self.facts, self.facts.context
        padded = F.pad(self.norm.normalize(x), (0, 0, 0, -len(x) % size))
        parts = self.q(padded), *self.kv(padded).chunk(2, -1)
        q, k, v = (part.reshape(-1, size, facts.heads, facts.head_dim).transpose(1, 2) for part in parts)
        at = torch.arange(size, device=x.device)
        relative = self.places.vectors[at[:, None] - at + facts.reach]
        bias = torch.einsum("bhcd,crd->bhcr", q, relative) * facts.head_dim**-0.5
        if len(padded) > len(x):
            bias[-1, :, :, len(x) % size :] = -torch.inf
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        flat = mixed.transpose(1, 2).reshape(len(padded), -1)[: len(x)]
        return x + self.out(flat)


class ConvolutionBlock(nn.Module):
    """Gated depthwise convolution over time with a batch norm, between two products."""

    def __init__(self, facts: GraniteSpeechFacts, scope: Scope) -> None:
        super().__init__()
        self.facts, size, inner = facts, facts.hidden, facts.inner
        self.norm = LayerNorm(size, _EPS, scope / "norm")
        self.up = Learned(scope / "up_conv" / "weight", 2 * inner, size, 1)
        self.up_bias = Learned(scope / "up_conv" / "bias", 2 * inner)
        self.kernel = Learned(scope / "depth_conv" / "conv" / "weight", inner, 1, facts.kernel)
        names = ("running_mean", "running_var", "weight", "bias")
        self.batch_norm = nn.ModuleList(Learned(scope / "batch_norm" / name, inner) for name in names)
        self.down = Learned(scope / "down_conv" / "weight", size, inner, 1)
        self.down_bias = Learned(scope / "down_conv" / "bias", size)

    def forward(self, x: Tensor) -> Tensor:
        half, inner = self.facts.kernel // 2, self.facts.inner
        up = F.linear(self.norm.normalize(x), self.up.vectors[..., 0], self.up_bias.vectors)
        gated = F.pad(F.glu(up).T, (half, half - (self.facts.kernel + 1) % 2))
        mixed = F.conv1d(gated[None], self.kernel.vectors, groups=inner)
        mean, variance, weight, bias = (part.get_parameter("vectors") for part in self.batch_norm)
        normed = F.batch_norm(mixed, mean, variance, weight, bias, eps=_EPS)
        return x + F.linear(F.silu(normed[0].T), self.down.vectors[..., 0], self.down_bias.vectors)


class ConformerLayer(nn.Module):
    """Feed-forward, attention, convolution, feed-forward, norm."""

    def __init__(self, facts: GraniteSpeechFacts, scope: Scope) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            HalfStep(facts, scope / "ff1"),
            BlockAttention(facts, scope / "attn"),
            ConvolutionBlock(facts, scope / "conv"),
            HalfStep(facts, scope / "ff2"),
        )
        self.norm = LayerNorm(facts.hidden, _EPS, scope / "post_norm")

    def forward(self, x: Tensor) -> Tensor:
        return self.norm.normalize(self.parts(x))


class FormerAttention(nn.Module):
    """Attention of queries to `states`, then a residual and a norm."""

    def __init__(self, facts: QFormerFacts, size_in: int, scope: Scope) -> None:
        super().__init__()
        self.heads, size, inner = facts.heads, facts.hidden, scope / "attention"
        sizes = {"query": size, "key": size_in, "value": size_in}
        self.q, self.k, self.v = (WholeLinear(sizes[name], size, inner / name, bias=True) for name in sizes)
        self.out = WholeLinear(size, size, scope / "output" / "dense", bias=True)
        self.norm = LayerNorm(size, facts.norm_eps, scope / "output" / "LayerNorm")

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        """Return the output [windows, queries, hidden] for x of that shape and [windows, states, size]."""
        products = ((self.q, x), (self.k, states), (self.v, states))
        q, k, v = (
            project(part.flatten(0, 1)).view(*part.shape[:2], self.heads, -1).transpose(1, 2)
            for project, part in products
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, x.shape[-1])
        return self.norm.normalize(x.flatten(0, 1) + self.out(mixed)).view(x.shape)


class FormerLayer(nn.Module):
    """Attention among queries, optional attention to the windows, and an MLP, each with a norm after."""

    def __init__(self, facts: QFormerFacts, layer: int, scope: Scope) -> None:
        super().__init__()
        self.attention = FormerAttention(facts, facts.hidden, scope / "attention")
        self.cross: FormerAttention | None = None
        if facts.attends(layer):
            self.cross = FormerAttention(facts, facts.size_in, scope / "crossattention")
        names = "intermediate_query.dense", "output_query.dense"
        self.mlp = VisionMLP(
            facts.hidden, facts.intermediate, scope, names=names, activation=facts.activation
        )
        self.norm = LayerNorm(facts.hidden, facts.norm_eps, scope / "output_query" / "LayerNorm")

    def forward(self, x: Tensor, windows: Tensor) -> Tensor:
        x = self.attention(x, x)
        x = x if self.cross is None else self.cross(x, windows)
        flat = x.flatten(0, 1)
        return self.norm.normalize(flat + self.mlp(flat)).view(x.shape)


class GraniteSpeech(Tower):
    """Granite Speech encoder; `mel` of an audio item is [states, size_in], two frames per state."""

    facts: GraniteSpeechFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        audio, former = self.facts, self.facts.former
        scope = scope if scope.is_stored("encoder.input_linear.weight") else scope / "model"
        encoder, projector = scope / "encoder", scope / "projector"
        self.first = WholeLinear(audio.size_in, audio.hidden, encoder / "input_linear", bias=True)
        self.layers = nn.ModuleList(
            ConformerLayer(audio, encoder / "layers" / i) for i in range(audio.layers)
        )
        self.classify = WholeLinear(audio.hidden, audio.outputs, encoder / "out", bias=True)
        self.declassify = WholeLinear(audio.outputs, audio.hidden, encoder / "out_mid", bias=True)
        self.queries = Learned(projector / "query", 1, audio.queries, former.hidden)
        self.norm = LayerNorm(former.hidden, former.norm_eps, projector / "qformer" / "layernorm")
        layers = projector / "qformer" / "encoder" / "layer"
        self.former = nn.ModuleList(FormerLayer(former, i, layers / i) for i in range(former.layers))
        self.project = WholeLinear(former.hidden, audio.size_out, projector / "linear", bias=True)

    @staticmethod
    def heads(facts: GraniteSpeechFacts) -> tuple[int, ...]:
        return ()

    def _encode_one(self, mel: Tensor) -> Tensor:
        facts = self.facts
        x = self.first(mel.to(self.queries.vectors.dtype))
        states = [x]
        for number, layer in enumerate(self.layers, 1):
            x = layer(x)
            if number == facts.layers // 2:
                x = x + self.declassify(self.classify(x).softmax(-1))
            states.append(x)
        joined = torch.cat([*(states[number] for number in facts.joined), x], -1)
        padded = F.pad(joined, (0, 0, 0, -len(x) % facts.window))
        windows = padded.view(-1, facts.window, facts.former.size_in)
        queries = self.norm.normalize(self.queries.vectors[0]).expand(len(windows), -1, -1)
        for layer in self.former:
            queries = layer(queries, windows)
        vectors: Tensor = self.project(queries.flatten(0, 1))
        return vectors

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        return [self._encode_one(item["mel"]) for item in items]

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        num_states = -(-num_vectors // self.facts.queries) * self.facts.window
        return {"mel": torch.zeros(num_states, self.facts.size_in, device=self.device)}

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        return item["mel"][0]
