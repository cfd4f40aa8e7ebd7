"""Tests of the settings of the lower tiers of the KV cache."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.layout import CacheSpec
from quire.config.kv_offloading import default_host_bytes, offloading_of, resolve_offloading
from quire.config.machine import Machine
from quire.config.vllm_names import translate
from quire.errors import ConfigError

FULL, STATE = CacheSpec("full", elements=8), CacheSpec("state", bytes_per_row=64)
CPU, GPU = (Machine(device, device, 1, 1 << 34, 1 << 34, 4) for device in ("cpu", "cuda"))
GIB = 1 << 30


def connector(**extra: Any) -> dict[str, Any]:
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def test_host_memory_is_a_tier_of_gpus_alone() -> None:
    assert resolve_offloading({"kv_offloading_size": 2.0}, [FULL], GPU) == {"kv_offloading_size": 2.0}
    for size in (2.0, None):
        assert resolve_offloading({"kv_offloading_size": size}, [FULL], CPU) == {"kv_offloading_size": 0.0}


def test_host_memory_is_a_tier_of_gpus_by_default() -> None:
    assert resolve_offloading({}, [FULL], GPU).get("kv_offloading_size") is None
    assert resolve_offloading({}, [FULL], GPU, by_default=False) == {"kv_offloading_size": 0.0}
    assert resolve_offloading({"kv_offloading_size": 0.0}, [FULL], GPU) == {"kv_offloading_size": 0.0}


@pytest.mark.parametrize(
    ("free", "cache", "num_devices", "num_engines", "expected"),
    [
        (200 * GIB, 100 * GIB, 1, 1, 16 * GIB),
        (800 * GIB, 400 * GIB, 4, 1, 64 * GIB),
        (120 * GIB, 100 * GIB, 1, 2, 6 * GIB),
        (200 * GIB, 3 * GIB, 1, 1, 3 * GIB),
    ],
)
def test_default_size(free: int, cache: int, num_devices: int, num_engines: int, expected: int) -> None:
    size = default_host_bytes(free, cache, num_devices=num_devices, num_engines=num_engines)
    assert size == expected


@pytest.mark.parametrize("args", [{"enable_prefix_caching": False}, {}])
def test_tiers_are_off_without_prefix_caching_and_for_cross_attention(
    args: dict[str, Any], tmp_path: Path
) -> None:
    tiers = {"kv_offloading_size": 2.0, "kv_offloading_dir": str(tmp_path)}
    specs = [FULL] if args else [FULL, CacheSpec("cross_attention", elements=8)]
    assert resolve_offloading(args | tiers, specs, GPU) == args | {"kv_offloading_size": 0.0}
    assert resolve_offloading(tiers, [FULL, None, STATE], GPU) == tiers


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        with pytest.raises(ConfigError, match="is not a directory"):
            resolve_offloading({"kv_offloading_dir": str(folder)}, [FULL], CPU)
    resolve_offloading({"kv_offloading_dir": str(tmp_path / "a" / "b")}, [FULL], CPU)
    assert not (tmp_path / "a").exists(), "it is created at the start"
    for name in ("", "a\0b", "~no_such_user/kv"):
        with pytest.raises(ConfigError, match="^kv_offloading_dir="):
            resolve_offloading({"kv_offloading_dir": name}, [FULL], CPU)


def test_an_unreadable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may read everything
    with pytest.raises(ConfigError, match="cannot be read and written by this user"):
        resolve_offloading({"kv_offloading_dir": str(tmp_path)}, [FULL], CPU)


def test_a_folder_below_an_unreadable_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, stat = tmp_path / "sub", os.stat

    def refused(path: Any, **options: Any) -> os.stat_result:
        if str(path) == str(folder):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr("os.stat", refused)  # root may read everything
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be read and written by this user"):
        resolve_offloading({"kv_offloading_dir": str(folder)}, [FULL], CPU)


def test_swap_space_and_connectors_are_mapped() -> None:
    assert translate({"swap_space": 4}) == {"kv_offloading_size": 4}
    assert translate({"swap_space": 0}) == {"kv_offloading_size": 0}
    assert translate({"swap_space": 4, "kv_offloading_size": 2.0}) == {"kv_offloading_size": 2.0}
    config = connector(cpu_bytes_to_use=3 * GIB, spec_name="TieringOffloadingSpec", eviction_policy="lru")
    assert translate({"kv_transfer_config": config}) == {"kv_offloading_size": 3.0}
    tier = {"type": "fs", "root_dir": "/kv", "n_read_threads": 4}
    assert offloading_of(connector(cpu_bytes_to_use=GIB, secondary_tiers=[tier])) == {
        "kv_offloading_size": 1.0,
        "kv_offloading_dir": "/kv",
    }
    simple = {"kv_connector": "SimpleCPUOffloadConnector", "kv_connector_extra_config": {"disk_path": "/kv"}}
    assert offloading_of(simple) == {"kv_offloading_size": 8.0, "kv_offloading_dir": "/kv"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("OffloadingConnector", "must be a JSON object"),
        ({"kv_connector": "NixlConnector"}, "kv_connector='NixlConnector' is not supported; known: Offload"),
        ({"kv_connector": "OffloadingConnector", "kv_role": "kv_none"}, "kv_role='kv_none' must be one of"),
        (connector(), "cpu_bytes_to_use must be specified in kv_connector_extra_config"),
        (connector(cpu_bytes_to_use=True), "it is True"),
        (connector(cpu_bytes_to_use=0), "it is 0"),
        (connector(cpu_bytes_to_use=1, eviction_policy="arc"), "eviction_policy='arc' is not supported; use"),
        (connector(cpu_bytes_to_use=1, nonsense=2), "kv_connector_extra_config key 'nonsense'; known: "),
        (connector(cpu_bytes_to_use=1, secondary_tiers=[{"type": "obj"}]), "give one tier with type 'fs'"),
        (connector(cpu_bytes_to_use=1, secondary_tiers=["fs"]), "give one tier with type 'fs'"),
        (connector(cpu_bytes_to_use=1, secondary_tiers={"type": "fs"}), "and its root_dir"),
        (connector(cpu_bytes_to_use=1, secondary_tiers=5), "give one tier with type 'fs'"),
        (connector(cpu_bytes_to_use=1, secondary_tiers=[{"type": "fs", "root_dir": ""}]), "and its root_dir"),
        (
            connector(cpu_bytes_to_use=1, secondary_tiers=[{"type": "fs", "root_dir": "/kv", "size": 4}]),
            "unknown secondary_tiers key 'size'",
        ),
        (connector(cpu_bytes_to_use=1e30), "as a number of bytes above 0; it is 1e+30"),
        (connector(cpu_bytes_to_use=float("nan")), "as a number of bytes above 0; it is nan"),
        (connector(cpu_bytes_to_use=1, cpu_bytes_to_use_per_rank=1), "key 'cpu_bytes_to_use_per_rank'"),
        (connector(cpu_bytes_to_use=1, disk_path=7), "disk_path=7 must be a directory"),
        (connector(cpu_bytes_to_use=1, disk_capacity_bytes="1"), "disk_capacity_bytes must be specified in"),
    ],
)
def test_other_connectors_are_refused(config: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        offloading_of(config)
    assert words in str(refused.value)
