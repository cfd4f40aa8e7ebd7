"""Reading decoders with recurrent state from GGUF headers: gated delta net, Mamba-2, short convolutions."""

from dataclasses import replace
from typing import Any

from quire.checkpoint.facts import ArchFacts, LayerFacts, MoeFacts, StateFacts
from quire.checkpoint.families.gguf import (
    check_divides,
    gguf_decoder,
    granite_scales,
    has_any,
    layers_without_mtp,
    optional_size,
    per_layer,
    read_gguf_deepseek_experts,
    read_gguf_experts,
)
from quire.checkpoint.families.lfm import conv_state
from quire.checkpoint.gguf import GGUFFile
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import read_gguf_rope


def qwen3next(file: GGUFFile, arch: ConfigReader, *, repeats_keys: bool = False) -> ArchFacts:
    """Read Qwen3-Next and Qwen3.5: gated delta net, gated attention in every fourth layer.

    With `repeats_keys` the loader repeats queries and keys for each value head, since files of Qwen3.5 assign
    value heads to key heads in another order than checkpoints do."""
    layers, unused = layers_without_mtp(arch)
    every, groups = arch.size("full_attention_interval", 4), arch.size("ssm.group_count")
    heads = check_divides(arch, "ssm.time_step_rank", groups)
    rope = read_gguf_rope(file, arch, arch.size("attention.key_length"))
    moe = _qwen_experts(arch)
    facts: dict[str, Any] = {}
    if moe is not None:
        facts["intermediate"] = arch.size("feed_forward_length", moe.intermediate)
    is_sparse = [f"blk.{at}.ffn_gate_inp.weight" in file.tensors for at in range(layers)]
    return gguf_decoder(
        file,
        arch,
        layers=tuple(
            LayerFacts(None, mixer="delta", moe=is_sparse[at])
            if (at + 1) % every
            else LayerFacts(rope, moe=is_sparse[at])
            for at in range(layers)
        ),
        qk_norm="head",
        output_gate=True,
        qkv_bias=f"blk.{every - 1}.attn_q.bias" in file.tensors,
        out_bias=f"blk.{every - 1}.attn_output.bias" in file.tensors,
        moe=moe,
        state=StateFacts(
            heads=heads,
            head_dim=check_divides(arch, "ssm.inner_size", heads) // heads,
            state=arch.size("ssm.state_size"),
            groups=heads if repeats_keys else groups,
            conv=arch.size("ssm.conv_kernel"),
            conv_bias=False,
        ),
        unused=unused,
        **facts,
    )


def _qwen_experts(arch: ConfigReader) -> MoeFacts | None:
    if optional_size(arch, "expert_count") is None:
        return None
    inner = arch.size("expert_feed_forward_length")
    return read_gguf_experts(
        arch,
        inner,
        renormalized=arch.flag("expert_weights_norm", True),
        shared_intermediate=arch.size("expert_shared_feed_forward_length", inner),
        shared_gate=True,
    )


