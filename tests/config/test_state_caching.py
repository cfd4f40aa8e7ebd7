"""Tests of the settings of prefix caching for models with SSM states."""

from typing import Any

import pytest

from quire.checkpoint.layout import CacheSpec
from quire.config.state_caching import resolve_state_caching
from quire.errors import ConfigError

STATE, FULL = CacheSpec("state", bytes_per_row=64), CacheSpec("full", elements=8)
HYBRID, ALONE = (STATE, FULL, None), (STATE, STATE)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr("quire.config.state_caching.warn_once", lambda _, text: messages.append(text))
    return messages


def resolved(specs: Any = HYBRID, block_size: int = 16, off_reason: str = "", **args: Any) -> tuple[Any, ...]:
    """Return whether prefix caching is on, the mode, the unit and the interval."""
    made = resolve_state_caching(args, specs, block_size, off_reason)
    names = ("mamba_cache_mode", "mamba_block_size", "prefix_cache_retention_interval")
    return (made.get("enable_prefix_caching"), *(made.get(name) for name in names))


def test_defaults(warnings: list[str]) -> None:
    assert resolved() == resolved(mamba_cache_mode="none") == (True, "align", 64, None)
    assert resolved(block_size=128) == (True, "align", 128, None)
    assert resolved(mamba_cache_mode="all") == (True, "all", 512, 512)
    assert resolved(specs=ALONE) == (False, None, None, None)
    assert resolved(specs=ALONE, enable_prefix_caching=True) == (True, "align", 64, None)
    assert resolved(mamba_block_size=32, prefix_cache_retention_interval=0) == (True, "align", 32, 0)
    assert resolved(prefix_cache_retention_interval=640) == (True, "align", 64, 640)
    assert not warnings


def test_prefix_caching_is_off_with_steps_of_fixed_lengths(warnings: list[str]) -> None:
    off = (False, None, None, None)
    assert resolved(off_reason="and enable_chunked_prefill is False", mamba_block_size=32) == off
    assert resolved(enable_prefix_caching=False, mamba_cache_mode="all") == off
    assert len(warnings) == 2
    assert "enable_chunked_prefill is False" in warnings[0] and "mamba_cache_mode" in warnings[1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"enable_prefix_caching": False, "mamba_block_size": 64}, "can only be set with"),
        ({"mamba_block_size": 40}, "multiple of block_size (16): use 48"),
        ({"prefix_cache_retention_interval": 100}, "multiple of mamba_block_size (64): use 128"),
        ({"specs": (FULL,), "prefix_cache_retention_interval": 64}, "this model has neither"),
    ],
)
def test_contradictions_are_refused(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(**args)
    assert words in str(error.value)


def test_models_without_states_ignore_the_settings(warnings: list[str]) -> None:
    windows = (FULL, CacheSpec("window", elements=8, window=8))
    args = {"mamba_cache_mode": "align", "mamba_block_size": 8, "prefix_cache_retention_interval": 8}
    assert resolve_state_caching(args | {"enable_prefix_caching": True}, windows, 16) == {
        "enable_prefix_caching": True
    }
    assert len(warnings) == 3
    assert resolve_state_caching({"mamba_cache_mode": "none"}, (FULL,), 16) == {}
    assert len(warnings) == 3
