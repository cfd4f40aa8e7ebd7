"""Tests of the settings of prefill and decode in different engines."""

from dataclasses import replace
from typing import Any

import pytest

from quire.checkpoint.layout import CacheSpec
from quire.config.env import Env
from quire.config.kv_transfer import TransferSettings, check_transfer
from quire.config.machine import Machine
from quire.config.sections import CacheSection, ParallelSection
from quire.config.vllm_names import translate
from quire.errors import ConfigError

FULL, CROSSED = CacheSpec("full", elements=8), CacheSpec("cross_attention", elements=8)
CPU, GPU = (Machine(device, device, 1, 1 << 34, 1 << 34, 4) for device in ("cpu", "cuda"))
PARALLEL = ParallelSection(cpu_threads=1, device="cpu", distributed_executor_backend="uni")


def config_of(role: Any = "kv_both", extra: Any = None, **fields: Any) -> dict[str, Any]:
    base = {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": extra or {}}
    return base | fields


def test_settings_of_vllm_are_read() -> None:
    ignored = {"kv_buffer_device": "cpu", "kv_buffer_size": 1e9, "kv_rank": 0, "kv_ip": "127.0.0.1"}
    extra = {"backends": ["UCX"], "peers": ["10.0.0.1", "node:5600", "[::1]:5601"], "load_timeout": 5}
    settings = TransferSettings.of(config_of("kv_consumer", extra, engine_id="decode-1", **ignored))
    assert settings is not None
    assert settings.peers == (("10.0.0.1", None), ("node", 5600), ("::1", 5601))
    assert (settings.engine_id, settings.fails, settings.load_timeout) == ("decode-1", False, 5.0)
    assert settings.consumes and not settings.produces
    both = TransferSettings.of(config_of(kv_load_failure_policy="fail"))
    assert both is not None and both.consumes and both.produces and both.fails
    assert TransferSettings.of({}) is None


def test_other_connectors_stay_tiers() -> None:
    assert translate({"kv_transfer_config": config_of()}) == {"kv_transfer_config": config_of()}
    assert translate({"kv_transfer_config": {}}) == {"kv_transfer_config": {}}
    with pytest.raises(ConfigError, match="'P2pNcclConnector' is not supported; known: .*, NixlConnector"):
        translate({"kv_transfer_config": config_of() | {"kv_connector": "P2pNcclConnector"}})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (config_of("kv_nothing"), "kv_role='kv_nothing' must be one of kv_both, kv_producer, kv_consumer"),
        (config_of(None), "kv_role=None must be one of"),
        (config_of(engine_id="a/b"), "engine_id='a/b' must have 1 to 128 letters"),
        (config_of(engine_id=".."), "must not begin with '.' or '-'"),
        (config_of(kv_load_failure_policy="retry"), "'retry' must be recompute or fail"),
        (config_of(kv_connector_extra_config=3), "kv_connector_extra_config=3 must be an object"),
        (config_of(kv_rol="kv_both"), "unknown kv_transfer_config key 'kv_rol'"),
        (config_of(extra={"peer": []}), "unknown kv_connector_extra_config key 'peer'"),
        (config_of(extra={"peers": "host"}), "peers='host' must be a list"),
        (config_of(extra={"peers": ["host:99999"]}), "peer 'host:99999' must be host, host:port or"),
        (config_of(extra={"peers": ["http://host"]}), "peer 'http://host' must be"),
        (config_of(extra={"load_timeout": 0}), "load_timeout=0 must be a number of seconds above 0"),
        (config_of(extra={"bidirectional_kv_xfer": True}), "bidirectional_kv_xfer=True is not supported"),
    ],
)
def test_wrong_settings_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        TransferSettings.of(config)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"cache": {"enable_prefix_caching": False}}, "prefix caching is off"),
        ({"spec": CROSSED}, "cross-attention states"),
    ],
)
def test_what_cannot_exchange_prefixes_is_refused(changes: dict[str, Any], words: str) -> None:
    cache = CacheSection(gpu_memory_utilization=0.9, kv_cache_dtype="auto", kv_transfer_config=config_of())
    cache = replace(cache, **changes.get("cache", {}))
    specs = [changes.get("spec", FULL), None]
    if not words:
        check_transfer(cache, specs)
        return
    with pytest.raises(ConfigError, match=words):
        check_transfer(cache, specs)
    check_transfer(replace(cache, kv_transfer_config={}), specs)


def test_variables_of_vllm_are_read() -> None:
    env = Env.read({"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.2", "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "60"})
    assert (env.kv.nixl_side_channel_host, env.kv.nixl_side_channel_port) == ("10.0.0.2", 5600)
    assert env.kv.nixl_abort_request_timeout == 60.0
