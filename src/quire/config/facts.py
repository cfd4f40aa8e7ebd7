"""The shape of a model, as plain facts: what a model file may ask for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """Rotary embedding as the checkpoint describes it; `kind` is a key of the table in `layers/rope.py`."""

    theta: float = 10000.0
    dim: int = 0
    """How many of the head's dimensions rotate."""
    max_len: int = 2048
    """The checkpoint's max_position_embeddings."""
    kind: str = "default"
    """default | linear | dynamic | llama3 | yarn | factors"""
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
    """`factors` only: the divisor of each frequency, as a GGUF file's rope_freqs tensor carries them."""


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What one layer may have other than its neighbours."""

    rope: RopeFacts
    window: int | None = None
    """How many tokens back it looks; None: to the first."""


@dataclass(frozen=True, slots=True)
class ArchFacts:
    """The shape of a decoder: all that a model file may ask for."""

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
    activation: str = "silu"
    tied: bool = False
    """Whether the output head shares the embedding's weight."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
