"""Dataclasses that describe the architecture of a model: all that its model code reads of the config."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """Rotary position embedding of the checkpoint; `kind` is a key of the table in `layers/rope.py`."""

    theta: float = 10000.0
    dim: int = 0
    """Number of rotated dimensions per head."""
    max_len: int = 2048
    """The checkpoint's max_position_embeddings."""
    kind: str = "default"
    """default | linear | dynamic | llama3 | yarn | longrope | factors | none (no rotation)"""
    pairs: bool = False
    """Whether dimensions 2i and 2i + 1 rotate as a pair (GPT-J style), not dimensions i and i + dim / 2
    (NeoX)."""
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
    """Divisor of each frequency: for `factors` from the rope_freqs tensor of a GGUF file, for `longrope` the
    factors within the original length."""
    long_factors: tuple[float, ...] = ()
    """`longrope` only: the divisors if the engine's maximum length is above the original length."""
    sections: tuple[int, ...] = ()
    """M-RoPE: how many of the dim / 2 frequencies rotate by time, height and width; empty: all rotate by the
    token position."""
    interleaved: bool = False
    """M-RoPE: whether the frequencies of the three sections alternate instead of following one another."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Properties that may differ from layer to layer."""

    rope: RopeFacts | None
    """Rotary embedding of the layer; None: there is none (NoPE)."""
    window: int | None = None
    """Sliding window in tokens; None: full attention."""
    chunked: bool = False
    """Whether tokens attend only within chunks of `window` positions (Llama 4)."""
    mixer: str = "attention"
    """Token mixer: attention | latent (MLA) | selective (Mamba) | mamba (Mamba-2) | delta | lightning | conv;
    attention+mamba: both in parallel; none: feed-forward only; transformers: its code, with its own cache."""
    moe: bool = False
    """Whether the feed-forward part is a mixture of experts."""
    heads: int = 0
    """Number of query heads; 0: the model's number."""
    kv_heads: int = 0
    """Number of key/value heads; 0: the model's number."""
    head_dim: int = 0
    """Head dimension; 0: the model's."""
    intermediate: int = 0
    """Intermediate size of the feed-forward part; 0: the model's."""
    keys_are_values: bool = False
    """Whether the layer has no value projection: its values are the projected keys, before their norm and
    rotation."""
    activation: str = ""
    """Activation of the feed-forward part and of the shared expert; empty: the model's."""
    expert_activation: str = ""
    """Activation of the routed experts; empty: the activation in the model's `moe`."""
    kv_sharing_target: int | None = None
    """Index of the layer whose KV cache this layer attends to (KV sharing); None: the layer has its own KV
    cache."""
    has_indexer: bool = True
    """Whether the layer has a sparse-attention indexer, in models with indexers; otherwise it attends to the
    tokens that the last indexer before it selected."""
    sparsity: float = 0.0
    """Approximate fraction of feed-forward gates that are set to 0."""
    block: int = -1
    """Index of the layer that holds the shared attention and feed-forward weights (Zamba2); -1: this layer
    uses no shared block."""
    use: int = 0
    """Number of layers before this layer that use a shared block."""
    residual_scales: tuple[float, ...] = ()
    """Factors in the residual sums: input and output of the mixer, then of the feed-forward part
    (MiniMax-Text-01)."""
    depth: float = 0.0
    """Index of the layer divided by the index of the last layer, for the decays of lightning attention."""


class Routing(NamedTuple):
    """How the experts of a token are selected and weighted."""

    per_token: int
    """Number of selected experts (top-k)."""
    scoring: str = "softmax"
    """Router scores: `softmax` over all experts, or `sigmoid` of each logit."""
    renormalized: bool = False
    """Whether the weights of the selected experts are scaled to sum to 1."""
    scale: float = 1.0
    """Factor on the final weights."""
    num_groups: int = 1
    """Number of equal expert groups; experts are selected from the best `top_groups` groups."""
    top_groups: int = 1
    group_best: int = 1
    """Number of best experts of a group; the sum of their scores is the score of the group."""


