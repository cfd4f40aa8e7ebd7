"""Parameter counts of a model, part by part, computed from its config."""

from collections.abc import Callable
from typing import NamedTuple

from quire.checkpoint.facts import ArchFacts, LayerFacts, StateFacts

_UNGATED = {
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "BertModel",
    "BloomForCausalLM",
    "CLIPModel",
    "DistilBertModel",
    "ErnieModel",
    "FalconForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoXForCausalLM",
    "Jais2ForCausalLM",
    "JinaEmbeddingsV3Model",
    "MPNetModel",
    "MptForCausalLM",
    "NemotronForCausalLM",
    "NemotronHForCausalLM",
    "OPTForCausalLM",
    "PersimmonForCausalLM",
    "PhiForCausalLM",
    "RobertaModel",
    "Starcoder2ForCausalLM",
    "WhisperForConditionalGeneration",
    "SiglipModel",
    "XLMRobertaModel",
}
"""Architectures with a feed-forward part without gate projection."""


class LayerWeights(NamedTuple):
    """Numbers of parameters (not bytes) of one layer, by part."""

    mixer: int
    """Parameters of the token mixer: attention or SSM."""
    dense: int
    """Feed-forward parameters that every token uses, including a router and a shared expert."""
    experts: int = 0
    """Parameters of all routed experts."""
    active_experts: int = 0
    """Parameters of the routed experts that one token uses."""

    @property
    def total(self) -> int:
        return self.mixer + self.dense + self.experts


class Weights(NamedTuple):
    """Numbers of parameters (not bytes) of a model, by part."""

    embedding: int
    head: int
    """Parameters of the output head; 0 if the head is tied to the embedding."""
    layers: tuple[LayerWeights, ...]
    tower: int = 0
    """Parameters of the multimodal encoders; 0: the model has none."""

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.tower + sum(layer.total for layer in self.layers)

    @property
    def active(self) -> int:
        """Return the number of parameters that one token uses; those of the embedding count only if the
        output head is tied to it."""
        active = sum(layer.mixer + layer.dense + layer.active_experts for layer in self.layers)
        return active + (self.head or self.embedding)


def count_parameters(facts: ArchFacts) -> Weights:
    """Count the parameters of a model, including norms and biases where `facts` have them: exact to one
    percent."""
    table = facts.vocab * facts.hidden
    positions = facts.max_len * facts.hidden if facts.learned_positions else 0
    if facts.encoder is not None:
        encoder = facts.encoder
        positions = (encoder.positions + encoder.token_types + encoder.task_types) * facts.hidden
    has_head = facts.encoder is None and not facts.tied
    layers = tuple(_layer(facts.of_layer(layer), layer) for layer in facts.layers)
    table += _altup(facts)
    tower = facts.media.tower.num_weights if facts.media is not None else 0
    return Weights(table + positions, table if has_head else 0, layers, tower)


def _altup(facts: ArchFacts) -> int:
    """Count the parameters of AltUp models (Gemma 3n) that lie outside of their layers."""
    if (altup := facts.altup) is None:
        return 0
    per_layer = len(facts.layers) * altup.per_layer
    return per_layer * (altup.vocab + facts.hidden) + 2 * (altup.inputs - 1) * facts.hidden**2


def _layer(facts: ArchFacts, layer: LayerFacts) -> LayerWeights:
    if facts.shared is not None:
        return _zamba_layer(facts, layer)
    if layer.shared_block >= 0:
        return LayerWeights(0, 0)
    mixer = _MIXERS[layer.mixer](facts) + 2 * facts.hidden
    if layer.kv_sharing_target is not None or layer.keys_are_values:
        missing = 1 if layer.kv_sharing_target is None else 2
        mixer -= missing * facts.hidden * facts.kv_heads * facts.head_dim
    if (altup := facts.altup) is not None:
        mixer += facts.hidden * (2 * altup.rank + 2 * altup.per_layer + altup.inputs + 6)
    if facts.media is not None and facts.media.num_cross_states > 0:
        mixer += _attention(facts) + facts.hidden
    if layer.moe:
        return _mixture(facts, mixer)
    return LayerWeights(mixer, _matrices(facts) * facts.hidden * facts.intermediate * layer.has_mlp)


