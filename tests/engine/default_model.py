"""The default model, which some tests use with real weights."""

import os
from pathlib import Path

import pytest

from quire.checkpoint.hub import locate
from quire.config.env import Env
from quire.errors import QuireError


def default_model() -> Path:
    """Return the path of the default model; skip the test if the model cannot be fetched."""
    try:
        return locate(None, cache_root=Env.read(os.environ).cache_root, progress=False)
    except QuireError as error:
        pytest.skip(f"the default model cannot be fetched: {error}")
