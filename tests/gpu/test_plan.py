"""Tests of `quire plan` against an engine on a GPU, term by term (`pytest -m gpu -s` prints them)."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.configure import configure
from quire.memory import human
from quire.plan.estimate import cache_of, memory_of
from quire.worker.worker import Worker

pytestmark = pytest.mark.gpu

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}
SHARED = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "torch_dtype": "bfloat16", "hidden_act": "silu"}
WITHIN = 0.05


def used() -> int:
    """Return the used device memory, without torch's cached memory."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("name", SHAPES)
def test_plan_matches_a_gpu_engine(name: str, tmp_path: Path) -> None:
    """Check weights, cache and total within 5 %."""
    (tmp_path / "config.json").write_text(json.dumps(SHARED | SHAPES[name]))
    gc.collect()
    torch.cuda.empty_cache()
    settings = {"model": str(tmp_path), "load_format": "dummy", "skip_tokenizer_init": True}
    config = configure(settings | {"max_model_len": 8192})
    planned = memory_of(config, "bf16")
    cache = cache_of(config, planned)
    worker = Worker(config)
    worker.load()
    size = worker.measure()
    needs = worker._needs
    assert needs is not None
    libraries = used() - torch.cuda.memory_reserved()
    worker.allocate(size)
    before = used()
    worker.warm_up()
    graphs, taken = used() - before, used()
    measured = {
        "weights": needs.weights,
        "activations": needs.activations,
        "graphs": graphs,
        "libraries": libraries,
        "KV cache": size.num_bytes,
    }
    terms = planned.terms(cache)
    print(f"\n{name} on {config.machine.name}, {human(config.machine.total_bytes)}")
    print(f"  put aside by the engine: graphs {human(needs.graphs)}, others {human(needs.other)}")
    for term, bytes_ in measured.items():
        print(f"  {term:<12} planned {human(terms[term]):>12}   measured {human(bytes_):>12}")
    full = planned.beside - planned.activations + cache.num_bytes
    print(f"  {'all':<12} planned {human(full):>12}   measured {human(taken):>12} (no step running)")
    worker.close()
    assert terms["weights"] == pytest.approx(measured["weights"], rel=WITHIN)
    assert cache.num_blocks == pytest.approx(size.num_blocks, rel=WITHIN)
    assert full == pytest.approx(taken, rel=WITHIN)
