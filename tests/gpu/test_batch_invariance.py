"""Tests of the batch-invariant mode on a GPU: the logits of a request have the same bits in any batch."""

import gc
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import SIZES, STORED, gpt_oss
from gguf_files import make_tiny_gguf
from invariance_cases import check_http, check_mixed, check_needle, check_one_by_one
from lora_oracle import save_adapter
from oracle import make_tiny
from requantized import requantize
from serve_process import SHARED_FLAGS, ServeProcess
from test_lora_all_families import RANK, chosen
from tiny import generate_preempted, logits_of, open_tiny, prompts_of
from tiny_text import text_model
from torch import Tensor
from zoo import architecture_of

from quire import LLM, LoRARequest, SamplingParams
from quire.data.outputs import RequestOutput
from quire.kernels import batch_invariant

pytestmark = pytest.mark.gpu
LONG: dict[str, Any] = {"max_position_embeddings": 1024}
LENGTH, COUNT = 530, 6
"""Prompt and output of the compared request: two splits of keys and a part of the third."""
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "batch_invariant": True,
    "block_size": 16,
    "num_gpu_blocks_override": 12000,
    "max_model_len": 700,
}
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "enable_prefix_caching": True},
    "eager, small chunks": {
        "max_num_seqs": 7,
        "max_num_batched_tokens": 96,
        "enable_prefix_caching": False,
        "enforce_eager": True,
    },
}
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


class Tracebacks(logging.Handler):
    """Keeps the tracebacks of failed steps, which an engine only logs."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.texts.append("".join(traceback.format_exception(*record.exc_info)))


TRACEBACKS = Tracebacks()


@pytest.fixture(autouse=True)
def fast_again() -> Any:
    TRACEBACKS.texts.clear()
    logging.getLogger("quire").addHandler(TRACEBACKS)
    yield
    logging.getLogger("quire").removeHandler(TRACEBACKS)
    batch_invariant.switch(False)


def generated(llm: LLM, *args: Any, **options: Any) -> list[RequestOutput]:
    """Generate; a failure reports the end of the first failed step's traceback."""
    try:
        return llm.generate(*args, use_tqdm=False, **options)
    except Exception as error:
        first = next(iter(TRACEBACKS.texts), "no traceback was logged")
        raise AssertionError(f"{error}\n{first[-1500:]}") from None


def opened(path: Path, way: str, **more: Any) -> LLM:
    gc.collect()
    torch.cuda.empty_cache()
    return open_tiny(path, **(SETTINGS | WAYS[way] | more))


def logits_among(llm: LLM, others: int, *, place: int = 0, lora: LoRARequest | None = None) -> Tensor:
    """Return the logits of the compared request beside `others`, of which every second has no adapter."""
    prompts = prompts_of(*(3 + 37 * number % 290 for number in range(others)), seed=others)
    params = [SamplingParams(temperature=0, max_tokens=COUNT + 3, ignore_eos=True) for _ in prompts]
    prompts.insert(place, prompts_of(LENGTH)[0])
    compared = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=-1)
    params.insert(place, compared)
    loras = None
    if lora is not None:
        loras = [lora if number == place or number % 2 else None for number in range(len(prompts))]
    return logits_of(generated(llm, prompts, params, lora_request=loras)[place])


def check(path: Path, *, lora: LoRARequest | None = None, **more: Any) -> None:
    """Compare the request alone with batches of 2, 7, 32 and 256, in several orders, after a prefix hit and a
    preemption, and with an engine without graphs and with small chunks, in which the adapter has another
    slot."""
    llm = opened(path, "graphs", **more)
    expected = logits_among(llm, 0, lora=lora)
    assert expected.isfinite().all()
    for others, place in ((0, 0), (1, 0), (1, 1), (6, 3), (31, 31), (255, 100)):
        again = logits_among(llm, others, place=place, lora=lora)
        assert torch.equal(again, expected), f"after a prefix hit, beside {others} others at {place}"
        llm.reset_prefix_cache()
        actual = logits_among(llm, others, place=place, lora=lora)
        assert torch.equal(actual, expected), f"beside {others} others at {place}"
    if lora is None:
        llm.reset_prefix_cache()
        prompts = [prompts_of(LENGTH)[0], *prompts_of(40, 9)]
        resumed = logits_of(generate_preempted(llm, prompts, COUNT, at=(3,))[0])
        assert torch.equal(resumed, expected), "after a preemption"
    llm.llm_engine.close()
    llm = opened(path, "eager, small chunks", **more)
    if lora is not None:
        generated(
            llm, prompts_of(9), SamplingParams(max_tokens=1), lora_request=LoRARequest("first", 2, lora.path)
        )
    for others, place in ((0, 0), (6, 2)):
        actual = logits_among(llm, others, place=place, lora=lora)
        assert torch.equal(actual, expected), f"eager and in small chunks, beside {others} others"
    llm.llm_engine.close()


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "qwen3_moe", "gemma2", "deepseek_v3", "mixtral", "phi3", "cohere2"]
)
def test_families(family: str, tmp_path: Path) -> None:
    """Check dense models, norms of heads, experts, windows and MLA."""
    check(make_tiny(family, tmp_path, **(SIZES.get(family, {}) | LONG))[0])


