"""Tests that models with tensor parallelism match one device."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from encoders import ENCODERS, make
from oracle import load_tiny, make_batch, make_tiny, random_prompts, run_paged
from safetensors.torch import load_file, save_file
from threads import ThreadGroup, run_threads, tp_worlds
from torch import Tensor

from quire.checkpoint.pooling import PoolingFacts
from quire.models.pooling import PoolingModel
from quire.parallel.world import World

STEPS = [[10, 0, 17], [1, 4, 6], [1, 1, 1]]
"""Prompt chunks, then decodes."""
PROMPTS = random_prompts(12, 5, 24, vocab=96)


def logits(path: Path, size: int, **options: Any) -> list[list[Tensor]]:
    """Return the logits of each rank and prompt; models are loaded one by one, since packing
    shares memory.
    """
    worlds = tp_worlds(size)
    models = [load_tiny(path, world=world, **options) for world in worlds]
    return run_threads(
        size, lambda world: run_paged(models[world.tp.rank], PROMPTS, STEPS), worlds=lambda _: worlds
    )


def pooled(path: Path, size: int, label_ids: list[int]) -> list[list[Tensor]]:
    """Return for each rank the hidden states of all tokens and the pooled outputs."""
    pooling = PoolingFacts("classify", "LAST", 3)
    build = functools.partial(PoolingModel, pooling=pooling, label_ids=label_ids)
    worlds = tp_worlds(size)
    models: list[Any] = [load_tiny(path, world=world, max_model_len=48, build=build) for world in worlds]

    @torch.inference_mode()
    def run(world: World) -> list[Tensor]:
        model = models[world.tp.rank]
        model.finalize()
        batch = make_batch([(ids, 0) for ids in PROMPTS], [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11]], 4)
        for module in model.modules():
            if hasattr(module, "backend"):
                module.backend.plan(batch)
        states = model(batch)
        return [states, model.vectors(states, "embed")]

    return run_threads(size, run, worlds=lambda _: worlds)


def compare(path: Path, size: int, **options: Any) -> None:
    (expected,) = logits(path, 1, **options)
    actual = logits(path, size, **options)
    for rank_logits in actual:
        for one, other, first in zip(rank_logits, expected, actual[0], strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
            assert torch.equal(one, first), "devices would draw different tokens"


MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", 2, {"attention_bias": True, "mlp_bias": True, "vocab_size": 129}),
    "llama, more devices than kv heads": ("LlamaForCausalLM", 4, {}),
    "llama, tied": ("LlamaForCausalLM", 2, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3ForCausalLM", 2, {}),
    "olmo2": ("Olmo2ForCausalLM", 2, {}),
    "olmo2, more devices than kv heads": ("Olmo2ForCausalLM", 4, {}),
    "olmo hybrid": ("OlmoHybridForCausalLM", 2, {}),
    "kimi linear": ("KimiLinearForCausalLM", 2, {}),
    "ling 3": ("BailingHybridForCausalLM", 2, {}),
    "minimax": ("MiniMaxForCausalLM", 2, {}),
    "beam": ("BeamForCausalLM", 2, {}),
    "flint": ("FlintForCausalLM", 2, {}),
    "kolibri": ("Kolibri1ForCausalLM", 2, {}),
    "laguna": ("LagunaForCausalLM", 2, {}),
    "lfm3": ("Lfm3ForCausalLM", 2, {}),
    "decilm": ("DeciLMForCausalLM", 2, {}),
    "ouro": ("OuroForCausalLM", 2, {}),
    "plamo3": ("Plamo3ForCausalLM", 2, {}),
    "telechat2": ("TeleChat2ForCausalLM", 2, {}),
    "telechat2, more devices than kv heads": ("TeleChat2ForCausalLM", 4, {}),
    "llama4, chunks": ("Llama4ForCausalLM", 2, {"attention_chunk_size": 7}),
    "gemma2": ("Gemma2ForCausalLM", 2, {}),
    "gemma3": ("Gemma3ForCausalLM", 2, {}),
    "gemma3n": ("Gemma3nForCausalLM", 2, {}),
    "gemma4": ("Gemma4ForCausalLM", 2, {}),
    "gemma4, experts": (
        "Gemma4ForCausalLM",
        2,
        {
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma4, more devices than kv heads": ("Gemma4UnifiedForCausalLM", 2, {}),
    "mimo_v2": ("MiMoV2FlashForCausalLM", 2, {}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", 2, {"indexer_types": ["full", "shared"]}),
    "mistral4": ("Mistral4ForCausalLM", 2, {}),
    "longcat": ("LongcatFlashForCausalLM", 2, {}),
    "gpt-oss": ("GptOssForCausalLM", 2, {}),
    "mixtral": ("MixtralForCausalLM", 2, {}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", 2, {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", 2, {}),
    "llama4": ("Llama4ForCausalLM", 2, {}),
    "granite_moe": ("GraniteMoeSharedForCausalLM", 2, {}),
    "step3": ("Step3TextForCausalLM", 2, {}),
    "step": ("Step3p5ForCausalLM", 2, {}),
    "glm4_moe": ("Glm4MoeForCausalLM", 2, {}),
    "cohere2_moe": ("Cohere2MoeForCausalLM", 2, {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", 2, {}),
    "deepseek_v2, straight queries": ("DeepseekV2ForCausalLM", 2, {"q_lora_rank": None}),
    "granite_hybrid": ("GraniteMoeHybridForCausalLM", 2, {"mamba_proj_bias": True}),
    "granite_hybrid, groups of several": ("GraniteMoeHybridForCausalLM", 4, {}),
    "nemotron_h": ("NemotronHForCausalLM", 2, {}),
    "nemotron_h, latent": (
        "NemotronHForCausalLM",
        4,
        {"moe_latent_size": 24, "mlp_bias": True, "use_bias": True},
    ),
    "mamba": ("MambaForCausalLM", 2, {"use_bias": True}),
    "falcon_mamba": ("FalconMambaForCausalLM", 4, {}),
    "mamba2": ("Mamba2ForCausalLM", 2, {}),
    "jamba": ("JambaForCausalLM", 2, {}),
    "lfm2": ("Lfm2ForCausalLM", 2, {"conv_bias": True}),
    "lfm2_moe": ("Lfm2MoeForCausalLM", 2, {}),
    "falcon_h1": ("FalconH1ForCausalLM", 2, {}),
    "falcon_h1, a norm of several": ("FalconH1ForCausalLM", 2, {"mamba_rms_norm": True, "mamba_n_groups": 1}),
    "zamba2": ("Zamba2ForCausalLM", 2, {}),
    "qwen3_next": ("Qwen3NextForCausalLM", 2, {}),
    "qwen3_next, groups of several": ("Qwen3NextForCausalLM", 4, {}),
    "qwen3_5": ("Qwen3_5ForCausalLM", 4, {"attention_bias": True}),
    "gpt2": ("GPT2LMHeadModel", 2, {}),
    "gpt_neox": ("GPTNeoXForCausalLM", 2, {}),
    "phi": ("PhiForCausalLM", 2, {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3ForCausalLM", 2, {}),
    "cohere": ("CohereForCausalLM", 2, {}),
    "glm": ("GlmForCausalLM", 2, {}),
    "glm4": ("Glm4ForCausalLM", 2, {}),
    "apertus": ("ApertusForCausalLM", 2, {}),
    "falcon": (
        "FalconForCausalLM",
        4,
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "falcon with slopes": ("FalconForCausalLM", 2, {"alibi": True, "parallel_attn": False}),
    "bloom": ("BloomForCausalLM", 4, {}),
    "mpt": ("MptForCausalLM", 2, {}),
    "dbrx": ("DbrxForCausalLM", 2, {}),
    "baichuan": ("BaichuanForCausalLM", 2, {}),
    "internlm2": ("InternLM2ForCausalLM", 4, {}),
    "afmoe": ("AfmoeForCausalLM", 2, {}),
    "bailing": ("BailingMoeForCausalLM", 2, {}),
    "cohere, normed heads": ("CohereForCausalLM", 2, {"use_qk_norm": True}),
    "stablelm, normed heads": ("StableLmForCausalLM", 4, {"qk_layernorm": True}),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", 2, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallel_logits_match_one_device(name: str, tmp_path: Path) -> None:
    """Check for missing or duplicate heads, channels or biases, and missing or doubled all-reduces."""
    architecture, size, settings = MODELS[name]
    path, _ = make_tiny(architecture, tmp_path, **settings)
    compare(path, size)


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen2MoeForCausalLM"])
def test_layer_has_two_all_reduces(family: str, tmp_path: Path) -> None:
    """Check that shared experts have no all-reduce of their own."""
    path, _ = make_tiny(family, tmp_path)
    worlds = tp_worlds(2)
    models = [load_tiny(path, world=world) for world in worlds]
    run_threads(2, lambda world: run_paged(models[world.tp.rank], PROMPTS, STEPS), worlds=lambda _: worlds)
    for world in worlds:
        assert isinstance(world.tp, ThreadGroup)
        assert world.tp.num_told == len(STEPS) * (1 + 2 * 2 + 1)


@pytest.mark.parametrize("name", [*ENCODERS, "decoder", "decoder, of tokens"])
def test_pooled_outputs_match_one_device(name: str, tmp_path: Path) -> None:
    """Check three classes on two devices."""
    if name in ENCODERS:
        path = make(tmp_path / "encoder", ENCODERS[name][0], **ENCODERS[name][1]).path
    else:
        path, _ = make_tiny("LlamaForCausalLM", tmp_path)
        stored = load_file(path / "model.safetensors") | {"score.weight": torch.randn(3, 64)}
        save_file(stored, path / "model.safetensors", {"format": "pt"})
    label_ids = [3, 90] if name == "decoder, of tokens" else []
    (expected,) = pooled(path, 1, label_ids)
    for actual in pooled(path, 2, label_ids):
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