@dataclass(frozen=True, slots=True)
class MoeFacts:
    """A mixture of experts, and the tensor names of its checkpoints."""

    experts: int
    intermediate: int
    """Intermediate size of one expert."""
    routing: Routing
    num_identity_experts: int = 0
    """Number of additional identity experts (LongCat-Flash)."""
    spread: float = 0.0
    """SparseMixer (Phi-3.5-MoE) threshold: a logit is masked if its distance to the maximum is more than this
    fraction of max(|logit|, maximum)."""
    choice_bias: bool = False
    """Whether a bias is added to the scores for the selection of experts only, not for their weights."""
    router_bias: bool = False
    wide_router: bool = False
    """Whether router logits are computed in float32 regardless of the model dtype."""
    expert_bias: bool = False
    activation: str = ""
    """Activation of the experts; empty: the model's."""
    plain: bool = False
    """Whether the experts and the shared expert have no gate projection."""
    latent: int = 0
    """Input and output size of the experts; 0: the hidden size."""
    shared_intermediate: int = 0
    """Intermediate size of the shared expert; 0: there is none."""
    shared_gate: bool = False
    """Whether the output of the shared expert is multiplied by a gate."""
    shared_mean: bool = False
    """Whether the outputs of the shared and the routed experts are averaged, not added."""
    weighs_input: bool = False
    """Whether the router weights multiply the input of the experts, not the output."""
    names: str = "mlp"
    """Key of the table of tensor names in `layers/moe.py`."""


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """Indexer of sparse attention (DSA): a token attends only to the top-scored tokens before it."""

    heads: int
    """Number of indexer query heads; all share one key."""
    dim: int
    top_k: int
    """Number of tokens that are attended to (top-k)."""
    rope_pairs: bool
    """Whether dimensions 2i and 2i + 1 rotate as a pair; otherwise i and i + dim / 2."""


@dataclass(frozen=True, slots=True)
class MlaFacts:
    """Multi-head latent attention (MLA): the cache holds one latent per token, shared by all heads."""

    kv_latent: int
    nope_dim: int
    """Dimensions of each query and key head that are not rotated."""
    rope_dim: int
    """Rotated dimensions; their keys are shared by all heads."""
    v_dim: int
    q_latent: int | None = None
    """Rank of the query compression; None: queries are projected directly from the hidden state."""
    index: IndexFacts | None = None
    """Sparse-attention indexer; None: full attention."""
    scales: tuple[float, float] = (1.0, 1.0)
    """Factors on the queries and on the normed KV latents."""


@dataclass(frozen=True, slots=True)
class StateFacts:
    """Layers with a state of fixed size: Mamba, Mamba-2, gated delta net, or a convolution alone."""

    heads: int
    """Number of state heads; gated delta: value heads; Mamba and a convolution alone: channels."""
    head_dim: int
    state: int
    """State size per head and head dimension; gated delta: size of a key head."""
    groups: int
    """Number of groups that share B and C; gated delta: number of key heads. 0 if B and C do not pass through
    the convolution."""
    conv: int
    """Kernel size of the convolution."""
    conv_bias: bool = True
    proj_bias: bool = False
    norm_groups: int = 1
    """Mamba-2: number of groups of the output norm."""
    norm: str = "gate_first"
    """Mamba-2: whether the gate is applied before the output norm (`gate_first`), after it (`gate_last`), or
    there is no norm (`none`). Mamba: norms of dt, B and C: `none`, `bare` without weights, or `weighed`."""
    norm_eps: float = 0.0
    """Epsilon of the norms that `norm` selects; 0: the epsilon of the model's other norms."""
    rank: int = 0
    """Mamba: rank of the time-step projection. Delta rule: rank of the projections of decay and output gate;
    0: one matrix each."""
    scales: tuple[float, ...] = ()
    """Mamba-2: factors on gate, input, B, C and time steps; empty: none."""
    time_limits: tuple[float, float] = (0.0, float("inf"))
    """Mamba-2: smallest and largest time step."""
    decays_channels: bool = False
    """Delta rule: whether each key channel of a head has its own decay (KDA); otherwise each head has one."""
    log_bound: float = 0.0
    """Delta rule: lower limit of the log decay, approached by a sigmoid; 0: none."""
    beta_scale: float = 1.0
    """Delta rule: factor on the sigmoid of beta; 2 allows negative eigenvalues."""
    gate: str = "silu"
    """Delta rule: function of the output gate."""


