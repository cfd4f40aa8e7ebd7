"""Dataclasses that describe the architecture of a model: all that its model code reads of the config."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """Settings of a rotary position embedding (RoPE). Fields without a description are named as in
    `rope_parameters` of config.json."""

    theta: float = 10000.0
    dim: int = 0
    """Number of rotated dimensions per head."""
    max_len: int = 2048
    """The checkpoint's max_position_embeddings, in tokens."""
    kind: str = "default"
    """Type of frequency scaling: default | linear | dynamic | llama3 | yarn | longrope | factors (any
    divisors) | none (no rotation)"""
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
    """Divisor of each of the dim / 2 frequencies, for the kinds `factors` and `longrope`. For `longrope` they
    apply up to the original length."""
    long_factors: tuple[float, ...] = ()
    """`longrope` only: divisor of each frequency if the engine's maximum length is above the original
    length."""
    sections: tuple[int, ...] = ()
    """M-RoPE: how many of the dim / 2 frequencies rotate by time, height and width; empty: all rotate by the
    token position."""
    interleaved: bool = False
    """M-RoPE: whether the frequencies of the three sections alternate instead of following one another."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Properties of one decoder layer; they may differ between the layers of a model."""

    rope: RopeFacts | None
    """Rotary embedding of the layer; None: the layer has no position embedding (NoPE)."""
    window: int | None = None
    """Sliding window in tokens; None: full attention."""
    chunked: bool = False
    """Whether tokens attend only within chunks of `window` positions (Llama 4)."""
    mixer: str = "attention"
    """The part of the layer before the feed-forward part: attention | latent (MLA) | selective (Mamba) |
    mamba (Mamba-2) | delta (gated delta rule) | lightning (lightning attention) | conv (short convolution) |
    attention+mamba (both in parallel) | none (feed-forward part only) | transformers (code and KV cache of
    the transformers package)"""
    moe: bool = False
    """Whether the feed-forward part is a mixture of experts."""
    heads: int = 0
    """Number of query heads; 0: the number in `ArchFacts`."""
    kv_heads: int = 0
    """Number of key/value heads; 0: the number in `ArchFacts`."""
    head_dim: int = 0
    """Head dimension; 0: the one in `ArchFacts`."""
    intermediate: int = 0
    """Intermediate size of the feed-forward part; 0: the size in `ArchFacts`."""
    keys_are_values: bool = False
    """Whether the layer has no value projection: its values are the projected keys, before their norm and
    rotation."""
    has_mlp: bool = True
    """Whether the layer has a feed-forward part."""
    activation: str = ""
    """Activation of the feed-forward part and of the shared expert; empty: the one in `ArchFacts`."""
    expert_activation: str = ""
    """Activation of the routed experts; empty: the one in `MoeFacts`."""
    kv_sharing_target: int | None = None
    """Index of the layer whose KV cache this layer attends to (KV sharing); None: the layer has its own KV
    cache."""
    has_indexer: bool = True
    """Whether the layer has its own indexer of sparse attention (DSA); otherwise the layer attends to the
    tokens that the nearest earlier indexer selected. Only models with indexers use this field."""
    sparsity: float = 0.0
    """Approximate fraction of feed-forward gates that are set to 0 (Gemma 3n)."""
    shared_block: int = -1
    """Zamba2: index of the first layer that uses the same shared block of attention and feed-forward weights;
    Ouro: index of the layer whose weights this layer uses. -1: the layer shares no weights."""
    shared_block_use: int = 0
    """Zamba2: number of earlier layers that use any shared block; tensor names of this layer's low-rank
    weights contain this number."""
    residual_scales: tuple[float, ...] = ()
    """Four factors in the residual sums: on the residual and the output of the token mixer, then on the
    residual and the output of the feed-forward part (MiniMax-Text-01, Beam)."""
    depth: float = 0.0
    """Lightning attention: index of the layer divided by the index of the last layer; the decays depend on
    this value."""


