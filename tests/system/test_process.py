"""Tests of the garbage collector's settings."""

import gc

import pytest

from quire.system.process import all_objects, collect_all


@pytest.mark.parametrize("look", [collect_all, all_objects])
def test_objects_stay_collectable_beside_frozen_ones(look: object) -> None:
    """Catches an engine that stays in memory after its owner has dropped it, because Python or the user froze
    other objects before."""
    assert callable(look)
    gc.freeze()
    before = gc.get_freeze_count()
    assert before > 0
    look()
    assert gc.get_freeze_count() <= before
