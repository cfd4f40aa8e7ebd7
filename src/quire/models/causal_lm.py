"""CausalLM: what the loader builds and the worker runs."""

from collections.abc import Iterator
from typing import Protocol, Self

from torch import Tensor, nn

from quire.attention.batch import Batch


class CausalLM(Protocol):
    """A language model over the paged cache: a module in two halves."""

    def __call__(self, batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        """`forward`: [T, hidden], after the final norm; of a stage before the last (x, residual)."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab]."""
        ...

    def modules(self) -> Iterator[nn.Module]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def eval(self) -> Self: ...
