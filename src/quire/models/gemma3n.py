"""Gemma 3n: several states per token (AltUp), per-layer token embeddings, KV caches shared by layers."""

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
from quire.models.decoder import Decoder, refuse_pipeline

_LEAST = 1e-5
"""Lower bound of the mean square by which a state is normalized, against division by zero."""


class AltUp(nn.Module):
    """AltUp (alternating updates) for several states per token: predict all states, run the layer on the
    active state, and correct all states by the layer's output."""

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
        """Return the output of AltUp's router, [T, inputs], from which the coefficients of prediction and
        correction are computed. `x` is [T, hidden], `inputs` the number of states per token."""
        routed = F.linear(self.norm.normalize(x) * self.scale, self.router.vectors)
        return torch.tanh(routed.float()).to(x.dtype)

    def predict(self, states: Tensor) -> Tensor:
        """Return the predictions for all states, [inputs, T, hidden]; the layer runs on that of the active
        state."""
        count, num_tokens, _ = states.shape
        weights = F.linear(self._modalities(states[self.active]), self.predicts.vectors)
        return states + torch.einsum("ith,tji->jth", states, weights.view(num_tokens, count, count))

    def correct(self, predicted: Tensor, output: Tensor) -> Tensor:
        """Return the predicted states, corrected by the layer's output [T, hidden] for the active state."""
        weights = F.linear(self._modalities(output), self.corrects.vectors) + 1
        return predicted + (output - predicted[self.active]) * weights.T[:, :, None]


class Laurel(nn.Module):
    """Learned augmented residual (LAuReL): x plus a normed low-rank projection of x."""

    def __init__(self, facts: ArchFacts, rank: int, scope: Scope) -> None:
        super().__init__()
        self.left = WholeLinear(facts.hidden, rank, scope / "linear_left")
        self.right = WholeLinear(rank, facts.hidden, scope / "linear_right")
        self.norm = norm_of(facts, scope / "post_laurel_norm")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return x + self.norm.normalize(self.right(self.left(x, batch), batch))


