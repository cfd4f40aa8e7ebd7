"""Decoders as GGUF headers describe them."""

from typing import Any

from quire.config.facts import ArchFacts, LayerFacts
from quire.config.families.decoder import check_heads, longest_of
from quire.config.gguf import GGUFFile
from quire.config.keys import Keys
from quire.config.rope import read_gguf_rope
from quire.errors import ConfigError


def gguf_decoder(file: GGUFFile, arch: Keys, **facts: Any) -> ArchFacts:
    """Llama, but for what `facts` say."""
    hidden, heads = arch.size("embedding_length"), arch.size("attention.head_count")
    kv_heads = arch.size("attention.head_count_kv", heads)
    if arch.get("attention.key_length") is None and hidden % heads:
        raise ConfigError(f"{arch.source}: embedding_length {hidden} is not divisible by {heads} heads")
    head_dim = arch.size("attention.key_length", hidden // heads)
    if arch.size("attention.value_length", head_dim) != head_dim:
        raise arch.wrong("attention.value_length", f"attention.key_length, {head_dim}")
    check_heads(arch.source, heads, kv_heads)
    embedding = file.tensors.get("token_embd.weight")
    layers = facts.pop("layers", None)
    if layers is None:
        layers = (LayerFacts(read_gguf_rope(file, arch, head_dim)),) * arch.size("block_count")
    base: dict[str, Any] = {
        "architecture": "",
        "vocab": embedding.shape[0] if embedding and embedding.shape else arch.size("vocab_size"),
        "hidden": hidden,
        "intermediate": arch.size("feed_forward_length") if "intermediate" not in facts else 0,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "norm_eps": arch.number("attention.layer_norm_rms_epsilon") if "norm_eps" not in facts else 0.0,
        "layers": layers,
        "tied": "output.weight" not in file.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "out_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "max_len": longest_of(layers),
    }
    return ArchFacts(**(base | facts))


def llama(file: GGUFFile, arch: Keys) -> ArchFacts:
    if arch.get("expert_count"):
        raise ConfigError(f"{file.path}: mixture-of-experts (expert_count) is not supported yet")
    return gguf_decoder(file, arch)


def qwen2(file: GGUFFile, arch: Keys) -> ArchFacts:
    return gguf_decoder(file, arch)


def qwen3(file: GGUFFile, arch: Keys) -> ArchFacts:
    return gguf_decoder(file, arch, qk_norm="head")
