"""Decoders with linear attention in most layers: OLMo Hybrid, Kimi Linear, Ling 3, MiniMax-Text-01 and M1."""

from dataclasses import replace

from quire.checkpoint.facts import ArchFacts, LayerFacts, RopeFacts, StateFacts
from quire.checkpoint.families.decoder import (
    FULL,
    decoder,
    full_every,
    head_dim_of,
    layer_kinds,
    sliding_window,
)
from quire.checkpoint.families.dense import olmo2
from quire.checkpoint.families.mla import mla_decoder
from quire.checkpoint.families.moe import (
    add_experts,
    deepseek_experts,
    first_dense,
    mtp_pattern,
    read_experts,
)
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import max_len_of, read_rope

_LINEAR = "linear_attention"
_KIMI_KEYS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Maps keys of Kimi Linear and Ling 3 to DeepSeek's, where these differ."""
_MINIMAX_KEYS = {
    "layernorm_full_attention_alpha": "full_attn_alpha_factor",
    "layernorm_full_attention_beta": "full_attn_beta_factor",
    "layernorm_linear_attention_alpha": "linear_attn_alpha_factor",
    "layernorm_linear_attention_beta": "linear_attn_beta_factor",
    "layernorm_mlp_alpha": "mlp_alpha_factor",
    "layernorm_mlp_beta": "mlp_beta_factor",
}
"""Maps keys of MiniMax-Text-01's published config.json to those of transformers."""


