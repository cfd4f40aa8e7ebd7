"""Tests of decoders that transformers runs over our cache, in whole engines, against transformers in
float32.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import check_against, generate, generate_preempted, open_tiny, prompts_of

from quire.checkpoint import transformers_config
from quire.checkpoint.model import read_checkpoint
from quire.checkpoint.transformers_config import IMPL_OWN_CACHE, OWN_CACHE
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.kernels.cpu.tape import Tape
from quire.kernels.ops import choose
from quire.logs import warn_once
from quire.models.transformers_modules import use_fast_modules

SETTINGS: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
GROUPED: dict[str, Any] = {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
DECODERS: dict[str, dict[str, Any]] = {
    "phi": {"intermediate_size": 96, "partial_rotary_factor": 0.5},
    "gpt_neox": {"intermediate_size": 96, "rotary_pct": 0.25},
    "olmo": {"intermediate_size": 96, "clip_qkv": 0.5},
    "gemma": GROUPED | {"tie_word_embeddings": True},
    "helium": GROUPED,
    "cohere": GROUPED | {"logit_scale": 0.3},
    "apertus": GROUPED,
    "ctrl": {"n_embd": 64, "dff": 96, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "exaone4": GROUPED | {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma2": GROUPED | {"sliding_window": 7, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    "smollm3": GROUPED | {"no_rope_layers": [0, 1]},
    "mixtral": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": GROUPED | {"tie_word_embeddings": False},
}
LATENT: dict[str, Any] = {
    "intermediate_size": 96,
    "first_k_dense_replace": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
BART: dict[str, Any] = {
    "is_encoder_decoder": False,
    "d_model": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "pad_token_id": 0,
}
VISION_CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
}
UNPAGED: dict[str, dict[str, Any]] = {
    "bart": BART,
    "bloom": {"n_layer": 2, "n_head": 4},
    "deepseek_v3": LATENT,
    "diffllama": GROUPED,
    "doge": GROUPED,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 7},
    "hrm_text": GROUPED | {"num_hidden_layers": 1, "H_cycles": 1, "L_cycles": 1},
    "mamba": {"state_size": 8},
    "bamba": GROUPED | {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 8},
}
"""Models that run with transformers' own cache. Weights of HRM are no views of those in its checkpoint."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stablelm": (GROUPED, "StableLm.* does not pass keyword arguments down.*='transformers_own_cache'"),
    "bert": ({"intermediate_size": 96}, "Bert.* over the paged cache it computes other logits"),
    "t5": ({}, "expected false: T5ForConditionalGeneration is .* not supported yet"),
    "git": ({"vision_config": VISION_CONFIG}, "GitForCausalLM .* its own table of attention classes"),
}