@dataclass(frozen=True, slots=True)
class SharedFacts:
    """Attention and feed-forward blocks shared by several layers (Zamba2). They also read the embedding. Each
    layer that uses a block adds its own low-rank weights to the shared weights."""

    blocks: int
    rank: int
    adapts_attention: bool
    """Whether queries, keys and values have low-rank weights per layer; the feed-forward part always has."""


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """An encoder-only model with bidirectional attention and no KV cache. Its sliding windows extend in both
    directions."""

    prefix: str
    """Prefix of the tensor names, except those of the classifier."""
    positions: int = 0
    """Number of learned positions; 0: the encoder has rotary embedding instead."""
    first_position: int = 0
    """The position of the first token."""
    padding: int | None = None
    """Token id of padding; None: it needs no special treatment. In BERT-like models padding tokens have the
    position before `first_position`, and the positions of other tokens do not count them."""
    token_types: int = 0
    """Number of token-type embeddings (segments of a prompt)."""
    distances: int = 0
    """Number of relative-position buckets with a learned attention bias per head (MPNet)."""
    task_types: int = 0
    """Number of task-type embeddings; the first is added to all tokens."""
    gated: bool = False
    """Whether the feed-forward part has a gate, in families with both forms."""
    classifier_bias: bool = False
    classifier_activation: str = ""
    size_out: int = 0
    """Size of the outputs, if they are projected hidden states; 0: the hidden size."""


@dataclass(frozen=True, slots=True)
class AltUpFacts:
    """AltUp: several hidden states per token, per-layer embeddings, and a low-rank branch beside attention
    (LAuReL). See arXiv 2301.13310 and 2411.07501."""

    inputs: int
    """Number of hidden states per token; 1: only per-layer embeddings are used."""
    active: int
    """Index of the hidden state that layers read."""
    is_scaled: bool
    """Whether the corrected state is scaled before it gates the per-layer embedding (altup_correct_scale)."""
    rank: int
    """Rank of the LAuReL branch."""
    per_layer: int
    """Size of a token's per-layer embedding."""
    vocab: int
    """Vocabulary size of the per-layer embedding; larger token ids use the embedding of token 0."""
    media_id: int | None = None
    """Token id whose per-layer embedding all placeholder tokens use; None: each placeholder token has its
    own."""


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """A draft head (EAGLE, EAGLE-3 or MTP): its inputs from the target model, and its outputs."""

    target_hidden: int
    aux_layers: tuple[int, ...] = ()
    """Indices of the target layers whose inputs are concatenated as the input of the draft. The number of
    target layers as index means the last layer's output. Empty: the input of the target's output head."""
    vocab: int = 0
    """Size of the output vocabulary of an EAGLE-3 draft; 0 for other drafts, which use the whole
    vocabulary."""
    keeps_normed: bool = False
    """Whether the residual stream starts from the normed hidden state."""
    layers_of: str = ""
    """Target architecture whose layer code the draft uses, if the draft is part of the target's checkpoint
    (MTP); empty for other drafts."""
    first: int = 0
    """Number of target layers before the draft layer in the checkpoint."""


@dataclass(frozen=True, slots=True)
class MediaFacts:
    """The multimodal inputs of a model."""

    family: str
    """Key of `MEDIA_CODE` in `checkpoint/multimodal/`."""
    modalities: tuple[str, ...]
    """image | video | audio"""
    tower: Any
    """Shape of the encoders: a frozen dataclass of the family in `checkpoint/multimodal/`."""
    levels: int = 0
    """Number of decoder layers, from the first on, that add further encoder outputs to their hidden states
    (DeepStack)."""
    is_whole: bool = False
    """Whether the tokens of an item attend to each other in both directions; chunked prefill must not split
    an item."""
    whole_in_windows: bool = False
    """Whether `is_whole` applies only to layers with a sliding window; the other layers are causal."""
    is_prefix: bool = False
    """Whether all prompt tokens of a request with items attend in both directions; chunked prefill must not
    split the prompt."""
    num_cross_states: int = 0
    """Number of encoder states that all tokens cross-attend to, instead of placeholder tokens (Whisper). Each
    prompt then has one item. 0: no cross-attention."""
    scale: float = 1.0
    """Factor on the item embeddings, for decoders that scale their input embeddings."""
    transcribes: bool = False
    """Whether the model transcribes audio and serves /v1/audio/transcriptions and /translations."""


@dataclass(frozen=True, slots=True)
class TransformersFacts:
    """A model that runs through the code of transformers or of its checkpoint."""

    config: str
    """JSON text of config.json with hf_overrides applied."""
    path: str
    """The directory of the checkpoint."""
    remote: bool = False
    """Whether to run the model code of the checkpoint; otherwise transformers' own."""
    own_cache: bool = False
    """Whether the model computes one sequence at a time, with transformers' cache instead of KV blocks."""


