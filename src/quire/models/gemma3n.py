"""Gemma 3n: several states of each token, of which a layer reads one and corrects all; embeddings of tokens
for each layer; and last layers that see the keys and values of others."""

from collections.abc import Callable
from statistics import NormalDist

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.attention.batch import Batch
from quire.checkpoint.facts import AltUpFacts, ArchFacts, LayerFacts
from quire.errors import ConfigError
from quire.kernels.ops import HeadEntry, HeadNorms
from quire.layers.attention import PagedAttention
from quire.layers.embedding import TokenEmbedding
from quire.layers.linear import ColumnLinear, RowLinear, WholeLinear
from quire.layers.mlp import MLP
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.layers.vision import Learned
from quire.models import llama
from quire.models.decoder import Decoder

_LEAST = 1e-5
"""Of the mean square of a state."""


class AltUp(nn.Module):
    """Alternating updates: what a layer would say to all states is predicted, and corrected by what it says
    to the one that it reads."""

    def __init__(self, facts: ArchFacts, altup: AltUpFacts, scope: Scope) -> None:
        super().__init__()
        count = altup.inputs
        self.active, self.scale = altup.active, 1 / facts.hidden
        self.norm = norm_of(facts, scope / "router_norm")
        self.router = Learned(scope / "modality_router" / "weight", count, facts.hidden)
        self.predicts = Learned(scope / "prediction_coefs" / "weight", count**2, count)
        self.corrects = Learned(scope / "correction_coefs" / "weight", count, count)
        self.out_scale = Learned(scope / "correct_output_scale", facts.hidden)

    def _modalities(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, inputs]"""
        routed = F.linear(self.norm.alone(x) * self.scale, self.router.vectors)
        return torch.tanh(routed.float()).to(x.dtype)

    def predict(self, states: Tensor) -> Tensor:
        """[inputs, T, hidden], as the states are."""
        count, num_tokens, _ = states.shape
        weights = F.linear(self._modalities(states[self.active]), self.predicts.vectors)
        return states + torch.einsum("ith,tji->jth", states, weights.view(num_tokens, count, count))

    def correct(self, predicted: Tensor, said: Tensor) -> Tensor:
        weights = F.linear(self._modalities(said), self.corrects.vectors) + 1
        return predicted + (said - predicted[self.active]) * weights.T[:, :, None]


class Laurel(nn.Module):
    """A learned residual: x, and a product of low rank."""

    def __init__(self, facts: ArchFacts, rank: int, scope: Scope) -> None:
        super().__init__()
        self.left = WholeLinear(facts.hidden, rank, scope / "linear_left")
        self.right = WholeLinear(rank, facts.hidden, scope / "linear_right")
        self.norm = norm_of(facts, scope / "post_laurel_norm")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm.alone(self.right(self.left(x)))


class SparseMLP(MLP):
    """down(act(gate) * up), of whose gates only the largest are left: those that are so many deviations above
    their mean, by what is above that."""

    def __init__(self, facts: ArchFacts, sparsity: float, scope: Scope) -> None:
        super().__init__(facts, scope)
        self.group, self.size = scope.group, facts.intermediate
        self.deviations = NormalDist().inv_cdf(sparsity)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up.multiply(x).chunk(2, -1)
        mean = self._mean(gate)
        cutoff = mean + self._mean((gate - mean).square()).sqrt() * self.deviations
        gated = F.gelu(F.relu(gate - cutoff.to(gate.dtype)), approximate="tanh") * up
        out: Tensor = self.down(gated)
        return out

    def _mean(self, x: Tensor) -> Tensor:
        """Over the shares of all devices."""
        return self.group.all_reduce(x.float().sum(-1, keepdim=True)) / self.size


class Attention(llama.Attention):
    """Values are normed as well, by no weight."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        sizes = self.qkv.kv_heads, facts.head_dim
        self.qkv.bounded = _values_normed(*sizes, facts.norm_eps, are_keys=layer.keys_are_values)


