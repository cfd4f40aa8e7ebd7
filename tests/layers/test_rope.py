"""Tests of RoPE variants that tests/models does not reach through whole models."""

from dataclasses import replace

import pytest
import torch

from quire.checkpoint.facts import RopeFacts
from quire.checkpoint.rope import ROPE_KINDS
from quire.kernels.reference.ops import rotate
from quire.layers.rope import KINDS, Rope
from quire.layers.scope import Scope

FACTS = RopeFacts(theta=10000.0, dim=8, max_len=64)


def rotated(facts: RopeFacts, scope: Scope, position: int) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 8)
    cos, sin = Rope(facts, scope).table[position].chunk(2)
    return rotate(x, cos, sin)


def test_every_rope_type_of_configs_is_in_the_table() -> None:
    assert set(KINDS) == {*ROPE_KINDS, "factors", "none"} - {"proportional"}, "those are read as factors"


def test_halves_rotate_by_position_times_frequency(scope: Scope) -> None:
    """Check half-split instead of interleaved pairs, the sign, and positions."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 8)
    actual = torch.view_as_complex(torch.stack(rotated(FACTS, scope, 5).chunk(2, -1), -1))
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001])
    turn = torch.polar(torch.ones(4), 5 * frequencies)
    torch.testing.assert_close(actual, torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * turn)


def test_factors_divide_the_frequencies(scope: Scope) -> None:
    """Check Llama 3 GGUF files, which store their scaling as a tensor of divisors."""
    factors = replace(FACTS, kind="factors", factors=(4.0,) * 4)
    linear = replace(FACTS, kind="linear", factor=4.0)
    torch.testing.assert_close(rotated(factors, scope, 9), rotated(linear, scope, 9))


def test_factors_reproduce_llama3(scope: Scope) -> None:
    llama3 = replace(FACTS, kind="llama3", factor=8.0, original_max_len=64)
    divisors = KINDS["default"](FACTS, 64) / KINDS["llama3"](llama3, 64)
    factors = replace(FACTS, kind="factors", factors=tuple(divisors.tolist()))
    torch.testing.assert_close(rotated(factors, scope, 50), rotated(llama3, scope, 50))


def test_dimensions_beyond_dim_are_unchanged(scope: Scope) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 8)
    out = rotated(replace(FACTS, dim=4), scope, 7)
    assert torch.equal(out[..., 4:], x[..., 4:])
    assert not torch.allclose(out[..., :4], x[..., :4])


@pytest.mark.parametrize("max_len", [16, 64])
def test_dynamic_rope_is_plain_within_the_original_length(max_len: int) -> None:
    dynamic = replace(FACTS, kind="dynamic", factor=4.0)
    torch.testing.assert_close(KINDS["dynamic"](dynamic, max_len), KINDS["default"](FACTS, max_len))
    assert not torch.allclose(KINDS["dynamic"](dynamic, 128), KINDS["default"](FACTS, 128))
