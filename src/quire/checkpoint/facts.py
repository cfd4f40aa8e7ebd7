"""The shape of a model, as plain facts: what a model file may ask for."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """Rotary embedding as the checkpoint describes it; `kind` is a key of the table in `layers/rope.py`."""

    theta: float = 10000.0
    dim: int = 0
    """How many of the head's dimensions rotate."""
    max_len: int = 2048
    """The checkpoint's max_position_embeddings."""
    kind: str = "default"
    """default | linear | dynamic | llama3 | yarn | longrope | factors"""
    pairs: bool = False
    """Neighbouring numbers of a head turn together, not the numbers of its two halves."""
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()
    """The divisor of each frequency: for `factors`, as a GGUF file's rope_freqs tensor carries them, and for
    `longrope` within the original length."""
    long_factors: tuple[float, ...] = ()
    """`longrope` only: the divisors of an engine for longer sequences than the original length."""
    sections: tuple[int, ...] = ()
    """How many of the dim / 2 frequencies turn by time, by height and by width; empty: all by the token's
    place."""
    interleaved: bool = False
    """Whether those of the three take turns, as long as there are some of each, not one after the other."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What one layer may have other than its neighbours."""

    rope: RopeFacts | None
    """None: its heads do not turn."""
    window: int | None = None
    """How many tokens back it looks; None: to the first."""
    mixer: str = "attention"
    """How it looks back: attention | latent | selective (Mamba) | mamba (Mamba-2) | delta | conv, or by two
    side by side: attention+mamba, or not at all: none"""
    moe: bool = False
    """Whether its feed-forward half is a mixture of experts."""
    heads: int = 0
    """Of its queries; 0: as many as the model says."""
    kv_heads: int = 0
    """Of its keys and values, likewise."""
    head_dim: int = 0
    """Of these, likewise."""
    intermediate: int = 0
    """The width of its feed-forward half, likewise."""
    keys_are_values: bool = False
    """Whether its values are its keys as they come, before norm and rotation."""
    activation: str = ""
    """That of its feed-forward half, and of the expert that every token is given to; empty: the model's."""
    expert_activation: str = ""
    """That of the experts; empty: theirs."""
    keys_of: int | None = None
    """The layer whose keys and values it sees, and keeps none itself; None: its own."""
    picks: bool = True
    """Whether it has an indexer of its own, where layers have; else it sees what the last one picked."""
    sparsity: float = 0.0
    """About what part of the gates of its feed-forward half is 0."""
    block: int = -1
    """The number of the layer whose attention and feed-forward it uses, where layers share these; else -1."""
    use: int = 0
    """How many have used one of them before it."""


class Routing(NamedTuple):
    """How the experts of a token are chosen and weighed."""

    per_token: int
    """How many are chosen."""
    scoring: str = "softmax"
    """What a logit counts: `softmax` over all experts, or `sigmoid` of itself."""
    renormalized: bool = False
    """Whether the weights of the chosen sum to 1."""
    scale: float = 1.0
    """Factor on the weights, last of all."""
    num_groups: int = 1
    """Experts stand in so many groups of equal size, and are chosen from the best `top_groups` of them."""
    top_groups: int = 1
    group_best: int = 1
    """A group is as good as the sum of its so many best experts."""


@dataclass(frozen=True, slots=True)
class MoeFacts:
    """A mixture of experts, and how its checkpoints name it."""

    experts: int
    intermediate: int
    """The width of one expert."""
    routing: Routing
    idle: int = 0
    """How many more there are to choose from that say what they are given."""
    spread: float = 0.0
    """Of two experts that are chosen one after the other: how far, relative to itself, logits may be from the
    best to count in its weight."""
    choice_bias: bool = False
    """Whether a bias counts in the choice of the experts, and not in their weights."""
    router_bias: bool = False
    wide_router: bool = False
    """Whether its logits are in float32, whatever type the model has."""
    expert_bias: bool = False
    activation: str = ""
    """Where experts have another than the rest of the model."""
    plain: bool = False
    """Whether experts, and the shared one, have no gate."""
    latent: int = 0
    """The width of what experts see and say; 0: that of the model."""
    shared_intermediate: int = 0
    """The width of the expert that every token is given to; 0: there is none."""
    shared_gate: bool = False
    """Whether what that one says is weighed by a gate."""
    shared_mean: bool = False
    """Whether the mean is taken of what that one and the others say, not the sum."""
    weighs_input: bool = False
    """Whether the weights are for what goes into the experts, not for what comes out."""
    names: str = "mlp"
    """A key of the table of names in `layers/moe.py`."""


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """An indexer: of all tokens before it a token sees those alone whose keys, kept for that, it scores
    best."""

    heads: int
    """Of its queries; all share one key."""
    dim: int
    most: int
    """How many tokens are seen."""
    neighbours: bool
    """Numbers 2i and 2i + 1 turn as a pair; otherwise half against half."""


