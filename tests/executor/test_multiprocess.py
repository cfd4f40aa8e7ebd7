"""Tests of ranks as processes: outputs match one process, and failures of ranks are handled."""

import os
import queue
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from oracle import make_tiny
from tiny import SMALL

from quire import LLM, SamplingParams
from quire.configure import configure
from quire.data.step_plan import Admission, StepPlan
from quire.errors import ConfigError, EngineDead, EngineError
from quire.executor import multiprocess, worker_group
from quire.executor.messages import PhaseDone, Returned, decode_call
from quire.executor.multiprocess import MultiprocessExecutor, RankedExecutor
from quire.executor.worker_group import LocalRanks
from quire.executor.worker_process import PipePort, RankAddress, local_ranks

PATIENCE_S = 60.0
"""Timeout of a test that hangs."""
PROMPTS = [[5, 6, 7, number] * (1 + number) for number in range(6)]
SETTINGS: dict[str, Any] = {
    **SMALL,
    "max_num_seqs": 4,
    "disable_log_stats": True,
}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the limit, since ranks on a busy machine may report a failure late."""
    monkeypatch.setattr(multiprocess, "CONSISTENT_S", PATIENCE_S)
    monkeypatch.setattr(multiprocess, "CAUSE_S", PATIENCE_S)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("ranks"))[0]


def generate(llm: LLM, **params: Any) -> list[Any]:
    sampling_params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3, **params)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    return [output.outputs[0] for output in llm.generate(prompts, sampling_params, use_tqdm=False)]


def ranks_of(llm: LLM) -> list[psutil.Process]:
    worker_group = llm.llm_engine.core.executor.worker_group  # type: ignore[attr-defined]
    return [psutil.Process(process.pid) for process in worker_group.processes]


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def pair(tiny: Path) -> Iterator[LLM]:
    llm = LLM(str(tiny), tensor_parallel_size=2, **SETTINGS)
    yield llm
    llm.llm_engine.close()


def test_two_ranks_match_one(pair: LLM, tiny: Path) -> None:
    assert len({os.getpid(), *(process.pid for process in ranks_of(pair))}) == 3
    expected = generate(LLM(str(tiny), **SETTINGS))
    for actual, wanted in zip(generate(pair), expected, strict=True):
        assert actual.token_ids == wanted.token_ids
        for logprobs, reference in zip(actual.logprobs, wanted.logprobs, strict=True):
            assert logprobs.keys() == reference.keys()
            for token_id, logprob in logprobs.items():
                assert logprob.logprob == pytest.approx(reference[token_id].logprob, abs=1e-4)


def test_step_that_fails_on_all_ranks_is_only_a_failed_step(pair: LLM) -> None:
    none, far = np.empty(0, np.int32), np.array([10_000], np.int32)
    broken = StepPlan(1 << 20, [], [], none, none, far, np.ones(1, np.int32), np.array([True]))
    with pytest.raises(EngineError, match="IndexError") as error:
        pair.llm_engine.core.executor.submit(broken).wait()
    assert not isinstance(error.value, EngineDead)
    assert len(generate(pair)) == len(PROMPTS)


def test_step_that_fails_on_the_last_stage_is_only_a_failed_step(pair: LLM) -> None:
    """Check that nothing that the first stage sent is taken for the next step's."""
    params = SamplingParams(logit_bias={1 << 20: 1.0})  # an invalid token id
    new = Admission(0, "a", [5, 6, 7], 3, 0, [[1]], params, seed=0)
    none, one = np.empty(0, np.int32), np.zeros(1, np.int32)
    broken = StepPlan(2 << 20, [], [new], none, none, one, np.full(1, 3, np.int32), np.ones(1, np.bool_))
    with pytest.raises(EngineError) as error:
        pair.llm_engine.core.executor.submit(broken).wait()
    assert not isinstance(error.value, EngineDead)
    assert len(generate(pair)) == len(PROMPTS)


def test_request_that_no_rank_can_compute_fails_alone(pair: LLM) -> None:
    engine, expected = pair.llm_engine, generate(pair)
    good = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    bad = good.clone()
    bad.allowed_token_ids = [10**7]  # bypasses the checks
    for number, ids in enumerate(PROMPTS[:2]):
        engine.add_request(str(number), {"prompt_token_ids": ids}, good)
    engine.step()
    engine.add_request("bad", {"prompt_token_ids": [5]}, good)
    request = next(item for id, item in engine.core.scheduler.requests.items() if id.startswith("bad"))
    request.params = bad
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    assert done["bad"].finish_reason == "error"
    assert [done[str(number)].token_ids for number in range(2)] == [item.token_ids for item in expected[:2]]


