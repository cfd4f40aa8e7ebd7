"""PoolingParams: what a request to a pooling model may ask for; Pooled: what comes of it."""

from typing import Any, Literal, Self, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError, nearest
from quire.unbuilt import UNBUILT, refuse

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
    returned_token_ids: list[int] | None = None
    skip_reading_prefix_cache: bool | None = None
    """None means: only where every token's own state is asked for."""
    second_start: int | None = None
    """Internal: where the second of two texts begins, for models that tell them apart."""

    def __post_init__(self) -> None:
        for name in UNBUILT["pooling field"]:
            refuse("pooling field", name, getattr(self, name))
        for name in ("use_activation", "normalize", "skip_reading_prefix_cache"):
            if (value := getattr(self, name)) not in (None, True, False):
                raise RequestError(f"{name} must be true or false, got {value!r}.", param=name)
        if self.use_activation is None:
            self.use_activation = self.normalize
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
