"""Fixture of a scope that builds small float32 layers on the CPU."""

import pytest
import torch

from quire.attention.torch_sdpa import TorchSDPA
from quire.layers.scope import Scope


@pytest.fixture
def scope() -> Scope:
    return Scope(dtype=torch.float32, device=torch.device("cpu"), backend=TorchSDPA(), max_len=64)
