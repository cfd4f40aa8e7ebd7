"""Tests of the facts of a checkpoint, from config.json and from a GGUF header, and of every invalid file."""

import json
import logging
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from quire.checkpoint.families import FAMILIES
from quire.checkpoint.model import Checkpoint, read_checkpoint
from quire.checkpoint.transformers_config import BORROWED, OWN_CACHE
from quire.errors import ConfigError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

INVERSE, CLA = {"scale_attn_by_inverse_layer_idx": True}, {"use_cla": True}
EXPERTS: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


def compressed(**changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "block"} | changes
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


def read(
    tmp_path: Path, changes: dict[str, Any], generation: dict[str, Any] | None = None, **options: Any
) -> Checkpoint:
    config = {key: value for key, value in (LLAMA | changes).items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return read_checkpoint(tmp_path, **options)


def test_basic_facts(tmp_path: Path) -> None:
    checkpoint = read(tmp_path, {})
    facts = checkpoint.facts
    assert (checkpoint.format, checkpoint.dtype, checkpoint.derived_max_len) == ("hf", "bfloat16", 256)
    assert (checkpoint.bos_id, checkpoint.eos_ids, checkpoint.generation) == (1, (2,), {})
    assert (facts.vocab, facts.hidden, facts.intermediate, len(facts.layers)) == (128, 64, 96, 3)
    assert (facts.heads, facts.kv_heads, facts.head_dim, facts.norm_eps) == (4, 2, 16, 1e-5)
    assert (facts.layers[-1].rope.theta, facts.layers[-1].rope.dim, facts.layers[-1].rope.kind) == (
        10000.0,
        16,
        "default",
    )
    assert not (facts.tied or facts.qkv_bias or facts.out_bias or facts.mlp_bias or facts.qk_norm)
    assert [layer.window for layer in facts.layers] == [None] * 3


def test_optional_keys_have_the_defaults_of_the_family(tmp_path: Path) -> None:
    facts = read(tmp_path, {"num_key_value_heads": "absent", "architectures": "absent"}).facts
    assert (facts.kv_heads, facts.architecture) == (4, "LlamaForCausalLM")
    assert read(tmp_path, {"head_dim": 32}).facts.head_dim == 32
    qwen3 = read(tmp_path, {"architectures": ["Qwen3ForCausalLM"]}).facts
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias) == (128, "head", False)
    for name in ("Qwen3MoeForCausalLM", "Glm4MoeForCausalLM"):
        assert read(tmp_path, EXPERTS | {"architectures": [name]}).facts.head_dim == 16


def test_other_names_of_a_family(tmp_path: Path) -> None:
    """Older checkpoints have another architecture name and other key names."""
    assert read(tmp_path, {"architectures": ["XverseForCausalLM"]}).facts.architecture == "LlamaForCausalLM"
    older = {"architectures": ["StableLMEpochForCausalLM"], "rope_pct": 0.5, "norm_eps": 1e-4}
    facts = read(tmp_path, older).facts
    assert (facts.architecture, facts.norm_eps) == ("StableLmForCausalLM", 1e-4)
    assert facts.layers[0].rope is not None and facts.layers[0].rope.dim == 8


