"""Dense decoders: Llama, and those that differ from it in a few settings."""

import math
from dataclasses import replace
from typing import Any

from quire.checkpoint.facts import ArchFacts, LayerFacts, RopeFacts
from quire.checkpoint.families.decoder import (
    FULL,
    LAYER_NORM,
    SLIDING,
    Windows,
    decoder,
    full_every,
    head_dim_of,
    layer_kinds,
    ropes_by_kind,
    same_window,
    sliding_window,
    windows_by_kind,
)
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import read_rope


def llama(keys: ConfigReader) -> ArchFacts:
    return decoder(keys, attention_bias=keys.flag("attention_bias"), mlp_bias=keys.flag("mlp_bias"))


def mistral(keys: ConfigReader) -> ArchFacts:
    return decoder(keys, windows=same_window(sliding_window(keys), keys))


def ministral3(keys: ConfigReader) -> ArchFacts:
    """Read Ministral 3: queries at positions beyond yarn's original length are scaled."""
    windows = same_window(sliding_window(keys, None), keys)
    return decoder(keys, head_dim=128, windows=windows, attention_temperature=attention_temperature(keys))


def attention_temperature(keys: ConfigReader) -> tuple[float, float]:
    block = keys.get("rope_parameters")
    if not isinstance(block, dict):
        raise keys.wrong("rope_parameters", "an object")
    rope = ConfigReader(f"{keys.source}, rope_parameters", block)
    return rope.size("original_max_position_embeddings"), rope.number("llama_4_scaling_beta")


def ministral(keys: ConfigReader) -> ArchFacts:
    window = sliding_window(keys)
    kinds = [FULL if window is None else SLIDING] * keys.size("num_hidden_layers")
    return decoder(keys, windows=windows_by_kind(keys, window, default=kinds))


def qwen2(keys: ConfigReader) -> ArchFacts:
    """Read Qwen 2; the MoE models may disable the biases."""
    return decoder(keys, qkv_bias=keys.flag("qkv_bias", True), windows=_qwen_windows(keys))


def qwen3(keys: ConfigReader) -> ArchFacts:
    biased, windows = keys.flag("attention_bias"), _qwen_windows(keys)
    return decoder(keys, head_dim=128, attention_bias=biased, qk_norm="head", windows=windows)


