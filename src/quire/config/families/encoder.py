"""Encoders: models that read a whole text in both directions."""

from typing import Any

from quire.config.facts import ArchFacts, EncoderFacts, LayerFacts
from quire.config.families.decoder import activation_of, layer_kinds, longest_of
from quire.config.keys import Keys
from quire.config.rope import max_len_of, read_rope
from quire.errors import ConfigError


def bert(keys: Keys) -> ArchFacts:
    return _bert(keys, "bert")


def roberta(keys: Keys) -> ArchFacts:
    """The position of padding is that token's own id, wherever it stands, and no text uses those before."""
    padding = keys.get("pad_token_id")
    padding = 1 if padding is None else padding
    if not isinstance(padding, int) or padding < 0:
        raise keys.wrong("pad_token_id", "a token id")
    return _bert(keys, "roberta", first_position=padding + 1, padding=padding)


def _bert(keys: Keys, prefix: str, first_position: int = 0, padding: int | None = None) -> ArchFacts:
    kind = keys.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise keys.wrong("position_embedding_type", "absolute (no other is supported)")
    if keys.flag("is_decoder"):
        raise keys.wrong("is_decoder", "false: only texts that are read in both directions are supported")
    positions = keys.size("max_position_embeddings", 512)
    return _encoder(
        keys,
        layers=(LayerFacts(None),) * keys.size("num_hidden_layers"),
        encoder=EncoderFacts(prefix, positions, first_position, padding, keys.size("type_vocab_size", 2)),
        activation=activation_of(keys, default="gelu"),
        norm_eps=keys.number("layer_norm_eps", 1e-12),
        max_len=positions - first_position,
        norm_bias=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def modernbert(keys: Keys) -> ArchFacts:
    """Most layers look at what is near, with a rotation of their own."""
    every = keys.size("global_attn_every_n_layers", 3)
    kinds = ("full_attention", "sliding_attention")
    named = layer_kinds(
        keys, *kinds, default=[kinds[bool(i % every)] for i in range(keys.size("num_hidden_layers"))]
    )
    near = keys.size("local_attention", 128) // 2
    head_dim = _head_dim(keys)
    ropes = {
        "full_attention": read_rope(_rope_keys(keys, "full_attention", "global", 160_000.0), head_dim),
        "sliding_attention": read_rope(_rope_keys(keys, "sliding_attention", "local", 10_000.0), head_dim),
    }
    layers = tuple(LayerFacts(ropes[kind], near if kind == "sliding_attention" else None) for kind in named)
    biased = keys.flag("attention_bias")
    return _encoder(
        keys,
        layers=layers,
        encoder=EncoderFacts(
            "model",
            classifier_bias=keys.flag("classifier_bias"),
            classifier_activation=activation_of(keys, "classifier_activation", "gelu"),
        ),
        activation=activation_of(keys, "hidden_activation", "gelu"),
        norm_eps=keys.number("norm_eps", 1e-5),
        max_len=longest_of(layers) or max_len_of(keys),
        norm_bias=keys.flag("norm_bias"),
        qkv_bias=biased,
        out_bias=biased,
        mlp_bias=keys.flag("mlp_bias"),
        fused_gate_up=True,
    )


def _encoder(keys: Keys, **facts: Any) -> ArchFacts:
    heads = keys.size("num_attention_heads")
    return ArchFacts(
        architecture="",
        vocab=keys.size("vocab_size"),
        hidden=keys.size("hidden_size"),
        intermediate=keys.size("intermediate_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=_head_dim(keys),
        norm="layer",
        **facts,
    )


def _head_dim(keys: Keys) -> int:
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    if hidden % heads:
        raise ConfigError(f"{keys.source}: hidden_size {hidden} is not divisible by {heads} heads")
    return hidden // heads


def _rope_keys(keys: Keys, kind: str, older: str, theta: float) -> Keys:
    """What concerns one kind of layer: a part of `rope_parameters`, or what came before it."""
    parameters = keys.get("rope_parameters") or {}
    own = parameters.get(kind) if isinstance(parameters, dict) else None
    if own is not None and not isinstance(own, dict):
        raise keys.wrong("rope_parameters", f"an object of objects, among them {kind}")
    given = {"rope_theta": keys.get(f"{older}_rope_theta") or theta, **(own or {})}
    return Keys(keys.source, {**keys.values, "rope_theta": None, "rope_parameters": given})
