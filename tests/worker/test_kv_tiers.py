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
from quire.errors import ConfigError
from quire.worker import disk_tier
from quire.worker.disk_tier import DiskTier, model_digest
from quire.worker.kv_tiers import CacheEntries, CpuBlockCopies, KindTiers, WorkerTiers
from quire.worker.worker import Worker

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


def run_logits(core: EngineCore, id: str, prompt: list[int]) -> tuple[torch.Tensor, Request]:
    """Return the logits of four tokens after a prompt."""
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=-1, ignore_eos=True)
    request = Request(
        id=id, tokens=list(prompt), params=params, prompt_len=len(prompt), limit=len(prompt) + 4, seed=0
    )
    core.add(request)
    logits: list[list[float]] = []
    while core.has_work:
        output = core.step()
        for row in [] if output is None else output.logprobs.get(id, []):
            by_id = dict(zip(row.token_ids, row.logprobs, strict=True))
            logits.append([by_id[token] for token in sorted(by_id)])
    return torch.tensor(logits), request


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_next"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_logits_are_the_same_with_pages_and_states_from_a_lower_tier(
    family: str, tier: str, models: dict[str, Path], tmp_path: Path
) -> None:
    fields = {"max_num_seqs": 1, "mamba_block_size": 16, "enable_prefix_caching": True}
    fields |= {"logprobs_mode": "raw_logits", "max_logprobs": -1}
    config = settings(models[family], **fields)
    size, folder = (0.01, None) if tier == "host" else (0.0, str(tmp_path))
    cache = replace(config.cache, kv_offloading_size=size, kv_offloading_dir=folder)
    core, _ = build_core(replace(config, cache=cache))
    try:
        expected, first = run_logits(core, "first", prompt_of(0))
        for number in range(1, 8):
            run(core, f"filler{number}", prompt_of(number))
        states = core.scheduler.kv.states
        assert states is not None and core.scheduler.kv.lookup(first).num_tokens == 0, "it was evicted"
        logits, request = run_logits(core, "again", prompt_of(0))
        num_from = request.num_from_host if tier == "host" else request.num_from_disk
        assert first.num_cached == 0 and request.num_cached == num_from == 32
        assert (logits - expected).abs().max() < 1e-5
    finally:
        core.close()


@pytest.mark.parametrize("family", ["gemma2", "nemotron_h", "deepseek_v2"])
def test_answers_are_the_same_after_a_restart(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    answers, unit = [], {"mamba_block_size": 16} if family == "nemotron_h" else {}
    for _ in range(2):
        core, _ = build_core(settings(models[family], kv_offloading_dir=str(tmp_path), **unit))
        try:
            answers.append(run(core, "one", prompt_of(0)))
        finally:
            core.close()
    (first, cold), (second, warm) = answers
    assert first == second
    num_cached = 32 if family == "nemotron_h" else 40  # of which a checkpoint of states was kept
    assert cold.num_cached == 0 and warm.num_cached == num_cached and 0 < warm.num_from_disk <= num_cached


def test_all_models_in_a_directory_share_its_size(models: dict[str, Path], tmp_path: Path) -> None:
    """Start models one after the other: with the last ones, files of the first make way, with states too."""
    num_bytes = list[int]()
    for family in ("nemotron_h", "qwen3", "gemma2", "nemotron_h"):
        cache = {"kv_offloading_dir": str(tmp_path), "kv_offloading_dir_size": 48_000 / 2**30}
        core, _ = build_core(settings(models[family], **cache))
        try:
            for number in range(4):
                run(core, str(number), prompt_of(number))
        finally:
            core.close()
        num_bytes.append(sum(path.stat().st_size for path in tmp_path.rglob("*.kv")))
    assert max(num_bytes) < 48_000 * 1.1 and min(num_bytes[1:3]) > 40_000, num_bytes


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"kv_offloading_dir_size": 1e-6},
            "is less than one block of .*: raise it to at least 0.0001",
        ),
        (
            {"kv_offloading_dir_size": 1e6},
            r"\(1000000.00 GiB\) is more than .*: lower it to at most 99.99",
        ),
        ({"kv_offloading_dir_size": 60, "data_parallel_size": 2}, r"\(2 engines \* 60.00 GiB\) is more than"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    fields: dict[str, Any],
    words: str,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.core.kv_tiers._free_on_disk", lambda folder: 100 * 2**30 - 1)
    config = settings(models["qwen3"], kv_offloading_dir=str(tmp_path), **fields)
    with pytest.raises(ConfigError, match=words):
        build_core(config)


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
    others += [
        settings(path, batch_invariant=True),
        settings(path, kv_cache_dtype="fp8"),
        settings(path, load_format="dummy"),
    ]
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


@pytest.mark.parametrize("family", ["qwen3", "nemotron_h"])
def test_a_sleeping_worker_holds_no_cache(family: str, models: dict[str, Path]) -> None:
    """Catches tiers that keep the memory of the cache, or the address of the one before the sleep."""
    worker = Worker(settings(models[family], enable_prefix_caching=True))
    worker.start()
    worker.open_tiers([4, 4], [0, 0])
    assert worker._tiers is not None
    worker.sleep(1)
    worker.sleep(1)
    assert all(kind.copies.entries.num_entries <= 1 for kind in worker._tiers.kinds)
    worker.wake_up(["weights", "kv_cache"])
    (pages, *states) = worker._tiers.kinds
    assert pages.copies.entries.num_entries == 40 and bool(states) == (family == "nemotron_h")
    bound = {tensor.data_ptr() for tensor in worker.loaded.cache_entries(None)[0].tensors}
    assert {tensor.data_ptr() for tensor in pages.copies.entries.tensors} == bound
    worker.close()


def test_blocks_are_copied_byte_by_byte(models: dict[str, Path]) -> None:
    """A stand-in for the pinned memory of a GPU: stores and loads of a cache with random bytes."""
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


def test_as_many_blocks_are_written_as_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a long prompt of which nothing is written, because not all of it may wait."""
    entries = CacheEntries([torch.randint(0, 256, (8, 64), dtype=torch.uint8)])
    monkeypatch.setattr(disk_tier, "_MAX_WAITING_BYTES", 2 * 64)
    disk = DiskTier(tmp_path / "model", model=bytes(32), block_bytes=64)
    tier = KindTiers(CpuBlockCopies(entries), num_slots=2, disk=disk)
    keys = [b"a", b"b", b"c"]
    tier.store(BlockStores([3, 4, 5], keys, [0, 0, 1], [True] * 3), ahead=False)
    *written, left_out = disk.read(keys)
    assert left_out is None and tier.slots is not None
    rows = entries.gather(torch.tensor([3, 4, 5]))
    assert torch.equal(tier.slots[1], rows[2])
    assert all(torch.equal(torch.as_tensor(block), row) for block, row in zip(written, rows, strict=False))
    disk.close()
