"""Tests of prefixes that move between two engines, with real caches on the CPU."""

from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from oracle import make_tiny

from quire.configure import configure
from quire.core.build import build_core
from quire.core.engine_core import EngineCore
from quire.data.kv_tiers import BlockRead
from quire.data.kv_transfer import RemotePrefix, TargetMemory
from quire.data.params import SamplingParams
from quire.data.request import Request, with_transfer
from quire.data.stats import TierStats
from quire.sched.kv_tiers import KVTiers
from quire.system import kv_channel
from quire.worker import kv_tiers, remote_tier
from quire.worker.remote_tier import RemoteEngines

FAMILIES = ("qwen3", "gemma2", "nemotron_h")
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_tiny(name, tmp_path_factory.mktemp(name))[0] for name in FAMILIES}


@pytest.fixture
def cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that starts an engine with a role; engines share a token and a port is free."""
    monkeypatch.setattr(kv_channel, "FOLDER", str(tmp_path))
    monkeypatch.setenv("QUIRE_CLUSTER_TOKEN", "secret")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
    with ExitStack() as stack:

        def start(path: Path, role: str | None = None, extra: Any = None, **fields: Any) -> EngineCore:
            base = {"model": str(path), "dtype": "float32", "block_size": 4, "max_num_seqs": 4}
            base |= {"use_tqdm_on_load": False, "num_gpu_blocks_override": 40, "max_model_len": 64}
            policy = {"kv_load_failure_policy": fields.pop("policy")} if "policy" in fields else {}
            if role is not None:
                config = {"kv_connector": "NixlConnector", "kv_role": role} | policy
                base["kv_transfer_config"] = config | {"kv_connector_extra_config": extra or {}}
            core, _ = build_core(configure(base | fields))
            stack.callback(core.close)
            return core

        yield start


def prompt_of(first: int, count: int = 41) -> list[int]:
    return [(first * 13 + 7 * at) % 90 + 3 for at in range(count)]


def begin(core: EngineCore, id: str, prompt: list[int], count: int = 4, **fields: Any) -> Request:
    transfer = fields.pop("transfer", None)
    request = Request(
        id=id,
        tokens=list(prompt),
        params=SamplingParams(
            temperature=0, max_tokens=count, extra_args={"kv_transfer_params": transfer} if transfer else None
        ),
        prompt_len=len(prompt),
        limit=len(prompt) + count,
        seed=0,
        **fields,
    )
    core.add(*with_transfer([request]))
    return request


def finish(core: EngineCore) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Run the requests of an engine; return the tokens and the transfer of each, or why it failed."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, Any] = {}
    while core.has_work:
        output = core.step()
        if output is not None:
            for id, new in output.by_request():
                tokens.setdefault(id, []).extend(new)
            for id, end in output.finished.items():
                ends[id] = "error" if end.reason == "error" else end.kv_transfer
    return tokens, ends


def prefill(core: EngineCore, prompt: list[int], **fields: Any) -> dict[str, Any]:
    begin(core, "request", prompt, 1, transfer=REMOTE_DECODE, **fields)
    transfer = finish(core)[1]["request"]
    assert isinstance(transfer, dict)
    return transfer


def decode(
    core: EngineCore, transfer: dict[str, Any] | None, prompt: list[int], **fields: Any
) -> tuple[list[int], Request]:
    request = begin(core, "request", prompt, transfer=transfer, **fields)
    return finish(core)[0].get("request", []), request


def tiers_of(core: EngineCore) -> KVTiers:
    tiers = core.scheduler.kv.tiers
    assert isinstance(tiers, KVTiers)
    return tiers


def num_offers(core: EngineCore) -> int:
    """Return the number of prefixes that an engine keeps for others, after it has released those that were
    read."""
    offers = tiers_of(core).offers
    assert offers is not None
    offers.settle()
    num_held = core.scheduler.kv.pool.num_usable - core.scheduler.kv.pool.num_free
    assert bool(num_held) == bool(len(offers)), "blocks are lost"
    return len(offers)


def stats_of(core: EngineCore) -> TierStats:
    return tiers_of(core).take_stats()


@pytest.mark.parametrize(
    ("family", "by_socket"), [("qwen3", False), ("qwen3", True), ("gemma2", False), ("nemotron_h", True)]
)
def test_answers_are_the_same_with_a_prefix_from_another_engine(
    family: str, by_socket: bool, models: dict[str, Path], cores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_socket:
        monkeypatch.setattr(kv_tiers, "open_memory", lambda path, nonce: None)
        monkeypatch.setattr(remote_tier, "AT_ONCE_BYTES", 1)
    unit = {"mamba_block_size": 16, "enable_prefix_caching": True} if family == "nemotron_h" else {}
    size = 32 if unit else 40
    alone, first, second = (
        cores(models[family], role, max_num_batched_tokens=16, **unit)
        for role in (None, "kv_producer", "kv_consumer")
    )
    expected = decode(alone, None, prompt_of(0))[0]
    transfer = prefill(first, prompt_of(0))
    assert transfer["remote_num_tokens"] == size and num_offers(first) == 1
    tokens, request = decode(second, transfer, prompt_of(0))
    assert tokens == expected
    assert request.num_from_remote == request.num_cached == size
    stats = stats_of(second)
    assert (stats.num_failed_transfers, stats.num_hits) == (0, size)
    (num_entries,), (num_bytes,) = stats.transfer_entries, stats.transfer_bytes
    assert num_entries >= (3 if unit else 10) and num_bytes == sum(stats.load_sizes)
    assert num_offers(first) == 0, "it was read"


class Buffer:
    """Memory of the engine that reads, which the other engine opens."""

    def __init__(self, handle: bytes) -> None:
        self.target = TargetMemory(bytes(32), handle=handle)
        self.data = torch.zeros(1 << 20, dtype=torch.uint8)
        self.error: Exception | None = None

    def write(self, start: int, contents: torch.Tensor) -> None:
        self.data[start : start + contents.nbytes] = contents.flatten()
        if self.error is not None:
            raise self.error


class Ipc:
    """CUDA IPC between two engines of this process, on memory of the CPU."""

    def __init__(self, *engines: EngineCore) -> None:
        self.buffers: list[Buffer] = []
        self.free: list[Buffer] = []
        self.delayed: list[Buffer] = []
        self.can_open = True
        for engine in engines:
            tiers: Any = engine.executor._worker._tiers  # type: ignore[attr-defined]
            tiers.ipc = self
            if tiers.remote is not None:
                tiers.remote.ipc = self

    def take(self) -> Buffer:
        if not self.free:
            self.buffers.append(Buffer(bytes([len(self.buffers)])))
            self.free.append(self.buffers[-1])
        return self.free.pop()

    def give_back(self, buffer: Buffer, delay_s: float) -> None:
        (self.delayed if delay_s else self.free).append(buffer)

    def open(self, target: TargetMemory) -> Buffer | None:
        return self.buffers[target.handle[0]] if self.can_open else None

    def close(self) -> None:
        self.buffers.clear()


@pytest.mark.parametrize("family", ["qwen3", "nemotron_h"])
def test_entries_are_written_to_memory_of_the_device(
    family: str, models: dict[str, Path], cores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = {"mamba_block_size": 16, "enable_prefix_caching": True} if family == "nemotron_h" else {}
    alone, first, second = (
        cores(models[family], role, **unit) for role in (None, "kv_producer", "kv_consumer")
    )
    monkeypatch.setattr(remote_tier, "AT_ONCE_BYTES", 5000)  # several reads, through the same buffer
    monkeypatch.setattr(remote_tier, "TransferMemory", None)
    ipc = Ipc(first, second)
    for number in range(2):
        expected = decode(alone, None, prompt_of(number))[0]
        tokens, request = decode(second, prefill(first, prompt_of(number)), prompt_of(number))
        assert tokens == expected and request.num_from_remote == (32 if unit else 40)
    assert stats_of(second).num_failed_transfers == 0 and num_offers(first) == 0
    assert len(ipc.buffers) == 1 and ipc.free == ipc.buffers and ipc.buffers[0].data.any()


def test_memory_of_the_device_is_not_used_again_after_a_transfer_that_did_not_end(
    models: dict[str, Path], cores: Any
) -> None:
    first, second = (cores(models["qwen3"], role) for role in ("kv_producer", "kv_consumer"))
    expected = [decode(first, None, prompt_of(number))[0] for number in range(6)]
    ipc = Ipc(first, second)
    ipc.take().error = ValueError("the other engine may write later")
    ipc.give_back(ipc.buffers[0], 0.0)
    tokens, request = decode(second, prefill(first, prompt_of(0)), prompt_of(0))
    assert tokens == expected[0] and not request.num_from_remote and not ipc.free
    tokens, request = decode(second, prefill(first, prompt_of(1)), prompt_of(1))
    assert tokens == expected[1] and request.num_from_remote == 40 and ipc.free == [ipc.buffers[1]]
    ipc.can_open = False
    for number in (2, 3):
        tokens, request = decode(second, prefill(first, prompt_of(number)), prompt_of(number))
        assert tokens == expected[number] and request.num_from_remote == 40
        assert ipc.free == [ipc.buffers[1]] and stats_of(second).num_failed_transfers == (number == 2)
    remote: Any = second.executor._worker._tiers.remote
    assert [*remote.device_reach.values()] == [False], "it is not offered again"
    remote.device_reach.clear()
    remote.digest = "other"
    tokens, request = decode(second, prefill(first, prompt_of(4)), prompt_of(4))
    assert tokens == expected[4] and not request.num_from_remote and ipc.free == [ipc.buffers[1]]
    transfer = prefill(first, prompt_of(5))
    tiers_of(first).close()
    remote._unreachable.clear()
    tokens, request = decode(second, transfer, prompt_of(5))
    assert tokens == expected[5] and not request.num_from_remote and ipc.delayed == [ipc.buffers[1]]


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_each_rank_reads_the_entries_of_the_same_rank(
    sizes: dict[str, int], models: dict[str, Path], cores: Any
) -> None:
    roles = (None, "kv_producer", "kv_consumer")
    alone, first, second = (cores(models["qwen3"], role, **sizes) for role in roles)
    expected = decode(alone, None, prompt_of(0))[0]
    transfer = prefill(first, prompt_of(0))
    assert transfer["tp_size"] == sizes.get("tensor_parallel_size", 1) and num_offers(first) == 1
    tokens, request = decode(second, transfer, prompt_of(0))
    assert tokens == expected and request.num_from_remote == 40
    assert stats_of(second).num_failed_transfers == 0 and num_offers(first) == 0, "all ranks have read it"
    for read in (first.executor.read(BlockRead(rank, [1, 2], False)) for rank in range(2)):
        while not read.done():
            first.executor.watch()
        assert len(read.result()) == sum(first.executor.call("describe_tiers")[0]) * 2, "over a socket"
    single = cores(models["qwen3"], "kv_consumer")
    tokens, request = decode(single, prefill(first, prompt_of(0)), prompt_of(0))
    assert tokens == expected and not request.num_cached and num_offers(first) == 1


def test_only_missing_blocks_are_read_and_a_full_hit_releases_the_prefix(
    models: dict[str, Path], cores: Any
) -> None:
    first, second = (cores(models["qwen3"], "kv_both") for _ in range(2))
    expected = decode(second, None, prompt_of(0, 21))[0]
    tokens, request = decode(second, prefill(first, prompt_of(0)), prompt_of(0))
    assert (request.num_cached, request.num_from_remote) == (40, 20)
    assert stats_of(second).transfer_entries == [5]
    transfer = prefill(first, prompt_of(0))
    again, request = decode(second, transfer, prompt_of(0))
    assert again == tokens and (request.num_cached, request.num_from_remote) == (40, 0)
    wait(tiers_of(second)._reports)
    assert num_offers(first) == 0 and not stats_of(second).transfer_entries
    short = prefill(first, [5, 6, 7])
    assert short["remote_num_tokens"] == 0 and short["remote_block_ids"] == [[]] and num_offers(first) == 0
    assert decode(second, short, prompt_of(0, 21))[0] == expected


def test_sequences_of_a_request_share_one_copy_and_salts_are_kept_apart(
    models: dict[str, Path], cores: Any
) -> None:
    first, second = (cores(models["qwen3"], role) for role in ("kv_producer", "kv_consumer"))
    transfer = prefill(first, prompt_of(0), cache_salt="a")
    for number in range(3):
        begin(second, str(number), prompt_of(0), transfer=transfer, cache_salt="a")
    tokens, _ = finish(second)
    assert len(tokens) == 3 and len({tuple(new) for new in tokens.values()}) == 1
    assert stats_of(second).transfer_entries == [10] and num_offers(first) == 0
    transfer = prefill(first, prompt_of(1), cache_salt="a")
    _, request = decode(second, transfer, prompt_of(1), cache_salt="b")
    assert not request.num_cached and stats_of(second).num_failed_transfers == 1
    assert num_offers(first) == 0


def test_a_prefix_that_is_gone_is_computed(
    models: dict[str, Path], cores: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "quire")
    first, second = (cores(models["qwen3"], role) for role in ("kv_producer", "kv_both"))
    expected = decode(first, None, prompt_of(0))[0]
    transfers = [prefill(first, prompt_of(number)) for number in (0, 1, 2)]
    offers = tiers_of(first).offers
    assert offers is not None and num_offers(first) == 3
    now = offers._clock()
    offers._clock = lambda: now + 480.1
    assert stats_of(first).num_expired_offers == 3 and num_offers(first) == 0
    tokens, request = decode(second, transfers[0], prompt_of(0))
    assert tokens == expected and not request.num_cached
    assert stats_of(second).num_failed_transfers == 1
    assert "10 of 10 entries are not kept there any more" in caplog.text
    tiers_of(first).close()
    assert decode(second, transfers[1], prompt_of(1))[1].num_from_remote == 0
    assert "it cannot be reached" in caplog.text and stats_of(second).num_failed_transfers == 1


def test_a_request_may_fail_with_its_transfer(models: dict[str, Path], cores: Any) -> None:
    silent = zmq.Context.instance().socket(zmq.ROUTER)
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    remote = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r"}
    remote |= {"remote_host": "127.0.0.1", "remote_port": port}
    for policy in ("fail", "recompute"):
        core = cores(models["qwen3"], "kv_both", {"load_timeout": 0.05}, policy=policy)
        begin(core, "request", prompt_of(0), transfer=remote)
        tokens, ends = finish(core)
        assert ends["request"] == ("error" if policy == "fail" else None)
        assert len(tokens.get("request", [])) == (0 if policy == "fail" else 4)
        assert core.scheduler.kv.pool.num_free == core.scheduler.kv.pool.num_usable
    silent.close(0)


def test_engines_of_other_layouts_and_tokens_are_refused(
    models: dict[str, Path], cores: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("WARNING", "quire")
    first = cores(models["qwen3"], "kv_producer")
    expected = decode(first, None, prompt_of(0))[0]
    transfer = prefill(first, prompt_of(0))
    other = cores(models["qwen3"], "kv_consumer", block_size=8)
    tokens, request = decode(other, transfer, prompt_of(0))
    assert tokens == expected and not request.num_cached
    assert "block_size is 8 here and 4 there" in caplog.text
    monkeypatch.setenv("QUIRE_CLUSTER_TOKEN", "another")
    stranger = cores(models["qwen3"], "kv_consumer")
    tokens, request = decode(stranger, transfer, prompt_of(0))
    assert tokens == expected and not request.num_cached and num_offers(first) == 1
    assert "QUIRE_CLUSTER_TOKEN must be the same for both engines" in caplog.text


def test_aborts_release_the_prefix_at_both_ends(models: dict[str, Path], cores: Any) -> None:
    first, second = (cores(models["qwen3"], role) for role in ("kv_producer", "kv_consumer"))
    begin(first, "aborted", prompt_of(3), 1, transfer=REMOTE_DECODE)
    assert not first.abort(["aborted"])["aborted"].kv_transfer and num_offers(first) == 0
    for number in range(2):
        begin(second, "request", prompt_of(number), transfer=prefill(first, prompt_of(number)))
        if number:
            second.step(0.0)  # begins to load its blocks
        second.abort(["request"])
        finish(second)
        wait(tiers_of(second)._reports)
        assert num_offers(first) == 0
    assert second.scheduler.kv.pool.num_free == second.scheduler.kv.pool.num_usable


def test_kept_prefixes_make_way_if_nothing_else_can_run(models: dict[str, Path], cores: Any) -> None:
    first = cores(models["qwen3"], "kv_producer")
    for number in range(3):
        prefill(first, prompt_of(number))
    assert num_offers(first) == 3 and len(decode(first, None, prompt_of(5))[0]) == 4
    assert num_offers(first) == 2 and stats_of(first).num_expired_offers == 0
    assert first.reset_prefix_cache() and num_offers(first) == 0
    prefill(first, prompt_of(0))
    first.reset_prefix_cache(external=True)
    tiers_of(first).weights_changed()
    begin(first, "request", prompt_of(0), 1, transfer=REMOTE_DECODE)
    assert finish(first)[1] == {"request": None}


def test_a_refused_connection_does_not_block() -> None:
    """After some failed handshakes ZMQ ends the connection, and a socket without any blocks."""
    engines = RemoteEngines({}, "secret", timeout_s=60.0)
    reader = engines.open(RemotePrefix("127.0.0.1", 1, "request"))
    sock, *_ = reader._connection
    sock.disconnect("tcp://127.0.0.1:1")
    assert reader.read([b"key"], 4) == [None] and "QUIRE_CLUSTER_TOKEN" in reader.problem
    reader.close()
    assert engines.open(RemotePrefix("127.0.0.1", 1, "other")).problem == reader.problem
    engines.close()
