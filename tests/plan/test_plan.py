"""Tests of `quire plan`: its arithmetic against the guide and engines, and as a command."""

import json
from pathlib import Path

import pytest
from oracle import make_tiny
from zoo import ZOO

from quire.checkpoint.model import Checkpoint
from quire.checkpoint.weights import count_parameters
from quire.cli import main
from quire.config.env import Env
from quire.configure import configure
from quire.errors import ConfigError
from quire.plan.devices import DEVICES, device
from quire.plan.estimate import (
    PRECISIONS,
    Wanted,
    cache_of,
    fits,
    kv_bytes_per_token,
    layouts,
    memory_of,
    smallest,
    weight_bytes,
)
from quire.plan.model_sizes import subject
from quire.plan.rates import rates
from quire.worker.worker import Worker

LLAMA_70B = "layers=80,hidden=8192,heads=64,kv_heads=8,intermediate=28672,vocab=128256"


def of(text: str) -> Checkpoint:
    return subject(text, Env.read({}))[0]


def test_weights_of_70b_match_the_guide() -> None:
    """Check 280, 140, 70 and 35 GB: parameters times bytes, plus scales and 16-bit embeddings."""
    model = of(LLAMA_70B)
    sizes = {name: weight_bytes(model, name) / 1e9 for name in PRECISIONS}
    assert sizes["fp32"] == pytest.approx(280, rel=0.02)
    assert sizes["bf16"] == pytest.approx(140, rel=0.02)
    assert sizes["fp8"] == pytest.approx(70, rel=0.05)
    assert 35 < sizes["int4"] < 41


def test_cache_of_70b_differs_from_the_guide() -> None:
    """Check 256 requests of 8,192 tokens in bf16: 687 GB, not 40."""
    (layers, per_token), *others = kv_bytes_per_token(of(LLAMA_70B), "bfloat16").values()
    assert not others and 256 * 8192 * layers * per_token / 1e9 == pytest.approx(687, rel=0.001)


def test_tp_divides_the_heads_of_70b() -> None:
    fit = fits(of(LLAMA_70B), device("h100").machine(3), "bf16", Wanted(8192, 1, {}), tp=3, pp=1)
    assert "does not divide 64 attention heads" in fit.why_not


def test_405b_in_bf16_does_not_fit_eight_h100() -> None:
    model = of("layers=126,hidden=16384,heads=128,kv_heads=8,intermediate=53248,vocab=128256")
    assert count_parameters(model.facts).total / 1e9 == pytest.approx(405, rel=0.01)
    eight = smallest(model, device("h100").machine(8), Wanted(8192, 1, {}), ("bf16",), most=8, per_node=8)
    assert all(fit.why_not for fit in eight)
    narrow = smallest(model, device("h100").machine(8), Wanted(8192, 1, {}), ("fp8",), most=8, per_node=8)
    assert not narrow[-1].why_not and narrow[-1].tp == 8


def test_first_working_layout_is_the_last_of_its_precision() -> None:
    actual = smallest(
        of(LLAMA_70B), device("h200").machine(8), Wanted(8192, 16, {}), ("bf16", "fp8"), most=8, per_node=8
    )
    assert [(fit.precision, fit.tp, fit.pp) for fit in actual if not fit.why_not] == [
        ("bf16", 2, 1),
        ("fp8", 1, 1),
    ]


def test_layouts_use_only_available_gpus() -> None:
    for most in (1, 3, 8, 16):
        actual = list(layouts(most, 8))
        assert actual[0] == (1, 1) and len(actual) == len({*actual})
        assert all(tp * pp <= most and tp <= 8 for tp, pp in actual)


@pytest.mark.parametrize("name", ["h200", "l4"])
def test_rates_stay_below_the_bounds(name: str) -> None:
    model, kind = (
        of("layers=32,hidden=4096,heads=32,kv_heads=8,intermediate=14336,vocab=128256"),
        DEVICES[name],
    )
    fit = fits(model, kind.machine(1), "int4", Wanted(2048, 1, {}), tp=1, pp=1)
    one = rates(fit, kind, batch=1, context=1)
    read = weight_bytes(model, "int4") - 2 * model.facts.vocab * model.facts.hidden
    assert one.decode_ms > 1e3 * read / kind.bytes_s
    assert one.prefill_tok_s < kind.flops / (2 * count_parameters(model.facts).active)
    many = rates(fit, kind, batch=64, context=1)
    assert many.decode_tok_s > 20 * one.decode_tok_s


CACHES = {
    *("LlamaForCausalLM", "GPT2LMHeadModel", "MistralForCausalLM", "Gemma3ForCausalLM", "Gemma3nForCausalLM"),
    *("Gemma4ForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM", "MiMoV2FlashForCausalLM"),
    *("Step3p5ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "LongcatFlashForCausalLM"),
    *("MambaForCausalLM", "Mamba2ForCausalLM", "Lfm2ForCausalLM", "NemotronHForCausalLM"),
    *("Qwen3NextForCausalLM", "Zamba2ForCausalLM", "Qwen3MoeForCausalLM"),
}
"""One architecture for each layout of the cache, with and without experts. The slow test runs all."""


def test_selected_architectures_are_known() -> None:
    assert set(ZOO) >= CACHES


@pytest.mark.parametrize(
    "architecture",
    [name if name in CACHES else pytest.param(name, marks=pytest.mark.slow) for name in ZOO],
)
def test_plan_matches_the_started_engine(architecture: str, tmp_path: Path) -> None:
    """Check the weights and the number of cache blocks."""
    path, _ = make_tiny(architecture, tmp_path)
    config = configure(
        {"model": str(path), "dtype": "float32", "max_num_seqs": 4, "skip_tokenizer_init": True}
    )
    worker = Worker(config)
    worker.load()
    measured = worker.measure()
    planned = memory_of(config, "fp32")
    moe = config.checkpoint.facts.moe
    within = 0.15 if moe is not None and moe.plain else 0.05  # experts without a gate are stored with one
    assert planned.weights == pytest.approx(worker.loaded.num_bytes, rel=within)
    assert cache_of(config, planned).num_blocks == pytest.approx(measured.num_blocks, rel=0.05)


def test_command_prints_the_serve_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "memory.svg"
    assert main(["plan", LLAMA_70B, "--gpu", "h100", "--concurrency", "16", "--svg", str(picture)]) == 0
    output = capsys.readouterr().out
    assert "quire serve" in output and "--tensor-parallel-size 4" in output and "no   bf16   tp 1" in output
    assert picture.read_text().startswith("<svg") and "KV cache" in picture.read_text()
    assert main(["plan", LLAMA_70B, "--gpu", "24", "--gpus", "1", "--json"]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert plan["command"] is None and plan["layouts"][0]["why_not"]


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["layers=80"], "needs hidden, heads, intermediate, vocab"),
        (["layers=eighty"], "is not a size of a model"),
        ([LLAMA_70B, "--gpu", "h2000"], "did you mean"),
        ([LLAMA_70B, "--precision", "int3"], "known: fp32"),
        ([LLAMA_70B, "--gpus", "0"], "at least 1"),
    ],
)
def test_invalid_arguments_are_named(
    words: list[str], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 1
    assert output in capsys.readouterr().err


def test_device_may_be_given_by_its_memory() -> None:
    assert device("96").total_bytes == 96 << 30
    with pytest.raises(ConfigError):
        device("-4")
