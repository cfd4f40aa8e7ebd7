"""The zoo: a tiny model of every architecture, each with its settings beyond the common ones."""

from collections.abc import Callable
from typing import Any, NamedTuple

import reshaped_twins
import twins
from step_twin import step3, step35

from quire.checkpoint.families import FAMILIES

Settings = dict[str, Any]
"""Keys of a config.json."""


class Specimen(NamedTuple):
    """A tiny model of one architecture."""

    settings: Settings = {}
    variants: dict[str, Settings] = {}
    """Settings of each variant by name; each is a separate model."""
    twin: Callable[[Settings], Any] | None = None
    """Builds the reference model where transformers has none of this name."""
    alike: bool = False
    """Whether it is another model under other names, which whole-engine tests skip."""


SHARED: Settings = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "attn_implementation": "eager",
}


def rope(kind: str, **settings: Any) -> Settings:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | settings}


LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
_YARN: Settings = {"factor": 4.0, "original_max_position_embeddings": 64}
TIED: Settings = {"tie_word_embeddings": True}
UNTIED: Settings = {"tie_word_embeddings": False}
MHA: Settings = {"num_key_value_heads": 4}
BIASES: Settings = {"attention_bias": True, "mlp_bias": True}
TURNS = ["sliding_attention", "full_attention"]


def longrope(original: int) -> Settings:
    """Return Phi's LongRoPE on 3/4 of a head; transformers uses one list below `original` tokens, another
    above.
    """
    short, long = [1.0 + 0.1 * i for i in range(6)], [2.0 + i for i in range(6)]
    settings = rope("longrope", short_factor=short, long_factor=long, partial_rotary_factor=0.75)
    return {"original_max_position_embeddings": original, "partial_rotary_factor": 0.75} | settings


def internlm3(settings: Settings) -> Any:
    """Build Llama with two bias flags."""
    import transformers

    biased = settings.get("bias", False)
    config = transformers.LlamaConfig(**settings, attention_bias=settings["qkv_bias"], mlp_bias=biased)
    model = transformers.LlamaForCausalLM(config)
    if not biased:
        for layer in model.model.layers:
            layer.self_attn.o_proj.bias = None
    return model


def falcon(settings: Settings) -> Any:
    """Build Falcon, whose config has no head size and whose eager attention adds ALiBi twice."""
    import transformers

    settings = settings | {"attn_implementation": "sdpa" if settings.get("alibi") else "eager"}
    config = transformers.FalconConfig(**{key: settings[key] for key in settings if key != "head_dim"})
    return transformers.FalconForCausalLM(config)


_GRANITE: Settings = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}

_SHARING: Settings = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}

_DEEPSEEK: Settings = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}

_INDEXED = _DEEPSEEK | {"index_topk": 12, "index_head_dim": 24, "index_n_heads": 16}
"""Enough heads that no token's score is 0, since the choice among equal scores is undefined."""

_STEP: Settings = {
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "num_attention_groups": 2,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
    "sliding_window": 5,
    "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 16},
    "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0],
    "moe_layers_enum": "1,2",
    "moe_num_experts": 6,
    "moe_top_k": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 40,
    "moe_router_scaling_factor": 1.7,
    "swiglu_limits": [0.0, 0.0, 0.3, 0.0],
    "swiglu_limits_shared": [0.5, 0.0, 0.4, 0.0],
}
_GEMMA4 = TIED | {"sliding_window": 7, "layer_types": TURNS, "global_head_dim": 32}
_HYBRID: Settings = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_FACTORS: Settings = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.7,
    "mlp_multipliers": [0.8, 0.6],
    "key_multiplier": 0.5,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.7, 0.6, 0.9, 1.1, 0.8],
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.4,
}
_DELTA = _HYBRID | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_EXPERTS: Settings = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA_EXPERTS: Settings = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}

_KIMI: Settings = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