class Routing(NamedTuple):
    """How the router selects and weights the experts of a token."""

    per_token: int
    """Number of selected experts (top-k)."""
    scoring: str = "softmax"
    """Router scores: `softmax` over all experts, or `sigmoid` of each logit."""
    renormalized: bool = False
    """Whether the weights of the selected experts are scaled to sum to 1."""
    scale: float = 1.0
    """Factor on the weights, after renormalization."""
    num_groups: int = 1
    """Number of groups of equally many experts; experts are selected from the best `top_groups` groups."""
    top_groups: int = 1
    group_best: int = 1
    """The score of a group is the sum of the scores of its best experts; this is the number of these
    experts."""


@dataclass(frozen=True, slots=True)
class MoeFacts:
    """A mixture of experts, and the tensor names of its checkpoints."""

    experts: int
    intermediate: int
    """Intermediate size of one expert."""
    routing: Routing
    num_identity_experts: int = 0
    """Number of additional experts that return their input (LongCat-Flash)."""
    sparsemixer_threshold: float = 0.0
    """SparseMixer (Phi-3.5-MoE) threshold: a logit is masked if its distance to the maximum is more than this
    fraction of max(|logit|, maximum)."""
    choice_bias: bool = False
    """Whether a bias is added to the scores for the selection of experts, but not for their weights
    (e_score_correction_bias)."""
    router_bias: bool = False
    wide_router: bool = False
    """Whether router logits are computed in float32 regardless of the model dtype."""
    expert_bias: bool = False
    activation: str = ""
    """Activation of the experts; empty: the one in `ArchFacts`."""
    plain: bool = False
    """Whether the experts and the shared expert have no gate projection."""
    latent: int = 0
    """Input and output size of the experts, if hidden states are projected to this size before them; 0: the
    hidden size."""
    shared_intermediate: int = 0
    """Intermediate size of the shared expert; 0: there is no shared expert."""
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
    """Number of earlier tokens that each token attends to."""
    rope_pairs: bool
    """Whether dimensions 2i and 2i + 1 rotate as a pair; otherwise i and i + dim / 2."""


@dataclass(frozen=True, slots=True)
class MlaFacts:
    """Multi-head latent attention (MLA): the KV cache has one latent vector per token, shared by all
    heads."""

    kv_latent: int
    """Size of the KV latents (kv_lora_rank), without the rotated key."""
    nope_dim: int
    """Number of dimensions of each query and key head that are not rotated."""
    rope_dim: int
    """Number of rotated dimensions of each head; all heads have the same rotated key."""
    v_dim: int
    q_latent: int | None = None
    """Size of the query latents (q_lora_rank); None: queries are projected directly from the hidden state."""
    index: IndexFacts | None = None
    """Sparse-attention indexer; None: full attention."""
    scales: tuple[float, float] = (1.0, 1.0)
    """Factors on the queries and on the normed KV latents."""


@dataclass(frozen=True, slots=True)
class StateFacts:
    """Layers with a recurrent state of fixed size: Mamba, Mamba-2, delta rule, lightning attention, or a
    short convolution alone."""

    heads: int
    """Number of heads of the state. Delta rule: number of value heads. Mamba and short convolutions: number
    of channels."""
    head_dim: int
    state: int
    """State size per dimension of a head. Delta rule: size of a key head."""
    groups: int
    """Mamba-2: number of groups of heads that share B and C. Delta rule: number of key heads. 0 for Mamba,
    where B and C do not pass through the convolution."""
    conv: int
    """Kernel size of the convolution."""
    conv_bias: bool = True
    proj_bias: bool = False
    norm_groups: int = 1
    """Mamba-2: number of groups of the output norm."""
    norm: str = "gate_first"
    """Mamba-2: whether the gate is applied before the output norm (`gate_first`), after it (`gate_last`), or
    there is no norm (`none`). Mamba: dt, B and C have no norms (`none`), norms without weights (`bare`) or
    norms with weights (`weighed`)."""
    norm_eps: float = 0.0
    """Epsilon of the norms that `norm` selects; 0: the epsilon of the model's other norms."""
    rank: int = 0
    """Mamba: rank of the time-step projection. Delta rule: rank of the projections of decay and output gate;
    0: one matrix each."""
    scales: tuple[float, ...] = ()
    """Mamba-2: factors on the projected gate, input, B, C and time steps; empty: no factors."""
    time_limits: tuple[float, float] = (0.0, float("inf"))
    """Mamba-2: smallest and largest time step."""
    decays_channels: bool = False
    """Delta rule: whether each key channel of a head has its own decay (KDA); otherwise each head has one."""
    log_bound: float = 0.0
    """Delta rule: lower limit of the log decay, which a sigmoid approaches; 0: no limit."""
    beta_scale: float = 1.0
    """Delta rule: factor on the sigmoid of beta; 2 allows negative eigenvalues."""
    gate: str = "silu"
    """Delta rule: activation of the output gate, silu or sigmoid."""


