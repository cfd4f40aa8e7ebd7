"""Tests of prefixes that move between two engines on a GPU: by CUDA IPC, and through host memory."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from on_gpu import opened
from oracle import make_tiny

from quire import LLM, SamplingParams
from quire.data.kv_tiers import BlockRead
from quire.worker import remote_tier

pytestmark = pytest.mark.gpu
SETTINGS: dict[str, Any] = {"num_gpu_blocks_override": 60, "max_model_len": 512, "max_num_seqs": 2}
START_S = 180


def run(llm: LLM, first: int, transfer: dict[str, Any] | None = None, max_tokens: int = 8) -> Any:
    prompt = {"prompt_token_ids": [(first * 13 + 7 * at) % 90 + 3 for at in range(401)]}
    extra_args = None if transfer is None else {"kv_transfer_params": transfer}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=extra_args)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
    monkeypatch.setenv("QUIRE_CLUSTER_TOKEN", "secret")
    return make_tiny("qwen3", tmp_path / "model", max_position_embeddings=1024)[0]


def engine(path: Path, role: str | None = None) -> LLM:
    config = {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": role}} if role else {}
    return opened(path, "bfloat16", enable_prefix_caching=True, **SETTINGS, **config)


def tiers_of(llm: LLM) -> Any:
    return llm.llm_engine.core.executor._worker._tiers


def produce(path: Path, pipe: Connection) -> None:
    """Run an engine that computes prompts in this process: the one with each number that is received."""
    llm = engine(path, "kv_producer")
    pipe.send(None)
    while True:
        pipe.send(run(llm, pipe.recv(), {"do_remote_decode": True}, max_tokens=1).kv_transfer_params)


def consume(path: Path, pipe: Connection) -> None:
    """Run an engine that loads prefixes in this process. Send its tokens and the bytes of its buffer."""
    llm = engine(path, "kv_consumer")
    pipe.send(None)
    while True:
        output = run(llm, *pipe.recv())
        ((_, buffer),) = tiers_of(llm).ipc._free
        pipe.send((output.num_cached_tokens, output.outputs[0].token_ids, len(buffer.data)))


@contextmanager
def process(run_engine: Callable[[Path, Connection], None], path: Path) -> Iterator[tuple[Connection, int]]:
    """Run an engine in another process; yield its pipe, and its process id."""
    here, there = get_context("spawn").Pipe()
    child = get_context("spawn").Process(target=run_engine, args=(path, there), daemon=True)
    child.start()
    there.close()
    try:
        assert here.poll(START_S), "the engine does not start"
        here.recv()
        assert child.pid is not None
        yield here, child.pid
    finally:
        child.kill()
        child.join()


def test_prefixes_move_by_cuda_ipc(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_tier, "AT_ONCE_BYTES", 20_000)  # many reads, through the same buffer
    monkeypatch.setattr(remote_tier, "TransferMemory", None)  # host memory is not used
    alone, second = engine(path), engine(path, "kv_consumer")
    remote, ipc = tiers_of(second).remote, tiers_of(second).ipc
    with process(produce, path) as (first, pid):
        for number in range(4):
            expected = run(alone, number).outputs[0].token_ids
            first.send(number)
            output = run(second, number, first.recv())
            assert output.num_cached_tokens == 400 and output.outputs[0].token_ids == expected
            assert [*remote.device_reach.values()] == [True] and len(ipc._free) == ipc._num_buffers == 1
        expected = run(alone, 5).outputs[0].token_ids
        first.send(5)
        kept = first.recv()
        os.kill(pid, signal.SIGKILL)
        output = run(second, 5, kept)
        assert not output.num_cached_tokens and output.outputs[0].token_ids == expected
    with process(produce, path) as (first, _):  # another engine writes to another buffer
        expected = run(alone, 6).outputs[0].token_ids
        first.send(6)
        output = run(second, 6, first.recv())
        assert output.num_cached_tokens == 400 and output.outputs[0].token_ids == expected
    for llm in (alone, second):
        llm.llm_engine.close()


def test_an_engine_that_ends_does_not_harm_the_one_that_writes_to_its_memory(path: Path) -> None:
    first = engine(path, "kv_producer")
    tiers, buffers = tiers_of(first), []
    for number in range(2):
        expected = run(first, number).outputs[0].token_ids
        with process(consume, path) as (second, _):
            second.send(
                (number, run(first, number, {"do_remote_decode": True}, max_tokens=1).kv_transfer_params)
            )
            num_cached, tokens, num_bytes = second.recv()
            assert (num_cached, tokens) == (400, expected)
        buffers.append([*tiers.ipc._opened.values()][-1])
        assert len({*buffers}) == number + 1 and None not in buffers
        for buffer in buffers:
            buffer.write(0, torch.full((num_bytes,), 7, dtype=torch.uint8, device="cuda"))
        torch.cuda.synchronize()
    assert run(first, 0).outputs[0].token_ids == run(first, 0).outputs[0].token_ids
    first.llm_engine.close()


def test_answers_are_the_same_with_a_prefix_from_another_engine(path: Path) -> None:
    """Engines of one process cannot use CUDA IPC."""
    alone, first, second = (engine(path, role) for role in (None, "kv_producer", "kv_consumer"))
    for number in range(3):
        expected = run(alone, number).outputs[0].token_ids
        kept = run(first, number, {"do_remote_decode": True}, max_tokens=1).kv_transfer_params
        assert kept["remote_num_tokens"] == 400
        output = run(second, number, kept)
        assert output.num_cached_tokens == 400 and output.outputs[0].token_ids == expected
    assert second.llm_engine.core.scheduler.kv.tiers.stats.num_failed_transfers == 0
    assert [*tiers_of(second).remote.device_reach.values()] == [False]
    for llm in (alone, first, second):
        llm.llm_engine.close()


def test_entries_are_read_byte_by_byte_beside_the_steps(tmp_path: Path) -> None:
    path, _ = make_tiny("qwen3", tmp_path / "model", max_position_embeddings=1024)
    llm = opened(path, "bfloat16", enable_prefix_caching=True, kv_offloading_size=0.25, **SETTINGS)
    tiers = tiers_of(llm)
    copies = tiers.kinds[0].copies
    for tensor in copies.entries.tensors:
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    ids = [*range(5, 45), 3]
    expected = copies.entries.gather(torch.tensor(ids, device="cuda")).cpu()
    copies._load_buffers = [type(b)(b.memory[:7]) for b in copies._load_buffers]  # several parts
    assert torch.equal(copies.read(ids), expected)
    assert bytes(tiers.read(BlockRead(0, ids, False))) == expected.numpy().tobytes()
    llm.llm_engine.close()
