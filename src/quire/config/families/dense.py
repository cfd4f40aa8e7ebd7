"""Decoders whose layers are all of one kind."""

from dataclasses import replace

from quire.config.facts import ArchFacts
from quire.config.families.decoder import Windows, decoder, everywhere, sliding_window, windows_by_kind
from quire.config.keys import Keys


def llama(keys: Keys) -> ArchFacts:
    biased = keys.flag("attention_bias")
    return decoder(keys, qkv_bias=biased, out_bias=biased, mlp_bias=keys.flag("mlp_bias"))


def granite(keys: Keys) -> ArchFacts:
    return replace(
        llama(keys),
        embed_scale=keys.number("embedding_multiplier", 1.0),
        residual_scale=keys.number("residual_multiplier", 1.0),
        attention_scale=keys.number("attention_multiplier", 1.0),
        logit_scale=1 / keys.number("logits_scaling", 1.0),
    )


def mistral(keys: Keys) -> ArchFacts:
    return decoder(keys, windows=everywhere(sliding_window(keys), keys))


def qwen2(keys: Keys) -> ArchFacts:
    return decoder(keys, qkv_bias=True, windows=_upper_windows(keys))


def qwen3(keys: Keys) -> ArchFacts:
    biased = keys.flag("attention_bias")
    return decoder(
        keys, head_dim=128, qkv_bias=biased, out_bias=biased, qk_norm="head", windows=_upper_windows(keys)
    )


def _upper_windows(keys: Keys) -> Windows:
    """Qwen's: where use_sliding_window is set, in the layers that are named or in those from
    max_window_layers on."""
    window = sliding_window(keys) if keys.flag("use_sliding_window") else None
    if window is None:
        return everywhere(None, keys)
    if keys.get("layer_types") is not None:
        return windows_by_kind(keys, window)
    first = keys.get("max_window_layers")
    first = 28 if first is None else first
    if not isinstance(first, int) or first < 0:
        raise keys.wrong("max_window_layers", "a number of layers")
    return tuple(window if layer >= first else None for layer in range(keys.size("num_hidden_layers")))
