"""Decoders as GGUF headers describe them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.checkpoint.facts import ArchFacts, LayerFacts, MoeFacts, Routing
from quire.checkpoint.families.alibi import slopes_of
from quire.checkpoint.families.decoder import Windows, check_heads, longest_of
from quire.checkpoint.families.moe import mixed
from quire.checkpoint.families.renamed import NORMED_VOCAB
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
    turning: Sequence[bool] | None = None,
    pairs: bool = False,
    **facts: Any,
) -> ArchFacts:
    """Llama, but for what `facts` say; the rest as for `decoder`."""
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
        turning = turning or [True] * len(windows)
        rope = read_gguf_rope(file, arch, head_dim, pairs=pairs) if any(turning) else None
        layers = tuple(
            LayerFacts(rope if turns else None, window)
            for window, turns in zip(windows, turning, strict=True)
        )
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
        "max_len": longest_of(layers) or arch.size("context_length", FALLBACK_MAX_LEN),
    }
    return ArchFacts(**(base | facts))


def llama(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Also Mixtral, of whose files the first ones have each expert by itself."""
    facts = gguf_decoder(file, arch)
    if _some(arch, "expert_count") is None:
        return facts
    names = "apart" if "blk.0.ffn_gate_exps.weight" in file.tensors else "mlp"
    return mixed(facts, _experts(arch, facts.intermediate, renormalized=True, names=names))