def _values_normed(kv_heads: int, head_dim: int, eps: float, *, are_keys: bool) -> Callable[[Tensor], Tensor]:
    """Of queries, keys and values; `are_keys`: of queries and keys."""

    def normed(qkv: Tensor) -> Tensor:
        values = qkv[:, -kv_heads * head_dim :].view(len(qkv), kv_heads, head_dim)
        wide = values.float()
        wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        if are_keys:
            return torch.cat((qkv, wide.to(qkv.dtype).flatten(1)), 1)
        values.copy_(wide)
        return qkv

    return normed


class SharingAttention(nn.Module):
    """Queries alone, which see what another layer keeps."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        inner = facts.heads * facts.head_dim
        self.q = ColumnLinear(facts.hidden, inner, scope / "q_proj", bias=facts.qkv_bias)
        self.norm = norm_of(facts, scope / "q_norm", facts.head_dim)
        self.out = RowLinear(inner, facts.hidden, scope / "o_proj", bias=facts.out_bias)
        self.rope, self.ops = rope, scope.ops
        self.seen: tuple[PagedAttention, ...] = ()
        """That layer's, whose module this one is not."""

    def see(self, other: nn.Module) -> None:
        assert isinstance(other, Attention), "a layer that keeps nothing"
        self.seen = (other.mix,)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        (seen,) = self.seen
        assert seen.k_cache is not None and seen.v_cache is not None, "bind() comes before forward()"
        spec, caches, batch = seen.spec, (seen.k_cache, seen.v_cache), batch.groups[seen.group]
        norms = HeadNorms(self.norm.weight, self.norm.weight, self.norm.eps)
        nowhere = torch.full_like(batch.slots, -1)
        entry = HeadEntry(spec.heads, *self.rope.of(batch), nowhere, *caches, norms, *spec.scales)
        beside = F.pad(self.q(x), (0, 2 * spec.kv_heads * spec.head_dim))
        q = self.ops.rotate_and_write(beside, entry)
        out: Tensor = self.out(seen.backend.forward(q, *caches, batch, spec).flatten(1))
        return out


def share_keys(facts: ArchFacts, attentions: list[nn.Module]) -> None:
    """Layers without keys of their own see those of others."""
    for layer, own in zip(facts.layers, attentions, strict=True):
        if isinstance(own, SharingAttention) and layer.keys_of is not None:
            own.see(attentions[layer.keys_of])


