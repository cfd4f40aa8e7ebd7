"""Weight updates of whole engines: transports, versions, and updates that are refused."""

import asyncio
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from formats import STORED
from ports import free_port
from requantized import requantize
from safetensors.torch import load_file, save_file
from tiny import open_tiny
from tiny_text import TextModel, open_text, text_model
from torch import Tensor

from quire import LLM, AsyncLLMEngine, EngineArgs, SamplingParams
from quire.entrypoints.llm_control import WeightTransferInitRequest, WeightTransferUpdateRequest
from quire.errors import ConfigError, RequestError
from quire.parallel.broadcast import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

Weights = dict[str, Tensor]
PROMPT = [5, 6, 7, 8, 9]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def new(model: TextModel) -> Weights:
    """Return other weights for the model."""
    random, old = torch.Generator().manual_seed(3), load_file(model.path / "model.safetensors")
    return {name: x + 0.5 * x.std() * torch.randn(x.shape, generator=random) for name, x in old.items()}


@pytest.fixture(scope="module")
def files(new: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the new weights in two files."""
    folder, names = tmp_path_factory.mktemp("new"), sorted(new)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: new[name] for name in part}, folder / f"model-{number}.safetensors")
    return folder


@pytest.fixture(scope="module")
def expected(model: TextModel, new: Weights) -> list[int]:
    """Return the output of transformers with the new weights."""
    old = {name: tensor.clone() for name, tensor in model.hf.state_dict().items()}
    model.hf.load_state_dict(new, strict=False)
    try:
        return model.greedy(PROMPT, 6)
    finally:
        model.hf.load_state_dict(old)


def opened(model: TextModel, backend: str, **settings: Any) -> LLM:
    return open_text(model, weight_transfer_config={"backend": backend}, **settings)


def output(llm: LLM) -> list[int]:
    (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], PARAMS, use_tqdm=False)
    return list(answer.outputs[0].token_ids)


def described(weights: Weights) -> dict[str, Any]:
    return {
        "names": list(weights),
        "dtype_names": [str(x.dtype).removeprefix("torch.") for x in weights.values()],
        "shapes": [list(x.shape) for x in weights.values()],
    }


@pytest.mark.parametrize(
    "settings",
    [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}],
    ids=["one worker", "two ranks", "two stages", "two cores"],
)
def test_update_by_files(
    model: TextModel, files: Path, expected: list[int], settings: dict[str, Any]
) -> None:
    """Catches old weights, old cached prefixes, and a part of the workers that is not updated."""
    llm = opened(model, "file", **settings)
    old = model.greedy(PROMPT, 6)
    assert output(llm) == old and llm.get_weight_version() == "default"
    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    llm.update_weights(SimpleNamespace(update_info={"path": str(files)}))
    assert output(llm) == old  # until the update is finished
    llm.finish_weight_update("step-1")
    assert llm.get_weight_version() == "step-1"
    assert output(llm) == expected != old
    llm.start_weight_update()
    llm.update_weights({"update_info": {"path": str(model.path / "model.safetensors")}})
    llm.finish_weight_update()
    assert llm.get_weight_version() == "update-2" and output(llm) == old
    llm.update_weight_version("again")
    assert llm.get_weight_version() == "again"


def test_update_of_an_async_engine(model: TextModel, files: Path, expected: list[int]) -> None:
    """Catches kept requests that do not continue, and a coroutine that reaches no core."""
    settings = {"dtype": "float32", "block_size": 4, "max_num_seqs": 16, "num_gpu_blocks_override": 400}
    args = EngineArgs(model=str(model.path), weight_transfer_config={"backend": "file"}, **settings)

    async def run() -> tuple[list[int], str]:
        engine = AsyncLLMEngine.from_engine_args(args)
        try:
            await engine.init_weight_transfer_engine(WeightTransferInitRequest({}))
            await engine.pause_generation(mode="keep")
            assert await engine.is_paused()
            await engine.start_weight_update()
            await engine.update_weights(WeightTransferUpdateRequest({"path": str(files)}))
            await engine.finish_weight_update("v1")
            await engine.resume_generation()
            async for answer in engine.generate({"prompt_token_ids": PROMPT}, PARAMS, "a"):
                token_ids = list(answer.outputs[0].token_ids)
            assert await engine.collective_rpc("check_health") == [None]
            return token_ids, await engine.get_weight_version()
        finally:
            await engine.aclose()

    assert asyncio.run(run()) == (expected, "v1")


def test_update_by_shared_memory(model: TextModel, new: Weights, expected: list[int]) -> None:
    memory = SharedMemory(create=True, size=sum(x.nbytes for x in new.values()))
    try:
        start = 0
        for tensor in new.values():
            memory.buf[start : start + tensor.nbytes] = tensor.numpy().tobytes()
            start += tensor.nbytes
        llm = opened(model, "shared_memory")
        llm.start_weight_update()
        llm.update_weights({"update_info": {**described(new), "shm_name": memory.name}})
        llm.finish_weight_update()
        assert output(llm) == expected
    finally:
        memory.close()
        memory.unlink()


@pytest.mark.parametrize("packed", [False, True])
def test_update_by_broadcast(model: TextModel, new: Weights, expected: list[int], packed: bool) -> None:
    """Catches tensors in another order, and chunks that trainer and worker divide differently."""
    llm, port = opened(model, "gloo"), free_port()
    options: dict[str, Any] = {"packed": True, "packed_buffer_size_bytes": 20_000} if packed else {}
    joined = threading.Event()

    def train() -> None:
        engine = NCCLWeightTransferEngine
        group = engine.trainer_init({"master_address": "127.0.0.1", "master_port": port, "world_size": 2})
        joined.set()
        engine.trainer_send_weights(iter(new.items()), NCCLTrainerSendWeightsArgs(group=group, **options))

    trainer = threading.Thread(target=train, daemon=True)
    trainer.start()  # the worker waits until its store listens
    address = {"master_address": "127.0.0.1", "master_port": port}
    llm.init_weight_transfer_engine({"init_info": {**address, "rank_offset": 1, "world_size": 2}})
    assert joined.wait(120)
    llm.start_weight_update()
    llm.update_weights({"update_info": described(new) | options})
    llm.finish_weight_update()
    trainer.join(120)
    assert not trainer.is_alive() and output(llm) == expected


def test_trainer_does_not_hang_if_its_update_is_refused(
    model: TextModel, new: Weights, expected: list[int]
) -> None:
    """Check that the group stays usable: a refused update, another part of it, then a good one."""
    llm, port = opened(model, "gloo"), free_port()
    unknown = {"model.extra.weight": torch.ones(7)}

    def train() -> None:
        engine = NCCLWeightTransferEngine
        group = engine.trainer_init({"master_address": "127.0.0.1", "master_port": port, "world_size": 2})
        for weights in (new | unknown, new, new):
            engine.trainer_send_weights(iter(weights.items()), {"group": group, "packed": True})

    trainer = threading.Thread(target=train, daemon=True)
    trainer.start()
    address = {"master_address": "127.0.0.1", "master_port": port, "packed": True}
    llm.init_weight_transfer_engine({"init_info": {**address, "rank_offset": 1, "world_size": 2}})
    llm.start_weight_update()
    with pytest.raises(RequestError, match="model.extra.weight: the model has no such"):
        llm.update_weights({"update_info": described(new | unknown)})
    with pytest.raises(RequestError, match="no weight update has been started"):
        llm.update_weights({"update_info": described(new)})
    assert output(llm) == model.greedy(PROMPT, 6)
    llm.start_weight_update()
    llm.update_weights({"update_info": described(new)})
    llm.finish_weight_update()
    trainer.join(120)
    assert not trainer.is_alive() and output(llm) == expected


def test_partial_update_changes_a_part_of_a_fused_layer(model: TextModel, new: Weights) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    llm = opened(model, "file")
    (names,) = llm.collective_rpc(lambda worker: worker.get_model().load_weights([(name, new[name])]))
    assert names == {name} and llm.reset_prefix_cache()
    old = {key: tensor.clone() for key, tensor in model.hf.state_dict().items()}
    model.hf.load_state_dict({name: new[name]}, strict=False)
    try:
        assert output(llm) == model.greedy(PROMPT, 6)
    finally:
        model.hf.load_state_dict(old)


Change = Callable[[Weights], Weights]
_NORM = "model.norm.weight"
WRONG: dict[str, tuple[Change, str]] = {
    "name": (
        lambda new: new | {"model.extra.weight": new[_NORM].clone()},
        "model.extra.weight: the model has no such",
    ),
    "shape": (lambda new: new | {_NORM: new[_NORM][:-1].clone()}, r"model.norm.weight has the shape \(63,\)"),
    "dtype": (lambda new: new | {_NORM: new[_NORM].long()}, "model.norm.weight has the dtype int64"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensor_refuses_the_whole_update(
    model: TextModel, new: Weights, tmp_path: Path, case: str
) -> None:
    """Catches an update of which the tensors before the wrong one stay."""
    change, problem = WRONG[case]
    save_file(change(new), tmp_path / "model.safetensors")
    llm = opened(model, "file")
    llm.start_weight_update()
    llm.update_weights({"update_info": {"path": str(model.path)}})
    with pytest.raises(RequestError, match=problem):
        llm.update_weights({"update_info": {"path": str(tmp_path)}})
    with pytest.raises(RequestError, match="no weight update has been started"):
        llm.finish_weight_update("bad")
    assert output(llm) == model.greedy(PROMPT, 6) and llm.get_weight_version() == "default"


def test_transfer_that_breaks_off_leaves_the_old_weights(
    model: TextModel, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = opened(model, "file")
    llm.start_weight_update()
    monkeypatch.setattr("quire.worker.weight_update._stage", _fail_after(3))
    with pytest.raises(OSError, match="the trainer is gone"):
        llm.update_weights({"update_info": {"path": str(files)}})
    assert output(llm) == model.greedy(PROMPT, 6)
    monkeypatch.undo()
    llm.start_weight_update()
    llm.update_weights({"update_info": {"path": str(files)}})
    llm.finish_weight_update()
    assert output(llm) != model.greedy(PROMPT, 6)


def _fail_after(count: int) -> Callable[..., None]:
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) > count:
            raise OSError("the trainer is gone")

    return fail


@pytest.fixture(scope="module")
def llm(model: TextModel) -> Iterator[LLM]:
    yield opened(model, "gloo")


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda llm: llm.update_weights({"update_info": {}}), "update_info lacks names"),
        (
            lambda llm: llm.update_weights({"update_info": described({})}),
            "no weight update has been started",
        ),
        (lambda llm: llm.finish_weight_update(), "no weight update has been started"),
        (lambda llm: llm.finish_weight_update("a\nb"), "a weight version has 1 to 200 printable ASCII"),
        (lambda llm: llm.update_weight_version(""), "a weight version has 1 to 200 printable ASCII"),
        (lambda llm: llm.init_weight_transfer_engine({}), "the request needs 'init_info'"),
        (
            lambda llm: llm.init_weight_transfer_engine({"init_info": {"a": 1}}),
            "init_info lacks master_address",
        ),
        (
            lambda llm: llm.init_weight_transfer_engine(
                {"init_info": {"master_address": "x", "master_port": 1, "rank_offset": 1, "world_size": 1}}
            ),
            "worker 0 has the rank 1, and world_size is 1",
        ),
        (lambda llm: llm.start_draft_weight_update(), "draft model cannot be updated"),
    ],
)
def test_wrong_calls_are_refused(llm: LLM, call: Callable[[LLM], None], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        call(llm)


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        ({"names": ["a"], "dtype_names": [], "shapes": []}, "have 1, 0, 0 entries"),
        ({"names": ["a"], "dtype_names": ["float99"], "shapes": [[1]]}, "a: 'float99' is not a dtype"),
        ({"names": ["a"], "dtype_names": ["float32"], "shapes": [[-1]]}, r"a: \[-1\] is not a shape"),
        ({"names": 3, "dtype_names": [], "shapes": []}, "update_info needs the list 'names'"),
        ({"names": [], "dtype_names": [], "shapes": [], "x": 1}, "update_info has the unknown key 'x'"),
        (
            {"names": ["model.norm.weight"], "dtype_names": ["float32"], "shapes": [[64]]},
            "the weight transfer is not initialized",
        ),
    ],
)
def test_wrong_descriptions_are_refused(llm: LLM, info: dict[str, Any], problem: str) -> None:
    llm.start_weight_update()
    with pytest.raises(RequestError, match=problem):
        llm.update_weights({"update_info": info})


def test_paths_and_memory_that_do_not_exist_are_refused(model: TextModel, tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    llm = opened(model, "file")
    for path, problem in [
        (tmp_path / "none", "has no safetensors file"),
        (tmp_path, "not a whole safetensors"),
    ]:
        llm.start_weight_update()
        with pytest.raises(RequestError, match=problem):
            llm.update_weights({"update_info": {"path": str(path)}})
    llm = opened(model, "shared_memory")
    for name in ("../etc/passwd", "no-such-memory"):
        llm.start_weight_update()
        with pytest.raises(RequestError, match="there is no shared memory"):
            llm.update_weights(
                {"update_info": {"names": [], "dtype_names": [], "shapes": [], "shm_name": name}}
            )


def test_updates_need_a_backend(model: TextModel) -> None:
    with pytest.raises(RequestError, match="Weight transfer not configured"):
        open_text(model).start_weight_update()
    with pytest.raises(ConfigError, match="unknown backend 'rdma'; known: nccl, gloo, ipc"):
        opened(model, "rdma")
    with pytest.raises(ConfigError, match="unknown weight_transfer_config key 'port'"):
        open_text(model, weight_transfer_config={"backend": "file", "port": 1})
    with pytest.raises(ConfigError, match="weight_transfer_config: weights cannot be updated with GGUF"):
        open_text(model, weight_transfer_config={"backend": "file"}, load_format="sharded_state")


def test_level_2_returns_to_the_weights_of_the_checkpoint(model: TextModel, files: Path) -> None:
    llm = opened(model, "file", enable_sleep_mode=True)
    llm.start_weight_update()
    llm.update_weights({"update_info": {"path": str(files)}})
    llm.finish_weight_update("v1")
    changed = output(llm)
    llm.sleep(level=1)
    with pytest.raises(RequestError, match="the engine sleeps: wake it up first"):
        llm.start_weight_update()
    llm.wake_up()
    assert output(llm) == changed and llm.get_weight_version() == "v1"
    llm.sleep(level=2)
    llm.wake_up()
    assert output(llm) == model.greedy(PROMPT, 6) and llm.get_weight_version() == "default"
    assert os.path.isdir(files)


def test_quantized_checkpoints_are_named_at_the_start_and_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a trainer that learns only at its first update that no weight can be changed."""
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    path, _ = requantize("llama", tmp_path, *STORED["awq"])
    with caplog.at_level(logging.WARNING):
        llm = open_tiny(path, weight_transfer_config={"backend": "file"})
    reason = r"weights of the kind \w+ cannot be updated: the checkpoint stores them quantized"
    assert re.search(f"weight_transfer_config is set, but {reason}", caplog.text)
    with pytest.raises(RequestError, match=reason):
        llm.start_weight_update()
