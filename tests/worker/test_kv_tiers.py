"""Tests of KV cache blocks in lower tiers, with real caches on the CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import make_tiny

from quire.configure import configure
from quire.core.build import build_core
from quire.core.engine_core import EngineCore
from quire.data.kv_tiers import BlockLoad, BlockStores
from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.worker.disk_tier import model_digest
from quire.worker.kv_tiers import CpuBlockCopies, KindTiers, WorkerTiers

FAMILIES = ("qwen3", "gemma2", "deepseek_v2", "nemotron_h", "qwen3_next")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_tiny(name, tmp_path_factory.mktemp(name))[0] for name in FAMILIES}


def settings(path: Path, **fields: Any) -> Any:
    base = {"model": str(path), "dtype": "float32", "block_size": 4, "max_num_seqs": 4}
    return configure(
        base | {"use_tqdm_on_load": False, "num_gpu_blocks_override": 40, "max_model_len": 64} | fields
    )


def run(core: EngineCore, id: str, prompt: list[int], count: int = 4) -> tuple[list[int], Request]:
    request = Request(
        id=id,
        tokens=list(prompt),
        params=SamplingParams(temperature=0, max_tokens=count),
        prompt_len=len(prompt),
        limit=len(prompt) + count,
        seed=0,
    )
    core.add(request)
    tokens: list[int] = []
    while core.has_work:
        output = core.step()
        if output is not None:
            tokens += [token for _, new in output.by_request() for token in new]
    return tokens, request


def prompt_of(first: int) -> list[int]:
    return [(first * 13 + 7 * at) % 90 + 3 for at in range(41)]


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_answers_are_the_same_with_blocks_from_host_memory(family: str, models: dict[str, Path]) -> None:
    config = settings(models[family])
    config = replace(config, cache=replace(config.cache, kv_offloading_size=0.01))
    core, _ = build_core(config)
    try:
        expected = run(core, "first", prompt_of(0))[0]
        for number in range(1, 6):
            run(core, f"filler{number}", prompt_of(number))
        tokens, request = run(core, "again", prompt_of(0))
        assert tokens == expected
        assert request.num_cached == 40 and request.num_from_host > 0 and not request.num_from_disk
    finally:
        core.close()


@pytest.mark.parametrize("family", ["gemma2", "deepseek_v2"])
def test_answers_are_the_same_after_a_restart(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    answers = []
    for _ in range(2):
        core, _ = build_core(settings(models[family], kv_offloading_dir=str(tmp_path)))
        try:
            answers.append(run(core, "one", prompt_of(0)))
        finally:
            core.close()
    (first, cold), (second, warm) = answers
    assert first == second
    assert cold.num_cached == 0 and warm.num_cached == 40 and 0 < warm.num_from_disk <= 40


def test_damaged_files_are_computed_again(models: dict[str, Path], tmp_path: Path) -> None:
    answers = []
    for _ in range(2):
        core, _ = build_core(settings(models["qwen3"], kv_offloading_dir=str(tmp_path)))
        try:
            answers.append(run(core, "one", prompt_of(0)))
        finally:
            core.close()
        for path in tmp_path.rglob("*.kv"):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
    assert answers[0][0] == answers[1][0] and answers[1][1].num_cached == 0


def test_everything_that_changes_a_block_changes_its_folder(models: dict[str, Path]) -> None:
    path = models["qwen3"]
    base = model_digest(settings(path))
    assert model_digest(settings(path)) == base
    others = [settings(path, block_size=8), settings(path, dtype="bfloat16"), settings(models["gemma2"])]
    others += [settings(path, kv_cache_dtype="fp8"), settings(path, load_format="dummy")]
    (weights,) = path.glob("*.safetensors")
    status = weights.stat()
    digests = [model_digest(config) for config in others]
    try:
        import os

        os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        digests.append(model_digest(settings(path)))
    finally:
        os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert len({base, *digests}) == len(digests) + 1


def test_blocks_are_copied_byte_by_byte(models: dict[str, Path]) -> None:
    """A stand-in for the pinned memory of a GPU: stores and loads of a cache with random bytes."""
    from quire.worker.worker import Worker

    worker = Worker(settings(models["gemma2"]))
    worker.start()
    (pages,) = worker.loaded.cache_entries(None)
    assert pages.entry_bytes == sum(tensor[0].numel() for tensor in pages.tensors)
    for tensor in pages.tensors:
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    tiers = WorkerTiers([KindTiers(CpuBlockCopies(pages), num_slots=6, disk=None)])
    expected = pages.gather(torch.tensor([5, 9, 30]))
    tiers.store(BlockStores([5, 9, 30], [b"a", b"b", b"c"], [2, 6, 1], [False] * 3, num_ahead=1))
    before = pages.gather(torch.arange(40))
    done = tiers.load(BlockLoad([11, 12, 13], [1, 2, 6], [b"a", b"b", b"c"]))
    assert done.failed == []
    after = pages.gather(torch.arange(40))
    assert torch.equal(after[[11, 12, 13]], expected[[2, 0, 1]])
    others = [number for number in range(40) if number not in (11, 12, 13)]
    assert torch.equal(after[others], before[others]), "no other block has changed"
    worker.close()
