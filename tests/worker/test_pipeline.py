"""Tests that pipeline stages and tensor-parallel ranks match a single worker."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import make_tiny
from staged import Engine

from quire.attention.batch import Batch
from quire.kernels.cpu import native
from quire.worker.cpu import CpuDevice

POISON = 91

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 5},
    "gemma2": {"num_hidden_layers": 4, "sliding_window": 5},
    "qwen3_moe": {"num_hidden_layers": 4},
    "deepseek_v3": {"num_hidden_layers": 4},
    "granitemoehybrid": {},
    "gpt2": {},
}


def answers(model: Path, **settings: Any) -> Engine:
    """Generate with chunked prompts, shared prefixes, more rows than blocks, and an abort."""
    engine = Engine(
        model, max_num_batched_tokens=16, num_gpu_blocks_override=24, max_model_len=64, **settings
    )
    draw = random.Random(3)
    common = [draw.randrange(3, 90) for _ in range(13)]
    for number in range(7):
        tail = [draw.randrange(3, 90) for _ in range(draw.randint(1, 11))]
        fields: dict[str, Any] = {"logprobs": 3} if number % 2 else {"prompt_logprobs": 2}
        if number == 4:
            fields = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3, "seed": 5}
        engine.add(str(number), common + tail if number % 3 else tail, count=9 + number, **fields)
    engine.add("gone", common, count=40)
    for _ in range(12):
        engine.step()
    assert engine.core.abort(["gone"])
    engine.tokens.pop("gone")
    engine.run()
    engine.close()
    return engine


@cache
def answers_of_one_worker(family: str, folder: Path, kv_cache_dtype: str = "auto") -> Engine:
    model, _ = make_tiny(family, folder / kv_cache_dtype, **FAMILIES[family])
    return answers(model, kv_cache_dtype=kv_cache_dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one")


@pytest.mark.parametrize("family", FAMILIES)
def test_two_and_three_stages_match_one_worker(family: str, tmp_path: Path, folder: Path) -> None:
    model, _ = make_tiny(family, tmp_path, **FAMILIES[family])
    one = answers_of_one_worker(family, folder)
    num_layers = len(one.config.checkpoint.facts.layers)
    uneven = {"pipeline_parallel_size": 3, "pp_layer_partition": f"1,{num_layers - 2},1"}
    for settings in [{"pipeline_parallel_size": 2}, *([uneven] if num_layers > 2 else [])]:
        many = answers(model, **settings)
        assert many.most_in_flight == settings["pipeline_parallel_size"]
        assert many.core.scheduler.num_preemptions > 0, "enough blocks would test less"
        check_same(many, one)


SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "heads and halves": ("llama", {}),
    "more devices than key heads": ("llama", {"tensor_parallel_size": 4}),
    "windows": ("gemma2", {}),
    "experts in stages": ("qwen3_moe", {"pipeline_parallel_size": 2}),
    "latents": ("deepseek_v3", {}),
    "states": ("granitemoehybrid", {}),
    "a cache of 8 bits": ("llama", {"kv_cache_dtype": "fp8"}),
}


@pytest.mark.parametrize("name", SHARED)
def test_tensor_parallel_ranks_match_one_worker(name: str, tmp_path: Path, folder: Path) -> None:
    """Check for a cache with the wrong heads and for ranks that sample different tokens."""
    family, sizes = SHARED[name]
    model, _ = make_tiny(family, tmp_path, **FAMILIES[family])
    many = answers(model, **({"tensor_parallel_size": 2} | sizes))
    assert many.core.scheduler.num_preemptions > 0, "enough blocks would test less"
    check_same(many, answers_of_one_worker(family, folder, sizes.get("kv_cache_dtype", "auto")))


def check_same(many: Engine, one: Engine) -> None:
    assert many.tokens == one.tokens
    for logprobs, expected in ((many.logprobs, one.logprobs), (many.prompt_logprobs, one.prompt_logprobs)):
        assert {id: len(actual) for id, actual in logprobs.items()} == {
            id: len(actual) for id, actual in expected.items()
        }
        for id in logprobs.keys() - {"gone"}:
            for a, b in zip(logprobs[id], expected[id], strict=True):
                assert a.token_ids[0] == b.token_ids[0]
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


@pytest.mark.parametrize("broken", range(3))
def test_step_that_fails_in_one_stage_fails_only_after_it(
    broken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that tensors sent for the failed step are not taken for the next step's, nor its tokens for
    output.
    """
    model, _ = make_tiny("llama", tmp_path, num_hidden_layers=3)
    engine = Engine(model, pipeline_parallel_size=3, enable_prefix_caching=False)
    body = engine.executor.workers[broken].model
    forward = body.forward

    def breaks(batch: Batch) -> Any:
        if (batch.token_ids == POISON).any():
            raise RuntimeError("poisoned")
        return forward(batch)

    monkeypatch.setattr(body, "forward", breaks)
    for number in range(6):
        prompt = [number * 9 + at for at in range(5)]
        engine.add(str(number), [*prompt, POISON] if number == 3 else prompt, count=8)
    engine.run()
    engine.close()
    assert [len(engine.tokens[str(number)]) for number in range(6)] == [8, 8, 8, 0, 8, 8]
    ended = {id: finish.reason for step in engine.steps for id, finish in step.finished.items()}
    assert ended == dict.fromkeys(map(str, range(6)), "length") | {"3": "error"}
    alone = Engine(model, enable_prefix_caching=False)
    for number in {*range(6)} - {3}:
        alone.add(str(number), [number * 9 + at for at in range(5)], count=8)
    assert alone.run() == {id: output for id, output in engine.tokens.items() if id != "3"}
    alone.close()
    for output in engine.executor.errors:
        assert [isinstance(output[stage], Exception) for stage in range(3)] == [
            stage >= broken for stage in range(3)
        ]
    assert engine.executor.errors


@pytest.mark.skipif(native.library() is None, reason="tapes are of native kernels")
def test_decodes_of_every_stage_use_tapes(tmp_path: Path) -> None:
    model, _ = make_tiny("llama", tmp_path, num_hidden_layers=3)
    output = []
    for settings in ({}, {"pipeline_parallel_size": 3, "enforce_eager": False}):
        engine = Engine(model, in_threads=False, **settings)
        for number in range(5):
            engine.add(str(number), [number * 9 + at for at in range(5)], count=12)
        output.append(engine.run())
    assert output[0] == output[1]
    for worker in engine.executor.workers:
        assert worker._runner is not None and isinstance(worker._runner.device, CpuDevice)
        tapes = worker._runner.device._tapes._tapes
        assert tapes and None not in tapes.values()