class OwnInputs(nn.Module):
    """What each token has for each layer, of its id and of its vector. The scope is the body's."""

    def __init__(self, facts: ArchFacts, altup: AltUpFacts, scope: Scope) -> None:
        super().__init__()
        self.vocab, self.hidden = altup.vocab, facts.hidden
        self.layers, self.per_layer = len(facts.layers), altup.per_layer
        width = self.layers * altup.per_layer
        self.embed = TokenEmbedding(altup.vocab, width, scope / "embed_tokens_per_layer")
        self.projection = WholeLinear(facts.hidden, width, scope / "per_layer_model_projection")
        self.norm = norm_of(facts, scope / "per_layer_projection_norm", altup.per_layer)

    def forward(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """[T, layers, per_layer]"""
        shape = (len(x), self.layers, self.per_layer)
        known = torch.where(token_ids < self.vocab, token_ids, 0).clamp_min(0)
        of_ids = self.embed(known) * self.per_layer**0.5
        of_vectors = (self.projection(x) * self.hidden**-0.5).view(-1, self.per_layer)
        out: Tensor = (self.norm.alone(of_vectors).view(shape) + of_ids.view(shape)) * 0.5**0.5
        return out


class Layer(nn.Module):
    """Attention beside a product of low rank, then feed-forward, each between two norms; at last what the
    token itself has to say to this layer."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        altup = facts.altup
        assert altup is not None
        shares = layer.keys_of is not None
        attention: type[nn.Module] = SharingAttention if shares else Attention
        self.altup = AltUp(facts, altup, scope / "altup")
        self.laurel = Laurel(facts, altup.rank, scope / "laurel")
        self.before_attention = norm_of(facts, scope / "input_layernorm")
        self.attention = attention(facts, layer, rope, scope / "self_attn")
        self.after_attention = norm_of(facts, scope / "post_attention_layernorm")
        self.before_mlp = norm_of(facts, scope / "pre_feedforward_layernorm")
        mlp = scope / "mlp"
        self.mlp = SparseMLP(facts, layer.sparsity, mlp) if layer.sparsity else MLP(facts, mlp)
        self.after_mlp = norm_of(facts, scope / "post_feedforward_layernorm")
        self.gate = WholeLinear(facts.hidden, altup.per_layer, scope / "per_layer_input_gate")
        self.widen = WholeLinear(altup.per_layer, facts.hidden, scope / "per_layer_projection")
        self.after_own = norm_of(facts, scope / "post_per_layer_input_norm")
        self.active, self.is_scaled = altup.active, altup.is_scaled

    def forward(self, states: Tensor, own: Tensor, batch: Batch) -> Tensor:
        """[inputs, T, hidden], and [T, per_layer] of its own."""
        predicted = self.altup.predict(states)
        x = predicted[self.active]
        normed = self.before_attention.alone(x)
        x = x + self.after_attention.alone(self.attention(normed, batch))
        x = (x + self.laurel(normed)) * 0.5**0.5
        x = x + self.after_mlp.alone(self.mlp(self.before_mlp.alone(x)))
        states = self.altup.correct(predicted, x)
        first = states[self.active]
        first = first * self.altup.out_scale.vectors if self.is_scaled else first
        told = self.widen(F.gelu(self.gate(first), approximate="tanh") * own)
        states[1:] += self.after_own.alone(told)
        return states


class Gemma3nModel(Decoder):
    """The model."""

    Layer = Layer

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        if not (scope.stage.is_first and scope.stage.is_last):
            raise ConfigError(
                "pipeline_parallel_size cannot be had with Gemma 3n, whose last layers see the keys of "
                "others: leave it out, and use tensor_parallel_size"
            )
        super().__init__(facts, scope)
        altup = facts.altup
        assert altup is not None
        body, hidden = scope / self.body, facts.hidden
        self.own = OwnInputs(facts, altup, body)
        self.spread, self.joined = (
            nn.ModuleList(WholeLinear(hidden, hidden, body / name / i) for i in range(altup.inputs - 1))
            for name in ("altup_projections", "altup_unembed_projections")
        )
        share_keys(facts, [layer.attention for layer in self.layers if isinstance(layer, Layer)])

    def forward(self, batch: Batch) -> Tensor:
        x, _ = self.embedded(batch)
        own = self.own(x, batch.token_ids)
        size = _size(x)
        states = torch.stack([x, *(_resized(each(x), size) for each in self.spread)])
        for number, layer in enumerate(self.layers):
            states = layer(states, own[:, number], batch)
        size = _size(states[0])
        others = [_resized(each(x), size) for each, x in zip(self.joined, states[1:], strict=True)]
        assert self.norm is not None
        return self.norm.alone(torch.stack([states[0], *others]).mean(0))

    def tap(self, layers: tuple[int, ...], max_tokens: int, device: torch.device) -> None:
        raise ConfigError("Gemma 3n has several states of each token: no head can draft on them")


def _size(x: Tensor) -> Tensor:
    """[T, hidden] -> [T, 1], the root of the mean square."""
    return x.square().mean(-1, keepdim=True).sqrt()


def _resized(x: Tensor, size: Tensor) -> Tensor:
    return x * size / x.square().mean(-1, keepdim=True).clamp_min(_LEAST).sqrt()