class SparseMLP(MLP):
    """Gated MLP with sparse gates: down(act(relu(gate - cutoff)) * up), where the cutoff lies a fixed number
    of standard deviations above the mean of the gates."""

    def __init__(self, facts: ArchFacts, sparsity: float, scope: Scope) -> None:
        super().__init__(facts, scope)
        self.group, self.size = scope.group, facts.intermediate
        self.deviations = NormalDist().inv_cdf(sparsity)

    def forward(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        gate, up = self.gate_up.multiply(x, batch).chunk(2, -1)
        mean = self._mean(gate)
        cutoff = mean + self._mean((gate - mean).square()).sqrt() * self.deviations
        gated = F.gelu(F.relu(gate - cutoff.to(gate.dtype)), approximate="tanh") * up
        return self.down(gated, batch)

    def _mean(self, x: Tensor) -> Tensor:
        """Return the mean of x over the shards of all tensor-parallel ranks."""
        return self.group.all_reduce(x.float().sum(-1, keepdim=True)) / self.size


class Attention(llama.Attention):
    """Llama attention that also normalizes the values, by a norm without weight."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        sizes = self.qkv.kv_heads, facts.head_dim
        self.qkv.transform_qkv = _norm_values(*sizes, facts.norm_eps, are_keys=layer.keys_are_values)


def _norm_values(kv_heads: int, head_dim: int, eps: float, *, are_keys: bool) -> Callable[[Tensor], Tensor]:
    """Return a function that applies a norm without weight to the values of concatenated QKV. With `are_keys`
    the input has no values; the normed keys are appended as values."""

    def normed(qkv: Tensor) -> Tensor:
        values = qkv[:, -kv_heads * head_dim :].view(len(qkv), kv_heads, head_dim)
        wide = values.float()
        wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        if are_keys:
            return torch.cat((qkv, wide.to(qkv.dtype).flatten(1)), 1)
        values.copy_(wide)
        return qkv

    return normed


class KVSharingAttention(nn.Module):
    """Query projection, attention to the KV cache of another layer, output projection."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        inner = facts.heads * facts.head_dim
        self.q = ColumnLinear(facts.hidden, inner, scope / "q_proj", bias=facts.qkv_bias)
        self.norm = norm_of(facts, scope / "q_norm", facts.head_dim)
        self.out = RowLinear(inner, facts.hidden, scope / "o_proj", bias=facts.out_bias)
        self.rope, self.ops = rope, scope.ops
        self.shared: tuple[PagedAttention, ...] = ()
        """Attention layer with the shared KV cache; a tuple, so that it is not registered as a submodule."""

    def share(self, other: nn.Module) -> None:
        """Use the KV cache of another attention layer."""
        assert isinstance(other, Attention), "only a layer with its own KV cache can be shared"
        self.shared = (other.mix,)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        (shared,) = self.shared
        assert shared.k_cache is not None and shared.v_cache is not None, "bind() comes before forward()"
        spec, caches, batch = shared.spec, (shared.k_cache, shared.v_cache), batch.groups[shared.group]
        norms = HeadNorms(self.norm.weight, self.norm.weight, self.norm.eps)
        no_slots = torch.full_like(batch.slots, -1)
        entry = HeadEntry(spec.heads, *self.rope.of(batch), no_slots, *caches, norms, *spec.scales)
        qkv = F.pad(self.q(x, batch), (0, 2 * spec.kv_heads * spec.head_dim))
        q = self.ops.rotate_and_write(qkv, entry)
        return self.out(shared.backend.forward(q, *caches, batch, spec).flatten(1), batch)


def share_kv_caches(facts: ArchFacts, attentions: list[nn.Module]) -> None:
    """Connect layers without their own KV cache to the layers that they share it with."""
    for layer, attention in zip(facts.layers, attentions, strict=True):
        if isinstance(attention, KVSharingAttention) and layer.kv_sharing_target is not None:
            attention.share(attentions[layer.kv_sharing_target])


class PerLayerInputs(nn.Module):
    """Per-layer inputs of each token, from its id and its embedding. `scope` is that of the body."""

    def __init__(self, facts: ArchFacts, altup: AltUpFacts, scope: Scope) -> None:
        super().__init__()
        self.vocab, self.hidden = altup.vocab, facts.hidden
        self.layers, self.per_layer = len(facts.layers), altup.per_layer
        width = self.layers * altup.per_layer
        self.embed = TokenEmbedding(altup.vocab, width, scope / "embed_tokens_per_layer")
        self.projection = WholeLinear(facts.hidden, width, scope / "per_layer_model_projection")
        self.norm = norm_of(facts, scope / "per_layer_projection_norm", altup.per_layer)

    def forward(self, x: Tensor, token_ids: Tensor, batch: Batch) -> Tensor:
        """Return the inputs of all layers, [T, layers, per_layer]."""
        shape = (len(x), self.layers, self.per_layer)
        ids = torch.where(token_ids < self.vocab, token_ids, 0).clamp_min(0)
        embedded = self.embed(ids, batch) * self.per_layer**0.5
        projected = (self.projection(x, batch) * self.hidden**-0.5).view(-1, self.per_layer)
        return (self.norm.normalize(projected).view(shape) + embedded.view(shape)) * 0.5**0.5


class PerLayerGate(nn.Module):
    """Gated projection by which a layer adds the per-layer input of each token. `scope` is that of the
    layer."""

    def __init__(self, facts: ArchFacts, altup: AltUpFacts, scope: Scope) -> None:
        super().__init__()
        self.ops, self.activation = scope.ops, facts.activation
        self.gate = WholeLinear(facts.hidden, altup.per_layer, scope / "per_layer_input_gate")
        self.widen = WholeLinear(altup.per_layer, facts.hidden, scope / "per_layer_projection")
        self.norm = norm_of(facts, scope / "post_per_layer_input_norm")

    def forward(self, x: Tensor, layer_input: Tensor, batch: Batch) -> Tensor:
        gated = self.ops.activate(self.gate(x, batch), self.activation) * layer_input
        return self.norm.normalize(self.widen(gated, batch))


class Layer(nn.Module):
    """AltUp prediction, attention with LAuReL, MLP (each with a norm before and after), AltUp correction, and
    the per-layer input of the token."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        altup = facts.altup
        assert altup is not None
        shares = layer.kv_sharing_target is not None
        attention: type[nn.Module] = KVSharingAttention if shares else Attention
        self.altup = AltUp(facts, altup, scope / "altup")
        self.laurel = Laurel(facts, altup.rank, scope / "laurel")
        self.before_attention = norm_of(facts, scope / "input_layernorm")
        self.attention = attention(facts, layer, rope, scope / "self_attn")
        self.after_attention = norm_of(facts, scope / "post_attention_layernorm")
        self.before_mlp = norm_of(facts, scope / "pre_feedforward_layernorm")
        mlp = scope / "mlp"
        self.mlp = SparseMLP(facts, layer.sparsity, mlp) if layer.sparsity else MLP(facts, mlp)
        self.after_mlp = norm_of(facts, scope / "post_feedforward_layernorm")
        self.own = PerLayerGate(facts, altup, scope)
        self.active, self.is_scaled = altup.active, altup.is_scaled

    def forward(self, states: Tensor, layer_input: Tensor, batch: Batch) -> Tensor:
        """Return the states [inputs, T, hidden] after the layer; `layer_input` is the per-layer input [T,
        per_layer]."""
        predicted = self.altup.predict(states)
        x = predicted[self.active]
        normed = self.before_attention.normalize(x)
        x = x + self.after_attention.normalize(self.attention(normed, batch))
        x = (x + self.laurel(normed, batch)) * 0.5**0.5
        x = x + self.after_mlp.normalize(self.mlp(self.before_mlp.normalize(x), batch))
        states = self.altup.correct(predicted, x)
        first = states[self.active]
        first = first * self.altup.out_scale.vectors if self.is_scaled else first
        states[1:] += self.own(first, layer_input, batch)
        return states


class Gemma3nModel(Decoder):
    """Gemma 3n decoder."""

    Layer = Layer

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        refuse_pipeline(scope, "Gemma 3n, where layers share the KV cache of others")
        super().__init__(facts, scope)
        altup = facts.altup
        assert altup is not None
        body, hidden = scope / self.names.body, facts.hidden
        self.own = PerLayerInputs(facts, altup, body)
        self.spread, self.joined = (
            nn.ModuleList(WholeLinear(hidden, hidden, body / name / i) for i in range(altup.inputs - 1))
            for name in ("altup_projections", "altup_unembed_projections")
        )
        share_kv_caches(facts, [layer.attention for layer in self.layers if isinstance(layer, Layer)])

    def forward(self, batch: Batch) -> Tensor:
        x, _ = self.embedded(batch)
        layer_inputs = self.own(x, batch.token_ids, batch)
        rms = _rms(x)
        states = torch.stack([x, *(_rescale(project(x, batch), rms) for project in self.spread)])
        for number, layer in enumerate(self.layers):
            states = layer(states, layer_inputs[:, number], batch)
        rms = _rms(states[0])
        pairs = zip(self.joined, states[1:], strict=True)
        others = [_rescale(project(x, batch), rms) for project, x in pairs]
        assert self.norm is not None
        return self.norm.normalize(torch.stack([states[0], *others]).mean(0))

    def set_aux_hidden_state_layers(
        self, layers: tuple[int, ...], max_tokens: int, device: torch.device
    ) -> None:
        raise ConfigError("draft heads are not supported with Gemma 3n, which has several states per token")


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True).sqrt()


def _rescale(x: Tensor, rms: Tensor) -> Tensor:
    return x * rms / x.square().mean(-1, keepdim=True).clamp_min(_LEAST).sqrt()
