"""Tests of worker extensions that were written for vLLM and receive weights from a trainer by themselves."""

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from safetensors.torch import load_file
from tiny_text import TextModel, open_text, text_model

from quire import AsyncLLMEngine, EngineArgs, SamplingParams
from quire.errors import RequestError
from quire.parallel.broadcast import BroadcastGroup, StatelessProcessGroup

EXTENSION = """
import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.utils import StatelessProcessGroup


class Extension:
    def connect_trainer(self, host, port, world_size):
        rank = get_world_group().rank
        group = StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world_size)
        self.trainer = PyNcclCommunicator(group, device=self.device)
        return [rank, get_world_group().world_size, torch.distributed.is_initialized()]

    def receive_weight(self, name, dtype, shape):
        weight = torch.empty(shape, dtype=dtype, device=self.device)
        self.trainer.broadcast(weight, src=self.trainer.world_size - 1)
        self.trainer.group.barrier()
        self.model_runner.model.load_weights(weights=[(name, weight)])

    def share_sum(self, number):
        return self.trainer.all_reduce(torch.tensor([number], device=self.device)).item()
"""
NAME = "model.norm.weight"
PROMPT = [5, 6, 7, 8, 9]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@pytest.fixture(autouse=True)
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_trainer.py").write_text(EXTENSION)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.syspath_prepend(tmp_path)


class Trainer(threading.Thread):
    """The last rank of a group, which sends one weight and takes part in a sum."""

    def __init__(self, port: int, world_size: int, weight: torch.Tensor) -> None:
        super().__init__(daemon=True)
        self.arguments, self.weight, self.sum = ("127.0.0.1", port, world_size - 1, world_size), weight, 0

    def run(self) -> None:
        group = BroadcastGroup(StatelessProcessGroup.create(*self.arguments), 0)
        group.broadcast(self.weight, src=group.world_size - 1)
        group.group.barrier()
        self.sum = int(group.all_reduce(torch.tensor([100])).item())
        group.group.store = group.group.socket = None


@pytest.fixture
def weight(model: TextModel) -> Iterator[torch.Tensor]:
    """Yield another weight, with which the model of transformers computes during the test."""
    parameter = model.hf.get_parameter(NAME)
    old = parameter.detach().clone()
    new = load_file(model.path / "model.safetensors")[NAME].roll(7) + 0.5
    parameter.data.copy_(new)
    try:
        yield new
    finally:
        parameter.data.copy_(old)


def test_weight_from_a_trainer_that_is_the_last_rank(model: TextModel, weight: torch.Tensor) -> None:
    """Check two workers in other processes, with a dtype among the arguments."""
    llm = open_text(model, worker_extension_cls="my_trainer.Extension", tensor_parallel_size=2)
    trainer = Trainer(free_port(), 3, weight)
    trainer.start()
    joined = llm.collective_rpc("connect_trainer", args=("127.0.0.1", trainer.arguments[1], 3))
    assert joined == [[0, 2, True], [1, 2, True]]
    llm.collective_rpc("receive_weight", args=(NAME, torch.float32, tuple(weight.shape)))
    assert llm.collective_rpc("share_sum", args=(5,)) == [110, 110]
    trainer.join(60)
    assert trainer.sum == 110
    llm.reset_prefix_cache()
    (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], PARAMS, use_tqdm=False)
    assert list(answer.outputs[0].token_ids) == model.greedy(PROMPT, 6)


def test_calls_of_an_async_engine(
    model: TextModel, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a worker alone in a child process, the engine's sleep, and its count of requests."""
    args = EngineArgs(
        model=str(model.path),
        worker_extension_cls="my_trainer.Extension",
        enable_sleep_mode=True,
        dtype="float32",
        num_gpu_blocks_override=400,
    )
    trainer = Trainer(free_port(), 2, weight)
    trainer.start()

    async def run() -> list[int]:
        engine: Any = AsyncLLMEngine.from_engine_args(args)
        try:
            assert not await engine.is_sleeping()
            await engine.sleep(level=1)
            assert await engine.is_sleeping()
            for tag in ("weights", "kv_cache"):
                await engine.wake_up(tags=[tag])
            assert not await engine.is_sleeping()
            address = "127.0.0.1", trainer.arguments[1], 2
            assert await engine.collective_rpc("connect_trainer", args=address) == [[0, 1, True]]
            shape = tuple(weight.shape)
            await engine.collective_rpc("receive_weight", args=(NAME, torch.float32, shape))
            assert await engine.collective_rpc("share_sum", args=(5,)) == [105]
            await engine.pause_generation(mode="keep")
            waiting = [asyncio.create_task(_tokens(engine, str(number))) for number in range(2)]
            while engine.output_processor.get_num_unfinished_requests() < 2:
                await asyncio.sleep(0.01)
            await engine.abort("1")
            await engine.resume_generation()
            await engine.wait_for_requests_to_drain()
            assert await waiting[1] == [] and engine.get_num_unfinished_requests() == 0
            monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION")
            with pytest.raises(RequestError, match="VLLM_ALLOW_INSECURE_SERIALIZATION=1, or pass plain"):
                await engine.collective_rpc("receive_weight", args=(NAME, torch.float32, shape))
            return await waiting[0]
        finally:
            await engine.aclose()

    assert asyncio.run(run()) == model.greedy(PROMPT, 6)


async def _tokens(engine: Any, request_id: str) -> list[int]:
    token_ids: list[int] = []
    async for answer in engine.generate({"prompt_token_ids": PROMPT}, PARAMS, request_id):
        token_ids = list(answer.outputs[0].token_ids)
    return token_ids
