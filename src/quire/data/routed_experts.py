"""The experts that tokens were routed to, from the worker to the output of a request."""

from math import prod
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray


class StepRoutes(msgspec.Struct):
    """The experts of the tokens of a step."""

    slots: NDArray[np.int64]
    """[tokens], slot of each token in the KV cache; negative for padding."""
    experts: NDArray[np.int16]
    """[tokens, MoE layers, experts per token], number of each expert."""


class RoutedRows(msgspec.Struct):
    """The experts of some consecutive tokens of a sequence, serialized."""

    shape: tuple[int, ...]
    """Tokens, MoE layers, experts per token."""
    data: bytes
    """Bytes of the expert numbers: uint8 for models with up to 256 experts, otherwise uint16."""

    @classmethod
    def of(cls, experts: NDArray[Any]) -> Self:
        return cls(experts.shape, experts.tobytes())

    def array(self) -> NDArray[Any]:
        kind = np.uint8 if len(self.data) == prod(self.shape) else np.uint16
        return np.frombuffer(self.data, kind).reshape(self.shape)
