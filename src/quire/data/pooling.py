"""PoolingParams: parameters of a request to a pooling model; Pooled: its output."""

from typing import Any, Literal, Self, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError, nearest

Floats = NDArray[np.float32]
Task = Literal["embed", "classify", "token_embed", "token_classify"]
TASKS: tuple[str, ...] = get_args(Task)


class PoolingParams(msgspec.Struct, omit_defaults=True):
    """Pooling parameters, validated on construction; the frontend fills in the defaults of the model."""

    use_activation: bool | None = None
    """Whether to normalize embeddings, or to convert logits to probabilities. None: the model's default."""
    dimensions: int | None = None
    """Number of dimensions of a shortened embedding, for Matryoshka models. None: the full embedding."""
    normalize: bool | None = None
    """The older name of `use_activation`."""
    task: Task | None = None
    """Pooling task; None: the task of the call (`LLM.embed`, `LLM.classify`)."""
    step_tag_id: int | None = None
    """Token id at which the pooling type STEP returns an output. None: the model's default."""
    returned_token_ids: list[int] | None = None
    """Ids of the logits that the pooling type STEP returns, selected before the activation."""
    skip_reading_prefix_cache: bool | None = None
    """Whether to skip the prefix cache. None: only for tasks by token, which need all hidden states."""
    second_start: int | None = None
    """Internal: position at which the second of two texts starts, for models with token types."""

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
        dimensions = self.dimensions
        if dimensions is not None and (
            not isinstance(dimensions, int) or isinstance(dimensions, bool) or dimensions < 1
        ):
            raise RequestError(
                f"dimensions must be a positive integer, got {dimensions!r}.", param="dimensions"
            )
        if self.task is not None and self.task not in TASKS:
            raise RequestError(
                f"pooling task {self.task!r} is not supported; known: {', '.join(TASKS)}"
                f"{nearest(str(self.task), TASKS)}",
                param="task",
            )

    @property
    def is_by_token(self) -> bool:
        """Whether the task has an output for each token."""
        return self.task in ("token_embed", "token_classify")

    def clone(self) -> Self:
        return msgspec.structs.replace(self)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class Pooled(msgspec.Struct):
    """A serializable array of float32, sent from the worker to the API server process."""

    data: bytes
    """Bytes of the float32 values."""
    shape: tuple[int, ...]

    @classmethod
    def of(cls, values: NDArray[Any]) -> Self:
        return cls(np.ascontiguousarray(values, np.float32).tobytes(), values.shape)

    def array(self) -> Floats:
        return np.frombuffer(self.data, np.float32).reshape(self.shape)
