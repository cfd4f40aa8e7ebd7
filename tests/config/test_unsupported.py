"""Tests of the refusal of unsupported features."""

from typing import Any

import pytest

from quire.config.structured_outputs import output_switches
from quire.config.unsupported import UNSUPPORTED, Place, check_supported, is_switch
from quire.errors import ConfigError, RequestError


@pytest.mark.parametrize("place", UNSUPPORTED)
def test_default_values_are_accepted(place: Place) -> None:
    for name, off in UNSUPPORTED[place].items():
        for value in (None, *off):
            check_supported(place, name, value)


@pytest.mark.parametrize(
    ("place", "name", "value", "kind", "words"),
    [
        (
            "engine argument",
            "offload_group_size",
            2,
            ConfigError,
            "offload_group_size=2 is not supported yet; leave it",
        ),
        ("server flag", "tool_server", "a", ConfigError, "tool_server='a' is not supported yet; leave it"),
        (
            "body field",
            "ec_transfer_params",
            {"a": 1},
            RequestError,
            "`ec_transfer_params` is not supported yet; leave it out",
        ),
        (
            "sampling field",
            "trace_decode_token_ids",
            [3],
            RequestError,
            "`trace_decode_token_ids` is not supported",
        ),
        ("call argument", "structured_outputs", 1, RequestError, "`structured_outputs` is not supported yet"),
    ],
)
def test_each_place_refuses_with_the_same_message(
    place: Place, name: str, value: Any, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind) as refused:
        check_supported(place, name, value)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    if isinstance(refused.value, RequestError):
        assert refused.value.param == name


def test_number_is_not_a_switch() -> None:
    """Catches `(0,) == (False,)`."""
    assert is_switch("engine argument", "disable_sliding_window") and is_switch("server flag", "grpc")
    assert not is_switch("engine argument", "offload_group_size")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"disable_whitespace": True}, "unknown structured_outputs_config key 'disable_whitespace'"),
        ({"disable_any_whitespace": 1}, "disable_any_whitespace=1 must be true or false"),
        ({"reasoning_parser": "qwen3"}, "set --reasoning-parser in place of reasoning_parser"),
        ({"enable_in_reasoning": 1}, "enable_in_reasoning=1 must be true or false"),
    ],
)
def test_structured_outputs_config_is_checked(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        output_switches(settings)
    assert output_switches({"backend": "xgrammar", "disable_any_whitespace": True}) == (
        "disable_any_whitespace",
    )
