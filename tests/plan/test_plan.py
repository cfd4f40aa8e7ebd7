"""Tests of `quire plan`: its arithmetic against the guide and engines, and as a command."""

import json
import re
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
    STORED,
    MemoryFit,
    Wanted,
    cache_of,
    fits,
    kv_bytes_per_token,
    layouts,
    memory_of,
    smallest,
    weight_bytes,
)
from quire.plan.model_sizes import KNOWN, by_parameters, subject
from quire.plan.rates import BATCHES, CONTEXT, rates
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


QWEN_30B = "layers=48,hidden=2048,heads=32,kv_heads=4,intermediate=6144,vocab=151936"
QWEN_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("params", "decode_ms", "prefill_tok_s", "within"),
    [
        ("0.6B", (0.69, 1.09, 1.56, 3.17, 5.55), 391_500, 0.01),
        ("8B", (3.91, 4.49, 5.09, 7.71, 12.52), 43_690, 0.01),
        (QWEN_30B, (2.45, 7.81, 14.16, 17.83, 20.78), 76_630, 0.15),
    ],
    ids=["0.6B", "8B", "30B-A3B"],
)
def test_rates_are_near_the_measured_ones(
    params: str, decode_ms: tuple[float, ...], prefill_tok_s: float, within: float, tmp_path: Path
) -> None:
    """Check the rows of docs/performance.md; those of the 30B-A3B are not among the data of the plan."""
    if params is QWEN_30B:
        model = of(str(write_config(tmp_path, params, None, **QWEN_EXPERTS)))
    else:
        model, _ = by_parameters(params)
    kind = DEVICES["h200"]
    fit = fits(model, kind.machine(1), "bf16", Wanted(4096, 1, {}), tp=1, pp=1)
    planned = [rates(fit, kind, batch=batch, context=CONTEXT) for batch in BATCHES]
    assert [rate.decode_ms for rate in planned] == pytest.approx(decode_ms, rel=within)
    assert planned[0].prefill_tok_s == pytest.approx(prefill_tok_s, rel=2 * within)
    page = (Path(__file__).parents[2] / "docs/performance.md").read_text()
    assert f"{decode_ms[2]}" in page and f"{prefill_tok_s:,}" in page


def test_rates_of_a_tiny_model_are_limited_by_its_layers() -> None:
    """A model of 135M would be read in 0.07 ms; its 30 layers take at least what those of the 0.6B take."""
    model = of("layers=30,hidden=576,heads=9,kv_heads=3,intermediate=1536,vocab=49152,tied=1")
    kind = DEVICES["h200"]
    fit = fits(model, kind.machine(1), "bf16", Wanted(2048, 1, {}), tp=1, pp=1)
    one = rates(fit, kind, batch=1, context=CONTEXT)
    assert 0.4 < one.decode_ms < 0.69 and one.prefill_tok_s < 3 * 391_500


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
        ([LLAMA_70B, "--quantization", "int3"], "--quantization 'int3'; known: fp32"),
        ([], "--params 70B"),
        ([LLAMA_70B, "--params", "70B"], "leave out 'layers=80"),
        (["llama-70b", "--active", "7B"], "--active needs --params"),
        (["--params", "70"], "is not a number of parameters such as 600M, 7B"),
        (["--params", "900B"], "0.5B to 500B; beyond that, give sizes"),
        (["--params", "70B", "--active", "70B"], "--active 70B must be less than --params 70B"),
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


def write_config(path: Path, sizes: str, quant: dict[str, object] | None, **others: object) -> Path:
    """Write the config.json of a decoder with these sizes and a quantization_config; a Llama unless `others`
    have another architecture."""
    names = dict(part.split("=") for part in sizes.split(","))
    keys = {
        "num_hidden_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads", "intermediate_size": "intermediate", "vocab_size": "vocab",
    }  # fmt: skip
    config: dict[str, object] = {key: int(names[name]) for key, name in keys.items()}
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
    config |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    config |= ({"quantization_config": quant} if quant else {}) | others
    (path / "config.json").write_text(json.dumps(config))
    return path


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
QWEN_32B = "layers=64,hidden=5120,heads=64,kv_heads=8,intermediate=25600,vocab=151936"
LLAMA_8B = "layers=32,hidden=4096,heads=32,kv_heads=8,intermediate=14336,vocab=128256"
LLAMA_405B = "layers=126,hidden=16384,heads=128,kv_heads=8,intermediate=53248,vocab=128256"
DEEPSEEK = "layers=61,hidden=7168,heads=128,kv_heads=128,intermediate=18432,vocab=129280"
EXPERTS = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
"""Other keys of DeepSeek-V3."""


