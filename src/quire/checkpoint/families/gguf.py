"""Reading decoders from GGUF headers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quire.checkpoint.facts import ArchFacts, LayerFacts, MlaFacts, MoeFacts, Routing
from quire.checkpoint.families.alibi import slopes_of
from quire.checkpoint.families.decoder import LAYER_NORM, Windows, attention_layers, check_heads, max_rope_len
from quire.checkpoint.families.llama_variants import NORMED_VOCAB
from quire.checkpoint.families.moe import add_experts
from quire.checkpoint.gguf import GGUFFile
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import FALLBACK_MAX_LEN, read_gguf_rope
from quire.errors import ConfigError


def gguf_decoder(
    file: GGUFFile,
    arch: ConfigReader,
    *,
    windows: Windows | None = None,
    layers: tuple[LayerFacts, ...] | None = None,
    rotates: Sequence[bool] | None = None,
    pairs: bool = False,
    **facts: Any,
) -> ArchFacts:
    """Read the header of a Llama-like decoder; `facts` are fields of ArchFacts, which replace those that are
    read. The other parameters are those of `decoder` for config.json."""
    hidden, heads = arch.size("embedding_length"), arch.size("attention.head_count")
    kv_heads = arch.size("attention.head_count_kv", heads)
    if arch.get("attention.key_length") is None and hidden % heads:
        raise ConfigError(f"{arch.source}: embedding_length {hidden} is not divisible by {heads} heads")
    head_dim = arch.size("attention.key_length", hidden // heads)
    if arch.size("attention.value_length", head_dim) != head_dim:
        raise arch.wrong("attention.value_length", f"attention.key_length, {head_dim}")
    check_heads(arch.source, heads, kv_heads)
    embedding = file.tensors.get("token_embd.weight")
    if layers is None:
        windows = windows or (None,) * arch.size("block_count")
        rotates = rotates or [True] * len(windows)
        rope = read_gguf_rope(file, arch, head_dim, pairs=pairs) if any(rotates) else None
        layers = attention_layers(windows, rotates, rope)
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
        "qkv_bias": f"blk.0.attn_{'qkv' if facts.get('fused_qkv') else 'q'}.bias" in file.tensors,
        "out_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "max_len": max_rope_len(layers) or arch.size("context_length", FALLBACK_MAX_LEN),
    }
    return ArchFacts(**(base | facts))


def llama(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Read Llama, and Mixtral; early Mixtral files have separate tensors for each expert."""
    facts = gguf_decoder(file, arch)
    if optional_size(arch, "expert_count") is None:
        return facts
    names = "apart" if "blk.0.ffn_gate_exps.weight" in file.tensors else "mlp"
    return add_experts(facts, read_gguf_experts(arch, facts.intermediate, names=names))


