"""Tests of offloaded layers on a GPU: equal logits, memory, sleep mode, and speed against the PCIe bound.

`pytest -m gpu -s tests/gpu/test_offload.py` prints the measured rates."""

import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import SIZES, STORED
from gguf_files import make_tiny_gguf
from on_gpu import answers, opened
from oracle import make_tiny
from requantized import requantize
from tiny import logits_of

from quire import LLM, SamplingParams
from quire.kernels.host_memory import host_memory, pin, unpin

pytestmark = pytest.mark.gpu
SIZE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 7, "head_dim": 64}
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OFFLOADED_GIB = 8
NUM_TOKENS = 24


def worker_of(llm: LLM) -> Any:
    return llm.llm_engine.core.executor._worker


def assert_same_answers(path: Path, **settings: Any) -> LLM:
    """Compare an engine with and without offloaded layers; return the one that has them."""
    whole = opened(path, "bfloat16", **settings)
    expected = [logits_of(output) for output in answers(whole)]
    whole.llm_engine.close()
    del whole
    llm = opened(path, "bfloat16", cpu_offload_gb=80, **settings)
    worker = worker_of(llm)
    assert len(worker.loaded.offload.layers) == len(worker.model.layers) and worker.loaded.offload.is_pinned
    for _ in range(2):
        for output, logits in zip(answers(llm), expected, strict=True):
            assert torch.equal(logits_of(output), logits)
    return llm


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
@pytest.mark.parametrize("quantization", [None, "fp8", "int8"])
def test_logits_are_equal(quantization: str | None, settings: dict[str, Any], tmp_path: Path) -> None:
    path, _ = make_tiny("llama", tmp_path, **SIZE)
    llm = assert_same_answers(path, quantization=quantization, **settings)
    graphs = worker_of(llm)._runner.device.graphs
    assert bool(graphs._by_size) == (not settings)
    llm.llm_engine.close()


@pytest.mark.parametrize("name", ["fp8 block", "awq", "nf4"])
def test_stored_formats(name: str, tmp_path: Path) -> None:
    sizes = SIZES["qwen3_moe"] | {"num_hidden_layers": 4, "moe_intermediate_size": 256}
    path, _ = requantize("qwen3_moe", tmp_path, *STORED[name], **sizes)
    assert_same_answers(path).llm_engine.close()


def test_gguf_file(tmp_path: Path) -> None:
    path, _ = make_tiny_gguf("llama", tmp_path, "Q4_0", **SIZE)
    assert_same_answers(path).llm_engine.close()


def test_tied_embeddings_and_adapter_slots(tmp_path: Path) -> None:
    path, _ = make_tiny("qwen3", tmp_path, **SIZE, tie_word_embeddings=True)
    assert_same_answers(path, enable_lora=True, max_loras=2, max_lora_rank=8).llm_engine.close()


def test_sleep_and_memory(tmp_path: Path) -> None:
    path, _ = make_tiny("llama", tmp_path, **SIZE)
    llm = assert_same_answers(path, enable_sleep_mode=True)
    expected = [logits_of(output) for output in answers(llm)]
    worker = worker_of(llm)
    offload, needs = worker.loaded.offload, worker._needs
    assert needs.buffers == offload.buffer_bytes > 0
    assert needs.weights + needs.buffers == worker.loaded.num_bytes
    for level in (1, 2):
        llm.sleep(level)
        assert all(buffer.untyped_storage().nbytes() == 0 for buffer in offload.buffers)
        llm.wake_up()
        for output, logits in zip(answers(llm), expected, strict=True):
            assert torch.equal(logits_of(output), logits)
    llm.llm_engine.close()


def pcie_bytes_s() -> float:
    """Measure copies from pinned memory, of the size of a layer."""
    num_bytes = 1 << 29
    host, device = host_memory(num_bytes), torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    assert pin(host)
    rates = []
    for _ in range(8):
        torch.cuda.synchronize()
        started = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(num_bytes / (time.perf_counter() - started))
    unpin(host)
    return max(rates)


def step_seconds(llm: LLM) -> float:
    """Return the median time of a decode step of one request."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
        times.append((time.perf_counter() - started) / NUM_TOKENS)
    return statistics.median(times)


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_speed_of_8b(quantization: str | None, settings: dict[str, Any], tmp_path: Path) -> None:
    """A step takes at most 1.25 times as long as the copies of its layers."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    gib = OFFLOADED_GIB if quantization is None else OFFLOADED_GIB / 2
    gc.collect()
    torch.cuda.empty_cache()
    bound = pcie_bytes_s()
    started = time.perf_counter()
    llm = LLM(
        str(tmp_path),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=8,
        quantization=quantization,
        cpu_offload_gb=gib,
        **settings,
    )
    start_s = time.perf_counter() - started
    offload = worker_of(llm).loaded.offload
    assert offload.host_bytes >= gib * 2**30
    seconds = step_seconds(llm)
    share = offload.host_bytes / bound / seconds
    print(
        f"\n8B {quantization or 'bf16'} {'eager' if settings else 'graphs'}: {1e3 * seconds:.1f} ms per step,"
        f" {offload.host_bytes / 2**30:.2f} GiB in {len(offload.layers)} layers,"
        f" {offload.host_bytes / seconds / 1e9:.1f} of {bound / 1e9:.1f} GB/s: {share:.0%} of the PCIe bound;"
        f" start {start_s:.1f} s"
    )
    llm.llm_engine.close()
    assert share >= 0.8
