"""Tests of the settings of KV events: every value is checked, and each rank has its own endpoint."""

from dataclasses import replace
from typing import Any

import pytest

from quire.config.kv_events import KVEventSettings, check_events, endpoint_of
from quire.config.sections import CacheSection, ParallelSection
from quire.errors import ConfigError

ON = {"enable_kv_cache_events": True}
CACHE = CacheSection(gpu_memory_utilization=0.9, kv_cache_dtype="auto")


def check(config: dict[str, Any], num_ranks: int, *, caches: bool = True) -> None:
    parallel = ParallelSection(device="cpu", data_parallel_size=num_ranks, cpu_threads=1)
    check_events(config, parallel, replace(CACHE, enable_prefix_caching=caches))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_kv_cache_event": True}, "unknown kv_events_config key .*did you mean"),
        ({"enable_kv_cache_events": "yes"}, "must be true or false"),
        ({"publisher": "kafka"}, "must be zmq or null"),
        ({"endpoint": "localhost:5557"}, "must be an address"),
        ({"endpoint": "tcp://*"}, "must be an address"),
        ({"endpoint": "tcp://*:70000"}, "must be an address"),
        ({"endpoint": "ipc://"}, "must be an address"),
        ({"endpoint": None}, "must be an address"),
        ({"replay_endpoint": 5558}, "must be an address"),
        ({"buffer_steps": 0}, "at least 1"),
        ({"hwm": -1}, "at least 0"),
        ({"max_queue_size": 1.5}, "a whole number"),
        ({"max_queue_size": True}, "a whole number"),
        ({"topic": 3}, "must be a string"),
        ({"encoding": "json"}, "must be map or array"),
    ],
)
def test_wrong_settings_are_refused_even_if_events_are_off(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVEventSettings.of(settings)


def test_events_are_off_unless_enabled() -> None:
    assert KVEventSettings.of({}) is None and KVEventSettings.of({"publisher": "zmq"}) is None
    assert KVEventSettings.of(ON | {"publisher": "null"}) is None
    assert KVEventSettings.of(ON) == KVEventSettings.of(ON | {"publisher": None, "replay_endpoint": None})
    defaults = KVEventSettings("tcp://*:5557", None, 10_000, 100_000, 100_000, "", "map")
    assert KVEventSettings.of(ON | {"publisher": "zmq"}) == defaults


def test_ranks_have_endpoints_of_their_own() -> None:
    assert endpoint_of("ipc:///run/events", 0) == "ipc:///run/events"
    assert endpoint_of("tcp://*:5557", 3) == "tcp://*:5560"
    assert endpoint_of("tcp://[::1]:5557", 1) == "tcp://[::1]:5558"
    assert endpoint_of("inproc://events", 2) == "inproc://events_dp2"
    with pytest.raises(ConfigError, match="each data-parallel rank needs its own"):
        check(ON | {"endpoint": "ipc:///run/events"}, 2)
    with pytest.raises(ConfigError, match="above 65535"):
        check(ON | {"endpoint": "tcp://*:65535"}, 2)


def test_endpoints_of_ranks_must_not_collide() -> None:
    replay = ON | {"replay_endpoint": "tcp://*:5558"}
    check(replay, 1)
    with pytest.raises(ConfigError, match=r"tcp://\*:5558 on data-parallel rank 0.*at least 2 apart"):
        check(replay, 2)
    with pytest.raises(ConfigError, match="takes the same port"):
        check(ON | {"replay_endpoint": "tcp://*:5557"}, 1)


def test_without_prefix_caching_events_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    check(ON, 1, caches=False)
    assert "kv_events_config has no effect" in caplog.text