def smollm3(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Read SmolLM3: every fourth layer has no rotary embedding (the header has no key for this)."""
    return gguf_decoder(file, arch, rotates=_rotated_layers(arch))


def granite(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    return gguf_decoder(file, arch, **granite_scales(arch))


def granite_scales(arch: ConfigReader) -> dict[str, Any]:
    return {
        "embed_scale": arch.number("embedding_scale", 1.0),
        "residual_scale": arch.number("residual_scale", 1.0),
        "attention_scale": arch.optional_number("attention.scale"),
        "logit_scale": 1 / arch.number("logit_scale", 1.0),
    }


def phi3(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    windows = (optional_size(arch, "attention.sliding_window"),) * arch.size("block_count")
    return gguf_decoder(file, arch, fused_qkv=True, fused_gate_up=True, windows=windows)


def olmo2(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    if optional_size(arch, "attention.sliding_window") is not None:
        raise arch.wrong("attention.sliding_window", "none: OLMo 3 is not supported in this format")
    return gguf_decoder(file, arch, qk_norm="all")


def cohere(file: GGUFFile, arch: ConfigReader, **facts: Any) -> ArchFacts:
    _check_no_qk_norm(file)
    return gguf_decoder(
        file,
        arch,
        pairs=True,
        norm="layer",
        norm_eps=arch.number("attention.layer_norm_epsilon"),
        logit_scale=arch.number("logit_scale", 1.0),
        **facts,
    )


def _check_no_qk_norm(file: GGUFFile) -> None:
    if "blk.0.attn_q_norm.weight" in file.tensors:
        raise ConfigError(f"{file.path}: norms of queries and keys (attn_q_norm) are not supported")


def cohere2(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Read Cohere 2: three window layers per full-attention layer; only window layers have rotary embedding.
    The header has no keys for this."""
    rotates = _rotated_layers(arch)
    window = arch.size("attention.sliding_window")
    return cohere(
        file, arch, rotates=rotates, windows=tuple(window if rotated else None for rotated in rotates)
    )


def layer_norm_decoder(file: GGUFFile, arch: ConfigReader, **facts: Any) -> ArchFacts:
    """Read a decoder with layer norms and, unless `facts` have another activation, tanh GELU. Nemotron's norm
    weights include the added 1."""
    base: dict[str, Any] = {
        "activation": "gelu_tanh",
        "norm_eps": arch.number("attention.layer_norm_epsilon"),
    }
    return gguf_decoder(file, arch, **(base | LAYER_NORM | facts))


def bloom(file: GGUFFile, arch: ConfigReader, **facts: Any) -> ArchFacts:
    same: dict[str, Any] = {
        "fused_qkv": True,
        "norm_bias": "blk.0.attn_norm.bias" in file.tensors,
        "rotates": [False] * arch.size("block_count"),
        "alibi_slopes": slopes_of(
            arch.size("attention.head_count"), arch.number("attention.max_alibi_bias", 8.0)
        ),
    }
    return layer_norm_decoder(file, arch, **(same | facts))


def mpt(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    clip = arch.optional_number("attention.clamp_kqv")
    return bloom(file, arch, activation="gelu", qkv_clip=clip)


def gpt2(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    rotates = [False] * arch.size("block_count")
    return layer_norm_decoder(file, arch, fused_qkv=True, learned_positions=True, rotates=rotates)


def stablelm(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    _check_no_qk_norm(file)
    norms = int(arch.flag("use_parallel_residual"))
    return layer_norm_decoder(file, arch, activation="silu", parallel_norms=norms)


def phi2(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    fused = "blk.0.attn_qkv.weight" in file.tensors
    return layer_norm_decoder(file, arch, fused_qkv=fused, head_bias="output.bias" in file.tensors)


def gptneox(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    norms = 2 if arch.flag("use_parallel_residual", True) else 0
    return layer_norm_decoder(file, arch, activation="gelu", fused_qkv=True, parallel_norms=norms)


def falcon(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Read Falcon: parallel attention and feed-forward, in large models with a norm each."""
    norms = 2 if "blk.0.attn_norm_2.weight" in file.tensors else 1
    return layer_norm_decoder(file, arch, activation="gelu", fused_qkv=True, parallel_norms=norms)


def olmo(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    return gguf_decoder(
        file,
        arch,
        norm="layer_bare",
        norm_eps=arch.number("attention.layer_norm_epsilon"),
        qkv_clip=arch.optional_number("attention.clamp_kqv"),
    )


def baichuan(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Read Baichuan: 13B has ALiBi slopes, and Baichuan 2 a normalized output head. The header has no keys
    for this: the number of layers and the vocabulary size distinguish the models."""
    facts = gguf_decoder(file, arch)
    facts = replace(facts, norm_head=facts.vocab == NORMED_VOCAB)
    if len(facts.layers) != 40:
        return facts
    layers = tuple(replace(layer, rope=None) for layer in facts.layers)
    return replace(facts, layers=layers, alibi_slopes=slopes_of(facts.heads))


def chatglm(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Read ChatGLM, and GLM-Edge, which has separate query, key and value tensors."""
    fused = "blk.0.attn_qkv.weight" in file.tensors
    return gguf_decoder(file, arch, pairs=True, fused_qkv=fused, fused_gate_up=True)


def dbrx(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    facts = gguf_decoder(
        file,
        arch,
        fused_qkv=True,
        norm="layer",
        norm_eps=arch.number("attention.layer_norm_epsilon"),
        qkv_clip=arch.optional_number("attention.clamp_kqv"),
    )
    return add_experts(facts, read_gguf_experts(arch, facts.intermediate))


def glm4moe(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Read GLM-4 MoE and dots.llm1; the MTP layers after the last layer are not used."""
    layers, unused = layers_without_mtp(arch)
    moe = read_gguf_deepseek_experts(arch, "sigmoid", renormalized=arch.flag("expert_weights_norm", True))
    facts = gguf_decoder(
        file,
        arch,
        windows=(None,) * layers,
        qk_norm="head" if "blk.0.attn_q_norm.weight" in file.tensors else "",
        unused=unused,
    )
    return add_experts(facts, moe, set(range(arch.count("leading_dense_block_count"), layers)))


def layers_without_mtp(arch: ConfigReader) -> tuple[int, str]:
    """Return the number of layers before the MTP layers, and a regular expression for the names of MTP
    tensors."""
    num_mtp, count = arch.count("nextn_predict_layers"), arch.size("block_count")
    layers = count - num_mtp
    if layers < 1:
        raise arch.wrong("nextn_predict_layers", f"fewer than the block_count {count}")
    numbers = "|".join(map(str, range(layers, count)))
    return layers, rf"\b(layers|blk)\.({numbers})\." if num_mtp else ""


def read_gguf_deepseek_experts(arch: ConfigReader, scoring: str, *, renormalized: bool) -> MoeFacts:
    """Read the routed and shared experts of DeepSeek and derived models."""
    inner, balanced = arch.size("expert_feed_forward_length"), scoring == "sigmoid"
    moe = read_gguf_experts(
        arch,
        inner,
        scoring=scoring,
        renormalized=renormalized,
        choice_bias=balanced,
        shared_intermediate=inner * arch.count("expert_shared_count"),
        names="apart_deepseek",
    )
    routing = moe.routing._replace(
        scale=arch.number("expert_weights_scale", 1.0),
        num_groups=arch.size("expert_group_count", 1),
        top_groups=arch.size("expert_group_used_count", 1),
        group_best=2 if balanced else 1,
    )
    return replace(moe, routing=routing)


_GATING = {1: "softmax", 2: "sigmoid"}
"""Maps values of expert_gating_func in GGUF headers to the function that computes router scores."""


def deepseek2(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Read DeepSeek-V2, V3 and derived models with latent attention, with or without experts."""
    layers, unused = layers_without_mtp(arch)
    rope_dim, heads = arch.size("rope.dimension_count"), arch.size("attention.head_count")
    # Files without these keys have the sizes of whole heads under the keys without _mla.
    key_dim = arch.size("attention.key_length_mla", arch.get("attention.key_length"))
    v_dim = arch.size("attention.value_length_mla", arch.get("attention.value_length"))
    if key_dim <= rope_dim:
        raise ConfigError(
            f"{arch.source}: {rope_dim} of {key_dim} dimensions of a key rotate; expected fewer"
        )
    mla = MlaFacts(
        kv_latent=arch.size("attention.kv_lora_rank"),
        nope_dim=key_dim - rope_dim,
        rope_dim=rope_dim,
        v_dim=v_dim,
        q_latent=optional_size(arch, "attention.q_lora_rank"),
    )
    rope = read_gguf_rope(file, arch, rope_dim, pairs=True)
    if rope.kind == "yarn":
        # The header has 0.1 * mscale_all_dim. There is no key for mscale, which is equal to it in all models.
        mscale = arch.number("rope.scaling.yarn_log_multiplier", 0.1) / 0.1
        rope = replace(rope, mscale=mscale, mscale_all_dim=mscale, attention_factor=None)
    sizes = {"attention.key_length": key_dim, "attention.value_length": key_dim}
    facts = gguf_decoder(
        file,
        arch.but(**{"attention.head_count_kv": heads}, **sizes),
        layers=(LayerFacts(rope, mixer="latent"),) * layers,
        mla=mla,
        qkv_bias="blk.0.attn_kv_a_mqa.bias" in file.tensors,
        unused=unused,
    )
    if optional_size(arch, "expert_count") is None:
        return facts
    scoring = _GATING.get(arch.size("expert_gating_func", 1))
    if scoring is None:
        raise arch.wrong("expert_gating_func", "1 (softmax) or 2 (sigmoid)")
    moe = read_gguf_deepseek_experts(arch, scoring, renormalized=arch.flag("expert_weights_norm"))
    return add_experts(facts, moe, set(range(arch.count("leading_dense_block_count"), layers)))


def minimax_m2(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    inner = _expert_width(arch)
    moe = read_gguf_experts(arch, inner, scoring="sigmoid", choice_bias=True)
    return add_experts(gguf_decoder(file, arch, qk_norm="all", intermediate=inner), moe)


def _rotated_layers(arch: ConfigReader) -> list[bool]:
    return [bool((layer + 1) % 4) for layer in range(arch.size("block_count"))]


def qwen2moe(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    inner, whole = _expert_width(arch), arch.size("feed_forward_length")
    shared = arch.size("expert_shared_feed_forward_length", whole)
    moe = read_gguf_experts(arch, inner, renormalized=False, shared_intermediate=shared, shared_gate=True)
    return add_experts(gguf_decoder(file, arch, intermediate=max(inner, shared)), moe)


def qwen3moe(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    inner = _expert_width(arch)
    facts = gguf_decoder(file, arch, qk_norm="head", intermediate=inner)
    return add_experts(facts, read_gguf_experts(arch, inner))


def olmoe(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    facts = gguf_decoder(file, arch, qk_norm="all")
    return add_experts(facts, read_gguf_experts(arch, facts.intermediate, renormalized=False))


def granitemoe(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Read Granite MoE, with or without a shared expert."""
    facts = granite(file, arch)
    shared = arch.count("expert_shared_feed_forward_length")
    return add_experts(facts, read_gguf_experts(arch, facts.intermediate, shared_intermediate=shared))


def _expert_width(arch: ConfigReader) -> int:
    """Return the intermediate size of one expert. In files without a key for it, feed_forward_length is the
    sum over the experts that a token uses."""
    used = arch.size("expert_used_count")
    if arch.get("expert_feed_forward_length") is None:
        return arch.size("feed_forward_length") // used
    return arch.size("expert_feed_forward_length")


def read_gguf_experts(
    arch: ConfigReader, inner: int, *, scoring: str = "softmax", renormalized: bool = True, **facts: Any
) -> MoeFacts:
    """Read experts of intermediate size `inner`; unless `facts` have other `names`, each matrix is stored as
    one tensor for all experts."""
    routing = Routing(arch.size("expert_used_count"), scoring, renormalized)
    return MoeFacts(arch.size("expert_count"), inner, routing, **({"names": "apart"} | facts))


def gpt_oss(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Read GPT-OSS: every other layer has a window, and yarn's bounds are not rounded. The header has no keys
    for this."""
    rope = replace(read_gguf_rope(file, arch, arch.size("attention.key_length")), truncate=False)
    windows = read_windows(arch, every=2, window=arch.size("attention.sliding_window"))
    inner = _expert_width(arch)
    facts = gguf_decoder(
        file,
        arch,
        layers=tuple(LayerFacts(rope, window) for window in windows),
        intermediate=inner,
        sinks=True,
    )
    moe = read_gguf_experts(arch, inner, router_bias=True, expert_bias=True, activation="clamped_swiglu")
    return add_experts(facts, moe)


def optional_size(arch: ConfigReader, key: str) -> int | None:
    """Return the size under `key`; None if the key is missing or 0."""
    value = arch.get(key)
    return None if value is None or (isinstance(value, int) and value == 0) else arch.size(key)


def has_any(file: GGUFFile, ending: str) -> bool:
    """Return whether the name of any tensor has this ending."""
    return any(name.endswith(ending) for name in file.tensors)


def read_windows(arch: ConfigReader, *, every: int, window: int | None) -> Windows:
    """Return the window of each layer: `window`, or None for every `every`-th layer. The file may set another
    interval, or a flag per layer."""
    count, pattern = arch.size("block_count"), arch.get("attention.sliding_window_pattern")
    if pattern is None or not hasattr(pattern, "__len__"):
        every = arch.size("attention.sliding_window_pattern", every)
        pattern = [(layer + 1) % every for layer in range(count)]
    if len(pattern) != count:
        raise arch.wrong("attention.sliding_window_pattern", f"a number, or {count} flags")
    return tuple(window if is_local else None for is_local in pattern)


def per_layer(arch: ConfigReader, key: str) -> list[int]:
    """Return the size of each layer under `key`, which may be 0; one stored size applies to all layers."""
    value, count = arch.get(key), arch.size("block_count")
    if not hasattr(value, "__len__"):
        return [arch.size(key)] * count
    sizes = np.asarray(value)
    if sizes.shape != (count,) or sizes.dtype.kind not in "iu" or sizes.min() < 0:
        raise arch.wrong(key, f"a number, or {count} numbers")
    return [int(size) for size in sizes]


def check_divides(arch: ConfigReader, key: str, divisor: int) -> int:
    """Return the size under `key`; raise if it is no multiple of `divisor`."""
    size = arch.size(key)
    if size % divisor:
        raise arch.wrong(key, f"a multiple of {divisor}")
    return size