@dataclass(frozen=True, slots=True)
class MlaFacts:
    """Latent attention: what is kept of a token is one latent, from which all heads make their own."""

    kv_latent: int
    nope_dim: int
    """Of each head's queries and keys: those that do not turn."""
    rope_dim: int
    """Those that do; their keys are the same for all heads."""
    v_dim: int
    q_latent: int | None = None
    """None: queries come straight from the hidden state."""
    index: IndexFacts | None = None
    """None: all tokens are seen."""
    scales: tuple[float, float] = (1.0, 1.0)
    """Factors on queries, and on latents behind their norm."""


@dataclass(frozen=True, slots=True)
class StateFacts:
    """Layers that keep a state of fixed size: Mamba, Mamba-2, gated delta, or a convolution alone."""

    heads: int
    """Of the state; for gated delta those of the values; for Mamba and a convolution alone the channels."""
    head_dim: int
    state: int
    """Numbers per head and head dimension; for gated delta the size of a key head."""
    groups: int
    """How many share the same input and output weights; for gated delta the heads of the keys. 0 where the
    convolution sees nothing of these."""
    conv: int
    """Tokens that the convolution in front sees."""
    conv_bias: bool = True
    proj_bias: bool = False
    norm_groups: int = 1
    """Mamba-2: how many parts of what it says have a norm each."""
    norm: str = "gate_first"
    """Mamba-2: whether the gate comes before that norm, `gate_last`, or there is no norm: `none`. Mamba: the
    norms of what the scan is given: `none`, `bare` ones without weights, or `weighed`."""
    norm_eps: float = 0.0
    """Of these; 0: as the model's other norms have it."""
    rank: int = 0
    """Mamba: numbers of a token that the time steps of all channels are made of."""
    scales: tuple[float, ...] = ()
    """Mamba-2: factors on gate, input, B, C and time steps; empty: none."""
    time_limits: tuple[float, float] = (0.0, float("inf"))
    """Mamba-2: the least and the most that a time step may be."""


@dataclass(frozen=True, slots=True)
class SharedFacts:
    """Blocks of attention and feed-forward that layers use in turn. They read the embedding, too; each use
    has products of a small rank of its own beside those that are shared."""

    blocks: int
    rank: int
    adapts_attention: bool
    """Whether queries, keys and values have such products; the feed-forward half always has."""


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """A model that reads a whole text in both directions, keeps nothing of it and generates nothing. Its
    windows reach as far ahead as back."""

    prefix: str
    """What its checkpoints call all but the classifier."""
    positions: int = 0
    """Learned ones; 0: none, its heads turn."""
    first_position: int = 0
    """The position of the first token."""
    padding: int | None = None
    """The token that has the position in front of the first, and does not count."""
    token_types: int = 0
    """Of how many texts in one prompt each has a vector of its own."""
    distances: int = 0
    """Classes of them, of each of which heads have a number that scores gain."""
    task_types: int = 0
    """Vectors of tasks, of which the first is added to all tokens."""
    gated: bool = False
    """Whether its feed-forward half is, of families that have both."""
    classifier_bias: bool = False
    classifier_activation: str = ""


@dataclass(frozen=True, slots=True)
class AltUpFacts:
    """Several states of each token, of which layers read one; what each layer is given of the token itself;
    and a product of low rank beside attention (arXiv 2301.13310, 2411.07501)."""

    inputs: int
    """How many states; 1: there is nothing but what each layer is given."""
    active: int
    """Which of them layers read."""
    is_scaled: bool
    """Whether a layer's own embedding is gated by what was scaled first."""
    rank: int
    """Of the product beside attention."""
    per_layer: int
    """Numbers of a token's embedding for one layer."""
    vocab: int
    """Tokens that have one; others have that of the first."""


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """A model that drafts on what another one makes of the same tokens: what it takes of that one."""

    target_hidden: int
    aux_layers: tuple[int, ...] = ()
    """It takes what goes into these layers of the target, side by side; the number behind that of the last
    layer is what comes out of that. None: what the target's head sees."""
    vocab: int = 0
    """How many tokens its own output head knows; 0: it has none, or one of all tokens."""
    keeps_normed: bool = False
    """Whether what it adds to is what it took after a norm."""
    layers_of: str = ""
    """The architecture whose layers it has, for one that is a part of the target's own checkpoint."""
    first: int = 0
    """The number of layers in front of it there."""


