"""The families of models: what their checkpoints say, and what goes without saying."""

from dataclasses import dataclass

from quire.config.facts import ArchFacts, LayerFacts
from quire.config.gguf import GGUFFile
from quire.config.keys import Keys
from quire.config.rope import read_gguf_rope, read_rope
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Family:
    """How the checkpoints of one architecture differ where their config.json does not say so."""

    model_type: str
    """config.json's model_type and, for the families that have one, the GGUF architecture."""
    qkv_bias: bool = False
    """Query, key and value always have a bias, whatever attention_bias says."""
    bias_keys: bool = False
    """attention_bias and mlp_bias are read."""
    qk_norm: bool = False
    head_dim: int | None = None
    """The head size where config.json names none; None: hidden / heads."""
    window: str = "none"
    """Sliding windows: `none`, `all` layers, or `upper` layers when use_sliding_window is set."""


FAMILIES = {
    "LlamaForCausalLM": Family("llama", bias_keys=True),
    "MistralForCausalLM": Family("mistral", window="all"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, window="upper"),
    "Qwen3ForCausalLM": Family("qwen3", bias_keys=True, qk_norm=True, head_dim=128, window="upper"),
}
GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def read_decoder(keys: Keys, architecture: str) -> ArchFacts:
    """A decoder that is Llama but for its family's facts."""
    family = FAMILIES[architecture]
    activation = keys.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise keys.wrong("hidden_act", "silu (no other activation is supported for this architecture)")
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    kv_heads = keys.size("num_key_value_heads", heads)
    if keys.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise ConfigError(
            f"{keys.source}: hidden_size {hidden} is not divisible by num_attention_heads {heads} "
            "and no head_dim is given"
        )
    head_dim = keys.size("head_dim", family.head_dim or hidden // heads)
    check_heads(keys.source, heads, kv_heads)
    rope = read_rope(keys, head_dim)
    windows = _windows(keys, family, keys.size("num_hidden_layers"))
    return ArchFacts(
        architecture=architecture,
        vocab=keys.size("vocab_size"),
        hidden=hidden,
        intermediate=keys.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        layers=tuple(LayerFacts(rope, window) for window in windows),
        tied=keys.flag("tie_word_embeddings"),
        qkv_bias=family.qkv_bias or (family.bias_keys and keys.flag("attention_bias")),
        out_bias=family.bias_keys and keys.flag("attention_bias"),
        mlp_bias=architecture == "LlamaForCausalLM" and keys.flag("mlp_bias"),
        qk_norm=family.qk_norm,
    )


def read_gguf_decoder(file: GGUFFile, arch: Keys, architecture: str) -> ArchFacts:
    hidden, heads = arch.size("embedding_length"), arch.size("attention.head_count")
    kv_heads = arch.size("attention.head_count_kv", heads)
    if arch.get("attention.key_length") is None and hidden % heads:
        raise ConfigError(f"{arch.source}: embedding_length {hidden} is not divisible by {heads} heads")
    head_dim = arch.size("attention.key_length", hidden // heads)
    if arch.size("attention.value_length", head_dim) != head_dim:
        raise arch.wrong("attention.value_length", f"attention.key_length, {head_dim}")
    check_heads(arch.source, heads, kv_heads)
    embedding = file.tensors.get("token_embd.weight")
    return ArchFacts(
        architecture=architecture,
        vocab=embedding.shape[0] if embedding and embedding.shape else arch.size("vocab_size"),
        hidden=hidden,
        intermediate=arch.size("feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=arch.number("attention.layer_norm_rms_epsilon"),
        layers=(LayerFacts(read_gguf_rope(file, arch, head_dim)),) * arch.size("block_count"),
        tied="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=FAMILIES[architecture].qk_norm,
    )


def check_heads(source: str, heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ConfigError(
            f"{source}: {heads} attention heads cannot share {kv_heads} key/value heads evenly; "
            "the first must be a multiple of the second"
        )


def _windows(keys: Keys, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """How far back each layer looks."""
    full = (None,) * num_layers
    if family.window == "none" or (family.window == "upper" and not keys.flag("use_sliding_window")):
        return full
    # An absent key means the default of these families; null means full attention.
    if "sliding_window" in keys.values and keys.get("sliding_window") is None:
        return full
    window = keys.size("sliding_window", 4096)
    if family.window == "all":
        return (window,) * num_layers
    kinds = keys.get("layer_types")
    if kinds is None:
        first = keys.get("max_window_layers")
        first = 28 if first is None else first
        if not isinstance(first, int) or first < 0:
            raise keys.wrong("max_window_layers", "a number of layers")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise keys.wrong("layer_types", f"{num_layers} entries, each one of {', '.join(known)}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
