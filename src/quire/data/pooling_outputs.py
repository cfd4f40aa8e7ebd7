"""What a caller gets back from a pooling model: vectors, embeddings, probabilities, scores."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from quire.data.pooling import Floats

Out = TypeVar("Out")


@dataclass
class PoolingOutput:
    """The numbers that were pooled: one vector, or one for each token."""

    data: Floats


@dataclass
class EmbeddingOutput:
    """A text as a vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """How likely each class is; the logits where no activation was asked for."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ScoringOutput:
    """How well two texts fit."""

    score: float


@dataclass
class PoolingRequestOutput(Generic[Out]):
    """A request and what was pooled of it."""

    request_id: str
    outputs: Out
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool
    error: Exception | None = None
    """Why the request failed; None for one that did not. `LLM` raises it."""


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """A request and its embedding."""

    @staticmethod
    def from_base(base: PoolingRequestOutput[PoolingOutput]) -> "EmbeddingRequestOutput":
        return EmbeddingRequestOutput(*_parts(base, EmbeddingOutput(base.outputs.data.tolist())))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """A request and its classes."""

    @staticmethod
    def from_base(base: PoolingRequestOutput[PoolingOutput]) -> "ClassificationRequestOutput":
        return ClassificationRequestOutput(*_parts(base, ClassificationOutput(base.outputs.data.tolist())))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """A pair of texts and its score."""

    @staticmethod
    def from_base(base: PoolingRequestOutput[PoolingOutput]) -> "ScoringRequestOutput":
        return ScoringRequestOutput(*_parts(base, ScoringOutput(float(base.outputs.data.item()))))


def _parts(base: PoolingRequestOutput[PoolingOutput], outputs: Out) -> tuple[str, Out, list[int], int, bool]:
    return base.request_id, outputs, base.prompt_token_ids, base.num_cached_tokens, base.finished