def olmo_hybrid(keys: ConfigReader) -> ArchFacts:
    """Read OLMo Hybrid: the gated delta rule, and attention, mostly without rotary embedding, in every fourth
    layer."""
    keys.require("hidden_act", "silu")
    heads, head_dim = keys.size("num_attention_heads"), head_dim_of(keys)
    default = full_every(keys, 4, other=_LINEAR)
    if FULL not in default:
        default[-1] = FULL
    kinds, block = layer_kinds(keys, _LINEAR, FULL, default=default), keys.get("rope_parameters")
    rotates = isinstance(block, dict) and block.get("rope_theta") is not None
    rope = read_rope(keys, head_dim) if rotates else None
    key_heads = keys.size("linear_num_key_heads", heads)
    key_dim = keys.size("linear_key_head_dim", 3 * keys.size("hidden_size") // (4 * key_heads))
    facts = olmo2(
        keys.defaults(rms_norm_eps=1e-6),
        layers=tuple(LayerFacts(rope) if kind == FULL else LayerFacts(None, mixer="delta") for kind in kinds),
        state=StateFacts(
            heads=keys.size("linear_num_value_heads", heads),
            head_dim=keys.size("linear_value_head_dim", 2 * key_dim),
            state=key_dim,
            groups=key_heads,
            conv=keys.size("linear_conv_kernel_dim", 4),
            conv_bias=False,
            norm_eps=1e-5,
            beta_scale=2.0 if keys.flag("linear_allow_neg_eigval", True) else 1.0,
        ),
    )
    return facts if rotates else replace(facts, max_len=max_len_of(keys))


def kimi_linear(keys: ConfigReader) -> ArchFacts:
    """Read Kimi Linear: KDA, latent attention without rotation in every fourth layer, DeepSeek's experts."""
    keys.require("hidden_act", "silu")
    keys = keys.defaults(rms_norm_eps=1e-5, routed_scaling_factor=2.446).renamed(_KIMI_KEYS)
    keys = keys.defaults(num_experts_per_tok=8, n_shared_experts=1)
    keys.require("mla_use_nope", True)
    keys.require("moe_router_activation_func", "sigmoid")
    keys.require("moe_layer_freq", 1)
    linear = ConfigReader(f"{keys.source}, linear_attn_config", keys.get("linear_attn_config") or {})
    count, default = keys.size("num_hidden_layers"), None
    if keys.get("layer_types") is None:
        full = [layer - 1 for layer in linear.integers("full_attn_layers")]
        full = full if linear.get("full_attn_layers") is not None else list(range(4, count, 4))
        default = [FULL if i in full else _LINEAR for i in range(count)]
    kinds = layer_kinds(keys, _LINEAR, FULL, default=default)
    dim = linear.size("head_dim", keys.size("linear_head_dim", 128))
    heads = linear.size("num_heads", keys.size("linear_num_heads", 32))
    conv = linear.size("short_conv_kernel_size", keys.size("linear_conv_kernel_dim", 4))
    state = StateFacts(
        heads=heads,
        head_dim=dim,
        state=dim,
        groups=heads,
        conv=conv,
        conv_bias=False,
        rank=dim,
        decays_channels=True,
        gate="sigmoid",
    )
    rope = RopeFacts(kind="none", dim=keys.size("qk_rope_head_dim", 64), max_len=max_len_of(keys))
    moe = replace(deepseek_experts(keys, "sigmoid"), names="kimi_linear")
    facts = mla_decoder(keys, pairs=False, rope=rope)
    return _mixed(add_experts(facts, moe, first_dense(keys, 1)), kinds, state)


def ling3(keys: ConfigReader) -> ArchFacts:
    """Read Ling 3 (BailingHybrid): KDA with a bounded decay, latent attention with gated heads in every sixth
    layer, DeepSeek's experts."""
    keys.require("hidden_act", "silu")
    sizes = {"num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 8, "topk_group": 4}
    keys = keys.renamed(_KIMI_KEYS).defaults(routed_scaling_factor=2.5, rope_theta=6e6, **sizes)
    default = full_every(keys, keys.size("layer_group_size", 6), other=_LINEAR)
    kinds = layer_kinds(keys, _LINEAR, FULL, default=default)
    heads, dim = keys.size("num_attention_heads"), keys.size("linear_head_dim", keys.size("head_dim", 128))
    bound = keys.values.get("kda_lower_bound", -5.0)
    if not isinstance(bound, int | float) or bound >= 0:
        raise keys.wrong("kda_lower_bound", "a negative number")
    state = StateFacts(
        heads=heads,
        head_dim=dim,
        state=dim,
        groups=heads,
        conv=keys.size("short_conv_kernel_size", 4),
        conv_bias=False,
        decays_channels=True,
        log_bound=float(bound) if keys.flag("kda_safe_gate", True) else 0.0,
        gate="sigmoid",
    )
    moe = replace(deepseek_experts(keys, "sigmoid"), names="bailing")
    facts = add_experts(mla_decoder(keys, pairs=True), moe, first_dense(keys, 2))
    return replace(_mixed(facts, kinds, state), head_gate=True, unused=mtp_pattern(keys))


def _mixed(facts: ArchFacts, kinds: list[str], state: StateFacts) -> ArchFacts:
    """Return the facts with the delta rule as the mixer of those layers that have the type linear_attention
    in `kinds`."""
    layers = (
        layer if kind == FULL else replace(layer, rope=None, mixer="delta")
        for layer, kind in zip(facts.layers, kinds, strict=True)
    )
    return replace(facts, layers=tuple(layers), state=state)


def minimax(keys: ConfigReader) -> ArchFacts:
    """Read MiniMax-Text-01 and M1: lightning attention, attention in every eighth layer, and experts."""
    keys = keys.renamed(_MINIMAX_KEYS).defaults(rope_theta=1e6, rms_norm_eps=1e-5)
    keys.require("postnorm", True)
    keys.require("shared_intermediate_size", 0)
    count, types = keys.size("num_hidden_layers"), keys.integers("attn_type_list")
    default = [FULL if kind else _LINEAR for kind in types] or full_every(keys, 2, first=0, other=_LINEAR)
    kinds = layer_kinds(keys, _LINEAR, FULL, default=default)
    head_dim = head_dim_of(keys)
    if keys.get("rotary_dim") is not None:
        keys = keys.defaults(partial_rotary_factor=keys.size("rotary_dim") / head_dim)
    window, rope = sliding_window(keys, None), read_rope(keys, head_dim)
    scales = {
        kind: _read_scales(keys, name) for kind, name in ((FULL, "full_attn"), (_LINEAR, "linear_attn"))
    }
    layers = tuple(
        LayerFacts(
            rope if kind == FULL else None,
            window if kind == FULL else None,
            mixer="attention" if kind == FULL else "lightning",
            residual_scales=(*scales[kind], *_read_scales(keys, "mlp")),
            depth=number / (count - 1 + 1e-5),
        )
        for number, kind in enumerate(kinds)
    )
    heads = keys.size("num_attention_heads")
    facts = decoder(
        keys,
        layers=layers,
        state=StateFacts(
            heads=heads, head_dim=head_dim, state=head_dim, groups=heads, conv=1, conv_bias=False
        ),
        unused=r"\.(slope_rate|query_decay|key_decay|diagonal_decay)$",
    )
    keys = keys.defaults(num_experts_per_tok=2)
    return add_experts(facts, read_experts(keys, "intermediate_size", True, names="mixtral"))


def _read_scales(keys: ConfigReader, name: str) -> tuple[float, float]:
    """Return the factors on the residual and on the output of one part of the layers, such as `mlp`."""
    return keys.number(f"{name}_alpha_factor", 1.0), keys.number(f"{name}_beta_factor", 1.0)
