"""Tests of the garbage collector's settings."""

import gc
import weakref
from collections.abc import Callable

import pytest

from quire.system.process import all_objects, collect_all


class Circle:
    """An object that only the garbage collector can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("call", [collect_all, all_objects])
def test_objects_stay_collectable_beside_frozen_ones(call: Callable[[], object]) -> None:
    """Catches an engine that stays in memory after its owner has dropped it, because Python or the user froze
    other objects before."""
    gc.freeze()
    circle = Circle()
    call()
    alive = weakref.ref(circle)
    del circle
    gc.collect()
    assert alive() is None