def qwen2(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    return gguf_decoder(file, arch)


def qwen3(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    return gguf_decoder(file, arch, qk_norm="head")


def smollm3(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Every fourth layer does not turn its heads; files do not say so."""
    return gguf_decoder(file, arch, turning=_three_of_four(arch))


def granite(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    return gguf_decoder(
        file,
        arch,
        embed_scale=arch.number("embedding_scale", 1.0),
        residual_scale=arch.number("residual_scale", 1.0),
        attention_scale=arch.optional_number("attention.scale"),
        logit_scale=1 / arch.number("logit_scale", 1.0),
    )


def phi3(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    windows = (_some(arch, "attention.sliding_window"),) * arch.size("block_count")
    return gguf_decoder(file, arch, fused_qkv=True, fused_gate_up=True, windows=windows)


def glm4(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    return gguf_decoder(file, arch, pairs=True, fused_gate_up=True)


def olmo2(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    if _some(arch, "attention.sliding_window") is not None:
        raise arch.wrong("attention.sliding_window", "none: OLMo 3 is not supported in this format")
    return gguf_decoder(file, arch, qk_norm="all")


def cohere(file: GGUFFile, arch: ConfigReader, **facts: Any) -> ArchFacts:
    if "blk.0.attn_q_norm.weight" in file.tensors:
        raise ConfigError(f"{file.path}: norms of queries and keys (attn_q_norm) are not supported")
    return gguf_decoder(
        file,
        arch,
        pairs=True,
        norm="layer",
        norm_eps=arch.number("attention.layer_norm_epsilon"),
        logit_scale=arch.number("logit_scale", 1.0),
        **facts,
    )


def cohere2(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Three window layers, whose heads turn, to a full one, whose heads do not; files do not say so."""
    turning = _three_of_four(arch)
    window = arch.size("attention.sliding_window")
    return cohere(file, arch, turning=turning, windows=tuple(window if turns else None for turns in turning))


def starcoder2(file: GGUFFile, arch: ConfigReader, **facts: Any) -> ArchFacts:
    norms: dict[str, Any] = {
        "norm": "layer",
        "norm_bias": True,
        "norm_eps": arch.number("attention.layer_norm_epsilon"),
    }
    return gguf_decoder(file, arch, **({"activation": "gelu_tanh"} | norms | facts))


def nemotron(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Its norms have the 1 added in these files."""
    return starcoder2(file, arch, activation="relu2")


def orion(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    return starcoder2(file, arch, activation="silu")


def arcee(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    return gguf_decoder(file, arch, activation="relu2")


def ernie(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    return gguf_decoder(file, arch, pairs=True)


def bloom(file: GGUFFile, arch: ConfigReader, **facts: Any) -> ArchFacts:
    same: dict[str, Any] = {
        "fused_qkv": True,
        "qkv_bias": "blk.0.attn_qkv.bias" in file.tensors,
        "norm_bias": "blk.0.attn_norm.bias" in file.tensors,
        "turning": [False] * arch.size("block_count"),
        "alibi_slopes": slopes_of(
            arch.size("attention.head_count"), arch.number("attention.max_alibi_bias", 8.0)
        ),
    }
    return starcoder2(file, arch, **(same | facts))


def mpt(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    clip = arch.optional_number("attention.clamp_kqv")
    return bloom(file, arch, activation="gelu", qkv_clip=clip)


def gpt2(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    return starcoder2(
        file,
        arch,
        fused_qkv=True,
        qkv_bias="blk.0.attn_qkv.bias" in file.tensors,
        learned_positions=True,
        turning=[False] * arch.size("block_count"),
    )


def stablelm(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    if "blk.0.attn_q_norm.weight" in file.tensors:
        raise ConfigError(f"{file.path}: norms of queries and keys (attn_q_norm) are not supported")
    return starcoder2(file, arch, activation="silu", side_by_side=int(arch.flag("use_parallel_residual")))


def phi2(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    fused = "blk.0.attn_qkv.weight" in file.tensors
    biased = f"blk.0.attn_{'qkv' if fused else 'q'}.bias" in file.tensors
    return starcoder2(file, arch, fused_qkv=fused, qkv_bias=biased, head_bias="output.bias" in file.tensors)


def gptneox(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    biased, wide = "blk.0.attn_qkv.bias" in file.tensors, arch.flag("use_parallel_residual", True)
    sides = 2 if wide else 0
    return starcoder2(file, arch, activation="gelu", fused_qkv=True, qkv_bias=biased, side_by_side=sides)


def falcon(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Both halves of a layer are side by side, behind a norm each in the large ones."""
    norms = 2 if "blk.0.attn_norm_2.weight" in file.tensors else 1
    return starcoder2(file, arch, activation="gelu", fused_qkv=True, side_by_side=norms)


def olmo(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    return gguf_decoder(
        file,
        arch,
        norm="layer_bare",
        norm_eps=arch.number("attention.layer_norm_epsilon"),
        qkv_clip=arch.optional_number("attention.clamp_kqv"),
    )


def baichuan(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """13B has slopes, which files do not say, and the second generation a head whose rows are of one
    length."""
    facts = gguf_decoder(file, arch)
    facts = replace(facts, unit_head=facts.vocab == NORMED_VOCAB)
    if len(facts.layers) != 40:
        return facts
    layers = tuple(replace(layer, rope=None) for layer in facts.layers)
    return replace(facts, layers=layers, alibi_slopes=slopes_of(facts.heads))


def chatglm(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Also GLM-Edge, whose files have queries, keys and values apart."""
    fused = "blk.0.attn_qkv.weight" in file.tensors
    biased = f"blk.0.attn_{'qkv' if fused else 'q'}.bias" in file.tensors
    return gguf_decoder(file, arch, pairs=True, fused_qkv=fused, qkv_bias=biased, fused_gate_up=True)


def dbrx(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    facts = gguf_decoder(
        file,
        arch,
        fused_qkv=True,
        norm="layer",
        norm_eps=arch.number("attention.layer_norm_epsilon"),
        qkv_clip=arch.optional_number("attention.clamp_kqv"),
    )
    return mixed(facts, _experts(arch, facts.intermediate, renormalized=True))


def glm4moe(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Layers behind the last draft, and are not used. Also dots.llm1."""
    drafting, count = _some(arch, "nextn_predict_layers") or 0, arch.size("block_count")
    inner, layers = arch.size("expert_feed_forward_length"), count - drafting
    if layers < 1:
        raise arch.wrong("nextn_predict_layers", f"fewer than {count}, of which there are all in all")
    routing = Routing(
        arch.size("expert_used_count"),
        "sigmoid",
        arch.flag("expert_weights_norm", True),
        arch.number("expert_weights_scale", 1.0),
        num_groups=arch.size("expert_group_count", 1),
        top_groups=arch.size("expert_group_used_count", 1),
        group_best=2,
    )
    moe = MoeFacts(
        arch.size("expert_count"),
        inner,
        routing,
        choice_bias=True,
        shared_intermediate=inner * (_some(arch, "expert_shared_count") or 0),
        names="apart_deepseek",
    )
    facts = gguf_decoder(
        file,
        arch,
        windows=(None,) * layers,
        qk_norm="head" if "blk.0.attn_q_norm.weight" in file.tensors else "",
        unused=rf"\b(layers|blk)\.({'|'.join(map(str, range(layers, count)))})\." if drafting else "",
    )
    return mixed(facts, moe, set(range(_some(arch, "leading_dense_block_count") or 0, layers)))


def gemma(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """The first one."""
    return gguf_decoder(file, arch, **_gemma(arch, largest=0))


def _three_of_four(arch: ConfigReader) -> list[bool]:
    return [bool((layer + 1) % 4) for layer in range(arch.size("block_count"))]


def qwen2moe(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    inner, whole = _expert_width(arch), arch.size("feed_forward_length")
    shared = arch.size("expert_shared_feed_forward_length", whole)
    moe = _experts(arch, inner, renormalized=False, shared_intermediate=shared, shared_gate=True)
    return mixed(gguf_decoder(file, arch, intermediate=max(inner, shared)), moe)


def qwen3moe(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    inner = _expert_width(arch)
    facts = gguf_decoder(file, arch, qk_norm="head", intermediate=inner)
    return mixed(facts, _experts(arch, inner, renormalized=True))


def olmoe(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    facts = gguf_decoder(file, arch, qk_norm="all")
    return mixed(facts, _experts(arch, facts.intermediate, renormalized=False))


def granitemoe(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Also with a shared expert."""
    facts = granite(file, arch)
    shared = arch.get("expert_shared_feed_forward_length") or 0
    moe = _experts(arch, facts.intermediate, renormalized=True, shared_intermediate=shared)
    return mixed(facts, moe)


def _expert_width(arch: ConfigReader) -> int:
    """Files from before the key has one share all that a token is given to."""
    used = arch.size("expert_used_count")
    if arch.get("expert_feed_forward_length") is None:
        return arch.size("feed_forward_length") // used
    return arch.size("expert_feed_forward_length")


def _experts(arch: ConfigReader, inner: int, *, renormalized: bool, **facts: Any) -> MoeFacts:
    base: dict[str, Any] = {"names": "apart"}
    routing = Routing(arch.size("expert_used_count"), renormalized=renormalized)
    return MoeFacts(arch.size("expert_count"), inner, routing, **(base | facts))


def gemma2(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    return gguf_decoder(
        file,
        arch,
        windows=_windows(arch, every=2, window=arch.size("attention.sliding_window", 4096)),
        attention_softcap=arch.number("attn_logit_softcapping", 50.0),
        logit_softcap=arch.number("final_logit_softcapping", 30.0),
        **_gemma(arch, largest=46),
    )


def gemma3(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Full layers have a rotation of their own, which alone may be stretched; the length counts that in."""
    head_dim = arch.size("attention.key_length")
    rope = read_gguf_rope(file, arch, head_dim)
    near = replace(rope, kind="default", factor=1.0, theta=arch.number("rope.freq_base_swa", 10000.0))
    windows = _windows(arch, every=6, window=_some(arch, "attention.sliding_window"))
    return gguf_decoder(
        file,
        arch,
        layers=tuple(LayerFacts(near if window else rope, window) for window in windows),
        qk_norm="head",
        logit_softcap=arch.optional_number("final_logit_softcapping"),
        max_len=arch.size("context_length", FALLBACK_MAX_LEN),
        **_gemma(arch, largest=62),
    )


def _gemma(arch: ConfigReader, largest: int) -> dict[str, Any]:
    """Its norms have the 1 added in these files. They do not say how queries are scaled: by the head's size,
    but in the model that has `largest` layers."""
    hidden, heads = arch.size("embedding_length"), arch.size("attention.head_count")
    is_largest = arch.size("block_count") == largest
    width = hidden // heads if is_largest else arch.size("attention.key_length", hidden // heads)
    return {
        "activation": "gelu_tanh",
        "attention_scale": width**-0.5,
        "embed_scale": math.sqrt(hidden),
    }


def gpt_oss(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Every other layer looks through a window, and the bounds of its yarn are not rounded; files do not say
    so."""
    rope = replace(read_gguf_rope(file, arch, arch.size("attention.key_length")), truncate=False)
    windows = _windows(arch, every=2, window=arch.size("attention.sliding_window"))
    inner = _expert_width(arch)
    facts = gguf_decoder(
        file,
        arch,
        layers=tuple(LayerFacts(rope, window) for window in windows),
        intermediate=inner,
        sinks=True,
    )
    moe = _experts(
        arch,
        inner,
        renormalized=True,
        router_bias=True,
        expert_bias=True,
        activation="clamped_swiglu",
    )
    return mixed(facts, moe)


def _some(arch: ConfigReader, key: str) -> int | None:
    """A size, or none where the file says nothing, or 0."""
    value = arch.get(key)
    return None if value is None or (isinstance(value, int) and value == 0) else arch.size(key)


def _windows(arch: ConfigReader, *, every: int, window: int | None) -> Windows:
    """The window in all layers but the last of every so many, or as the file says: another number, or yes
    and no by layer."""
    count, pattern = arch.size("block_count"), arch.get("attention.sliding_window_pattern")
    if pattern is None or not hasattr(pattern, "__len__"):
        every = arch.size("attention.sliding_window_pattern", every)
        pattern = [(layer + 1) % every for layer in range(count)]
    if len(pattern) != count:
        raise arch.wrong("attention.sliding_window_pattern", f"a number, or {count} of yes and no")
    return tuple(window if near else None for near in pattern)