def _qwen_windows(keys: ConfigReader) -> Windows:
    """Return the window of each layer of Qwen. With use_sliding_window, the window layers are those in
    layer_types or, without this key, all layers from max_window_layers on."""
    window = sliding_window(keys) if keys.flag("use_sliding_window") else None
    if window is None:
        return same_window(None, keys)
    if keys.get("layer_types") is not None:
        return windows_by_kind(keys, window)
    first = keys.count("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(keys.size("num_hidden_layers")))


def smollm3(keys: ConfigReader) -> ArchFacts:
    """Read SmolLM3: every fourth layer has no rotary embedding."""
    num_layers, interval = keys.size("num_hidden_layers"), keys.size("no_rope_layer_interval", 4)
    rotates = keys.get("no_rope_layers")
    if rotates is None:
        rotates = [bool((layer + 1) % interval) for layer in range(num_layers)]
    if not isinstance(rotates, list) or len(rotates) != num_layers:
        raise keys.wrong("no_rope_layers", f"{num_layers} entries, 0 for layers without rotary embedding")
    window = sliding_window(keys, None) if keys.flag("use_sliding_window") else None
    return decoder(
        keys.defaults(rope_theta=2e6, tie_word_embeddings=True),
        rotates=rotates,
        windows=windows_by_kind(keys, window, default=[FULL if rotated else SLIDING for rotated in rotates]),
        attention_bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
    )


def gemma(keys: ConfigReader) -> ArchFacts:
    """Read Gemma 1. Its `gelu` means the tanh approximation."""
    keys.require("use_bidirectional_attention", False)
    if keys.get("hidden_act") in (None, "gelu"):
        keys = keys.but(hidden_act="gelu_pytorch_tanh")
    return decoder(
        keys.defaults(tie_word_embeddings=True),
        head_dim=256,
        norm="rms_plus_one",
        attention_bias=keys.flag("attention_bias"),
        embed_scale=math.sqrt(keys.size("hidden_size")),
    )


def ernie(keys: ConfigReader, head_dim: int | None = 128, **facts: Any) -> ArchFacts:
    keys = keys.defaults(rope_theta=500000.0, rms_norm_eps=1e-5, tie_word_embeddings=True)
    return decoder(keys, head_dim=head_dim, pairs=True, biases=keys.flag("use_bias"), **facts)


def hunyuan(keys: ConfigReader) -> ArchFacts:
    """Read Hunyuan. For `dynamic` rope with the key alpha, the rope base is scaled regardless of the
    length."""
    keys.require("use_qk_norm", True)
    keys.require("use_cla", False)
    head_dim = head_dim_of(keys)
    for name in ("rope_parameters", "rope_scaling"):
        block = keys.get(name)
        if isinstance(block, dict) and block.get("alpha"):
            rope = ConfigReader(f"{keys.source}, {name}", {"rope_theta": keys.get("rope_theta")} | block)
            stretch = rope.number("alpha") ** (head_dim / (head_dim - 2))
            plain = {"rope_type": "default", "rope_theta": rope.number("rope_theta", 10000.0) * stretch}
            keys = keys.but(**{name: plain})
    return llama(keys.defaults(rms_norm_eps=1e-5))


def granite(keys: ConfigReader) -> ArchFacts:
    return decoder(
        keys,
        attention_bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
        embed_scale=keys.number("embedding_multiplier", 1.0),
        residual_scale=keys.number("residual_multiplier", 1.0),
        attention_scale=keys.number("attention_multiplier", 1.0),
        logit_scale=1 / keys.number("logits_scaling", 1.0),
    )


def granite_swa(keys: ConfigReader) -> ArchFacts:
    """Read Granite with sliding windows: three window layers per full-attention layer. Each layer may have
    its own rope base, or no rotary embedding."""
    num_layers = keys.size("num_hidden_layers")
    windows = windows_by_kind(keys, sliding_window(keys, 128), default=full_every(keys, 4, first=0))
    facts = granite(keys)
    bases = keys.get("layer_rope_theta")
    if bases is None:
        ropes = [layer.rope for layer in facts.layers]
    elif not isinstance(bases, list) or len(bases) != num_layers:
        raise keys.wrong("layer_rope_theta", f"{num_layers} numbers, 0 for layers without rotary embedding")
    else:
        ropes = [_read_layer_rope(keys, base, facts.head_dim) if base else None for base in bases]
    layers = tuple(LayerFacts(rope, window) for rope, window in zip(ropes, windows, strict=True))
    return replace(facts, layers=layers, sinks=True)


def _read_layer_rope(keys: ConfigReader, theta: float, head_dim: int) -> RopeFacts:
    block = keys.get("rope_parameters")
    if isinstance(block, dict):
        keys = keys.but(rope_parameters=block | {"rope_theta": theta})
    return read_rope(keys.but(rope_theta=theta), head_dim)


def internlm3(keys: ConfigReader) -> ArchFacts:
    biased = keys.flag("bias")
    return decoder(keys, qkv_bias=keys.flag("qkv_bias"), out_bias=biased, mlp_bias=biased)


def seed_oss(keys: ConfigReader) -> ArchFacts:
    return decoder(
        keys,
        head_dim=128,
        qkv_bias=keys.flag("attention_bias", True),
        out_bias=keys.flag("attention_out_bias"),
        mlp_bias=keys.flag("mlp_bias"),
    )


def phi3(keys: ConfigReader) -> ArchFacts:
    """Read Phi-3. Older files call longrope `su` or `yarn`."""
    for name in ("rope_parameters", "rope_scaling"):
        block = keys.get(name)
        if isinstance(block, dict) and block.get("rope_type", block.get("type")) in ("su", "yarn"):
            keys = keys.but(**{name: {**block, "rope_type": "longrope"}})
    return decoder(
        keys.defaults(original_max_position_embeddings=4096, rms_norm_eps=1e-5),
        fused_qkv=True,
        fused_gate_up=True,
        windows=same_window(sliding_window(keys, None), keys),
    )


def glm(keys: ConfigReader) -> ArchFacts:
    """Read GLM: half of each head is rotated, in adjacent pairs."""
    return decoder(
        keys.defaults(partial_rotary_factor=0.5, rms_norm_eps=1.5625e-7),
        head_dim=128,
        pairs=True,
        qkv_bias=keys.flag("attention_bias", True),
        fused_gate_up=True,
    )


def olmo2(keys: ConfigReader, **facts: Any) -> ArchFacts:
    keys = keys.defaults(rms_norm_eps=1e-5)
    return decoder(keys, qk_norm="all", attention_bias=keys.flag("attention_bias"), **facts)


def olmo3(keys: ConfigReader) -> ArchFacts:
    """Read OLMo 3: three window layers per full-attention layer; only full-attention layers have rope
    scaling."""
    keys = keys.defaults(rope_theta=500000.0)
    pattern = full_every(keys, 4)
    kinds = layer_kinds(keys, SLIDING, FULL, default=pattern)
    head_dim = head_dim_of(keys)
    ropes = ropes_by_kind(keys, head_dim, SLIDING, FULL)
    if keys.get("rope_parameters") is None:
        ropes[SLIDING] = ropes_by_kind(keys.but(rope_scaling=None), head_dim, SLIDING)[SLIDING]
    windows = windows_by_kind(keys, sliding_window(keys), default=pattern)
    layers = (LayerFacts(ropes[kind], window) for kind, window in zip(kinds, windows, strict=True))
    return olmo2(keys, layers=tuple(layers))


def exaone4(keys: ConfigReader) -> ArchFacts:
    """Read EXAONE 4: in models with window layers, only these layers have rotary embedding."""
    window, kinds = sliding_window(keys), full_every(keys, 1)
    if window is not None and keys.get("layer_types") is None:
        kinds = full_every(keys, keys.size("sliding_window_pattern", 4))
    windows = windows_by_kind(keys, window, default=kinds)
    return decoder(
        keys.defaults(rms_norm_eps=1e-5),
        windows=windows,
        rotates=[window is None or layer_window is not None for layer_window in windows],
        qk_norm="head",
    )


def cohere(keys: ConfigReader, **facts: Any) -> ArchFacts:
    return decoder(
        keys.defaults(rope_theta=500000.0, layer_norm_eps=1e-5, tie_word_embeddings=True),
        pairs=True,
        norm="layer",
        eps_key="layer_norm_eps",
        attention_bias=keys.flag("attention_bias"),
        qk_norm="each" if keys.flag("use_qk_norm") else "",
        logit_scale=keys.number("logit_scale", 0.0625),
        **facts,
    )


def cohere2(keys: ConfigReader) -> ArchFacts:
    """Read Cohere 2: three window layers per full-attention layer; only window layers have rotary
    embedding."""
    keys = keys.defaults(rope_theta=10000.0)
    pattern = full_every(keys, keys.size("sliding_window_pattern", 4))
    windows = windows_by_kind(keys, sliding_window(keys), default=pattern)
    return cohere(keys, windows=windows, rotates=[window is not None for window in windows])


def nemotron(keys: ConfigReader) -> ArchFacts:
    return decoder(
        keys.defaults(partial_rotary_factor=0.5, norm_eps=1e-5, hidden_act="relu2"),
        norm="layer_plus_one",
        norm_bias=True,
        eps_key="norm_eps",
        attention_bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
    )


def arcee(keys: ConfigReader) -> ArchFacts:
    return llama(keys.defaults(rms_norm_eps=1e-5, hidden_act="relu2"))


def jais2(keys: ConfigReader) -> ArchFacts:
    keys = keys.defaults(layer_norm_eps=1e-5, hidden_act="relu2", attention_bias=True, mlp_bias=True)
    return decoder(
        keys,
        **LAYER_NORM,
        eps_key="layer_norm_eps",
        attention_bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
    )


def cwm(keys: ConfigReader) -> ArchFacts:
    """Read CWM: three window layers per full-attention layer."""
    windows = windows_by_kind(keys, sliding_window(keys, 8192), default=full_every(keys, 4, first=0))
    keys = keys.defaults(rope_theta=1e6, rms_norm_eps=1e-5)
    return decoder(keys, head_dim=128, windows=windows, mlp_bias=keys.flag("mlp_bias"))


def hyperclovax(keys: ConfigReader) -> ArchFacts:
    """Read HyperCLOVA X: Granite with norms after attention and feed-forward; logits are multiplied by the
    scale, not divided."""
    keys.require("use_post_norm", True)
    facts = granite(keys.but(logits_scaling=None))
    scale = keys.optional_number("attention_multiplier")
    return replace(facts, attention_scale=scale, logit_scale=keys.number("logits_scaling", 1.0))


def apertus(keys: ConfigReader) -> ArchFacts:
    """Read Apertus, where the activation (xIELU) has weights and is part of the model code."""
    keys.require("hidden_act", "xielu")
    return decoder(
        keys.defaults(rope_theta=12e6, rms_norm_eps=1e-5).but(hidden_act=None),
        qk_norm="head",
        attention_bias=keys.flag("attention_bias"),
        unused=r"\.act_fn\.(beta|eps)$",
    )


def starcoder2(keys: ConfigReader) -> ArchFacts:
    windows, biased = same_window(sliding_window(keys, None), keys), keys.flag("use_bias", True)
    keys = keys.defaults(norm_epsilon=1e-5, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True)
    return decoder(keys, windows=windows, eps_key="norm_epsilon", biases=biased, **LAYER_NORM)


def gpt_keys(keys: ConfigReader) -> ConfigReader:
    """Return the keys of GPT-2 or GPT-J, with their values also under Llama's key names."""
    hidden = keys.size("n_embd")
    return keys.but(
        hidden_size=hidden,
        num_attention_heads=keys.size("n_head"),
        num_hidden_layers=keys.size("n_layer"),
        num_key_value_heads=None,
        head_dim=None,
        intermediate_size=keys.size("n_inner", 4 * hidden),
        activation_function=keys.get("activation_function") or "gelu_new",
        rms_norm_eps=keys.number("layer_norm_epsilon", 1e-5),
    )


def gpt2(keys: ConfigReader, **facts: Any) -> ArchFacts:
    keys.require("scale_attn_by_inverse_layer_idx", False)
    return decoder(
        gpt_keys(keys).defaults(tie_word_embeddings=True),
        rotates=[False] * keys.size("n_layer"),
        activation_key="activation_function",
        fused_qkv=True,
        attention_scale=None if keys.flag("scale_attn_weights", True) else 1.0,
        biases=True,
        **({"transposed": True, "learned_positions": True} | LAYER_NORM | facts),
    )


def gpt_neox(keys: ConfigReader) -> ArchFacts:
    rotary_factor, theta = keys.optional_number("rotary_pct"), keys.optional_number("rotary_emb_base")
    return decoder(
        keys.defaults(
            partial_rotary_factor=rotary_factor or 0.25,
            rope_theta=theta or 10000.0,
            hidden_act="gelu",
            layer_norm_eps=1e-5,
        ).but(num_key_value_heads=None),
        eps_key="layer_norm_eps",
        parallel_norms=2 if keys.flag("use_parallel_residual", True) else 0,
        fused_qkv=True,
        **LAYER_NORM,
        attention_bias=keys.flag("attention_bias", True),
        mlp_bias=True,
    )


def phi(keys: ConfigReader) -> ArchFacts:
    return decoder(
        keys.defaults(partial_rotary_factor=0.5, hidden_act="gelu_new", layer_norm_eps=1e-5),
        eps_key="layer_norm_eps",
        biases=True,
        head_bias=True,
        qk_norm="head" if keys.flag("qk_layernorm") else "",
        **LAYER_NORM,
    )


def opt(keys: ConfigReader) -> ArchFacts:
    keys.require("do_layer_norm_before", True)
    keys.require("layer_norm_elementwise_affine", True)
    keys.require("_remove_final_layer_norm", False)
    keys.require("word_embed_proj_dim", keys.size("hidden_size"))
    return decoder(
        keys.defaults(activation_function="relu", tie_word_embeddings=True).but(num_key_value_heads=None),
        rotates=[False] * keys.size("num_hidden_layers"),
        learned_positions=True,
        intermediate=keys.size("ffn_dim"),
        activation_key="activation_function",
        norm_eps=1e-5,
        biases=keys.flag("enable_bias", True),
        **LAYER_NORM,
    )


def whisper(keys: ConfigReader) -> ArchFacts:
    """Read the decoder of Whisper. transformers ignores `scale_embedding`, and so does Quire."""
    hidden, num_layers = keys.size("d_model", 384), keys.size("decoder_layers", 4)
    return decoder(
        keys.but(
            hidden_size=hidden,
            num_attention_heads=keys.size("decoder_attention_heads", 6),
            num_hidden_layers=num_layers,
            num_key_value_heads=None,
            head_dim=None,
            max_position_embeddings=keys.size("max_target_positions", 448),
        ).defaults(activation_function="gelu", tie_word_embeddings=True),
        rotates=[False] * num_layers,
        learned_positions=True,
        intermediate=keys.size("decoder_ffn_dim", 4 * hidden),
        activation_key="activation_function",
        norm_eps=1e-5,
        unused=r"^proj_out\.weight$",
        biases=True,
        **LAYER_NORM,
    )