def test_stopped_rank_is_waited_for_and_killed_rank_is_fatal(tiny: Path) -> None:
    """Check also that no rank outlives the engine.

    A killed rank is named, and not reported as hung.
    """
    pair = LLM(str(tiny), tensor_parallel_size=2, **SETTINGS)
    first, second = ranks_of(pair)
    executor = pair.llm_engine.core.executor
    second.send_signal(signal.SIGSTOP)
    pair.llm_engine.add_request("1", {"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=2))
    assert pair.llm_engine.core.step(timeout_s=0.2) is None
    executor.watch()
    second.send_signal(signal.SIGCONT)
    while pair.llm_engine.has_unfinished_requests():
        pair.llm_engine.step()
    second.kill()
    with pytest.raises(EngineDead, match=r"Worker_TP1 is gone: pid \d+ was killed by SIGKILL"):
        generate(pair)
    with pytest.raises(EngineDead):
        executor.watch()
    pair.llm_engine.close()
    assert is_gone(first) and is_gone(second)


def test_single_rank_can_be_a_process(tiny: Path, spawned_engines: None) -> None:
    llm = LLM(str(tiny), distributed_executor_backend="mp", **SETTINGS)
    (rank,) = ranks_of(llm)
    assert rank.ppid() == os.getpid()
    assert generate(llm)[0].token_ids
    del llm
    psutil.wait_procs([rank], timeout=PATIENCE_S)
    assert is_gone(rank)


class OneBroken(MultiprocessExecutor):
    """Two ranks of which the second finds no weights."""

    folder: Path

    def start_ranks(self) -> LocalRanks:
        def broken(place: RankAddress) -> RankAddress:
            nowhere = replace(place.config.checkpoint, path=Path("/nowhere"))
            return replace(place, config=replace(place.config, checkpoint=nowhere))

        first, second = local_ranks(self.config, 0, f"file://{self.folder}/init_method")
        return LocalRanks([first, broken(second)])


def test_rank_that_fails_to_start_is_reported_and_ends_all(tiny: Path, tmp_path: Path) -> None:
    config = configure({"model": str(tiny), "tensor_parallel_size": 2} | SETTINGS)
    executor = OneBroken(config)
    executor.folder = tmp_path
    with pytest.raises(ConfigError, match=r"^rank 1 \(Worker_TP1\) cannot start: .*/nowhere"):
        executor.start()
    assert all(process.poll() is not None for process in executor.worker_group.processes)  # type: ignore[attr-defined]


WARM_UP = """
import os, sys
import torch.distributed
from quire.executor import worker_process
from quire.worker.worker import Worker

def warm_up(self):
    if sys.argv[4] == "1":
        {fault}
    torch.distributed.barrier()

Worker.warm_up = warm_up
worker_process.main()
"""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ('raise RuntimeError("no room for graphs")', "cannot start: RuntimeError: no room for graphs"),
        ("os._exit(3)", r"ended while it was starting: pid \d+ ended with exit code 3"),
    ],
)
def test_rank_that_fails_in_warm_up_is_named(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, fault: str, words: str
) -> None:
    """Check that the error is not only a closed connection, and that the other ranks are not waited for."""
    monkeypatch.setattr(multiprocess, "CAUSE_S", 2.0)
    monkeypatch.setattr(worker_group, "_ENTRY", WARM_UP.format(fault=fault))
    executor = MultiprocessExecutor(configure({"model": str(tiny), "tensor_parallel_size": 2} | SETTINGS))
    with pytest.raises(ConfigError, match=rf"^rank 1 \(Worker_TP1\) {words}"):
        executor.start()
    assert all(process.poll() is not None for process in executor.worker_group.processes)  # type: ignore[attr-defined]


def test_ranks_that_wait_in_warm_up_for_a_failed_rank_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check after sleep: the engine restarts instead of waiting for the timeout of its collectives."""

    class HalfWarm:
        names = ("first", "second")
        messages: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

        def send(self, data: bytes, timeout_s: float) -> None:
            call = decode_call(data)
            assert call is not None
            self.messages.put((1, Returned(call.number, error="no memory")))

    monkeypatch.setattr(multiprocess, "WARM_UP_FAILURE_S", 0.05)
    executor: Any = RankedExecutor(None)  # type: ignore[arg-type]
    executor.worker_group = HalfWarm()
    with pytest.raises(EngineDead, match="warm_up failed on second, and the others wait for it: no memory"):
        executor.call("warm_up")


def test_start_has_a_deadline(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "0.02")
    with pytest.raises(EngineDead, match=r"not ready within 0\.02 s .*waiting for rank 0; rank 0: \w+"):
        LLM(str(tiny), distributed_executor_backend="mp", **SETTINGS)


def test_rank_whose_parent_has_ended_exits_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches tracebacks of the ranks when the user presses Ctrl-C while they start."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(PipePort, "_listen", lambda port: None)  # it would notice the end, too, but later
    rank_end, parent_end = Pipe()
    unused: Any = None
    port = PipePort(rank_end, unused, None)
    parent_end.close()
    with pytest.raises(SystemExit) as end:
        port.report(PhaseDone())
    assert end.value.code == 0