def _zamba_layer(facts: ArchFacts, layer: LayerFacts) -> LayerWeights:
    """Count the parameters of a Zamba2 layer: Mamba, and a projection after the shared block. The first layer
    that uses a shared block also counts the weights of this block."""
    shared, hidden = facts.shared, facts.hidden
    assert shared is not None
    mixer, dense = _mamba(facts) + hidden, 0
    if layer.shared_block >= 0:
        queries, keys = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
        adapters = 3 * (2 * hidden + queries) if shared.adapts_attention else 0
        mixer += hidden * hidden + shared.rank * (adapters + hidden + 2 * facts.intermediate)
        if layer.shared_block_use < shared.blocks:
            mixer += hidden * (3 * queries + 4 * keys + 3)
            dense = 3 * hidden * facts.intermediate
    return LayerWeights(mixer, dense)


def _matrices(facts: ArchFacts) -> int:
    return 2 if facts.architecture in _UNGATED else 3


def _mixture(facts: ArchFacts, mixer: int) -> LayerWeights:
    moe = facts.moe
    assert moe is not None, "an MoE layer needs MoeFacts"
    matrices = 2 if moe.plain else 3
    inner = moe.latent or facts.hidden
    expert = matrices * inner * moe.intermediate
    dense = facts.hidden * moe.experts + matrices * facts.hidden * moe.shared_intermediate
    dense += 2 * facts.hidden * moe.latent
    return LayerWeights(mixer, dense, moe.experts * expert, moe.routing.per_token * expert)


def _attention(facts: ArchFacts) -> int:
    queries, keys = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    gates = queries if facts.output_gate else facts.heads * facts.head_gate
    biases = (queries + 2 * keys) * facts.qkv_bias
    if facts.v_dim:
        values = (facts.heads + facts.kv_heads) * facts.v_dim
        return facts.hidden * (queries + keys + values) + biases
    rank = facts.query_rank
    first = rank * (facts.hidden + queries) if rank else facts.hidden * queries
    return first + facts.hidden * (queries + gates + 2 * keys) + biases


def _latent(facts: ArchFacts) -> int:
    mla, heads = facts.mla, facts.heads
    assert mla is not None, "latent attention needs MlaFacts"
    queries = heads * (mla.nope_dim + mla.rope_dim)
    down = facts.hidden * (mla.kv_latent + mla.rope_dim)
    up = mla.kv_latent * heads * (mla.nope_dim + mla.v_dim)
    query = (facts.hidden + queries) * mla.q_latent if mla.q_latent else facts.hidden * queries
    if (index := mla.index) is not None:
        query += facts.hidden * (index.dim + index.heads) + (mla.q_latent or 0) * index.heads * index.dim
    return query + down + up + heads * mla.v_dim * facts.hidden


def _state(facts: ArchFacts) -> StateFacts:
    assert facts.state is not None, "an SSM layer needs StateFacts"
    return facts.state


def _mamba(facts: ArchFacts) -> int:
    state = _state(facts)
    inner, shared = state.heads * state.head_dim, 2 * state.groups * state.state
    return facts.hidden * (3 * inner + shared + state.heads) + (inner + shared) * (state.conv + 1)


def _selective(facts: ArchFacts) -> int:
    state = _state(facts)
    projected = state.rank + 2 * state.state
    return state.heads * (3 * facts.hidden + projected + state.rank + state.state + state.conv + 3)


def _conv(facts: ArchFacts) -> int:
    state = _state(facts)
    return state.heads * (4 * facts.hidden + state.conv)


def _delta(facts: ArchFacts) -> int:
    state = _state(facts)
    values, keys = state.heads * state.head_dim, state.groups * state.state
    decays = keys if state.decays_channels else state.heads
    gates = facts.hidden * (values + decays)
    if state.rank:
        gates = state.rank * (2 * facts.hidden + values + decays)
    return facts.hidden * (2 * values + 2 * keys + state.heads) + gates + (values + 2 * keys) * state.conv


def _lightning(facts: ArchFacts) -> int:
    state = _state(facts)
    return state.heads * state.head_dim * (5 * facts.hidden + 1)


_MIXERS: dict[str, Callable[[ArchFacts], int]] = {
    "attention": _attention,
    "latent": _latent,
    "attention+mamba": lambda facts: _attention(facts) + _mamba(facts),
    "selective": _selective,
    "mamba": _mamba,
    "conv": _conv,
    "delta": _delta,
    "lightning": _lightning,
    "transformers": _attention,
    "none": lambda facts: 0,
}
"""Function that counts the parameters of each `LayerFacts.mixer`."""
