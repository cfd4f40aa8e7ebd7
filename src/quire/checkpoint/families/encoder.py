"""Encoder-only models: BERT and its relatives, with bidirectional attention."""

import math
from dataclasses import replace
from typing import Any

from quire.checkpoint.facts import ArchFacts, EncoderFacts, LayerFacts, RopeFacts
from quire.checkpoint.families.decoder import (
    FULL,
    SLIDING,
    activation_of,
    full_every,
    layer_kinds,
    max_rope_len,
)
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import max_len_of, read_rope
from quire.errors import ConfigError


def bert(keys: ConfigReader) -> ArchFacts:
    return _bert(keys, "bert")


def roberta(keys: ConfigReader) -> ArchFacts:
    """Read RoBERTa. The position of padding tokens is their token id; positions of text start after it."""
    padding = keys.get("pad_token_id")
    padding = 1 if padding is None else padding
    if not isinstance(padding, int) or padding < 0:
        raise keys.wrong("pad_token_id", "a token id")
    return _bert(keys, "roberta", first_position=padding + 1, padding=padding)


def ernie(keys: ConfigReader) -> ArchFacts:
    tasks = keys.size("task_type_vocab_size", 3) if keys.flag("use_task_id") else 0
    return _bert(keys, "ernie", task_types=tasks)


def mpnet(keys: ConfigReader) -> ArchFacts:
    """Read MPNet. Padding is always token 1; there are no token types."""
    if keys.size("relative_attention_num_buckets", 32) != 32:
        raise keys.wrong("relative_attention_num_buckets", "32")
    return _bert(keys, "mpnet", first_position=2, padding=1, token_types=0, distances=32)


def distilbert(keys: ConfigReader) -> ArchFacts:
    """Read DistilBERT: BERT with other key names and without token types."""
    renamed = {
        "hidden_size": keys.size("dim", 768),
        "intermediate_size": keys.size("hidden_dim", 3072),
        "num_attention_heads": keys.size("n_heads", 12),
        "num_hidden_layers": keys.size("n_layers", 6),
        "hidden_act": keys.get("activation"),
    }
    return _bert(keys.but(**renamed, layer_norm_eps=1e-12), "distilbert", token_types=0)


def _bert(keys: ConfigReader, prefix: str, **encoder: Any) -> ArchFacts:
    """Read BERT or a model like it; `encoder` are fields of EncoderFacts."""
    kind = keys.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise keys.wrong("position_embedding_type", "absolute (no other is supported)")
    if keys.flag("is_decoder"):
        raise keys.wrong("is_decoder", "false: only bidirectional attention is supported")
    positions = keys.size("max_position_embeddings", 512)
    fields: dict[str, Any] = {"token_types": keys.size("type_vocab_size", 2)} | encoder
    return _encoder(
        keys,
        layers=(LayerFacts(None),) * keys.size("num_hidden_layers"),
        encoder=EncoderFacts(prefix, positions, **fields),
        activation=activation_of(keys, default="gelu"),
        norm_eps=keys.number("layer_norm_eps", 1e-12),
        max_len=positions - encoder.get("first_position", 0),
        norm_bias=True,
        biases=True,
    )


def modernbert(keys: ConfigReader) -> ArchFacts:
    """Read ModernBERT: most layers have a sliding window and another rope base."""
    default = full_every(keys, keys.size("global_attn_every_n_layers", 3), first=0)
    named = layer_kinds(keys, FULL, SLIDING, default=default)
    window = keys.size("local_attention", 128) // 2
    head_dim = _head_dim(keys)
    ropes = {
        FULL: read_rope(_rope_keys(keys, FULL, "global", 160_000.0), head_dim),
        SLIDING: read_rope(_rope_keys(keys, SLIDING, "local", 10_000.0), head_dim),
    }
    layers = tuple(LayerFacts(ropes[kind], window if kind == SLIDING else None) for kind in named)
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
        max_len=max_rope_len(layers) or max_len_of(keys),
        norm_bias=keys.flag("norm_bias"),
        qkv_bias=keys.flag("attention_bias"),
        out_bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
        fused_gate_up=True,
    )