@dataclass(frozen=True, slots=True)
class MediaFacts:
    """What a model takes in beside text."""

    family: str
    """A key of the tables in `multimodal/families/` and `models/towers/`."""
    modalities: tuple[str, ...]
    """image | video | audio"""
    tower: Any
    """The shape of its towers: a frozen dataclass of the family's own, in `config/media/`."""
    levels: int = 0
    """How many layers, from the first on, are given further vectors of an item to add to their states."""
    is_whole: bool = False
    """Whether the tokens of an item see each other in both directions: no step may divide one."""
    is_prefix: bool = False
    """Whether all tokens of a prompt with items do: no step may divide such a prompt."""
    crossed: int = 0
    """Where no tokens stand for an item, and all of the sequence see its vectors: how many these are. Each
    prompt has one item then. 0: tokens stand for items."""
    scale: float = 1.0
    """By which the vectors of items are multiplied, for a decoder that does so with all that goes into it."""
    transcribes: bool = False
    """Whether it writes down what it hears: what /v1/audio/transcriptions and /translations are for."""


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A model whose code is not Quire's: what builds it."""

    config: str
    """Its config.json, hf_overrides laid over it."""
    path: str
    """The directory of the checkpoint."""
    remote: bool = False
    """The code lies in the checkpoint and may be run; else transformers has it."""


@dataclass(frozen=True, slots=True)
class ArchFacts:
    """The shape of a model: all that a model file may ask for."""

    architecture: str
    """A key of the model table, such as LlamaForCausalLM."""
    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    layers: tuple[LayerFacts, ...]
    v_dim: int = 0
    """The size of a head's values, where it is less than that of its keys; 0: the same. They are kept as wide
    as keys."""
    max_len: int = 2048
    """The longest sequence that the checkpoint was made for, rope scaling counted in."""
    activation: str = "silu"
    """A name of `kernels/reference/activations.py`."""
    norm: str = "rms"
    """rms | layer, each also as _plus_one: a weight of 0 multiplies by 1; layer_bare has no weight at all"""
    norm_bias: bool = False
    tied: bool = False
    """Whether the output head shares the embedding's weight."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    unit_head: bool = False
    """Whether the rows of the output head are made of one length."""
    qk_norm: str = ""
    """Norms of queries and keys: none, of each `head`, of `each` by weights of its own, or of `all` heads as
    one."""
    qkv_clip: float | None = None
    """How far queries, keys and values may be from 0."""
    unit_heads: bool = False
    """Whether queries and keys that turn are first made of one length."""
    query_growth: tuple[float, float] | None = None
    """After every so many positions queries grow, by this weight."""
    fused_qkv: bool = False
    """Whether query, key and value are one tensor of the checkpoint."""
    fused_gate_up: bool = False
    """Whether gate and up are one."""
    across: bool = False
    """Whether the checkpoint has the weights of linear layers with inputs before outputs."""
    sinks: bool = False
    """Whether each head has a logit that takes part in its softmax and has no value."""
    alibi_slopes: tuple[float, ...] = ()
    """What the scores of each head lose for each token between query and key (ALiBi); empty: nothing."""
    output_gate: bool = False
    """Whether each head's output is weighed by a gate that comes with its query."""
    head_gate: bool = False
    """Whether it is weighed by one number."""
    attention_scale: float | None = None
    """Factor on the scores; None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    attention_scales: tuple[float, float] = (1.0, 1.0)
    """Factors on what goes into attention and on what comes out; of families that have them, as the next."""
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    """Factors on the gate and on what comes out."""
    state_scale: float = 1.0
    """Factor on what comes out of layers with a state."""
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    learned_positions: bool = False
    side_by_side: int = 0
    """How many norms stand in front of attention and feed-forward where both read the same; 0: the second
    reads what the first has said. Of families that have both."""
    moe: MoeFacts | None = None
    mla: MlaFacts | None = None
    state: StateFacts | None = None
    altup: AltUpFacts | None = None
    shared: SharedFacts | None = None
    encoder: EncoderFacts | None = None
    unused: str = ""
    """An expression that finds the tensors of the checkpoint which are passed over on purpose."""
    media: MediaFacts | None = None
    """Set of a model that takes in more than text, unless nobody asked for that."""
    predicting: LayerFacts | None = None
    """The layer of the checkpoint that predicts the next token but one, where it is not like the last."""
    drafts: HeadFacts | None = None
    """Set of a model that only drafts."""
    borrowed: Borrowed | None = None
    """Set where transformers runs the model."""

    def of_layer(self, layer: LayerFacts) -> "ArchFacts":
        """The same with what a layer has of its own in the place of what most have."""
        names = ("heads", "kv_heads", "head_dim", "intermediate", "activation")
        own: dict[str, Any] = {name: getattr(layer, name) for name in names if getattr(layer, name)}
        if self.moe is not None and layer.expert_activation:
            own["moe"] = replace(self.moe, activation=layer.expert_activation)
        return replace(self, **own) if own else self
