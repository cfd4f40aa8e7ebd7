"""Base of the processors of images."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.data.multimodal import Array, MediaItem
from quire.errors import ConfigError, RequestError
from quire.multimodal.processors import ProcessedItem
from quire.text.tokenizer import Tokenizer


def token_of(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that the family needs."""
    token_id = tokenizer.backend.token_to_id(token)
    if token_id is None:
        raise ConfigError(f"the tokenizer has no token {token}, which this model needs for images")
    return token_id


class ImageProcessor:
    """Base of processors that replace a mark of one token by a span of image tokens; both may be the same
    token."""

    modalities: tuple[str, ...] = ("image",)

    def __init__(self, mark: int, image_id: int, hidden: int, tokenizer: Tokenizer) -> None:
        self.mark, self.image_id, self.hidden = mark, image_id, hidden
        self.tokenizer = tokenizer

    def marks(self, modality: str) -> list[int]:
        return [self.mark]

    def text(self, modality: str, number: int) -> str:
        return self.tokenizer.backend.id_to_token(self.mark) or ""

    def build_item(self, token_ids: list[int], place: int | None = None, **more: Any) -> ProcessedItem:
        """Build the item of a span that has vectors at its image tokens, or at the tokens `place`."""
        places = np.asarray(token_ids) == (self.image_id if place is None else place)
        edges = np.flatnonzero(np.diff(places, prepend=False, append=False)).reshape(-1, 2)
        runs = [(int(first), int(end - first)) for first, end in edges]
        return ProcessedItem(token_ids, [] if places.all() else runs, **more)

    def embeds_span(self, num_vectors: int) -> list[int]:
        """Return the span of embeddings that a user sends."""
        return [self.image_id] * num_vectors

    def process_embeds(self, modality: str, embeds: Mapping[str, NDArray[Any]]) -> ProcessedItem:
        vectors = embeds["embeds"]
        vectors = vectors[0] if vectors.ndim == 3 and len(vectors) == 1 else vectors
        if vectors.ndim != 2 or vectors.shape[1] != self.hidden or not len(vectors):
            raise RequestError(
                f"{modality}_embeds: the shape is {vectors.shape}, expected (vectors, {self.hidden})",
                "multi_modal_data",
            )
        return self.build_item(self.embeds_span(len(vectors)), arrays={"embeds": Array.of(vectors)})

    def positions(
        self, token_ids: Sequence[int], items: Sequence[MediaItem], facts: Sequence[Mapping[str, Any]]
    ) -> Array | None:
        return None