STATES = (
    *(
        "Bamba",
        "FalconH1",
        "FalconMamba",
        "GraniteMoeHybrid",
        "Jamba",
        "KimiLinear",
        "Lfm2",
        "Lfm2Moe",
        "Mamba",
    ),
    *("Mamba2", "MiniMax", "NemotronH", "OlmoHybrid", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Zamba2"),
)


@pytest.mark.parametrize("family", STATES)
def test_models_with_states(family: str, tmp_path: Path) -> None:
    check(make_tiny(f"{family}ForCausalLM", tmp_path, **LONG)[0])


def test_speculation_with_states(tmp_path: Path) -> None:
    check_speculation(make_tiny("Qwen3NextForCausalLM", tmp_path, **LONG)[0])


FORMATS: dict[str, Callable[[Path], tuple[Path, Any]]] = {
    "awq": lambda folder: requantize("llama", folder, *STORED["awq"], **SIZES["llama"], **LONG),
    "awq experts": lambda folder: requantize(
        "qwen3_moe", folder, *STORED["awq"], **SIZES["qwen3_moe"], **LONG
    ),
    "Q4_0": lambda folder: make_tiny_gguf("llama", folder, "Q4_0", **SIZES["llama"], **LONG),
    "Q8_0 experts": lambda folder: make_tiny_gguf("qwen3_moe", folder, "Q8_0", **SIZES["qwen3_moe"], **LONG),
    "mxfp4": gpt_oss,
}


@pytest.mark.parametrize("name", FORMATS)
def test_stored_formats(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check kernels that dequantize. The YaRN scaling of gpt-oss is for 256 tokens."""
    if name == "mxfp4":
        monkeypatch.setenv("QUIRE_ALLOW_LONG_MAX_MODEL_LEN", "1")
    check(FORMATS[name](tmp_path)[0])


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_online_quantization(quantization: str, family: str, tmp_path: Path) -> None:
    check(make_tiny(family, tmp_path, **SIZES[family], **LONG)[0], quantization=quantization)


def test_fp8_cache(tmp_path: Path) -> None:
    check(make_tiny("llama", tmp_path, **SIZES["llama"], **LONG)[0], kv_cache_dtype="fp8_e4m3")


def test_float32(tmp_path: Path) -> None:
    check(make_tiny("llama", tmp_path, **SIZES["llama"], **LONG)[0], dtype="float32")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_adapters(family: str, tmp_path: Path) -> None:
    """Check adapters of linear layers, experts and latents."""
    path, hf = make_tiny(family, tmp_path, **(SIZES.get(family, {}) | LONG))
    save_adapter(hf, tmp_path / "a", 1, **RANK, **chosen(architecture_of(family), hf))
    check(path, lora=LoRARequest("a", 1, str(tmp_path / "a")), **LORA)


@pytest.mark.parametrize("most", [12, 540])
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention(family: str, most: int, tmp_path: Path) -> None:
    """Check selections of equal scores, and prompts whose keys are all selected only beside longer ones."""
    path, _ = make_tiny(family, tmp_path, **LONG, index_topk=most)
    check(path)
    if most > LENGTH:
        llm = opened(path, "graphs", enable_prefix_caching=False)
        expected = logits_among(llm, 0)
        params = [SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=-1)] * 2
        outputs = generated(llm, prompts_of(LENGTH) + prompts_of(650, seed=9), params)
        assert torch.equal(logits_of(outputs[0]), expected), "beside a prompt that needs a selection"
        llm.llm_engine.close()


@pytest.mark.parametrize("layout", ["tensor_parallel_size", "data_parallel_size"])
def test_expert_parallelism(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check two ranks on one GPU, which add through the host."""
    monkeypatch.setenv("QUIRE_TEST_SHARE_GPU", "1")
    path, _ = make_tiny("qwen3_moe", tmp_path, **SIZES["qwen3_moe"], **LONG)
    settings = {layout: 2, "enable_expert_parallel": True, "gpu_memory_utilization": 0.3}
    llm = opened(path, "eager, small chunks", **settings)
    expected = logits_among(llm, 0)
    for others, place in ((1, 1), (6, 3), (31, 31)):
        actual = logits_among(llm, others, place=place)
        assert torch.equal(actual, expected), f"beside {others} others at {place}"
    llm.llm_engine.close()


def test_speculation_has_the_tokens_of_the_plain_engine(tmp_path: Path) -> None:
    check_speculation(make_tiny("llama", tmp_path, **SIZES["llama"], **LONG)[0])


def check_speculation(path: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    prompts = prompts_of(300, 9, 40, 5, 254, 250)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    answers = []
    for more in ({}, {"speculative_config": drafts}):
        llm = opened(path, "graphs", **more)
        outputs = generated(llm, prompts, params)
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
        llm.llm_engine.close()
    assert answers[0] == answers[1]


def test_sampled_answers_one_by_one_and_in_one_batch(tmp_path: Path) -> None:
    """Check tokens and logprobs of 32 seeded requests, and that decodes have the logprobs of a prompt."""
    path, _ = make_tiny("llama", tmp_path, **SIZES["llama"], **LONG)
    llm = opened(path, "graphs", logprobs_mode="raw_logprobs")
    prompts = prompts_of(*(5 + 13 * number % 290 for number in range(32)))
    params = SamplingParams(temperature=0.6, seed=1234, max_tokens=16, ignore_eos=True, logprobs=5)
    together = [sampled(output) for output in generated(llm, prompts, params)]
    llm.reset_prefix_cache()
    assert [sampled(generated(llm, [prompt], params)[0]) for prompt in prompts] == together
    llm.reset_prefix_cache()
    whole = [
        prompt + [token for token, _ in answer] for prompt, answer in zip(prompts, together, strict=True)
    ]
    again = generated(llm, whole, SamplingParams(max_tokens=1, prompt_logprobs=0))
    for output, answer in zip(again, together, strict=True):
        last = zip(answer, (output.prompt_logprobs or [])[-len(answer) :], strict=True)
        assert all(position and position[token].logprob == logprob for (token, logprob), position in last)
    llm.llm_engine.close()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "Qwen3NextForCausalLM"])
def test_requests_alone_and_among_others(family: str, tmp_path: Path) -> None:
    """Check a prompt among random batches, prompts with logprobs, and prompts that arrive during decodes."""
    path, _ = make_tiny(family, tmp_path, **(SIZES.get(family, {}) | LONG))
    llm = opened(path, "graphs", max_num_batched_tokens=512)
    check_needle(llm, 300, trials=5, most=128)
    check_mixed(llm, 300)
    llm.llm_engine.close()
    llm = opened(path, "graphs", logprobs_mode="raw_logprobs")
    check_one_by_one(llm, 32)
    llm.llm_engine.close()


def test_completions_alone_and_in_one_call(tmp_path: Path) -> None:
    model = str(text_model(tmp_path).path)
    flags = (*SHARED_FLAGS, "--batch-invariant", "--dtype", "bfloat16", "--max-num-seqs", "64")
    with ServeProcess(model, *flags, log=tmp_path / "log") as server:
        server.until_healthy()
        check_http(server, "tiny", 32)
        server.end_cleanly()


def sampled(output: RequestOutput) -> list[tuple[int, float]]:
    """Return the sampled tokens with their logprobs."""
    (answer,) = output.outputs
    positions = zip(answer.token_ids, answer.logprobs or [], strict=True)
    return [(token, position[token].logprob) for token, position in positions]


def test_bits_differ_without_the_mode(tmp_path: Path) -> None:
    """Check that the comparisons of this file can fail."""
    path, _ = make_tiny("llama", tmp_path, **SIZES["llama"], **LONG)
    llm = opened(path, "graphs", batch_invariant=False)
    expected, differ = logits_among(llm, 0), 0
    for others in (6, 31, 255):
        llm.reset_prefix_cache()
        differ += not torch.equal(logits_among(llm, others), expected)
    assert differ
    llm.llm_engine.close()
