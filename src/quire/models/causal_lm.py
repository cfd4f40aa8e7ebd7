"""CausalLM: the protocol of models that the loader builds and the worker runs."""

from collections.abc import Iterator
from typing import Protocol, Self

from torch import Tensor, nn

from quire.attention.batch import Batch


class CausalLM(Protocol):
    """A language model over the paged KV cache: `forward` to hidden states, then `logits`."""

    def __call__(self, batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        """Return hidden states [T, hidden] after the final norm, or (x, residual) before the last stage."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, vocab] of hidden states [N, hidden]."""
        ...

    def modules(self) -> Iterator[nn.Module]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def eval(self) -> Self: ...