@dataclass(frozen=True, slots=True)
class SharedFacts:
    """Attention and feed-forward blocks shared by several layers (Zamba2). The input of a block is the hidden
    state concatenated with the token embedding. Each layer that uses a block adds its own low-rank weights to
    the shared weights."""

    blocks: int
    rank: int
    adapts_attention: bool
    """Whether queries, keys and values have low-rank weights per layer; the feed-forward part always has
    them."""


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
    """Token id of padding; None: padding needs no special treatment. In BERT-like models padding tokens have
    the position before `first_position`, and positions count only the other tokens."""
    token_types: int = 0
    """Number of token-type embeddings (segments of a prompt)."""
    distances: int = 0
    """Number of relative-position buckets with a learned attention bias per head (MPNet)."""
    task_types: int = 0
    """Number of task-type embeddings; the first is added to all tokens."""
    gated: bool = False
    """Whether the feed-forward part has a gate projection; used by families that have models with and without
    it."""
    classifier_bias: bool = False
    classifier_activation: str = ""
    size_out: int = 0
    """Size of the outputs, if they are projected hidden states; 0: the hidden size."""


@dataclass(frozen=True, slots=True)
class AltUpFacts:
    """AltUp (Gemma 3n): several hidden states per token, per-layer embeddings, and a low-rank branch parallel
    to attention (LAuReL). See arXiv 2301.13310 and 2411.07501."""

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
    """Indices of the target layers whose inputs are concatenated as the input of the draft. An index equal to
    the number of target layers means the output of the last layer. Empty: the draft reads the input of the
    target's output head."""
    vocab: int = 0
    """Size of the output vocabulary of an EAGLE-3 draft; 0 for other drafts, which use the target's
    vocabulary."""
    keeps_normed: bool = False
    """Whether the residual stream starts from the normed hidden state (norm_before_residual of EAGLE-3)."""
    layers_of: str = ""
    """MTP: architecture of the target, whose layer code the draft uses as well; empty for other drafts."""
    first: int = 0
    """MTP: number of target layers, which is the index of the MTP layer in the checkpoint."""


@dataclass(frozen=True, slots=True)
class MediaFacts:
    """The multimodal inputs of a model."""

    family: str
    """Family of multimodal models, a key of `MEDIA_CODE` (processor and encoder) in
    `checkpoint/multimodal/`."""
    modalities: tuple[str, ...]
    """Modalities that the model accepts: image | video | audio"""
    tower: Any
    """Sizes and settings of the encoders: a frozen dataclass of the family in `checkpoint/multimodal/`."""
    levels: int = 0
    """Number of first decoder layers that add further encoder outputs to their hidden states (DeepStack)."""
    is_whole: bool = False
    """Whether the tokens of a multimodal item (such as an image) attend to each other in both directions. If
    so, chunked prefill must not split an item."""
    whole_in_windows: bool = False
    """Whether `is_whole` applies only to layers with a sliding window; the other layers are causal."""
    is_prefix: bool = False
    """Whether all prompt tokens of a request with multimodal items attend in both directions. If so, chunked
    prefill must not split the prompt."""
    num_cross_states: int = 0
    """Number of encoder hidden states that all tokens cross-attend to (Whisper). The prompt of such a model
    has one multimodal item and no placeholder tokens. 0: no cross-attention."""
    scale: float = 1.0
    """Factor on the embeddings of multimodal items, for decoders that scale their input embeddings."""
    transcribes: bool = False
    """Whether the model transcribes audio, so that /v1/audio/transcriptions and /v1/audio/translations
    exist."""


