"""Tests of a small device with a full batch and every sampling feature: the reserved memory suffices."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from oracle import make_tiny

from quire import LLM
from quire.configure import configure
from quire.sampling.memory_probe import everything
from quire.worker.worker import Worker

pytestmark = pytest.mark.gpu
VOCAB, ROWS, DEVICE_BYTES = 151_936, 256, 5 << 30


@pytest.fixture
def small_device() -> Iterator[float]:
    """Limit this device to a share of its memory."""
    gc.collect()
    torch.cuda.empty_cache()
    yield DEVICE_BYTES / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_full_batch_with_all_features_does_not_run_out_of_memory(
    tmp_path: Path, small_device: float, mode: str
) -> None:
    """Check that penalties, logprobs and prompt logprobs have memory that the cache did not take."""
    path, _ = make_tiny("qwen3", tmp_path, hidden_size=256, vocab_size=VOCAB, max_position_embeddings=1024)
    llm = LLM(
        str(path),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=ROWS,
        gpu_memory_utilization=small_device,
        logprobs_mode=mode,
    )
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((small_device * total - outside) / total)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, 1000, (2 * ROWS, 200), generator=generator).tolist()
    params = everything(VOCAB, 20)
    params.prompt_logprobs, params.max_tokens, params.ignore_eos, params.stop_token_ids = 20, 24, False, [3]
    params.min_tokens = 24
    for output in llm.generate(prompts, params, use_tqdm=False):
        outputs = output.outputs[0]
        assert outputs.finish_reason == "length" and len(outputs.token_ids) == 24
        assert outputs.logprobs is not None and all(len(logprob or {}) >= 20 for logprob in outputs.logprobs)
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 200
        assert not {1, 3} & set(outputs.token_ids) and max(outputs.token_ids) < 1024


def test_states_of_rows_are_counted_once(tmp_path: Path) -> None:
    """Check that the SSM states of the profiling step do not reduce the cache."""
    sizes = {"hidden_size": 256, "mamba_d_state": 256, "max_position_embeddings": 1024}
    path, _ = make_tiny("granitemoehybrid", tmp_path, **sizes)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    config = configure({"model": str(path), "dtype": "bfloat16", "max_num_seqs": 1024, "max_model_len": 1024})
    worker = Worker(config)
    worker.load()
    size = worker.measure()
    states = 1025 * worker.loaded.layout.row_bytes(2)
    assert states > 1 << 30 and size.num_bytes > states
    assert worker._needs is not None and worker._needs.other < total - free + states // 2
