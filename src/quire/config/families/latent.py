"""Latent attention: DeepSeek-V2 and V3, and who has their configuration, such as Kimi-K2."""

from quire.config.facts import ArchFacts, LayerFacts, MlaFacts
from quire.config.families.decoder import decoder
from quire.config.families.moe import deepseek_experts, first_dense, mixed
from quire.config.keys import Keys
from quire.config.rope import read_rope


def deepseek_v2(keys: Keys) -> ArchFacts:
    return mixed(_latent(keys, pairs=True), deepseek_experts(keys, "softmax"), first_dense(keys))


def deepseek_v3(keys: Keys) -> ArchFacts:
    facts = _latent(keys, pairs=keys.flag("rope_interleave", True))
    return mixed(facts, deepseek_experts(keys, "sigmoid"), first_dense(keys))


def _latent(keys: Keys, *, pairs: bool) -> ArchFacts:
    mla = MlaFacts(
        kv_latent=keys.size("kv_lora_rank", 512),
        nope_dim=keys.size("qk_nope_head_dim", 128),
        rope_dim=keys.size("qk_rope_head_dim", 64),
        v_dim=keys.size("v_head_dim", 128),
        q_latent=keys.size("q_lora_rank") if keys.get("q_lora_rank") is not None else None,
    )
    # config.json's head_dim is the rotating part here, where there is one at all.
    keys = keys.but(head_dim=mla.nope_dim + mla.rope_dim)
    layer = LayerFacts(read_rope(keys, mla.rope_dim, pairs=pairs), mixer="latent")
    biased = keys.flag("attention_bias")
    return decoder(
        keys,
        layers=(layer,) * keys.size("num_hidden_layers"),
        qkv_bias=biased,
        out_bias=biased,
        mla=mla,
    )
