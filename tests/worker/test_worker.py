"""Tests of the worker: its construction, and single steps against transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import make_tiny, run_hf

from quire.configure import configure
from quire.data.params import SamplingParams
from quire.data.step_plan import Admission, StepPlan
from quire.errors import ConfigError
from quire.worker.worker import Worker

BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return make_tiny("qwen3", tmp_path_factory.mktemp("worker"))


def start(path: Path, **settings: Any) -> Worker:
    base_settings = {"model": str(path), "dtype": "float32", "block_size": BLOCK_SIZE, "max_num_seqs": 4}
    worker = Worker(
        configure(base_settings | {"use_tqdm_on_load": False, "num_gpu_blocks_override": 80} | settings)
    )
    worker.start()
    return worker


def admission(row: int, token_ids: list[int], block_ids: list[int], **fields: Any) -> Admission:
    params = SamplingParams(temperature=0, logprobs=1, **fields)
    length = len(token_ids)
    return Admission(
        row=row,
        request_id=str(row),
        token_ids=token_ids,
        prompt_len=length,
        num_computed=0,
        block_ids=[block_ids],
        params=params,
        seed=0,
    )


def plan(rows: list[int], counts: list[int], samples: list[bool], **changes: Any) -> StepPlan:
    none = np.empty(0, np.int32)
    fields: dict[str, Any] = {"released": [], "admitted": [], "block_rows": none, "block_ids": none}
    ints = {"rows": np.array(rows, np.int32), "num_tokens": np.array(counts, np.int32)}
    return StepPlan(step=1, samples=np.array(samples), **(fields | ints | changes))


def test_number_of_threads_follows_the_config(tiny: tuple[Path, Any]) -> None:
    before = torch.get_num_threads()
    try:
        start(tiny[0], cpu_threads=3)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_prompts_chunks_and_decodes_in_one_step(tiny: tuple[Path, Any]) -> None:
    """Check rows out of order, arbitrary blocks and an unfinished prompt against transformers."""
    path, hf = tiny
    worker = start(path)
    prompts = {3: [5, 9, 30, 31, 32], 1: [7, 8], 0: list(range(40, 51))}
    tables = {3: [17, 4], 1: [9], 0: [30, 2]}
    new = [admission(row, prompts[row], tables[row]) for row in (3, 1, 0)]
    first = worker.submit(plan([3, 1, 0], [5, 2, 7], [True, True, False], admitted=new)).wait()
    expected = {row: int(run_hf(hf, prompts[row])[-1].argmax()) for row in prompts}
    assert first.token_ids.tolist() == [expected[3], expected[1]]
    assert sorted(first.logprobs) == [1, 3]
    grown = {"block_rows": np.array([0], np.int32), "block_ids": np.array([[61]], np.int32)}
    second = worker.submit(plan([3, 1, 0], [1, 1, 4], [True, True, True], **grown)).wait()
    after = [int(run_hf(hf, [*prompts[row], expected[row]])[-1].argmax()) for row in (3, 1)]
    assert second.token_ids.tolist() == [*after, expected[0]]


def test_prompt_logprobs_cover_each_position_once(tiny: tuple[Path, Any]) -> None:
    path, hf = tiny
    worker = start(path)
    prompt = list(range(40, 51))
    new = [admission(2, prompt, [30, 2, 61], prompt_logprobs=1)]
    actual = worker.submit(plan([2], [6], [False], admitted=new)).wait().prompt_logprobs[2]
    actual += worker.submit(plan([2], [5], [True])).wait().prompt_logprobs[2]
    rows = torch.log_softmax(run_hf(hf, prompt), -1)
    assert [entry.token_ids[0] for entry in actual] == prompt[1:]
    for entry, row in zip(actual, rows, strict=False):
        assert entry.logprobs[0] == pytest.approx(row[entry.token_ids[0]].item(), abs=1e-4)
        assert entry.token_ids[1] == int(row.argmax())


def test_reused_row_forgets_the_last_requests_params(tiny: tuple[Path, Any]) -> None:
    path, _ = tiny
    worker = start(path)
    asking = [admission(2, [5, 6], [3], prompt_logprobs=1, bad_words=[])]
    assert 2 in worker.submit(plan([2], [2], [True], admitted=asking)).wait().prompt_logprobs
    silent = [admission(2, [5, 6], [3])]
    assert worker.submit(plan([2], [2], [True], admitted=silent, released=[2])).wait().prompt_logprobs == {}


def test_cache_has_the_reported_number_of_blocks(tiny: tuple[Path, Any]) -> None:
    path, _ = tiny
    worker = start(path, num_gpu_blocks_override=70)
    last = [admission(0, [5, 6, 7], [69])]
    assert len(worker.submit(plan([0], [3], [True], admitted=last)).wait().token_ids) == 1


def test_run_before_start_is_an_internal_error(tiny: tuple[Path, Any]) -> None:
    worker = Worker(configure({"model": str(tiny[0]), "dtype": "float32"}))
    with pytest.raises(AssertionError, match="start"):
        worker.submit(plan([0], [1], [True])).wait()


def test_row_starts_from_the_states_of_another_after_its_step(tmp_path: Path) -> None:
    """Check that states are kept after the step that computes them, and restored before the next."""
    path, hf = make_tiny("lfm2", tmp_path)
    worker, prompt = start(path, mamba_block_size=4), [5, 9, 30, 31, 32, 33]
    first = admission(0, prompt, [1, 2])
    saves = np.array([[0], [1], [4]], np.int32)
    worker.submit(plan([0], [4], [False], admitted=[first], saves=saves)).wait()
    second = admission(2, prompt, [1, 3])
    second.num_computed, second.state = 4, 1
    result = worker.submit(plan([2], [2], [True], admitted=[second])).wait()
    assert result.token_ids.tolist() == [int(run_hf(hf, prompt)[-1].argmax())]
    (logprobs,) = result.logprobs[2]
    expected = torch.log_softmax(run_hf(hf, prompt)[-1], -1).max()
    assert abs(logprobs.logprobs[0] - float(expected)) < 1e-4


def test_weights_larger_than_the_memory_are_refused_before_they_are_loaded(tiny: tuple[Path, Any]) -> None:
    """Catches a start that the kernel ends for lack of memory, without a message."""
    settings = {"model": str(tiny[0]), "dtype": "float32", "load_format": "dummy"}
    config = configure(settings | {"hf_overrides": {"intermediate_size": 10**9}})
    with pytest.raises(ConfigError, match="weights take about .* GiB, and the cpu has .*quire plan"):
        Worker(config).load()
    little = replace(config.machine, total_bytes=1)
    Worker(replace(configure(settings | {"quantization": "int8"}), machine=little)).load()


def test_out_of_memory_while_loading_names_remedies(
    tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(configure({"model": str(tiny[0]), "dtype": "float32"}))

    def fail(on_progress: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 1 GiB")

    monkeypatch.setattr(worker.loaded, "load", fail)
    with pytest.raises(ConfigError, match="out of memory: the weights take about .*--quantization int8"):
        worker.load()