ZOO: dict[str, Specimen] = {
    "LlamaForCausalLM": Specimen(
        variants={
            "rope-default": rope("default", rope_theta=5000.0),
            "rope-linear": rope("linear", factor=4.0),
            "rope-dynamic": rope("dynamic", factor=2.0),
            "rope-llama3": LLAMA3,
            "rope-yarn": rope("yarn", **_YARN),
            "rope-yarn-mscale": rope(
                "yarn",
                mscale=1.0,
                mscale_all_dim=0.5,
                beta_fast=16.0,
                beta_slow=2.0,
                truncate=False,
                **_YARN,
            ),
            "rope-yarn-attention-factor": rope("yarn", attention_factor=1.3, **_YARN),
            "biases": BIASES,
            "tied": TIED,
            "mha": {"num_key_value_heads": 4},
            "one-kv-head": {"num_key_value_heads": 1},
            "wide-heads": {"head_dim": 32},
        }
    ),
    "Cohere2ForCausalLM": Specimen({"sliding_window": 7, "layer_types": TURNS}),
    "CohereForCausalLM": Specimen(
        {"logit_scale": 0.3}, {"biased": {"attention_bias": True}, "normed": {"use_qk_norm": True}}
    ),
    "ApertusForCausalLM": Specimen(variants={"biased": {"attention_bias": True}}),
    "ArceeForCausalLM": Specimen(variants={"biases": BIASES}),
    "Ernie4_5ForCausalLM": Specimen(variants={"biases-tied": {"use_bias": True} | TIED}),
    "Exaone4ForCausalLM": Specimen(
        {"sliding_window": 7, "layer_types": TURNS},
        {"full": {"sliding_window": None, "layer_types": ["full_attention"] * 2}},
    ),
    "GPT2LMHeadModel": Specimen({"num_key_value_heads": 4, "n_inner": 96}, {"tied": TIED}),
    "GPTNeoXForCausalLM": Specimen(
        {"num_key_value_heads": 4},
        {"unbiased": {"attention_bias": False}, "in-turn": {"use_parallel_residual": False}},
    ),
    "GemmaForCausalLM": Specimen(TIED, {"old-gelu": {"hidden_act": "gelu", "attention_bias": True}}),
    "Glm4ForCausalLM": Specimen(rope("default", partial_rotary_factor=0.5)),
    "GlmForCausalLM": Specimen(rope("default", partial_rotary_factor=0.5)),
    "GraniteForCausalLM": Specimen(
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.0,
        }
    ),
    "GraniteSWAForCausalLM": Specimen(
        _GRANITE | {"sliding_window": 7, "layer_rope_theta": [0, 5000.0]},
        {"default-windows": {"layer_rope_theta": None}},
    ),
    "HunYuanDenseV1ForCausalLM": Specimen(
        rope("dynamic", alpha=50.0, factor=1.0), {"plain-rope": rope("default")}
    ),
    "InternLM3ForCausalLM": Specimen({"qkv_bias": True}, {"biases": {"bias": True}}, internlm3),
    "Ministral3ForCausalLM": Specimen(
        rope(
            "yarn",
            factor=16.0,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.3,
        ),
        {"window": {"sliding_window": 7}},
    ),
    "MinistralForCausalLM": Specimen({"sliding_window": 7, "layer_types": TURNS}),
    "NemotronForCausalLM": Specimen({"norm_eps": 1e-5}, {"biases": BIASES}),
    "OPTForCausalLM": Specimen({"ffn_dim": 96, "init_std": 0.2, "num_key_value_heads": 4}, {"tied": TIED}),
    "Olmo2ForCausalLM": Specimen(variants={"biases": {"attention_bias": True}}),
    "Olmo3ForCausalLM": Specimen(
        {
            "sliding_window": 7,
            "layer_types": TURNS,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "full_attention": rope("yarn", **_YARN)["rope_parameters"],
            },
        }
    ),
    "PhiForCausalLM": Specimen(
        rope("default", partial_rotary_factor=0.5) | {"num_key_value_heads": 4},
        {"normed": {"qk_layernorm": True}, "tied": TIED},
    ),
    "Phi3ForCausalLM": Specimen(
        longrope(original=256), {"long": longrope(original=8), "window": {"sliding_window": 7}}
    ),
    "SeedOssForCausalLM": Specimen(),
    "SmolLM3ForCausalLM": Specimen({"no_rope_layers": [1, 0]}),
    "Starcoder2ForCausalLM": Specimen(
        variants={"unbiased": {"use_bias": False}, "window": {"sliding_window": 7}}
    ),
    "MistralForCausalLM": Specimen({"sliding_window": 7}, {"full": {"sliding_window": None}}),
    "Qwen2ForCausalLM": Specimen(
        variants={
            "tied-upper-window": {
                "tie_word_embeddings": True,
                "use_sliding_window": True,
                "sliding_window": 5,
                "max_window_layers": 1,
            }
        }
    ),
    "Qwen3ForCausalLM": Specimen(
        variants={
            "layer-types": {
                "attention_bias": True,
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"],
            }
        }
    ),
    "BloomForCausalLM": Specimen(TIED, {"untied-6-heads": {"n_head": 6, "hidden_size": 48} | UNTIED}),
    "MptForCausalLM": Specimen(
        {"max_seq_len": 256},
        {
            "clipped": {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}, "n_heads": 12, "d_model": 96},
        },
    ),
    "FalconForCausalLM": Specimen(
        {"num_key_value_heads": 1, "num_kv_heads": 4, "ffn_hidden_size": 96},
        {
            "two-norms": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
            "one-norm": {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "num_kv_heads": 2},
            "in-turn": {"parallel_attn": False, "multi_query": False} | TIED,
            "alibi": {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True},
        },
        falcon,
    ),
    "GPTBigCodeForCausalLM": Specimen({"n_inner": 96}, {"mha": {"multi_query": False} | TIED}),
    "GPTJForCausalLM": Specimen({"num_key_value_heads": 4, "n_inner": 96, "rotary_dim": 8}),
    "OlmoForCausalLM": Specimen(variants={"clipped": {"clip_qkv": 0.5, "attention_bias": True}}),
    "PersimmonForCausalLM": Specimen({"num_key_value_heads": 4}, {"no-norms": {"qk_layernorm": False}}),
    "StableLmForCausalLM": Specimen(
        variants={
            "normed-side-by-side": {"qk_layernorm": True, "use_parallel_residual": True},
            "normed-biased": {"qk_layernorm": True, "use_qkv_bias": True},
        }
    ),
    "JAISLMHeadModel": Specimen(
        TIED
        | {
            "num_key_value_heads": 4,
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 2,
            "n_inner": 96,
            "position_embedding_type": "alibi",
            "activation_function": "swiglu",
            "mup_scale_qk_dot_by_d": True,
            "mup_embeddings_scale": 3.0,
            "mup_width_scale": 0.5,
        },
        twin=twins.jais,
        alike=True,
    ),
    "DeciLMForCausalLM": Specimen(
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": None,
            "block_configs": [
                {"attention": {"no_op": True}, "ffn": {"intermediate_size": 48}},
                {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
                {"attention": {"n_heads_in_group": 4, "no_op": False}, "ffn": {"no_op": True}},
                {"attention": {"n_heads_in_group": 1}, "ffn": {"ffn_mult": 0.5, "no_op": False}},
            ],
        },
        twin=reshaped_twins.decilm,
    ),
    "OuroForCausalLM": Specimen(rope("default") | {"total_ut_steps": 3}, twin=reshaped_twins.ouro),
    "Plamo3ForCausalLM": Specimen(
        TIED | {"window_size": 7, "sliding_window_pattern": 2, "rope_theta": 5e4, "rope_local_theta": 1e4},
        twin=reshaped_twins.plamo3,
    ),
    "TeleChat2ForCausalLM": Specimen(
        {"n_layer": 2, "n_head": 4, "ffn_hidden_size": 96, "layer_norm_epsilon": 1e-5},
        {"mha": {"num_key_value_heads": 4}},
        reshaped_twins.telechat2,
        alike=True,
    ),
    "TeleFLMForCausalLM": Specimen(
        {"use_mup": True, "input_mult": 3.0, "output_mult": 2.0, "mup_scale_factor": 8.0},
        twin=reshaped_twins.teleflm,
        alike=True,
    ),
    "Jais2ForCausalLM": Specimen(variants={"unbiased": {"attention_bias": False, "mlp_bias": False}}),
    "CwmForCausalLM": Specimen({"sliding_window": 7, "layer_types": TURNS}),
    "HyperCLOVAXForCausalLM": Specimen(_GRANITE),
    "BaichuanForCausalLM": Specimen(MHA, {"unit-head": {"vocab_size": 125696}}, twins.baichuan, alike=True),
    "BaiChuanForCausalLM": Specimen(MHA, twin=twins.baichuan_7b, alike=True),
    "ChatGLMModel": Specimen(
        {
            "num_layers": 2,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "ffn_hidden_size": 96,
            "kv_channels": 16,
            "layernorm_epsilon": 1e-5,
            "add_qkv_bias": True,
            "rope_ratio": 50,
        },
        twin=twins.chatglm,
        alike=True,
    ),
    "ExaoneForCausalLM": Specimen(
        {"num_layers": 2, "layer_norm_epsilon": 1e-5} | LLAMA3, twin=twins.exaone, alike=True
    ),
    "InternLM2ForCausalLM": Specimen(twin=twins.internlm2, alike=True),
    "InternLMForCausalLM": Specimen({"bias": True}, twin=twins.internlm, alike=True),
    "MiMoForCausalLM": Specimen({"attention_bias": True}, twin=twins.mimo, alike=True),
    "MiniCPMForCausalLM": Specimen(
        TIED | {"scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 32}, twin=twins.minicpm, alike=True
    ),
    "OrionForCausalLM": Specimen({"rms_norm_eps": 1e-5}, twin=twins.orion, alike=True),
    "QWenLMHeadModel": Specimen(
        {"kv_channels": 16, "layer_norm_epsilon": 1e-6, "seq_length": 256, "no_bias": True},
        twin=twins.qwen,
        alike=True,
    ),
    "DeepseekForCausalLM": Specimen(_SHARING | {"n_shared_experts": 2}, twin=twins.deepseek, alike=True),
    "BailingMoeForCausalLM": Specimen(
        {
            **_EXPERTS,
            "num_shared_experts": 2,
            "norm_head": True,
        },
        twin=twins.bailing,
        alike=True,
    ),
    "BailingMoeV2ForCausalLM": Specimen(
        _SHARING
        | {
            "num_experts": 8,
            "num_shared_experts": 1,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
            "score_function": "sigmoid",
            "rms_norm_eps": 1e-6,
        },
        twin=twins.bailing_v2,
        alike=True,
    ),
    "Gemma2ForCausalLM": Specimen(
        {
            "sliding_window": 7,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        }
    ),
    "VaultGemmaForCausalLM": Specimen(
        {"sliding_window": 7, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0} | TIED
    ),
    "Gemma3ForCausalLM": Specimen(
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 7,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
        }
    ),
    "Gemma3nForCausalLM": Specimen(
        {
            "num_hidden_layers": 5,
            "layer_types": [*TURNS, "sliding_attention", *TURNS],
            "num_kv_shared_layers": 2,
            "sliding_window": 7,
            "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 120,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0, 0.9],
            "altup_active_idx": 0,
        },
        {"nothing-shared": {"num_kv_shared_layers": 0, "altup_correct_scale": False}},
    ),
    "Gemma4ForCausalLM": Specimen(
        _GEMMA4
        | {
            "num_hidden_layers": 5,
            "layer_types": [*TURNS, "sliding_attention", *TURNS],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 128,
            "final_logit_softcapping": 5.0,
        },
        {
            "experts": {
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
                "enable_moe_block": True,
                "num_experts": 6,
                "top_k_experts": 2,
                "moe_intermediate_size": 32,
            }
        },
    ),
    "Gemma4UnifiedForCausalLM": Specimen(
        _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {"narrow": {"global_head_dim": 16, "attention_bias": True}},
    ),
    "MiMoV2FlashForCausalLM": Specimen(
        {
            "sliding_window": 7,
            "layer_types": TURNS,
            "mlp_layer_types": ["dense", "sparse"],
            "num_key_value_heads": 1,
            "head_dim": 24,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
        {"biased": {"attention_bias": True, "attention_value_scale": 0.5}},
    ),
    "GptOssForCausalLM": Specimen(
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}
        | rope("yarn", truncate=False, beta_fast=32.0, beta_slow=1.0, **_YARN)
    ),
    "MixtralForCausalLM": Specimen({"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2MoeForCausalLM": Specimen(
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": 48,
        },
        {"unbiased": {"qkv_bias": False}},
    ),
    "Qwen3MoeForCausalLM": Specimen(
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
        {"not-renormalized": {"norm_topk_prob": False}, "dense-layer": {"mlp_only_layers": [1]}},
    ),
    "MellumForCausalLM": Specimen(
        {
            **_EXPERTS,
            "sliding_window": 7,
            "layer_types": TURNS,
            "mlp_layer_types": ["dense", "sparse"],
        }
    ),
    "OlmoeForCausalLM": Specimen(
        {"num_experts": 6, "num_experts_per_tok": 2}, {"clipped": {"clip_qkv": 0.5}}
    ),
    "GraniteMoeForCausalLM": Specimen(_GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "GraniteMoeSharedForCausalLM": Specimen(
        _GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48}
    ),
    "Llama4ForCausalLM": Specimen(
        {
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "intermediate_size_mlp": 80,
            "interleave_moe_layer_step": 2,
            "floor_scale": 8,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 256,
        },
        {"two-experts": {"num_experts_per_tok": 2}, "chunks": {"attention_chunk_size": 7}},
    ),
    "Glm4MoeForCausalLM": Specimen(_SHARING | {"use_qk_norm": True, "attention_bias": True}),
    "Ernie4_5_MoeForCausalLM": Specimen(
        {
            "num_hidden_layers": 3,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
        },
        {"biases-some-layers": {"use_bias": True, "moe_layer_interval": 2, "moe_num_shared_experts": 0}},
    ),
    "HunYuanMoEV1ForCausalLM": Specimen(
        {"num_experts": 4, "moe_topk": 2} | rope("dynamic", alpha=50.0, factor=1.0)
    ),
    "Cohere2MoeForCausalLM": Specimen(
        {
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 80,
            "num_experts": 4,
            "num_shared_experts": 2,
        },
        {
            "sigmoid-rms": {
                "rms_norm_eps": 1e-5,
                "expert_selection_fn": "sigmoid",
                "shared_expert_combination_strategy": "sum",
                "prefix_dense_sliding_window_pattern": 2,
            }
        },
    ),
    "Dots1ForCausalLM": Specimen(
        _SHARING, {"window": {"sliding_window": 7, "max_window_layers": 1, "norm_topk_prob": True}}
    ),
    "ExaoneMoeForCausalLM": Specimen(
        _SHARING | {"num_experts": 8, "num_shared_experts": 2, "sliding_window": 7, "layer_types": TURNS}
    ),
    "FlexOlmoForCausalLM": Specimen({"num_experts": 6, "num_experts_per_tok": 2}),
    "GraniteMoeSWAForCausalLM": Specimen(
        _GRANITE
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "sliding_window": 7,
            "layer_rope_theta": [0, 5000.0],
        }
    ),
    "MiniMaxM2ForCausalLM": Specimen(
        {"num_local_experts": 6, "num_experts_per_tok": 2}, {"half-turned": {"rotary_dim": 8}}
    ),
    "DbrxForCausalLM": Specimen(
        {
            "d_model": 64,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 1.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "PhimoeForCausalLM": Specimen(
        {"num_local_experts": 6, "router_jitter_noise": 0.4, "rope_theta": 10000.0},
        {"biased": {"attention_bias": True, "lm_head_bias": True, "sliding_window": 7}},
    ),
    "AfmoeForCausalLM": Specimen(
        {
            "num_hidden_layers": 3,
            **_EXPERTS,
            "num_shared_experts": 2,
            "route_scale": 1.7,
            "sliding_window": 7,
            "global_attn_every_n_layers": 3,
            "mup_enabled": True,
        }
    ),
    "HYV3ForCausalLM": Specimen(_EXPERTS),
    "SolarOpenForCausalLM": Specimen(_SHARING),
    "Step3TextForCausalLM": Specimen(
        {
            "num_hidden_layers": 3,
            "share_q_dim": 24,
            "moe_layers_enum": "1,2",
            "moe_num_experts": 6,
            "moe_top_k": 2,
            "moe_intermediate_size": 32,
            "share_expert_dim": 40,
            "rope_theta": 500000.0,
        },
        {"normed-experts": {"norm_expert_weight": True, "moe_layers_enum": "0,2"} | TIED},
        step3,
    ),
    "Step3p5ForCausalLM": Specimen(
        _STEP,
        {
            "biases": BIASES | {"swiglu_limits": None, "swiglu_limits_shared": None},
            "stretched": {
                "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64}
                | {"low_freq_factor": 1.0, "high_freq_factor": 32.0},
                "yarn_only_types": ["full_attention"],
            },
        },
        step35,
    ),
    "DeepseekV2ForCausalLM": Specimen(
        _DEEPSEEK | {"topk_method": "group_limited_greedy"},
        {
            "straight-queries": {"q_lora_rank": None, "topk_method": "greedy", "attention_bias": True},
            "yarn": rope("yarn", mscale=0.7, mscale_all_dim=0.9, **_YARN),
        },
    ),
    "MiniCPM3ForCausalLM": Specimen(
        _DEEPSEEK | TIED | {"scale_emb": 3.0, "scale_depth": 1.2, "dim_model_base": 32},
        {"straight-queries": {"q_lora_rank": None}},
    ),
    "DeepseekV3ForCausalLM": Specimen(
        _DEEPSEEK | {"num_hidden_layers": 3},
        {
            "yarn": rope("yarn", mscale=1.0, mscale_all_dim=1.0, **_YARN),
            "halves": {"rope_interleave": False, "attention_bias": True},
        },
    ),
    "AXK1ForCausalLM": Specimen(
        _DEEPSEEK | {"mlp_layer_types": ["dense", "sparse"]},
        {"all-sparse": {"mlp_layer_types": ["sparse"] * 2}},
    ),
    "YoutuForCausalLM": Specimen(
        _DEEPSEEK | TIED, {"straight-queries": {"q_lora_rank": None, "rope_interleave": False} | UNTIED}
    ),
    "LongcatFlashForCausalLM": Specimen(
        _DEEPSEEK
        | {
            "num_hidden_layers": 4,
            "num_layers": 2,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
            "zero_expert_num": 3,
            "moe_topk": 3,
        },
        {"none-idle": {"zero_expert_num": 0}},
    ),
    "Mistral4ForCausalLM": Specimen(
        _DEEPSEEK
        | {"head_dim": 24}
        | rope(
            "yarn",
            factor=16.0,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.3,
        ),
        {"all-sparse": {"first_k_dense_replace": 0, "norm_topk_prob": False}},
    ),
    "DeepseekV32ForCausalLM": Specimen(
        _INDEXED, {"yarn": rope("yarn", mscale=1.0, mscale_all_dim=1.0, **_YARN)}
    ),
    "Glm4MoeLiteForCausalLM": Specimen(
        _DEEPSEEK, {"all-sparse": {"mlp_layer_types": ["sparse", "sparse"], "attention_bias": True}}
    ),
    "GlmMoeDsaForCausalLM": Specimen(
        _INDEXED, {"shared": {"indexer_types": ["full", "shared"]}, "all-seen": {"index_topk": 256}}
    ),
    "BambaForCausalLM": Specimen(
        {
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 32,
        },
        {"biases": BIASES | {"mamba_proj_bias": True}},
    ),
    "FalconH1ForCausalLM": Specimen(
        _FACTORS
        | {"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_state": 16, "mamba_n_groups": 2}
        | {"mamba_chunk_size": 32},
        {
            "normed": {"mamba_rms_norm": True, "attention_bias": True, "mlp_bias": True},
            "gate-first": {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 1},
        },
    ),
    "FalconMambaForCausalLM": Specimen({"state_size": 8, "tie_word_embeddings": True}),
    "GraniteMoeHybridForCausalLM": Specimen(
        _GRANITE
        | _HYBRID
        | {
            "num_local_experts": 0,
            "shared_intermediate_size": 40,
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 32,
        },
        {
            "experts-rope": {
                "num_local_experts": 4,
                "position_embedding_type": "rope",
                "tie_word_embeddings": True,
                "mamba_conv_bias": False,
                "mamba_proj_bias": True,
            }
        },
    ),
    "JambaForCausalLM": Specimen(
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "num_experts": 4,
            "mamba_d_state": 8,
        },
        {
            "experts-beside-mamba": {"expert_layer_offset": 0, "mamba_proj_bias": True},
            "dense": {"num_experts": 1, "mamba_conv_bias": False, "mamba_dt_rank": 3},
        },
    ),
    "Lfm2ForCausalLM": Specimen(
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
        {
            "biased-as-wide-as-said": {
                "conv_bias": True,
                "block_auto_adjust_ff_dim": False,
                "conv_L_cache": 4,
            },
            "tied-by-number": {"layer_types": None, "full_attn_idxs": [2]} | TIED,
        },
    ),
    "Lfm2MoeForCausalLM": Specimen(
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            **_EXPERTS,
            "routed_scaling_factor": 1.5,
        },
        {"plain-choice": {"use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0}},
    ),
    "Mamba2ForCausalLM": Specimen(
        {"num_heads": 8, "state_size": 16, "n_groups": 2, "chunk_size": 32},
        {"biases-limits": {"use_bias": True, "use_conv_bias": False, "time_step_limit": [0.5, 0.8]} | TIED},
    ),
    "MambaForCausalLM": Specimen(
        {"state_size": 8},
        {"biases": {"use_bias": True, "use_conv_bias": False, "time_step_rank": 3, "state_size": 5} | TIED},
    ),
    "NemotronHForCausalLM": Specimen(
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 32,
            "time_step_min": 0.6,
            "n_routed_experts": 6,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "routed_scaling_factor": 1.5,
        },
        {
            "latent-biases": {
                "moe_latent_size": 24,
                "mlp_bias": True,
                "use_bias": True,
                "use_conv_bias": False,
            }
        },
    ),
    "Qwen3NextForCausalLM": Specimen(_DELTA | _DELTA_EXPERTS | {"mlp_only_layers": [0]}),
    "Qwen3_5ForCausalLM": Specimen(_DELTA | {"attention_bias": True}),
    "Qwen3_5MoeForCausalLM": Specimen(_DELTA | _DELTA_EXPERTS),
    "Zamba2ForCausalLM": Specimen(
        TIED
        | {
            "num_hidden_layers": 5,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid", "linear_attention"],
            "num_mem_blocks": 2,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "adapter_rank": 8,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "n_mamba_heads": 8,
            "mamba_d_state": 16,
            "mamba_ngroups": 2,
            "chunk_size": 32,
            "time_step_min": 0.6,
            "initializer_range": 0.1,
        },
        {"one-block": {"num_mem_blocks": 1, "use_shared_attention_adapter": False, "use_mem_rope": False}},
    ),
    "BeamForCausalLM": Specimen(
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "sliding_window": 6,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "final_logit_softcapping": 5.0,
        },
        {"no cap": {"final_logit_softcapping": None}},
    ),
    "FlintForCausalLM": Specimen(
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 6,
            **_EXPERTS,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [0],
        }
    ),
    "Kolibri1ForCausalLM": Specimen(
        {
            "layer_types": TURNS,
            "sliding_window": 6,
            **_EXPERTS,
            "shared_expert_intermediate_size": 24,
        },
        {"renormalized": {"norm_topk_prob": True}},
    ),
    "LagunaForCausalLM": Specimen(
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_attention_heads_per_layer": [4, 8, 4],
            "sliding_window": 6,
            **_EXPERTS,
            "shared_expert_intermediate_size": 24,
            "moe_routed_scaling_factor": 1.5,
        },
        {"per element": {"gating": "per-element"}},
    ),
    "Lfm3ForCausalLM": Specimen(
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "sliding_attention"],
            "sliding_window": 6,
        },
        {"no gate": {"use_attention_gate": False, "conv_bias": True}},
    ),
    "BailingHybridForCausalLM": Specimen(
        _KIMI | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
        {"unbounded": {"kda_safe_gate": False, "layer_types": None, "layer_group_size": 3}},
    ),
    "KimiLinearForCausalLM": Specimen(_KIMI, {"low-rank queries": {"q_lora_rank": 24}}),
    "MiniMaxForCausalLM": Specimen(
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "block_size": 16,
            "full_attn_alpha_factor": 1.5,
            "full_attn_beta_factor": 0.7,
            "linear_attn_alpha_factor": 0.8,
            "linear_attn_beta_factor": 1.2,
            "mlp_alpha_factor": 0.6,
            "mlp_beta_factor": 1.1,
        },
    ),
    "OlmoHybridForCausalLM": Specimen(
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 12,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        {"no rope, positive": {"rope_parameters": None, "linear_allow_neg_eigval": False}},
    ),
}
STORED: dict[str, Settings] = {"LongcatFlashForCausalLM": {"zero_expert_num": 0}}
"""Settings with which all weights of a model are stored: transformers stores some for identity experts."""
UNTAPED = {
    "ApertusForCausalLM": "aten.clamp.default",
    "BeamForCausalLM": "aten.add_.Tensor",
    "DbrxForCausalLM": "aten.clamp_.default",
    "DeepseekV32ForCausalLM": "aten.index.Tensor",
    "Gemma3nForCausalLM": "aten.lt.Scalar",
    "Gemma4ForCausalLM": "aten.lt.Scalar",
    "Gemma4UnifiedForCausalLM": "aten.square.default",
    "GlmMoeDsaForCausalLM": "aten.index.Tensor",
    "Kolibri1ForCausalLM": "aten.add.Tensor",
    "LagunaForCausalLM": "aten.softplus.default",
    "LongcatFlashForCausalLM": "aten.ge.Scalar",
    "MiMoV2FlashForCausalLM": "aten.pad.default",
    "PersimmonForCausalLM": "aten.layer_norm.default",
    "PhimoeForCausalLM": "aten.max.dim",
    "Step3TextForCausalLM": "aten.cat.default",
    "Zamba2ForCausalLM": "aten.clone.default",
}
"""Models whose CPU decodes are not taped, with the reason: a torch activation, clamp, norm, router, indexer
or copy.
"""


def architecture_of(name: str) -> str:
    """Return the architecture of an architecture or model_type."""
    if name in ZOO:
        return name
    return next(architecture for architecture, family in FAMILIES.items() if family.model_type == name)
