"""Decoders with multi-head latent attention: DeepSeek-V2, V3 and derived models such as Kimi-K2, and GLM."""

import math
from dataclasses import replace

from quire.checkpoint.facts import ArchFacts, IndexFacts, LayerFacts, MlaFacts, MoeFacts, RopeFacts, Routing
from quire.checkpoint.families.decoder import decoder
from quire.checkpoint.families.dense import attention_temperature
from quire.checkpoint.families.moe import add_experts, deepseek_experts, first_dense, mtp_pattern
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.rope import read_rope


def deepseek_v2(keys: ConfigReader) -> ArchFacts:
    return add_experts(mla_decoder(keys, pairs=True), deepseek_experts(keys, "softmax"), first_dense(keys))


def deepseek_v3(keys: ConfigReader) -> ArchFacts:
    return _deepseek_v3(keys, pairs=keys.flag("rope_interleave", True), first=0)


def minicpm3(keys: ConfigReader) -> ArchFacts:
    """Read MiniCPM3: no experts; scaling factors as in MiniCPM."""
    layers, hidden = keys.size("num_hidden_layers"), keys.size("hidden_size")
    sizes = {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
    v_dim = hidden // keys.size("num_attention_heads")
    keys = keys.but(q_lora_rank=keys.values.get("q_lora_rank", 768))  # null: no query compression
    keys = keys.defaults(rms_norm_eps=1e-5, v_head_dim=v_dim, **sizes)
    return replace(
        mla_decoder(keys, pairs=False),
        embed_scale=keys.number("scale_emb", 12.0),
        residual_scale=keys.number("scale_depth", 1.4) / math.sqrt(layers),
        logit_scale=keys.number("dim_model_base", 256.0) / hidden,
        tied=keys.flag("tie_word_embeddings", True),
    )


def glm4_moe_lite(keys: ConfigReader) -> ArchFacts:
    return _deepseek_v3(keys, pairs=keys.flag("rope_interleave", True), first=1)


def axk1(keys: ConfigReader) -> ArchFacts:
    """Read A.X K1: DeepSeek-V3 with a norm after the experts."""
    keys.require("moe_layer_freq", 1)
    return _deepseek_v3(keys, pairs=keys.flag("rope_interleave", True), first=1)


def youtu(keys: ConfigReader) -> ArchFacts:
    """Read Youtu-LLM, which has no experts."""
    keys = keys.but(q_lora_rank=keys.values.get("q_lora_rank", 1536))  # null: no query compression
    facts = mla_decoder(keys, pairs=keys.flag("rope_interleave", True))
    return replace(facts, tied=keys.flag("tie_word_embeddings", True))


def longcat(keys: ConfigReader) -> ArchFacts:
    """Read LongCat-Flash. Each of its layers has two attention and two feed-forward parts, which are two
    layers here; experts run in parallel to the second half. Some experts return their input."""
    hidden, count = keys.size("hidden_size"), keys.size("num_layers", 28)
    inner = keys.size("ffn_hidden_size", 12288)
    sizes = {"q_lora_rank": 1536, "rope_theta": 1e7, "rms_norm_eps": 1e-5}
    keys = keys.defaults(**sizes).but(num_hidden_layers=2 * count, intermediate_size=inner)
    facts = mla_decoder(keys, pairs=True)
    assert facts.mla is not None and facts.mla.q_latent is not None
    scales = tuple((hidden / size) ** 0.5 for size in (facts.mla.q_latent, facts.mla.kv_latent))
    num_identity = keys.values.get("zero_expert_num", 256) or 0
    experts = keys.size("n_routed_experts", 512)
    moe = MoeFacts(
        experts,
        keys.size("expert_ffn_hidden_size", 2048),
        Routing(keys.size("moe_topk", 12), scale=keys.number("routed_scaling_factor", 6.0)),
        num_identity_experts=num_identity,
        shared_intermediate=inner,
        choice_bias=True,
        wide_router=True,
        names="longcat",
    )
    identity_ids = "|".join(str(experts + i) for i in range(num_identity)) or "none"
    return replace(
        add_experts(facts, moe, set(range(0, 2 * count, 2))),
        mla=replace(facts.mla, scales=(scales[0], scales[1])),
        unused=rf"\.experts\.({identity_ids})\.|^model\.mtp\.",
    )


def mistral4(keys: ConfigReader) -> ArchFacts:
    """Read Mistral 4: softmax routing, and query scaling as in Ministral 3. The size of the rotated part
    comes from qk_rope_head_dim."""
    sizes = {"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64}
    keys = keys.defaults(norm_topk_prob=True, topk_method="group_limited_greedy", **sizes)
    block = keys.get("rope_parameters")
    if not isinstance(block, dict):
        raise keys.wrong("rope_parameters", "an object")
    rope = {key: value for key, value in block.items() if key != "partial_rotary_factor"}
    facts = mla_decoder(keys.but(rope_parameters=rope), pairs=keys.flag("rope_interleave", True))
    moe = deepseek_experts(keys, "softmax")
    moe = replace(moe, routing=moe.routing._replace(group_best=2))
    return replace(
        add_experts(facts, moe, first_dense(keys)), attention_temperature=attention_temperature(keys)
    )


def deepseek_v32(keys: ConfigReader) -> ArchFacts:
    return _with_indexer(keys, pairs=False)


def glm_moe_dsa(keys: ConfigReader) -> ArchFacts:
    """Read GLM-5: some layers reuse the tokens that the last indexer selected."""
    facts, count = _with_indexer(keys, pairs=True), keys.size("num_hidden_layers")
    kinds = keys.get("indexer_types") or keys.get("index_topk_pattern")
    if isinstance(kinds, str):
        kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in kinds]
    if kinds is None:
        every, first = keys.size("index_topk_freq", 1), keys.get("index_skip_topk_offset")
        first = 2 if first is None else first
        kinds = ["shared" if max(at - first + 1, 0) % every else "full" for at in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not {*kinds} <= {"full", "shared"}:
        raise keys.wrong("indexer_types", f"{count} entries, each full or shared")
    if kinds[0] == "shared":
        raise keys.wrong("indexer_types", "full for the first layer")
    layers = tuple(
        replace(layer, has_indexer=kind == "full") for layer, kind in zip(facts.layers, kinds, strict=True)
    )
    return replace(facts, layers=layers, predicting=facts.layers[-1])


def _with_indexer(keys: ConfigReader, *, pairs: bool) -> ArchFacts:
    keys = keys.defaults(q_lora_rank=1536)
    facts = _deepseek_v3(keys, pairs=True, first=3)
    assert facts.mla is not None
    index = IndexFacts(
        keys.size("index_n_heads", 64), keys.size("index_head_dim", 128), keys.size("index_topk", 2048), pairs
    )
    return replace(facts, mla=replace(facts.mla, index=index))


def _deepseek_v3(keys: ConfigReader, *, pairs: bool, first: int) -> ArchFacts:
    """Read a decoder with DeepSeek-V3's experts, in layers from `first` on unless config.json has another
    number."""
    facts = add_experts(
        mla_decoder(keys, pairs=pairs), deepseek_experts(keys, "sigmoid"), first_dense(keys, first)
    )
    return replace(facts, unused=mtp_pattern(keys))


def mla_decoder(keys: ConfigReader, *, pairs: bool, rope: RopeFacts | None = None) -> ArchFacts:
    """Read a decoder with latent attention in all layers; `rope` replaces the rope of config.json."""
    mla = MlaFacts(
        kv_latent=keys.size("kv_lora_rank", 512),
        nope_dim=keys.size("qk_nope_head_dim", 128),
        rope_dim=keys.size("qk_rope_head_dim", 64),
        v_dim=keys.size("v_head_dim", 128),
        q_latent=keys.size("q_lora_rank") if keys.get("q_lora_rank") is not None else None,
    )
    # head_dim of config.json, if set, is only the rotated part here.
    keys = keys.but(head_dim=mla.nope_dim + mla.rope_dim)
    layer = LayerFacts(rope or read_rope(keys, mla.rope_dim, pairs=pairs), mixer="latent")
    return decoder(
        keys,
        layers=(layer,) * keys.size("num_hidden_layers"),
        attention_bias=keys.flag("attention_bias"),
        mla=mla,
    )
