"""Tests of building an engine core from a configuration."""

from types import SimpleNamespace
from typing import Any

from quire.core.build import _why_no_prefixes


def test_models_with_the_cache_of_transformers_name_it_as_the_reason_of_misses() -> None:
    facts = SimpleNamespace(borrowed=SimpleNamespace(own_cache=True), encoder=None, layers=())
    config: Any = SimpleNamespace(pooling=None, checkpoint=SimpleNamespace(facts=facts))
    assert _why_no_prefixes(config) == "the model keeps the cache of transformers, not blocks"