_DUAL_ACTIVATIONS = ("quick_gelu", "gelu", "gelu_pytorch_tanh")


def clip_text(keys: ConfigReader) -> ArchFacts:
    sizes = {"vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    return _dual_text(keys, sizes, positions=77, activation="quick_gelu", norm_eps=1e-5)


def siglip_text(keys: ConfigReader) -> ArchFacts:
    sizes = {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    return _dual_text(keys, sizes, positions=64, activation="gelu_pytorch_tanh", norm_eps=1e-6)


def _dual_text(
    keys: ConfigReader, sizes: dict[str, int], *, positions: int, activation: str, norm_eps: float
) -> ArchFacts:
    """Read the text encoder of CLIP or SigLIP; the parameters after `keys` are the defaults of the family."""
    keys = keys.defaults(**sizes)
    activation = str(keys.get("hidden_act") or activation)
    if activation not in _DUAL_ACTIVATIONS:
        raise keys.wrong("hidden_act", f"one of {', '.join(_DUAL_ACTIVATIONS)}")
    positions = keys.size("max_position_embeddings", positions)
    size_out = keys.size("projection_size", keys.size("hidden_size"))
    padding = keys.token_ids("pad_token_id") or (1,)
    return _encoder(
        keys,
        layers=(LayerFacts(None),) * keys.size("num_hidden_layers", 12),
        encoder=EncoderFacts("text_model", positions, padding=padding[0], size_out=size_out),
        activation=activation,
        norm_eps=keys.number("layer_norm_eps", norm_eps),
        max_len=positions,
        norm_bias=True,
        biases=True,
        unused=r"^logit_(scale|bias)$|\.position_ids$",
    )


_NOMIC_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor",
}
"""Maps keys of the first Nomic checkpoints to those of transformers."""
_NOMIC_LEN = 2048
"""Length in tokens that Nomic was trained for; longer texts would need dynamic rope scaling."""


def nomic(keys: ConfigReader) -> ArchFacts:
    is_older = keys.get("n_embd") is not None
    keys = keys.renamed(_NOMIC_KEYS)
    for key, usual in (("prenorm", False), ("use_rms_norm", False), ("rotary_emb_interleaved", False)):
        if keys.flag(key, usual) is not usual:
            raise keys.wrong(key, "false")
    if is_older and (keys.get("activation_function") != "swiglu" or (keys.get("num_experts") or 0) > 0):
        raise keys.wrong("activation_function", "swiglu, without experts")
    trained = min(keys.size("max_trained_positions", _NOMIC_LEN), keys.size("max_position_embeddings", 2048))
    rope = read_rope(_with_theta(keys, 1000.0), _head_dim(keys))
    return _rotary_encoder(
        keys,
        rope,
        EncoderFacts("nomic_bert", token_types=keys.count("type_vocab_size", 2), gated=True),
        activation=activation_of(keys, default="silu"),
        max_len=trained,
        qkv_bias=keys.flag("qkv_proj_bias"),
        out_bias=keys.flag("qkv_proj_bias"),
        mlp_bias=keys.flag("mlp_fc2_bias"),
    )


def gte(keys: ConfigReader) -> ArchFacts:
    """Read GTE in the format of transformers, or of the first GTE checkpoints (remote-code architecture
    New)."""
    is_new = any(str(name).startswith(("New", "GteNew")) for name in keys.get("architectures") or ())
    if (kind := keys.get("position_embedding_type")) not in (None, "rope"):
        raise keys.wrong("position_embedding_type", f"rope ({kind!r} is not supported)")
    if str(keys.get("layer_norm_type") or "layer_norm") != "layer_norm":
        raise keys.wrong("layer_norm_type", "layer_norm")
    if keys.flag("logn_attention_scale"):
        raise keys.wrong("logn_attention_scale", "false")
    length = keys.size("max_position_embeddings", 8192)
    return _rotary_encoder(
        keys,
        _stretched_rope(keys, 10_000.0 if is_new else 160_000.0, length),
        EncoderFacts("new" if is_new else "gte", token_types=keys.count("type_vocab_size", 1), gated=True),
        activation=activation_of(keys, default="gelu"),
        max_len=length,
        biases=True,
    )


def jina(keys: ConfigReader) -> ArchFacts:
    rope = read_rope(_with_theta(keys, 20_000.0), _head_dim(keys))
    return _rotary_encoder(
        keys,
        rope,
        EncoderFacts("roberta", token_types=keys.count("type_vocab_size", 1)),
        activation=activation_of(keys, default="gelu"),
        norm_eps=keys.number("layer_norm_eps", 1e-5),
        max_len=max_len_of(keys),
        biases=True,
    )


def _rotary_encoder(keys: ConfigReader, rope: RopeFacts, encoder: EncoderFacts, **facts: Any) -> ArchFacts:
    fields = {"norm_eps": keys.number("layer_norm_eps", 1e-12), "norm_bias": True, **facts}
    layers = (LayerFacts(rope),) * keys.size("num_hidden_layers")
    return _encoder(keys, layers=layers, encoder=encoder, **fields)


def _stretched_rope(keys: ConfigReader, theta: float, length: int) -> RopeFacts:
    """Read the rope of GTE; `theta` is the default rope base. The scaling type `ntk` (kexue.fm/archives/9706)
    increases the base, divides all frequencies, and sets the maximum length to `length`."""
    scaling = keys.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling.get("type", scaling.get("rope_type")) != "ntk":
        return read_rope(_with_theta(keys, theta), _head_dim(keys))
    if scaling.get("mixed_b") is not None:
        raise keys.wrong("rope_scaling", "an object without mixed_b")
    factor = ConfigReader(f"{keys.source}, rope_scaling", scaling).number("factor")
    rope = read_rope(_with_theta(keys.but(rope_scaling=None), theta), _head_dim(keys))
    divisor = math.pow(factor, 2 / rope.dim)
    return replace(rope, theta=rope.theta * factor, kind="linear", factor=divisor, max_len=length)


def _with_theta(keys: ConfigReader, theta: float) -> ConfigReader:
    """Return the keys with rope_theta set: to its value in config.json, or else to `theta`."""
    rope = keys.get("rope_parameters")
    value = rope.get("rope_theta") if isinstance(rope, dict) else None
    return keys.but(rope_theta=value or keys.get("rope_theta") or theta)


def _encoder(keys: ConfigReader, *, biases: bool = False, **facts: Any) -> ArchFacts:
    """Read an encoder with layer norms; `biases`: whether linear layers have biases unless `facts` override
    this."""
    heads = keys.size("num_attention_heads")
    facts = {"qkv_bias": biases, "out_bias": biases, "mlp_bias": biases, **facts}
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


def _head_dim(keys: ConfigReader) -> int:
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    if hidden % heads:
        raise ConfigError(f"{keys.source}: hidden_size {hidden} is not divisible by {heads} heads")
    return hidden // heads


def _rope_keys(keys: ConfigReader, kind: str, older: str, theta: float) -> ConfigReader:
    """Return the keys with the rope of the layer type `kind`: its part of `rope_parameters`, or the older key
    such as `global_rope_theta` (prefix `older`, default `theta`)."""
    parameters = keys.get("rope_parameters") or {}
    section = parameters.get(kind) if isinstance(parameters, dict) else None
    if section is not None and not isinstance(section, dict):
        raise keys.wrong("rope_parameters", f"an object of objects, among them {kind}")
    rope = {"rope_theta": keys.get(f"{older}_rope_theta") or theta, **(section or {})}
    return keys.but(rope_theta=None, rope_parameters=rope)