@dataclass(frozen=True, slots=True)
class ArchFacts:
    """The architecture of a model: all that its model code reads."""

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
    """Size of a value head if smaller than a key head; 0: equal. The KV cache stores values padded to the key
    size."""
    max_len: int = 2048
    """Maximum sequence length of the checkpoint, rope scaling included."""
    activation: str = "silu"
    """Name of an activation in `kernels/reference/activations.py`."""
    norm: str = "rms"
    """rms | layer, also with the suffix _plus_one: the norm multiplies by 1 + weight; layer_bare has no
    weight"""
    norm_bias: bool = False
    tied: bool = False
    """Whether the output head shares the embedding's weight."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    norm_head: bool = False
    """Whether the rows of the output head are normalized to unit length."""
    query_rank: int = 0
    """Rank of the query projection, a product of two matrices with a norm between them (Step3); 0: one
    matrix."""
    qk_norm: str = ""
    """Norm of queries and keys: empty for none, `head` per head, `each` with separate weights per head, or
    `all` over all heads at once."""
    qkv_clip: float | None = None
    """Absolute limit on the values of queries, keys and values."""
    qk_l2_norm: bool = False
    """Whether rotated queries and keys are L2-normalized first (Llama 4)."""
    attention_temperature: tuple[float, float] | None = None
    """Attention temperature (Llama 4), a factor on queries: interval in positions, and weight of the log
    term; None: no such factor."""
    fused_qkv: bool = False
    """Whether query, key and value are one tensor in the checkpoint."""
    fused_gate_up: bool = False
    """Whether gate and up are one tensor in the checkpoint."""
    transposed: bool = False
    """Whether the checkpoint stores linear weights transposed, as (inputs, outputs)."""
    sinks: bool = False
    """Whether each head has a sink logit: it takes part in the softmax and has no value."""
    alibi_slopes: tuple[float, ...] = ()
    """ALiBi slope of each head; empty: no ALiBi."""
    output_gate: bool = False
    """Whether the attention output is multiplied by a gate that is projected with the query."""
    head_gate: bool = False
    """Whether the attention output is multiplied by one gate value per head."""
    attention_scale: float | None = None
    """Factor on the attention scores; None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    attention_scales: tuple[float, float] = (1.0, 1.0)
    """Factors on the input and output of attention. Only some families use `attention_scales`, `mlp_scales`
    and `state_scale`."""
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    """Factors on the gate and the output of the feed-forward part."""
    state_scale: float = 1.0
    """Factor on the output of SSM layers."""
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    learned_positions: bool = False
    parallel_norms: int = 0
    """Number of input norms if attention and feed-forward run in parallel; 0: they run one after the other.
    Only used by families that have models of both kinds."""
    moe: MoeFacts | None = None
    mla: MlaFacts | None = None
    state: StateFacts | None = None
    altup: AltUpFacts | None = None
    shared: SharedFacts | None = None
    encoder: EncoderFacts | None = None
    unused: str = ""
    """Regular expression for names of checkpoint tensors that are not loaded; empty: all are loaded."""
    media: MediaFacts | None = None
    """Multimodal inputs; None for text-only models, or if they are disabled."""
    predicting: LayerFacts | None = None
    """The MTP layer; None: it is like the last attention layer."""
    drafts: HeadFacts | None = None
    """Inputs and outputs of a draft head; None: the model is no draft head."""
    borrowed: TransformersFacts | None = None
    """Settings of a model that runs through transformers; None: Quire has its model code."""

    @property
    def size_out(self) -> int:
        """Return the size of the model's output for a token, before any head."""
        return (self.encoder.size_out if self.encoder is not None else 0) or self.hidden

    def of_layer(self, layer: LayerFacts) -> "ArchFacts":
        """Return the facts with the values that one layer sets in place of the model's."""
        names = ("heads", "kv_heads", "head_dim", "intermediate", "activation")
        changes: dict[str, Any] = {name: getattr(layer, name) for name in names if getattr(layer, name)}
        if self.moe is not None and layer.expert_activation:
            changes["moe"] = replace(self.moe, activation=layer.expert_activation)
        return replace(self, **changes) if changes else self