@dataclass(frozen=True, slots=True)
class TransformersFacts:
    """A model that runs through the code of transformers or of its checkpoint."""

    config: str
    """JSON text of config.json with hf_overrides applied."""
    path: str
    """The directory of the checkpoint."""
    remote: bool = False
    """Whether to run the model code in the checkpoint (trust_remote_code), not the code of transformers."""
    own_cache: bool = False
    """Whether the model computes one sequence at a time, with transformers' cache instead of KV blocks."""


@dataclass(frozen=True, slots=True)
class ArchFacts:
    """The architecture of a model: all values of the config that its model code reads."""

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
    """Size of a value head if it is smaller than a key head; 0: both have the same size. The KV cache stores
    values padded to the size of keys."""
    max_len: int = 2048
    """Maximum sequence length of the checkpoint in tokens, rope scaling included."""
    activation: str = "silu"
    """Name of an activation in `kernels/reference/activations.py`."""
    norm: str = "rms"
    """Type of the norms: rms | layer, with the suffix _plus_one if the norm multiplies by 1 + weight;
    layer_bare: layer norms without weights"""
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
    """Rank of the query projection if it consists of two matrices with a norm between them (Step3); 0: the
    projection is one matrix."""
    qk_norm: str = ""
    """Norm of queries and keys: empty for none, `head` per head, `each` with separate weights per head, or
    `all` over all heads at once."""
    qkv_clip: float | None = None
    """Absolute limit on the values of queries, keys and values."""
    qk_l2_norm: bool = False
    """Whether queries and keys are L2-normalized in layers with rotary embedding (Llama 4)."""
    attention_temperature: tuple[float, float] | None = None
    """Attention temperature of Llama 4, a factor on queries that grows with the position: (interval in
    positions, weight of the log term). None: queries have no such factor."""
    fused_qkv: bool = False
    """Whether query, key and value are one tensor in the checkpoint."""
    fused_gate_up: bool = False
    """Whether gate and up are one tensor in the checkpoint."""
    transposed: bool = False
    """Whether the checkpoint stores linear weights transposed, as (inputs, outputs)."""
    sinks: bool = False
    """Whether each head has a learned sink logit, which takes part in the softmax but has no value."""
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
    """Factors on the input and the output of attention (Falcon-H1), or 1 and a factor on values (MiMo-V2)."""
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    """Factors on the gate and the output of the feed-forward part (Falcon-H1)."""
    state_scale: float = 1.0
    """Factor on the output of SSM layers (Falcon-H1)."""
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    learned_positions: bool = False
    parallel_norms: int = 0
    """Number of input norms if attention and feed-forward part run in parallel; 0: they run one after the
    other. Used by families that have models of both forms."""
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
    """Properties of the layer for multi-token prediction (MTP); None: those of the last attention layer."""
    drafts: HeadFacts | None = None
    """Inputs and outputs of a draft head for speculative decoding; None: the model is no draft head."""
    borrowed: TransformersFacts | None = None
    """Settings of a model that runs through transformers; None: Quire has code for the model."""

    @property
    def size_out(self) -> int:
        """Return the size of a token's output vector, before any output head."""
        return (self.encoder.size_out if self.encoder is not None else 0) or self.hidden

    def of_layer(self, layer: LayerFacts) -> "ArchFacts":
        """Return a copy in which the values that `layer` sets replace those of the whole model."""
        names = ("heads", "kv_heads", "head_dim", "intermediate", "activation")
        changes: dict[str, Any] = {name: getattr(layer, name) for name in names if getattr(layer, name)}
        if self.moe is not None and layer.expert_activation:
            changes["moe"] = replace(self.moe, activation=layer.expert_activation)
        return replace(self, **changes) if changes else self
