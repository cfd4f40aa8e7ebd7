"""Tests of KV events of whole engines: a subscriber over ZMQ has the blocks of the cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kv_subscriber import Subscriber
from mirror import Mirror
from ports import free_port
from tiny_text import TextModel, open_text, text_model

from quire import LLM, SamplingParams
from quire.configure import configure
from quire.core.build import build_core
from quire.core.facts import config_of_rank
from quire.data.block_hash import short_hash
from quire.data.request import Request

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


def settings(**fields: Any) -> dict[str, Any]:
    return {"kv_events_config": {"enable_kv_cache_events": True, **fields}}


@pytest.fixture
def endpoints(tmp_path: Path) -> dict[str, str]:
    return {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}


@pytest.fixture
def llm(model: TextModel, endpoints: dict[str, str], tmp_path: Path) -> Iterator[LLM]:
    llm = open_text(
        model,
        block_size=4,
        num_gpu_blocks_override=32,
        max_model_len=64,
        enable_sleep_mode=True,
        kv_offloading_dir=str(tmp_path / "tier"),
        weight_transfer_config={"backend": "file"},
        **settings(**endpoints),
    )
    yield llm
    llm.llm_engine.close()


@pytest.fixture
def subscriber(endpoints: dict[str, str], llm: LLM) -> Iterator[Subscriber]:
    subscriber = Subscriber(**endpoints)
    yield subscriber
    subscriber.close()


def generate(llm: LLM, families: range) -> None:
    prompts = [
        {"prompt_token_ids": [5 + (family * 31 + 7 * at) % 300 for at in range(30)]} for family in families
    ]
    llm.generate(prompts, PARAMS, use_tqdm=False)


def blocks_of(llm: LLM) -> set[tuple[str, int, int]]:
    """Return the blocks that requests find in the cache."""
    kv = llm.llm_engine.core.scheduler.kv
    blocks = {("GPU", 0, short_hash(key)) for key in kv.pool.index}
    (pages,) = kv.tiers.stores.kinds
    return blocks | {("STORAGE", 0, short_hash(key)) for key in pages.disk}


def test_a_subscriber_follows_the_cache(llm: LLM, subscriber: Subscriber, model: TextModel) -> None:
    def is_same(mirror: Mirror) -> bool:
        return mirror.blocks == blocks_of(llm)

    def media() -> set[str]:
        return {medium for medium, _, _ in subscriber.mirror.blocks}

    generate(llm, range(6))
    mirror = subscriber.until(is_same)
    assert media() == {"GPU", "STORAGE"} and mirror.digests
    assert any(event["type"] == "BlockRemoved" for event in mirror.events), "nothing was evicted"
    generate(llm, range(6))  # some blocks come back from disk
    subscriber.until(is_same)
    assert llm.reset_prefix_cache()
    subscriber.until(is_same)
    assert media() == {"STORAGE"}
    generate(llm, range(2))
    subscriber.until(is_same)
    llm.sleep(level=1)
    subscriber.until(is_same)
    assert media() == {"STORAGE"}
    llm.wake_up()
    generate(llm, range(2))
    subscriber.until(is_same)
    assert media() == {"GPU", "STORAGE"}
    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"path": str(model.path / "model.safetensors")}})
    llm.finish_weight_update()
    subscriber.until(lambda mirror: not mirror.blocks)
    assert not blocks_of(llm)


def test_each_data_parallel_rank_has_its_own_port(model: TextModel, tmp_path: Path) -> None:
    port, replay = free_port(), free_port()
    events = settings(endpoint=f"tcp://*:{port - 1}", replay_endpoint=f"tcp://*:{replay - 1}", topic="kv@")
    config = configure(
        {"model": str(model.path), "max_model_len": 64, "num_gpu_blocks_override": 32, "block_size": 4}
        | {"data_parallel_size": 2, "use_tqdm_on_load": False, **events}
    )
    core, _ = build_core(config_of_rank(config, 1))
    subscriber = Subscriber(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay}")
    try:
        tokens = list(range(5, 14))
        core.add(Request(id="a", tokens=tokens, params=PARAMS, prompt_len=9, limit=15, seed=0))
        while core.has_work:
            core.step()
        mirror = subscriber.until(lambda mirror: len(mirror.blocks) == 3)
        assert mirror.ranks == {1} and mirror.events[0]["token_ids"] == tokens[:8]
    finally:
        subscriber.close()
        core.close()


@pytest.mark.parametrize("off", [{}, {"publisher": "null", "enable_kv_cache_events": True}])
def test_without_events_nothing_is_collected(model: TextModel, off: dict[str, Any]) -> None:
    config = configure({"model": str(model.path), "kv_events_config": off, "use_tqdm_on_load": False})
    core, _ = build_core(config)
    try:
        assert core.scheduler.kv.events is None
    finally:
        core.close()