@pytest.mark.parametrize(
    ("sizes", "quant", "gpu", "tp", "gigabytes", "token_bytes"),
    [
        # Weights: billions of parameters in layers x bits / 8, and those of embedding and head x 2. AWQ has 4
        # bits, and 16 + 4 bits of scale and zero for 128 weights; block FP8 has 32 bits for 128 x 128.
        # A token: 2 vectors x 2 bytes x 128 x 8 heads x layers / tp; DeepSeek: 2 x (512 + 64) x layers.
        (LLAMA_8B, None, "l4", 1, 8.03 * 2, 131_072),
        (LLAMA_8B, FP8, "l4", 1, 6.98 * 8.002 / 8 + 1.05 * 2, 131_072),
        (LLAMA_8B, AWQ, "l4", 1, 6.98 * 4.156 / 8 + 1.05 * 2, 131_072),
        (LLAMA_70B, None, "h100", 2, 70.55 * 2 / 2, 163_840),
        (LLAMA_70B, FP8, "h200", 1, 68.45 * 8.002 / 8 + 2.10 * 2, 327_680),
        (LLAMA_70B, AWQ, "a100-80", 1, 68.45 * 4.156 / 8 + 2.10 * 2, 327_680),
        (LLAMA_405B, None, "b200", 8, 405.85 * 2 / 8, 64_512),
        (LLAMA_405B, FP8, "h100", 8, (401.65 * 8.002 / 8 + 4.20 * 2) / 8, 64_512),
        (LLAMA_405B, AWQ, "a100-80", 4, (401.65 * 4.156 / 8 + 4.20 * 2) / 4, 129_024),
        (DEEPSEEK, None, "b200", 8, 671.03 * 2 / 8, 70_272),
        (DEEPSEEK, FP8, "h200", 8, (669.18 * 8.002 / 8 + 1.85 * 2) / 8, 70_272),
        (DEEPSEEK, AWQ, "h100", 8, (669.18 * 4.156 / 8 + 1.85 * 2) / 8, 70_272),
        # Quantized models that fit one device, and do not in 16 bits.
        (LLAMA_70B, AWQ, "h100", 1, 68.45 * 4.156 / 8 + 2.10 * 2, 327_680),
        (QWEN_32B, FP8, "l40s", 1, 31.21 * 8.002 / 8 + 1.56 * 2, 262_144),
    ],
)
def test_plan_agrees_with_arithmetic_by_hand(
    sizes: str, quant: dict[str, object] | None, gpu: str, tp: int, gigabytes: float, token_bytes: int,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Check the weights and the cache of one device, and that no smaller layout fits."""
    others = EXPERTS if sizes is DEEPSEEK else {"head_dim": 128}
    model = of(str(write_config(tmp_path, sizes, quant, **others)))
    precision, kind = "bf16" if quant is None else STORED, device(gpu)
    *smaller, fit = smallest(model, kind.machine(8), Wanted(4096, 1, {}), (precision,), most=8, per_node=8)
    assert (fit.why_not, fit.tp, fit.pp) == ("", tp, 1) and all(other.why_not for other in smaller)
    assert fit.memory is not None and fit.cache is not None
    assert fit.memory.weights / 1e9 == pytest.approx(gigabytes, rel=0.01)
    beside = fit.memory.activations + fit.memory.graphs + fit.memory.libraries
    room = 0.92 * kind.total_bytes - fit.memory.weights - beside
    assert fit.cache.num_tokens == pytest.approx(room / token_bytes, rel=0.002, abs=32)


def test_quantized_checkpoint_has_one_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_config(tmp_path, LLAMA_70B, AWQ))
    assert main(["plan", path, "--gpu", "h100"]) == 0
    shown = capsys.readouterr().out
    assert "stored as awq" in shown and "int8" not in shown and "--tensor-parallel-size" not in shown
    assert main(["plan", path, "--gpu", "h100", "--precision", "fp8"]) == 1
    assert "the weights are stored as awq" in capsys.readouterr().err


def test_speeds_include_the_largest_batch_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "8B", "--gpu", "l40s", "--gpus", "1", "--dtype", "bfloat16"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"batch +(\d+):", shown) == ["1", re.search(r"(\d+)\.\d requests of 8,192", shown)[1]]  # type: ignore[index]


def test_cloud_instances_are_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert device("g6e.12xlarge").label == "L40S" and device("P5.48xlarge").per_node == 8
    assert main(["plan", LLAMA_70B, "--gpu", "g6e.12xlarge", "--precision", "bf16"]) == 0
    shown = capsys.readouterr().out
    assert "up to 4:" in shown and "--tensor-parallel-size 4" in shown
    with pytest.raises(ConfigError, match=r"'p5.48' is unknown.*did you mean 'p5.48xlarge'"):
        device("p5.48")
    with pytest.raises(ConfigError, match="GiB of its memory, such as --gpu 24$"):
        device("rtx4090")


def test_plan_says_what_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", LLAMA_70B, "--gpu", "l40s", "--gpus", "2", "--precision", "bf16"]) == 1
    shown = capsys.readouterr().out
    assert "3 layouts    at best" in shown and "GiB" in shown and "L40S would do, in bf16" in shown
    flags = ["--gpu", "h100", "--gpus", "4", "--precision", "bf16", "--concurrency", "900"]
    assert main(["plan", LLAMA_70B, *flags]) == 1
    assert "requests of 8,192 tokens at once would do (--concurrency)" in capsys.readouterr().out


def test_known_sizes_are_those_of_the_models() -> None:
    """Check billions of parameters against those stated for Qwen3, Llama 2 and 3, Mistral and Qwen2.5."""
    stated = dict(
        zip(KNOWN, (0.6, 1.24, 3.21, 7.25, 8.03, 13.0, 14.8, 32.8, 70.6, 72.7, 123, 406), strict=True)
    )
    counts = {name: count_parameters(by_parameters(name)[0].facts).total / 1e9 for name in KNOWN}
    assert counts == pytest.approx(stated, rel=0.01)


@pytest.mark.parametrize(
    ("params", "active", "gigabytes", "layers", "kv_bytes"),
    [
        ("7B", None, 14.5, 32, 131_072),  # 7.25 B in Mistral-7B; 2 x 8 x 128 values of 2 bytes in 32 layers
        ("13b", None, 26.0, 40, 819_200),  # Llama-2-13B: 40 KV heads
        ("32B", None, 65.5, 64, 262_144),
        ("70B", None, 141.1, 80, 327_680),
        ("175B", None, 350, 98, 401_408),
        ("405B", None, 811.7, 126, 516_096),
        ("671B", "37B", 1342, 66, 270_336),
        ("744B", "40B", 1488, 68, 278_528),
        ("0.75T", "40B", 1500, 68, 278_528),
    ],
)
def test_size_alone_gives_the_weights_by_hand(
    params: str, active: str | None, gigabytes: float, layers: int, kv_bytes: int
) -> None:
    """Check weights of two bytes, and a cache of two vectors of 128 values for each KV head and layer."""
    model, note = by_parameters(params, active)
    assert weight_bytes(model, "bf16") / 1e9 == pytest.approx(gigabytes, rel=0.01)
    if active is not None:
        used = count_parameters(model.facts).active / 1e9
        assert used == pytest.approx(float(active[:-1]), rel=0.05) and "MLA" in note
    assert len(model.facts.layers) == layers and "an estimate from the size alone" in note
    per_layer = 2 * 2 * model.facts.kv_heads * 128
    assert kv_bytes_per_token(model, "bfloat16") == {"full": (layers, per_layer)}
    assert layers * per_layer == kv_bytes and model.facts.heads % 8 == 0


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        # The guide's table: 7B-13B on one GPU, 32B-70B on 4, 175B-405B on 8, a 744B MoE on 16.
        ("--params 7B --gpus 1 --dtype float16", ["yes  bf16   tp 1"]),
        ("--params 13B --gpus 1 --dtype bfloat16", ["yes  bf16   tp 1"]),
        ("--params 32B --gpus 4 --dtype bfloat16", ["yes  bf16   tp 1"]),
        ("--params 70B --gpus 4 --dtype bfloat16 --concurrency 16", ["yes  bf16   tp 4"]),
        ("--params 70B --gpus 1 --quantization awq", ["yes  int4   tp 1"]),
        ("llama-3-70b --gpus 1 --quantization awq", ["yes  int4   tp 1"]),
        ("--params 175B --gpus 8 --precision bf16", ["no   bf16   3 layouts", "yes  bf16   tp 8"]),
        ("--params 405B --gpus 8 -q fp8", ["no   fp8    3 layouts", "yes  fp8    tp 8"]),
        ("--params 744B --active 40B --gpus 16 -q fp8", ["no   fp8 ", "yes  fp8    tp 4 x pp 3"]),
        ("--params 744B --active 40B --gpus 16 -q gptq", ["no   int4", "yes  int4   tp 8"]),
    ],
)
def test_table_of_the_guide_can_be_asked(
    flags: str, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--gpu", "h100", *flags.split()]) == 0
    shown = capsys.readouterr().out
    assert [line for line in lines if line not in shown] == []
    assert "an estimate from the size alone" in shown and "quire serve MODEL --max-model-len" in shown


@pytest.mark.parametrize(
    ("name", "precision"),
    [("x/Qwen3-32B-FP8", "fp8"), ("x/llama-3-70b-awq", "int4"), ("x/Some-8B-NVFP4", "fp8"), ("x/8B", None)],
)
def test_precision_of_a_name_without_a_checkpoint(
    name: str, precision: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", name, "--gpu", "h200"]) == 0
    shown = capsys.readouterr().out
    (sizes,) = (line for line in shown.splitlines() if line.startswith("Weights, GB: "))
    assert sizes.count(",") == (1 if precision else 5) and (precision or "bf16") in sizes
    assert (f"{precision} weights, by the name" in shown) == (precision is not None)


def test_sizes_that_do_not_fit_the_guides_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Check 2 x 405 = 810 GB against 8 x 80, and 2 x 744 = 1,488 against 16 x 80."""
    for flags in ("--params 405B --gpus 8", "--params 744B --active 40B --gpus 16"):
        assert main(["plan", "--gpu", "h100", "--precision", "bf16", *flags.split()]) == 1
        assert "Nothing fits: " in capsys.readouterr().out


def test_size_in_a_name_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, note = subject("nobody/Qwen9-235B-A22B-Instruct", Env.read({}))
    assert count_parameters(model.facts).total / 1e9 == pytest.approx(235, rel=0.01)
    assert note.startswith("no config.json found; an estimate") and model.facts.moe is not None
    with pytest.raises(ConfigError, match="--params 671B --active 37B"):
        subject("nobody/Mixer-8x7B", Env.read({}))


@pytest.mark.parametrize("gpu", ["mi300x", "trainium2", "trn2.48xlarge"])
def test_devices_without_a_backend_are_planned_but_not_served(
    gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--params", "70B", "--gpu", gpu, "--precision", "bf16"]) == 0
    shown = capsys.readouterr().out
    assert "Quire runs on NVIDIA GPUs and on CPUs, not on" in shown and "quire serve" not in shown


def test_offloaded_layers_make_a_model_fit_and_limit_its_speed(capsys: pytest.CaptureFixture[str]) -> None:
    model, h200 = of(LLAMA_70B), DEVICES["h200"]

    def fit_with(gib: float) -> MemoryFit:
        wanted = Wanted(8192, 1, {"cpu_offload_gb": gib} if gib else {})
        return fits(model, h200.machine(1), "bf16", wanted, tp=1, pp=1)

    assert "exceed the memory" in fit_with(0).why_not
    fit = fit_with(40)
    assert fit.why_not == "" and fit.memory is not None
    host_bytes, per_layer = fit.memory.offloaded.host_bytes, weight_bytes(model, "bf16") / 82
    assert 40 * 2**30 <= host_bytes < 40 * 2**30 + per_layer
    assert fit.memory.offloaded.buffer_bytes == pytest.approx(2 * per_layer, rel=0.05)
    assert fit.memory.weights + host_bytes == pytest.approx(weight_bytes(model, "bf16"), rel=1e-6)
    speed = rates(fit, h200, batch=1, context=8192)
    assert speed.decode_tok_s == pytest.approx(h200.pcie_bytes_s / host_bytes)
    flags = ["--gpu", "h200", "--gpus", "1", "--precision", "bf16", "--cpu-offload-gb", "40"]
    assert main(["plan", LLAMA_70B, *flags]) == 0
    text = capsys.readouterr().out
    assert "Assumed: 64 GB/s of PCIe, as stated for the device; it was not measured" in text
    assert f"at most {speed.decode_tok_s:.2f} tokens/s" in text and "--cpu-offload-gb 40" in text
    assert main(["plan", LLAMA_70B, *flags, "--json"]) == 0
    (layout,) = json.loads(capsys.readouterr().out)["layouts"]
    assert layout["offloaded"]["host_bytes_per_device"] == host_bytes
    assert layout["bytes_per_device"]["offload buffers"] == fit.memory.offloaded.buffer_bytes
