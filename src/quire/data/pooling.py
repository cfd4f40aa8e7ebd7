"""PoolingParams: what a request to a pooling model may ask for; Pooled: what comes of it."""

from typing import Any, Literal, Self, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError, nearest

Floats = NDArray[np.float32]
Task = Literal["embed", "classify", "token_embed", "token_classify"]
TASKS: tuple[str, ...] = get_args(Task)


class PoolingParams(msgspec.Struct, omit_defaults=True):
    """What is made of a prompt's hidden states. Construction validates; the frontend fills in what the model
    says."""

    use_activation: bool | None = None
    """Embeddings: their length becomes 1. Classes: logits become probabilities. None: as the model says."""
    dimensions: int | None = None
    """Only the first so many numbers of an embedding, for models that were trained for it."""
    normalize: bool | None = None
    """The older name of `use_activation`."""
    task: Task | None = None
    """None: what is called for (`LLM.embed`, `LLM.classify`)."""
    step_tag_id: int | None = None
    """Of pooling of the type STEP: only these tokens have an answer. None: as the model says."""
    returned_token_ids: list[int] | None = None
    """Of the same: which numbers of an answer are given out, before their activation."""
    skip_reading_prefix_cache: bool | None = None
    """None means: only where tokens' own states are asked for, which are never read from there."""
    second_start: int | None = None
    """Internal: where the second of two texts begins, for models that tell them apart."""

    def __post_init__(self) -> None:
        for name in ("use_activation", "normalize", "skip_reading_prefix_cache"):
            if (value := getattr(self, name)) not in (None, True, False):
                raise RequestError(f"{name} must be true or false, got {value!r}.", param=name)
        if self.use_activation is None:
            self.use_activation = self.normalize
        if self.step_tag_id is not None and not _is_id(self.step_tag_id):
            raise RequestError(
                f"step_tag_id must be a token id, got {self.step_tag_id!r}.", param="step_tag_id"
            )
        returned = self.returned_token_ids
        if returned is not None and not (isinstance(returned, list | tuple) and all(map(_is_id, returned))):
            raise RequestError(
                f"returned_token_ids must be a list of token ids, got {returned!r}.",
                param="returned_token_ids",
            )
        wanted = self.dimensions
        if wanted is not None and (not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1):
            raise RequestError(f"dimensions must be a positive integer, got {wanted!r}.", param="dimensions")
        if self.task is not None and self.task not in TASKS:
            raise RequestError(
                f"pooling task {self.task!r} is not supported; known: {', '.join(TASKS)}"
                f"{nearest(str(self.task), TASKS)}",
                param="task",
            )

    @property
    def is_by_token(self) -> bool:
        """Whether each token has an answer of its own."""
        return self.task in ("token_embed", "token_classify")

    def clone(self) -> Self:
        return msgspec.structs.replace(self)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class Pooled(msgspec.Struct):
    """Numbers on their way from the worker to whoever asked."""

    data: bytes
    """float32"""
    shape: tuple[int, ...]

    @classmethod
    def of(cls, values: NDArray[Any]) -> Self:
        return cls(np.ascontiguousarray(values, np.float32).tobytes(), values.shape)

    def array(self) -> Floats:
        return np.frombuffer(self.data, np.float32).reshape(self.shape)