def test_family_is_detected_by_model_type(tmp_path: Path) -> None:
    """Catches a table entry with a model_type that no checkpoint has; aliases are skipped."""
    import transformers

    for architecture, family in FAMILIES.items():
        if hasattr(transformers, architecture):
            config = getattr(transformers, architecture).config_class
            text = config.sub_configs.get("text_config", config)
            assert text.model_type == family.model_type


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MptForCausalLM"], "attn_config": {"qk_ln": True}},
            "attn_config: qk_ln is True, expected False",
        ),
        ({"architectures": ["OPTForCausalLM"], "word_embed_proj_dim": 32}, "word_embed_proj_dim is 32"),
        ({"architectures": ["OPTForCausalLM"], "do_layer_norm_before": False}, "do_layer_norm_before is Fal"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers .*3 entries"),
        ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "su"}}, "short_factor is None"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3]}}, "three sizes, 8 in all"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 9]}}, "three sizes, 8 in all"),
        (
            {"architectures": ["HunYuanMoEV1ForCausalLM"], "moe_topk": [1, 2, 1]},
            "moe_topk .*the same for all",
        ),
        ({"architectures": ["HunYuanDenseV1ForCausalLM"], "use_cla": True}, "use_cla is True"),
        ({"architectures": ["Ministral3ForCausalLM"]}, "rope_parameters is None, expected an object"),
        ({"architectures": ["GemmaForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional"),
        (
            {"architectures": ["GraniteSWAForCausalLM"], "layer_rope_theta": [0]},
            "layer_rope_theta .*3 numbers",
        ),
        ({"architectures": ["MiniMaxM2ForCausalLM"], "scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (
            {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M?*"},
            "pattern is 'M\\?\\*'",
        ),
        ({"architectures": ["NemotronHForCausalLM"], "mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'"),
        (EXPERTS | {"mlp_layer_types": ["sparse"]}, "mlp_layer_types .*3 entries"),
        (EXPERTS | {"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers is '1'"),
    ],
)
def test_unsupported_variants_of_a_family_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Otherwise the model would give wrong answers."""
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, changes, model_impl="quire")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model_type": "opt", "architectures": ["OPTForCausalLM"], "do_layer_norm_before": False}, None),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]} | INVERSE, None),
        ({"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"]} | INVERSE, "inverse"),
        ({"model_type": "hunyuan_v1_dense", "architectures": ["HunYuanDenseV1ForCausalLM"]} | CLA, "use_cla"),
    ],
)
def test_settings_that_only_transformers_supports(
    tmp_path: Path, changes: dict[str, Any], error: str | None
) -> None:
    """A setting that the code of transformers does not read either is refused, and so are other heads."""
    with nullcontext() if error is None else pytest.raises(ConfigError, match=error):
        assert read(tmp_path, changes).facts.borrowed is not None


def test_biases_by_family(tmp_path: Path) -> None:
    llama = read(tmp_path, {"attention_bias": True, "mlp_bias": True}).facts
    assert llama.qkv_bias and llama.out_bias and llama.mlp_bias
    qwen2 = read(tmp_path, {"architectures": ["Qwen2ForCausalLM"]}).facts
    assert qwen2.qkv_bias and not qwen2.out_bias and not qwen2.mlp_bias


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 9}, (9, 9, 9)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, ()),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "use_sliding_window": False}, ()),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            (None, None, 9),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (9, None, 9),
        ),
        ({"sliding_window": 9}, ()),
    ],
)
def test_sliding_windows(tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    facts = read(tmp_path, changes).facts
    assert tuple(layer.window for layer in facts.layers) == (windows or (None,) * len(facts.layers))


@pytest.mark.parametrize(
    ("changes", "theta", "kind", "derived"),
    [
        ({"rope_theta": 5e5}, 5e5, "default", 256),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, 1e4, "default", 256),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 1e4, "linear", 1024),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 1e4, "dynamic", 512),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 4.0,
                    "original_max_position_embeddings": 100,
                }
            },
            5e5,
            "yarn",
            400,
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            },
            5e5,
            "llama3",
            256,
        ),
    ],
)
def test_rope_in_both_spellings_and_the_derived_length(
    tmp_path: Path, changes: dict[str, Any], theta: float, kind: str, derived: int
) -> None:
    checkpoint = read(tmp_path, changes)
    assert (checkpoint.facts.layers[-1].rope.theta, checkpoint.facts.layers[-1].rope.kind) == (theta, kind)
    assert checkpoint.derived_max_len == derived


def test_missing_length_is_2048_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path, {"max_position_embeddings": "absent"}).derived_max_len == 2048
    assert "assuming 2048" in caplog.text


def test_layers_with_a_sparse_attention_indexer(tmp_path: Path) -> None:
    """Covers all forms in GLM-5's files."""
    glm = EXPERTS | {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"}

    def picks(**keys: Any) -> list[bool]:
        return [layer.has_indexer for layer in read(tmp_path, glm | keys).facts.layers]

    count = len(picks())
    assert picks() == [True] * count
    shared = ["full"] + ["shared"] * (count - 1)
    assert picks(indexer_types=shared) == [True] + [False] * (count - 1)
    assert picks(index_topk_pattern="F" + "S" * (count - 1)) == [True] + [False] * (count - 1)
    assert picks(index_topk_freq=4, index_skip_topk_offset=1) == [at % 4 == 0 for at in range(count)]
    with pytest.raises(ConfigError, match="indexer_types .* full for the first layer"):
        picks(indexer_types=shared[::-1])
    with pytest.raises(ConfigError, match=f"indexer_types .* {count} entries"):
        picks(indexer_types=["full"])


def test_generation_config_overrides_and_keeps_only_known_keys(tmp_path: Path) -> None:
    generation = {"eos_token_id": [7, 2, 7], "temperature": 0.6, "top_k": None, "do_sample": True}
    checkpoint = read(tmp_path, {}, generation)
    assert checkpoint.eos_ids == (7, 2)
    assert checkpoint.generation == {"temperature": 0.6}
    assert read(tmp_path, {"eos_token_id": [5, 6]}, {}).eos_ids == (5, 6)


def test_overrides_are_merged_before_reading(tmp_path: Path) -> None:
    """Catches an override of one rope key that removes the others."""
    changes = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    overrides = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "num_hidden_layers": 1}
    checkpoint = read(tmp_path, changes, overrides=overrides)
    assert (checkpoint.facts.layers[-1].rope.theta, checkpoint.facts.layers[-1].rope.factor) == (5e5, 2.0)
    assert (len(checkpoint.facts.layers), checkpoint.derived_max_len) == (1, 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "64 is not divisible by .* 6"),
        ({"hidden_size": "absent"}, "the key hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected a positive integer below"),
        ({"hidden_size": 64.5}, "hidden_size is 64.5"),
        ({"num_hidden_layers": 10**12}, "expected a positive integer below"),
        ({"num_hidden_layers": -2}, "num_hidden_layers is -2"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        ({"architectures": ["LamaForCausalLM"]}, "docs/models.md lists the .*nearest is 'LlamaForCausalLM'"),
        ({"architectures": "LlamaForCausalLM"}, "expected a list of names"),
        ({"architectures": "absent", "model_type": "gpt9"}, "'gpt9' is not supported"),
        ({"architectures": "absent", "model_type": "absent"}, "architectures is None, expected the name"),
        (
            {"architectures": ["BartForCausalLM"], "hidden_size": "absent"},
            "'BartForCausalLM' is not supported.* hidden_size",
        ),
        (
            {"architectures": ["HeliumForCausalLM"], "layer_types": 5},
            "'HeliumForCausalLM' .* layer_types is 5",
        ),
        ({"architectures": ["HeliumForCausalLM"], "rope_scaling": [1]}, "rope_scaling is \\[1\\]"),
        ({"architectures": ["Lfm2ForCausalLM"], "full_attn_idxs": 5}, "full_attn_idxs is 5"),
        ({"architectures": ["JambaForCausalLM"], "attn_layer_offset": "x"}, "attn_layer_offset is 'x'"),
        ({"architectures": ["FalconH1ForCausalLM"], "mlp_multipliers": ["x", 1]}, "expected 2 numbers"),
        (
            {"architectures": ["Mamba2ForCausalLM"], "num_heads": 2, "time_step_limit": 1},
            "expected two numbers",
        ),
        ({"architectures": ["Mamba2ForCausalLM"], "head_dim": 7}, "head_dim is 7, expected 128 / num_heads"),
        ({"rope_scaling": {"type": "su"}}, "rope type 'su' .*known: default, linear"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "short_factor is \\[1.0\\], expected 8",
        ),
        ({"rope_scaling": {"type": "linear"}}, "the key factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one flat object"),
        ({"rope_theta": 1}, "rope_theta is 1.0"),
        ({"head_dim": 15}, "15 rotating dimensions"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish', expected one of silu"),
        (
            {"quantization_config": {"quant_method": "odd"}},
            "has the quant_method 'odd', which",
        ),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8', expected an object"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn', expected one of float32"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', expected a token id"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": []},
            "layer_types .*expected 3 entries",
        ),
    ],
)
def test_invalid_value_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Catches a KeyError, a TypeError, or a model built from invalid values."""
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, changes)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("content", ["{not json", "[1, 2]", "", "[" * 200_000])
def test_config_that_is_not_a_json_object_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_checkpoint(tmp_path)


def test_invalid_generation_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json: temperature is 'hot'"):
        read(tmp_path, {}, {"temperature": "hot"})


def test_path_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"no model at .*nowhere"):
        read_checkpoint(tmp_path / "nowhere")


def write_gguf(path: Path, arch: str = "llama", drop: str = "", **extra: Any) -> Path:
    writer = GGUFWriter(path, arch)
    sizes = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }
    for key, value in (sizes | extra).items():
        name = key if key.startswith("general.") else f"{arch}.{key}"
        if key != drop and isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(9)
    writer.add_tensor("token_embd.weight", np.zeros((128, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_file_needs_no_config_json(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("quire").addHandler(caplog.handler)
    try:
        result = read_checkpoint(write_gguf(tmp_path / "m.gguf"), config_path=tmp_path)
    finally:
        logging.getLogger("quire").removeHandler(caplog.handler)
    assert result.format == "gguf" and "hf_config_path has no effect" in caplog.text


def test_facts_of_a_gguf_header(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_gguf(tmp_path / "m.gguf", **{"rope.freq_base": 5e4}))
    facts = checkpoint.facts
    assert (checkpoint.format, checkpoint.dtype, checkpoint.derived_max_len) == ("gguf", "float32", 512)
    assert (checkpoint.bos_id, checkpoint.eos_ids) == (1, (2, 9))
    assert (facts.architecture, facts.vocab, facts.hidden, len(facts.layers)) == (
        "LlamaForCausalLM",
        128,
        64,
        2,
    )
    assert (facts.heads, facts.kv_heads, facts.head_dim, facts.tied) == (4, 2, 16, True)
    assert facts.norm_eps == pytest.approx(1e-5)
    assert (facts.layers[-1].rope.theta, facts.layers[-1].rope.kind) == (5e4, "default")


def test_sampling_defaults_of_a_gguf_header(tmp_path: Path) -> None:
    sampling = {"temp": 0.6, "top_k": 40, "top_p": 0.95, "mirostat": 2}
    header = {f"general.sampling.{key}": value for key, value in sampling.items()}
    checkpoint = read_checkpoint(write_gguf(tmp_path / "m.gguf", **header))
    assert checkpoint.generation == {"temperature": 0.6, "top_k": 40, "top_p": 0.95}


def test_tensors_of_a_gguf_file_give_facts(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    extra = {
        "output.weight": np.zeros((128, 64), np.float32),
        "blk.0.attn_q.bias": np.zeros(64, np.float32),
        "rope_freqs.weight": factors,
        "attention.key_length": 16,
    }
    facts = read_checkpoint(write_gguf(tmp_path / "m.gguf", **extra)).facts
    assert (facts.tied, facts.qkv_bias, facts.out_bias) == (False, True, False)
    assert (facts.layers[-1].rope.kind, facts.layers[-1].rope.factors) == ("factors", tuple(factors.tolist()))


def test_rope_scaling_of_a_gguf_header(tmp_path: Path) -> None:
    extra = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    }
    checkpoint = read_checkpoint(write_gguf(tmp_path / "m.gguf", "qwen2", **extra))
    assert (checkpoint.facts.layers[-1].rope.kind, checkpoint.facts.layers[-1].rope.factor) == ("yarn", 4.0)
    assert checkpoint.derived_max_len == 512


@pytest.mark.parametrize(("arch", "largest"), [("gemma2", 46), ("gemma3", 62)])
def test_gemma_gguf_query_scale_is_derived(tmp_path: Path, arch: str, largest: int) -> None:
    """The scale follows the head size, except in the largest model of each kind."""
    for num_layers, width in ((26, 32), (largest, 16)):
        extra = {"attention.key_length": 32, "block_count": num_layers}
        facts = read_checkpoint(write_gguf(tmp_path / "m.gguf", arch, **extra)).facts
        assert facts.attention_scale == width**-0.5
        assert (facts.norm, facts.embed_scale) == ("rms", 8)


def test_gemma3_length_includes_rope_scaling(tmp_path: Path) -> None:
    stretched = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    extra = stretched | {"attention.key_length": 16, "attention.sliding_window": 7, "block_count": 6}
    checkpoint = read_checkpoint(write_gguf(tmp_path / "m.gguf", "gemma3", **extra))
    kinds = [layer.rope.kind for layer in checkpoint.facts.layers if layer.rope]
    assert (checkpoint.derived_max_len, kinds) == (512, ["default"] * 5 + ["linear"])
    of_json = {"architectures": ["Gemma3ForCausalLM"], "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert read(tmp_path, of_json).derived_max_len == 256


@pytest.mark.parametrize(
    ("arch", "extra", "message"),
    [
        ("bert", {}, "'bert' is not supported; known: .*llama, .*qwen3"),
        ("llama", {"drop": "block_count"}, "block_count is missing"),
        ("llama", {"attention.head_count_kv": 3}, "4 attention heads cannot share 3"),
        ("llama", {"expert_count": 8}, "expert_used_count is missing"),
        (
            "gemma3",
            {"attention.key_length": 16, "attention.sliding_window_pattern": [True]},
            "a number, or 2 flags",
        ),
        ("llama", {"rope.scaling.type": "longrope"}, "none, linear or yarn"),
        ("llama", {"rope_freqs.weight": np.ones(5, np.float32)}, r"rope_freqs\.weight is F32 \(5,\)"),
        ("llama", {"attention.value_length": 8}, r"attention\.value_length is 8"),
        ("llama", {"expert_count": [2, 4]}, "expert_count is .*, expected a positive integer"),
        ("phi3", {"attention.sliding_window": "near"}, "sliding_window is 'near', expected a positive"),
        ("llama", {"rope.scaling.type": [1, 2]}, "none, linear or yarn"),
        ("llama", {"general.sampling.temp": "hot"}, r"general\.sampling\.temp is 'hot', expected a number"),
    ],
)
def test_invalid_gguf_header_is_named(tmp_path: Path, arch: str, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_checkpoint(write_gguf(tmp_path / "m.gguf", arch, **extra))
    assert "m.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForQuestionAnswering"]}, "a head that is not .* embeddings.*'LlamaModel'"),
        ({"architectures": ["GPT2ForQuestionAnswering"]}, "a head that is not .* embeddings.*'GPT2Model'"),
        ({"architectures": ["HeliumForTokenClassification"]}, "'HeliumForTokenClassification' is not"),
        ({"architectures": ["HeliumForCausalLM"], "hidden_size": [8, 16]}, "hidden_size is \\[8, 16\\]"),
    ],
)
def test_unsupported_heads_are_refused_in_one_sentence(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Catches a token classifier with tied embeddings that is taken for a generative model."""
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, {"tie_word_embeddings": True} | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["RwkvForCausalLM"], "num_attention_heads": None},
        {"architectures": ["HeliumForCausalLM"], "intermediate_size": [8, 16]},
        {"architectures": ["HeliumForCausalLM"], "layer_types": ["conv", "full_attention", "conv"]},
        {"architectures": ["HeliumForCausalLM"], "kv_lora_rank": 8},
        {"architectures": ["DiffLlamaForCausalLM"], "model_type": "diffllama"},
        {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"},
        {"architectures": ["XGLMForCausalLM"], "model_type": "xglm"},
    ],
)
def test_models_beyond_plain_attention_have_transformers_cache(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert read(tmp_path, changes).facts.architecture == OWN_CACHE
    plain = {"architectures": ["HeliumForCausalLM"], "model_type": "helium"}
    assert read(tmp_path, plain).facts.architecture == BORROWED


def test_text_model_of_a_multimodal_family(tmp_path: Path) -> None:
    gemma = {"architectures": ["Gemma3TextModel"], "hidden_activation": "gelu_pytorch_tanh", "head_dim": 16}
    assert read(tmp_path, gemma).facts.architecture == "Gemma3ForCausalLM"
    assert not read(tmp_path, gemma | {"use_bidirectional_attention": "vision"}).pooling.bidirectional
    assert read(tmp_path, gemma | {"use_bidirectional_attention": "all"}).pooling.bidirectional


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": ["silu"]}, "hidden_act is .*, expected one of"),
        ({"problem_type": ["x"]}, "problem_type is .*, expected one of"),
        ({"quantization_config": {"quant_method": ["awq"]}}, "which is not supported; known"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "dynamic": {"a": 1}}}, "an object each"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "llm_int8_skip_modules": [1]}},
            "a list of names",
        ),
        ({"architectures": ["Llama4ForCausalLM"], "no_rope_layers": [1]}, "3 numbers, 0 for layers"),
        ({"architectures": ["Llama4ForCausalLM"], "moe_layers": -1}, "-1, expected a list of integers"),
        ({"quantization_config": compressed(group_size="x")}, "group_size is 'x', expected a whole number"),
        ({"quantization_config": compressed(num_bits=[8])}, r"num_bits is \[8\], expected a whole number"),
        ({"quantization_config": compressed(block_structure="x")}, "which is not supported"),
    ],
)
def test_value_of_another_type_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Catches a TypeError from inside."""
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, changes)


def test_overrides_cannot_change_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hf_overrides"):
        read_checkpoint(write_gguf(tmp_path / "m.gguf"), {"vocab_size": 5})


def test_reading_facts_does_not_import_torch() -> None:
    code = "import quire.checkpoint.model, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
