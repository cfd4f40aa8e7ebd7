"""Tests of ranks on several machines: joining, mismatches, and an engine over two loopback addresses."""

import os
import re
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracle import make_tiny
from ports import free_port
from preloaded import Preloaded
from tiny import SMALL

from quire import LLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.configure import configure
from quire.errors import ConfigError, EngineDead
from quire.executor.multi_node import MultiNodeRanks, NodeAgent

PATIENCE_S = 150.0
SETTINGS: dict[str, Any] = {
    **SMALL,
    "max_num_seqs": 4,
    "nnodes": 2,
    "tensor_parallel_size": 2,
    "master_addr": "127.0.0.2",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("nodes"))[0]


@pytest.fixture
def config(tiny: Path) -> EngineConfig:
    return configure({"model": str(tiny), "master_port": free_port("127.0.0.2")} | SETTINGS)


def changed(config: EngineConfig, **parallel: Any) -> EngineConfig:
    return replace(config, parallel=replace(config.parallel, **parallel))


def ends_of(config: EngineConfig, *others: EngineConfig) -> list[str]:
    """Return the final messages of the first machine and of the others; none of them starts a rank.

    The others connect when the first machine listens, and it gives up when all of them have an answer.
    """
    output: dict[int, str] = {}

    def join(number: int) -> None:
        agent = NodeAgent(others[number])
        try:
            end = agent._serve(agent._connect())
            output[number] = "gone" if end is None else end.problem
        except ConfigError as error:
            output[number] = str(error)

    threads = [threading.Thread(target=join, args=(number,), daemon=True) for number in range(len(others))]

    class FirstMachine(MultiNodeRanks):
        def await_all(self, deadline: float) -> bool:
            for thread in threads:
                thread.start()
            while len(self.nodes) + len(self._refusals) < len(others):
                assert time.monotonic() < deadline, "a machine has neither joined nor been refused"
                time.sleep(0.01)
            return super().await_all(time.monotonic())

    with pytest.raises(ConfigError) as problem:
        FirstMachine(config, PATIENCE_S)
    for thread in threads:
        if thread.ident is not None:
            thread.join(PATIENCE_S)
    return [str(problem.value), *(output[number] for number in range(len(others)))]


def test_version_or_size_mismatch_is_reported_to_its_machine(config: EngineConfig) -> None:
    """Check that the first machine keeps waiting and finally reports what it rejected."""
    other = replace(config, model=replace(config.model, max_model_len=64))
    head, node = ends_of(config, changed(other, node_rank=1))
    assert re.search(r"^node 1 \(.*\) was started with max_model_len=64, and the first with .*=256", node)
    assert head.startswith("no word from node 1 of 2") and head.endswith(node)
    _, node = ends_of(config, changed(config, nnodes=3, node_rank=2))
    assert "was started with nnodes=3, and the first with nnodes=2" in node


def test_duplicate_node_rank_is_reported_to_the_second(config: EngineConfig) -> None:
    three = changed(config, nnodes=3, tensor_parallel_size=3)
    second = changed(three, node_rank=1)
    head, *nodes = ends_of(three, second, second)
    assert head.startswith("no word from node 2 of 3")
    assert sorted(problem.startswith("two machines have --node-rank 1") for problem in nodes) == [False, True]
    assert head in nodes, "the first machine received the reason"


def test_missing_machines_are_named(config: EngineConfig) -> None:
    (head,) = ends_of(config)
    assert head.startswith("no word from node 1 of 2 within 150 s")
    agent = NodeAgent(changed(config, node_rank=1))
    agent.timeout_s = 0.2
    with pytest.raises(ConfigError, match=f"no engine at 127.0.0.2:{config.parallel.master_port} within"):
        agent._connect()


@pytest.mark.parametrize("error", [TimeoutError("timed out"), OSError("got end of file during message")])
def test_unresponsive_first_machine_may_return(config: EngineConfig, error: OSError) -> None:
    """Check a power loss: the system ends the connection, possibly within a message."""

    class Head:
        is_closed = False

        def send_bytes(self, data: bytes) -> None: ...

        def recv_bytes(self, longest: int) -> bytes:
            raise error

        def close(self) -> None:
            self.is_closed = True

    head = Head()
    assert NodeAgent(changed(config, node_rank=1))._serve(head) is None  # type: ignore[arg-type]
    assert head.is_closed


def test_port_in_use_and_unauthenticated_connections(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "127.0.0.2", config.parallel.master_port
    with socket.create_server(where):
        (head,) = ends_of(config)
        assert f"cannot listen for other machines on 127.0.0.2:{where[1]} (Address already in use)" in head

    await_all = MultiNodeRanks.await_all

    def pestered(worker_group: MultiNodeRanks, deadline: float) -> bool:
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\5hello"):
            with socket.create_connection(where) as stranger:
                stranger.sendall(noise)
        return await_all(worker_group, deadline + 0.5)

    monkeypatch.setattr(MultiNodeRanks, "await_all", pestered)
    (head,) = ends_of(config)
    assert head.startswith("no word from node 1")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"nnodes": 3}, "2 workers cannot be divided evenly over nnodes=3"),
        ({"node_rank": 2}, r"node_rank=2 must be below nnodes \(2\)"),
        ({"data_parallel_size": 2}, "data_parallel_address"),
    ],
)
def test_invalid_configurations_are_rejected_before_start(tiny: Path, settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configure({"model": str(tiny)} | SETTINGS | settings)


def test_two_machines_match_one_and_restart(tiny: Path, tmp_path: Path, preloaded: Preloaded) -> None:
    """Check an agent that joins late, whose rank is killed, and that serves the next engine too."""
    port, alone = free_port("127.0.0.2"), {"nnodes": 1, "tensor_parallel_size": 1}
    prompts = [{"prompt_token_ids": [5, 6, 7, number]} for number in range(4)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def answers(llm: LLM) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    expected = answers(LLM(str(tiny), **(SETTINGS | alone)))
    settings = SETTINGS | {"node_rank": 1, "master_port": port, "max_num_batched_tokens": 1024}
    settings.pop("use_tqdm_on_load")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if value is not True]
    command = ["serve", str(tiny), *flags, "--headless", "--skip-tokenizer-init"]
    log = tmp_path / "log"
    agent = preloaded.open(command, environment=os.environ, cwd=None, log=log)
    try:
        llm = LLM(str(tiny), master_port=port, **SETTINGS)
        assert answers(llm) == expected
        log_text = log.read_text()
        (pid,) = {int(actual) for actual in re.findall(r"\(Worker_TP1 pid=(\d+)\)", log_text)}
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match="Worker_TP1 is gone"):
            answers(llm)
        llm.llm_engine.close()
        second = LLM(str(tiny), master_port=port, **SETTINGS)
        assert answers(second) == expected
        second.llm_engine.close()
        assert agent.wait(PATIENCE_S) == 0, "the machines end with the engine"
    finally:
        agent.kill()
