"""Weights: how many numbers a model has, part by part, out of its facts alone."""

from collections.abc import Callable
from typing import NamedTuple

from quire.checkpoint.facts import ArchFacts, LayerFacts

_PLAIN = {
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "BertModel",
    "BloomForCausalLM",
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
    "XLMRobertaModel",
}
"""Architectures whose feed-forward half has no gate."""


class LayerWeights(NamedTuple):
    """Numbers of one layer."""

    mixer: int
    """What looks back: attention, or what keeps a state."""
    dense: int
    """What every token meets in the feed-forward half: router and shared expert of a mixture, too."""
    experts: int = 0
    """Of all of them."""
    met: int = 0
    """Those of the experts that one token is given to."""

    @property
    def total(self) -> int:
        return self.mixer + self.dense + self.experts


class Weights(NamedTuple):
    """Numbers of a model."""

    embedding: int
    head: int
    """0 where it is the embedding."""
    layers: tuple[LayerWeights, ...]
    tower: int = 0
    """Of an encoder whose states all tokens see; others are not counted."""

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.tower + sum(layer.total for layer in self.layers)

    @property
    def active(self) -> int:
        """Those that one token meets; of the embedding it is a row, unless the head is the same."""
        met = sum(layer.mixer + layer.dense + layer.met for layer in self.layers)
        return met + (self.head or self.embedding)


def count(facts: ArchFacts) -> Weights:
    """Norms and biases included, where facts tell of them: to a percent, for every family."""
    table = facts.vocab * facts.hidden
    positions = facts.max_len * facts.hidden if facts.learned_positions else 0
    if facts.encoder is not None:
        encoder = facts.encoder
        positions = (encoder.positions + encoder.token_types + encoder.task_types) * facts.hidden
    has_head = facts.encoder is None and not facts.tied
    layers = tuple(_layer(facts.of_layer(layer), layer) for layer in facts.layers)
    table += _beside(facts)
    tower = facts.media.tower.num_weights if facts.media is not None else 0
    return Weights(table + positions, table if has_head else 0, layers, tower)


def _beside(facts: ArchFacts) -> int:
    """What models with several states have in front of their layers, and behind them."""
    if (altup := facts.altup) is None:
        return 0
    own = len(facts.layers) * altup.per_layer
    return own * (altup.vocab + facts.hidden) + 2 * (altup.inputs - 1) * facts.hidden**2


def _crosses(facts: ArchFacts) -> bool:
    return facts.media is not None and facts.media.crossed > 0


def _layer(facts: ArchFacts, layer: LayerFacts) -> LayerWeights:
    if facts.shared is not None:
        return _sharing(facts, layer)
    mixer = _MIXERS[layer.mixer](facts) + 2 * facts.hidden
    if layer.keys_of is not None or layer.keys_are_values:
        missing = 1 if layer.keys_of is None else 2
        mixer -= missing * facts.hidden * facts.kv_heads * facts.head_dim
    if (altup := facts.altup) is not None:
        mixer += facts.hidden * (2 * altup.rank + 2 * altup.per_layer + altup.inputs + 6)
    if _crosses(facts):
        mixer += _attention(facts) + facts.hidden
    if layer.moe:
        return _mixture(facts, mixer)
    is_one_thing = any(each.mixer == "none" for each in facts.layers)
    if is_one_thing and layer.mixer != "none":
        return LayerWeights(mixer, 0)
    return LayerWeights(mixer, _matrices(facts) * facts.hidden * facts.intermediate)


def _sharing(facts: ArchFacts, layer: LayerFacts) -> LayerWeights:
    """Mamba, and behind what several layers share a product; the first of them has what is shared."""
    shared, hidden = facts.shared, facts.hidden
    assert shared is not None
    mixer, dense = _mamba(facts) + hidden, 0
    if layer.block >= 0:
        queries, keys = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
        own = 3 * (2 * hidden + queries) if shared.adapts_attention else 0
        mixer += hidden * hidden + shared.rank * (own + hidden + 2 * facts.intermediate)
        if layer.use < shared.blocks:
            mixer += hidden * (3 * queries + 4 * keys + 3)
            dense = 3 * hidden * facts.intermediate
    return LayerWeights(mixer, dense)


def _matrices(facts: ArchFacts) -> int:
    """Of a feed-forward half."""
    return 2 if facts.architecture in _PLAIN else 3


def _mixture(facts: ArchFacts, mixer: int) -> LayerWeights:
    moe = facts.moe
    assert moe is not None, "a layer of experts needs facts of them"
    matrices = 2 if moe.plain else 3
    inner = moe.latent or facts.hidden
    each = matrices * inner * moe.intermediate
    dense = facts.hidden * moe.experts + matrices * facts.hidden * moe.shared_intermediate
    dense += 2 * facts.hidden * moe.latent
    return LayerWeights(mixer, dense, moe.experts * each, moe.routing.per_token * each)


def _attention(facts: ArchFacts) -> int:
    queries, keys = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    gates = queries if facts.output_gate else facts.heads * facts.head_gate
    biases = (queries + 2 * keys) * facts.qkv_bias
    if facts.v_dim:
        values = (facts.heads + facts.kv_heads) * facts.v_dim
        return facts.hidden * (queries + keys + values) + biases
    return facts.hidden * (2 * queries + gates + 2 * keys) + biases


def _latent(facts: ArchFacts) -> int:
    mla, heads = facts.mla, facts.heads
    assert mla is not None, "latent attention needs facts of it"
    queries = heads * (mla.nope_dim + mla.rope_dim)
    down = facts.hidden * (mla.kv_latent + mla.rope_dim)
    up = mla.kv_latent * heads * (mla.nope_dim + mla.v_dim)
    query = (facts.hidden + queries) * mla.q_latent if mla.q_latent else facts.hidden * queries
    if (index := mla.index) is not None:
        query += facts.hidden * (index.dim + index.heads) + (mla.q_latent or 0) * index.heads * index.dim
    return query + down + up + heads * mla.v_dim * facts.hidden


def _mamba(facts: ArchFacts) -> int:
    state = facts.state
    assert state is not None, "a state needs facts of it"
    inner, shared = state.heads * state.head_dim, 2 * state.groups * state.state
    return facts.hidden * (3 * inner + shared + state.heads) + (inner + shared) * (state.conv + 1)


def _selective(facts: ArchFacts) -> int:
    state = facts.state
    assert state is not None, "a state needs facts of it"
    made = state.rank + 2 * state.state
    return state.heads * (3 * facts.hidden + made + state.rank + state.state + state.conv + 3)


def _conv(facts: ArchFacts) -> int:
    state = facts.state
    assert state is not None, "a state needs facts of it"
    return state.heads * (4 * facts.hidden + state.conv)


def _delta(facts: ArchFacts) -> int:
    state = facts.state
    assert state is not None, "a state needs facts of it"
    values, keys = state.heads * state.head_dim, state.groups * state.state
    return facts.hidden * (3 * values + 2 * keys + 2 * state.heads) + (values + 2 * keys) * state.conv


_MIXERS: dict[str, Callable[[ArchFacts], int]] = {
    "attention": _attention,
    "latent": _latent,
    "attention+mamba": lambda facts: _attention(facts) + _mamba(facts),
    "selective": _selective,
    "mamba": _mamba,
    "conv": _conv,
    "delta": _delta,
    "none": lambda facts: 0,
}
"""By `LayerFacts.mixer`: its numbers."""