def lfm2(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Read LFM2: gated short convolutions, attention in layers with key/value heads, and in some models
    experts after the first layers."""
    moe, dense = None, arch.size("block_count")
    if optional_size(arch, "expert_count") is not None:
        inner, bias = arch.size("expert_feed_forward_length"), has_any(file, ".exp_probs_b.bias")
        moe = read_gguf_experts(arch, inner, scoring="sigmoid", choice_bias=bias)
        dense = arch.count("leading_dense_block_count")
    biased = has_any(file, ".shortconv.in_proj.bias")
    state = conv_state(arch.size("embedding_length"), arch.size("shortconv.l_cache"), biased)
    facts = _hybrid(file, arch, "conv", state, rotates=True, qk_norm="head")
    layers = tuple(replace(layer, moe=at >= dense) for at, layer in enumerate(facts.layers))
    return replace(facts, layers=layers, moe=moe)


def _hybrid(
    file: GGUFFile, arch: ConfigReader, mixer: str, state: StateFacts, *, rotates: bool, **facts: Any
) -> ArchFacts:
    """Read a decoder with attention in layers with key/value heads, and `mixer` in all other layers;
    `rotates`: whether attention has rotary embedding."""
    kv_heads = per_layer(arch, "attention.head_count_kv")
    hidden, heads = arch.size("embedding_length"), arch.size("attention.head_count")
    rope = read_gguf_rope(file, arch, arch.size("attention.key_length", hidden // heads))
    attention = LayerFacts(rope if rotates else None)
    return gguf_decoder(
        file,
        arch.but(**{"attention.head_count_kv": max(kv_heads) or heads}),
        layers=tuple(attention if count else LayerFacts(None, mixer=mixer) for count in kv_heads),
        state=state,
        **facts,
    )


def _mamba2(file: GGUFFile, arch: ConfigReader) -> StateFacts:
    groups = arch.size("ssm.group_count", 1)
    heads = check_divides(arch, "ssm.time_step_rank", groups)
    return StateFacts(
        heads=heads,
        head_dim=check_divides(arch, "ssm.inner_size", heads) // heads,
        state=arch.size("ssm.state_size"),
        groups=groups,
        norm_groups=groups,
        conv=arch.size("ssm.conv_kernel"),
        conv_bias=has_any(file, ".ssm_conv1d.bias"),
        proj_bias=has_any(file, ".ssm_in.bias"),
    )


def granitehybrid(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Read Granite 4 and Bamba: Mamba-2, and attention that mostly has no rotary embedding."""
    rotates = arch.flag("rope.scaling.finetuned", True)
    facts = _hybrid(file, arch, "mamba", _mamba2(file, arch), rotates=rotates, **granite_scales(arch))
    if optional_size(arch, "expert_count") is None:
        stored = file.tensors.get("blk.0.ffn_up.weight")  # feed_forward_length may be that of another part
        return replace(facts, intermediate=stored.shape[0]) if stored else facts
    shared = arch.count("expert_shared_feed_forward_length")
    moe = read_gguf_experts(arch, facts.intermediate, shared_intermediate=shared)
    return replace(facts, moe=moe, layers=tuple(replace(layer, moe=True) for layer in facts.layers))


def nemotron_h(file: GGUFFile, arch: ConfigReader) -> ArchFacts:
    """Read Nemotron-H. A layer is Mamba-2, attention without rotary embedding, experts or a plain
    feed-forward part. Time steps are at least 0.001 (the header has no key for this)."""
    count, unused = layers_without_mtp(arch)
    kv_heads, inner = per_layer(arch, "attention.head_count_kv"), per_layer(arch, "feed_forward_length")
    moe = None
    if optional_size(arch, "expert_count") is not None:
        moe = replace(
            read_gguf_deepseek_experts(arch, "sigmoid", renormalized=arch.flag("expert_weights_norm", True)),
            plain=True,
            latent=arch.count("moe_latent_size"),
            shared_intermediate=arch.size("expert_shared_feed_forward_length"),
            names="apart_nemotron_h",
        )
    layers = tuple(
        LayerFacts(None, has_mlp=False)
        if kv_heads[at]
        else LayerFacts(None, mixer="none", moe=moe is not None)
        if inner[at]
        else LayerFacts(None, mixer="mamba", has_mlp=False)
        for at in range(count)
    )
    eps = "attention.layer_norm_rms_epsilon"
    eps = eps if arch.get(eps) is not None else "attention.layer_norm_epsilon"
    return gguf_decoder(
        file,
        arch.but(**{"attention.head_count_kv": max(kv_heads) or arch.size("attention.head_count")}),
        layers=layers,
        intermediate=max(inner),
        norm_eps=arch.number(eps),
        activation="relu2",
        qkv_bias=has_any(file, ".attn_q.bias"),
        out_bias=has_any(file, ".attn_output.bias"),
        mlp_bias=has_any(file, ".ffn_down.bias"),
        moe=moe,
        state=replace(_mamba2(file, arch), time_limits=(1e-3, float("inf"))),
        unused=unused,
    )
