"""Outputs of pooling models: vectors, embeddings, probabilities, scores."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from quire.data.pooling import Floats

Out = TypeVar("Out")


@dataclass
class PoolingOutput:
    """The pooled data: one vector [size], or one vector for each token [tokens, size]."""

    data: Floats


@dataclass
class EmbeddingOutput:
    """The embedding vector of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """Probability of each class; logits if no activation was requested."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ScoringOutput:
    """Similarity score of two texts."""

    score: float


@dataclass
class PoolingRequestOutput(Generic[Out]):
    """A request and its pooled output."""

    request_id: str
    outputs: Out
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool
    error: Exception | None = None
    """Error of a failed request, which `LLM` raises; else None."""


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """A request and its embedding."""

    @staticmethod
    def from_base(base: PoolingRequestOutput[PoolingOutput]) -> "EmbeddingRequestOutput":
        return EmbeddingRequestOutput(*_parts(base, EmbeddingOutput(base.outputs.data.tolist())))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """A request and the probabilities of its classes."""

    @staticmethod
    def from_base(base: PoolingRequestOutput[PoolingOutput]) -> "ClassificationRequestOutput":
        return ClassificationRequestOutput(*_parts(base, ClassificationOutput(base.outputs.data.tolist())))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """A request with a pair of texts, and the score of the pair."""

    @staticmethod
    def from_base(base: PoolingRequestOutput[PoolingOutput]) -> "ScoringRequestOutput":
        return ScoringRequestOutput(*_parts(base, ScoringOutput(float(base.outputs.data.item()))))


def _parts(base: PoolingRequestOutput[PoolingOutput], outputs: Out) -> tuple[str, Out, list[int], int, bool]:
    return base.request_id, outputs, base.prompt_token_ids, base.num_cached_tokens, base.finished