def make(kind: str, folder: Path, **settings: Any) -> tuple[Path, Any]:
    """Return a seeded random float32 model whose outputs vary."""
    import transformers

    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**(SETTINGS | settings))
    seq2seq, decoder = transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForCausalLM
    auto: Any = seq2seq if config.is_encoder_decoder else decoder
    hf_model = auto.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        # Random values, since norms of ones and biases of zeros would hide a layer that ignores them.
        for parameter in hf_model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    hf_model.save_pretrained(folder / kind)
    return folder / kind, hf_model


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Return messages of Quire's loggers, which do not propagate."""
    warn_once.cache_clear()
    logger = logging.getLogger("quire")
    logger.addHandler(caplog.handler)
    yield lambda: [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    logger.removeHandler(caplog.handler)


@pytest.fixture(scope="module")
def helium(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return make("helium", tmp_path_factory.mktemp("helium"), **GROUPED | {"num_key_value_heads": 4})


def edited(path: Path, folder: Path, **changes: Any) -> Path:
    """Copy the checkpoint with another config.json."""
    shutil.copytree(path, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", DECODERS)
def test_every_logit_matches_transformers(kind: str, tmp_path: Path) -> None:
    """Check chunks beside decodes, prefix hits, and a cache that is too small for all requests."""
    path, hf_model = make(kind, tmp_path, **DECODERS[kind])
    llm = open_tiny(
        path,
        model_impl="transformers",
        max_model_len=80,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=30,
    )
    (common,) = prompts_of(17)
    prompts = [common + tail for tail in prompts_of(1, 9, 23, seed=8)] + [common[:8], *prompts_of(30, 50, 2)]
    check_against(hf_model, generate(llm, prompts))
    check_against(hf_model, generate(llm, prompts_of(10, 11, 12, 13, 9, 10, 8, 12, seed=5), count=12))
    assert llm.llm_engine.core.scheduler.num_preemptions > 0
    generate(llm, prompts[:1], count=1)
    second = generate(llm, prompts[:1], count=3)
    check_against(hf_model, second)
    assert second[0].num_cached_tokens > 0


@pytest.mark.parametrize("kind", UNPAGED)
def test_models_with_transformers_cache(kind: str, tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    """Check prompts in chunks, beside others, and requests that are preempted and computed again."""
    path, hf_model = make(kind, tmp_path, **UNPAGED[kind])
    llm = open_tiny(path, model_impl="transformers", max_num_seqs=3, max_num_batched_tokens=11)
    assert llm.llm_engine.config.checkpoint.facts.architecture == OWN_CACHE
    assert not [line for line in warnings() if "each step computes all tokens" in line]
    check_against(hf_model, generate_preempted(llm, prompts_of(17, 9, 5, 12), count=5, at=(2, 5)))
    assert llm.llm_engine.core.scheduler.num_preemptions >= 2


@pytest.mark.parametrize("kind", ["data2vec-text", "roberta"])
def test_positions_that_follow_from_padding(kind: str, tmp_path: Path) -> None:
    """Check decoders whose code has another file name than their folder, and that count positions from the
    padding token."""
    path, hf_model = make(kind, tmp_path, is_decoder=True, pad_token_id=0, intermediate_size=96)
    llm = open_tiny(
        path, runner="generate", max_num_seqs=3, max_num_batched_tokens=11, model_impl="transformers"
    )
    assert llm.llm_engine.config.checkpoint.facts.architecture == OWN_CACHE
    check_against(hf_model, generate(llm, prompts_of(17, 9, 5), count=4))


def test_any_model_can_have_transformers_cache(tmp_path: Path) -> None:
    path, hf_model = make("stablelm", tmp_path, **GROUPED)
    llm = open_tiny(path, model_impl=IMPL_OWN_CACHE, enable_prefix_caching=True)
    assert not llm.config.cache.enable_prefix_caching
    assert open_tiny(path, model_impl=IMPL_OWN_CACHE).config.scheduler.max_num_seqs == 40
    check_against(hf_model, generate(llm, prompts_of(9, 2)))
    with pytest.raises(ConfigError, match="speculative_config is not supported with transformers' own cache"):
        open_tiny(
            path,
            model_impl=IMPL_OWN_CACHE,
            speculative_config={"method": "ngram", "num_speculative_tokens": 2},
        )


@pytest.mark.parametrize(("kind", "reason"), [("openai-gpt", "has no cache"), ("helium", "other logits")])
def test_models_without_a_usable_cache(
    kind: str, reason: str, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    """Check a model without a cache, and one without a window whose config.json names one, so that
    transformers' cache drops tokens."""
    path, hf_model = make(kind, tmp_path, n_embd=64, n_head=4, n_layer=2, **GROUPED)
    path = edited(path, tmp_path / "windows", sliding_window=2)
    llm = open_tiny(path, model_impl=IMPL_OWN_CACHE, max_num_batched_tokens=11, max_num_seqs=3)
    assert [output for output in warnings() if reason in output]
    check_against(hf_model, generate(llm, prompts_of(17, 2, 9)))
    check_against(hf_model, generate(llm, prompts_of(23)))


def test_windows_that_config_json_does_not_name_are_applied(tmp_path: Path) -> None:
    """Check older checkpoints, whose windows follow from their configuration class."""
    path, hf_model = make("gemma2", tmp_path, **DECODERS["gemma2"])
    path = edited(path, tmp_path / "older", layer_types=None)
    llm = open_tiny(path, model_impl="transformers", max_model_len=64)
    check_against(hf_model, generate(llm, prompts_of(23, 9)))
    windows = [layer.window for layer in llm.llm_engine.config.checkpoint.facts.layers]
    assert windows == [None, None]


def test_window_that_only_the_mask_defines(tmp_path: Path) -> None:
    settings = GROUPED | {"sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2}
    path, hf_model = make("phimoe", tmp_path, **settings)
    llm = open_tiny(path, model_impl="transformers", max_model_len=64)
    check_against(hf_model, generate(llm, prompts_of(23, 9)))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32, "ffn_dim": 96}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_embd": 64, "n_layer": 2, "n_head": 4}),
        ("bloom", {"apply_residual_connection_post_layernorm": True, "n_layer": 2, "n_head": 4}),
        ("gpt_oss", GROUPED | {"swiglu_limit": 0.5, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("mamba", {"hidden_act": "gelu", "state_size": 8}),
    ],
)
def test_settings_that_only_transformers_supports(
    kind: str, settings: dict[str, Any], tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    """Check models of architectures of Quire, such as OPT-350M, with settings that its code refuses."""
    path, hf_model = make(kind, tmp_path, **settings)
    llm = open_tiny(path, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=11)
    assert llm.config.checkpoint.facts.borrowed is not None
    assert any("the model runs through transformers instead" in line for line in warnings())
    check_against(hf_model, generate(llm, prompts_of(23, 9)))


def test_attention_sinks_are_applied(tmp_path: Path) -> None:
    settings = GROUPED | {"sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2}
    path, hf_model = make("gpt_oss", tmp_path, **settings)
    llm = open_tiny(path, model_impl="transformers", attention_backend="TORCH_SDPA", max_model_len=64)
    check_against(hf_model, generate(llm, prompts_of(23, 9)))


@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
def test_chunks_of_any_size(chunk: int, helium: tuple[Path, Any]) -> None:
    path, hf_model = helium
    llm = open_tiny(path, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 3))
    check_against(hf_model, generate(llm, prompts_of(23, 9, 37), count=3))


@pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi", "smollm3", "helium"])
def test_decode_steps_are_replayed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that no operation of these models keeps a step from being recorded, and that replays compute the
    same as eager steps."""
    path, _ = make(kind, tmp_path, **DECODERS[kind])
    replays, replay = [], Tape.replay
    monkeypatch.setattr(Tape, "replay", lambda tape: (replays.append(1), replay(tape)))
    prompts = prompts_of(23, 9, 37)
    settings = {"model_impl": "transformers", "max_num_seqs": 3}
    taped = generate(open_tiny(path, **settings), prompts, count=12)
    assert len(replays) >= 8
    del replays[:]
    eager = generate(open_tiny(path, enforce_eager=True, **settings), prompts, count=12)
    assert not replays
    assert [one.outputs[0].token_ids for one in taped] == [one.outputs[0].token_ids for one in eager]


def test_auto_falls_back_to_transformers_and_warns_once(
    helium: tuple[Path, Any], tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    for _ in range(2):
        open_tiny(helium[0])
    slow = [output for output in warnings() if "slower" in output]
    assert len(slow) == 1 and slow[0].startswith("HeliumForCausalLM runs through transformers")
    llama = open_tiny(make("llama", tmp_path, **DECODERS["llama"])[0])
    assert llama.llm_engine.config.checkpoint.facts.borrowed is None


@pytest.mark.parametrize("model_impl", ["quire", "vllm"])
def test_model_impl_quire_can_be_required(model_impl: str, helium: tuple[Path, Any]) -> None:
    with pytest.raises(ConfigError, match=r"'HeliumForCausalLM' is not supported.*model_impl='auto'"):
        open_tiny(helium[0], model_impl=model_impl)


def test_without_transformers_supported_families_are_listed(
    helium: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers_config._read_model_tables.cache_clear()
    monkeypatch.setattr(transformers_config, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"docs/models.md lists .*transformers package installed"):
        read_checkpoint(helium[0])
    transformers_config._read_model_tables.cache_clear()


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_models_are_rejected_with_a_reason(kind: str, tmp_path: Path) -> None:
    """Check that there are neither wrong logits nor errors from inside other code."""
    settings, reason = REFUSED[kind]
    path, _ = make(kind, tmp_path, **settings)
    with pytest.raises(ConfigError, match=reason):
        open_tiny(path, model_impl="transformers")


def test_transformers_backend_does_not_pool(helium: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only generates: leave runner and convert out"):
        open_tiny(helium[0], runner="pooling")
    classifier = edited(helium[0], tmp_path / "c", architectures=["HeliumForSequenceClassification"])
    with pytest.raises(ConfigError, match="'HeliumForSequenceClassification' is not supported"):
        open_tiny(classifier)


def test_missing_or_misshaped_weights_are_named(helium: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks 9 of .*model\.layers\.2\.mlp"):
        open_tiny(edited(helium[0], tmp_path / "deeper", num_hidden_layers=3))
    with pytest.raises(ConfigError, match=r"\(96, 64\), but the model's configuration says \(80, 64\)"):
        open_tiny(edited(helium[0], tmp_path / "narrower", intermediate_size=80))


def test_single_experts_of_a_checkpoint_fill_one_parameter(tmp_path: Path) -> None:
    path, _ = make("mixtral", tmp_path, **DECODERS["mixtral"])
    with pytest.raises(ConfigError, match=r"lacks 12 of .*block_sparse_moe\.experts\.4\.w1"):
        open_tiny(edited(path, tmp_path / "more", num_local_experts=6), model_impl="transformers")


REMOTE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({mark!r}).touch()
class FarConfig(LlamaConfig):
    model_type = "far"
class FarForCausalLM(LlamaForCausalLM):
    config_class = FarConfig
"""


def test_checkpoint_code_runs_only_with_trust_remote_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    llama, hf_model = make("llama", tmp_path, **DECODERS["llama"])
    auto_map = {"AutoConfig": "far.FarConfig", "AutoModelForCausalLM": "far.FarForCausalLM"}
    named = {"architectures": ["FarForCausalLM"], "model_type": "far", "auto_map": auto_map}
    path, mark = edited(llama, tmp_path / "far", **named), tmp_path / "was-run"
    (path / "far.py").write_text(REMOTE.format(mark=str(mark)))
    for model_impl in ("auto", "transformers"):
        with pytest.raises(ConfigError, match=r"'FarForCausalLM' is not supported.*trust_remote_code=True"):
            open_tiny(path, model_impl=model_impl)
    # Code in the directory of a known model is ignored.
    open_tiny(edited(llama, tmp_path / "near", auto_map=auto_map), trust_remote_code=True)
    assert not mark.exists()
    check_against(hf_model, generate(open_tiny(path, trust_remote_code=True), prompts_of(9, 20)))
    assert mark.exists()
    assert any("Running the Python code in" in output for output in warnings())


@pytest.mark.parametrize(
    ("changes", "max_len", "windows"),
    [
        ({}, 128, (None, None)),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, 512, (None, None)),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, 128, (None, None)),
        (
            {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 32},
            32,
            (None, None),
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
            128,
            (None, 9),
        ),
    ],
)
def test_model_info_of_any_config(
    helium: tuple[Path, Any], tmp_path: Path, changes: dict[str, Any], max_len: int, windows: tuple[Any, ...]
) -> None:
    """Check dynamic RoPE, whose angles would depend on the other requests of a batch: it must not
    be scaled.
    """
    facts = read_checkpoint(edited(helium[0], tmp_path / "m", **changes)).facts
    assert (facts.max_len, tuple(layer.window for layer in facts.layers)) == (max_len, windows)
    assert (facts.heads, facts.kv_heads, facts.head_dim, facts.hidden, facts.vocab) == (4, 4, 16, 64, 128)


def test_text_decoder_of_a_multimodal_model_runs_alone(tmp_path: Path) -> None:
    import transformers

    text = SETTINGS | GROUPED | {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}, image_token_index=127
    )
    auto: Any = transformers.AutoModelForCausalLM
    hf_model = auto.from_config(config, attn_implementation="eager").float().eval()
    hf_model.save_pretrained(tmp_path)
    llm = open_tiny(tmp_path, model_impl="transformers", max_num_batched_tokens=40)
    check_against(hf_model, generate(llm, prompts_of(9, 50, vocab=120), count=4))


@pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
@torch.inference_mode()
def test_bfloat16_layers_use_native_kernels_and_follow_their_weights() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 40, dtype=torch.bfloat16), torch.nn.Linear(40, 24))
    use_fast_modules(model, choose(torch.device("cpu"), torch.bfloat16))
    wide, narrow = model[1], model[0]
    assert "forward" in vars(narrow) and "forward" not in vars(wide), "float32 stays with torch"
    x = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    for _ in range(2):
        expected = torch.nn.functional.linear(x.float(), narrow.weight.float(), narrow.bias.float())
        assert narrow(x).shape == (2, 3, 40)
        torch.testing.assert_close(narrow(x).float(), expected, atol=0.02, rtol=0.02)
        narrow.weight = torch.nn.Parameter(torch.randn(40, 64).bfloat16(), requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_use_native_kernels_unless_they_are_others(dtype: torch.dtype) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norms = torch.nn.ModuleList([LlamaRMSNorm(64, 1e-5), GemmaRMSNorm(64, 1e-5)]).to(dtype)
    for norm in norms:
        norm.weight.data += torch.randn(64, dtype=dtype)
    x = torch.randn(1, 5, 4, 64, dtype=dtype)
    expected = norms[0](x)
    use_fast_modules(norms, choose(torch.device("cpu"), dtype))
    assert "forward" in vars(norms[0]) and "forward" not in vars(norms[1]), "Gemma's weight is added to 1"
    near = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(norms[0](x), expected, atol=near, rtol=near)
    assert norms[0](x.double()).dtype == torch.float64, "other dtypes keep the module's own code"
