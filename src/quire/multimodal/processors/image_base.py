"""Base classes of image processors, and of all that expand a placeholder token to a span of tokens."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.reader import ConfigReader
from quire.data.multimodal import Array, MediaItem
from quire.errors import ConfigError, RequestError
from quire.multimodal.images import (
    CLIP_MEAN,
    CLIP_STD,
    IMAGE_ARGUMENTS,
    Pixels,
    PixelScaling,
    Size,
    argument_errors,
    fitted,
    override_settings,
    resample_of,
    resized,
    size_of,
    stored_settings,
    video_settings,
)
from quire.multimodal.processors import Content, ProcessedItem, Video
from quire.text.tokenizer import Tokenizer


def token_of(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that the model needs for images; raise a ConfigError if it is missing."""
    token_id = tokenizer.backend.token_to_id(token)
    if token_id is None:
        raise ConfigError(f"the tokenizer has no token {token}, which this model needs for images")
    return token_id


def read_vectors(modality: str, embeds: Mapping[str, NDArray[Any]], hidden: int) -> NDArray[Any]:
    """Return the embeddings that a user sends in place of an item, [vectors, hidden]."""
    vectors = embeds["embeds"]
    vectors = vectors[0] if vectors.ndim == 3 and len(vectors) == 1 else vectors
    if vectors.ndim != 2 or vectors.shape[1] != hidden or not len(vectors):
        message = f"{modality}_embeds: the shape is {vectors.shape}, expected (vectors, {hidden})"
        raise RequestError(message, "multi_modal_data")
    return vectors


class SpanProcessor:
    """Base of processors that expand a one-token placeholder (mark) to a span of image or audio tokens."""

    modalities: tuple[str, ...]

    def __init__(self, mark: int, image_id: int, hidden: int, tokenizer: Tokenizer) -> None:
        self.mark, self.image_id, self.hidden = mark, image_id, hidden
        self.tokenizer = tokenizer

    def marks(self, modality: str) -> list[int]:
        return [self.mark]

    def text(self, modality: str, number: int) -> str:
        return self.tokenizer.backend.id_to_token(self.mark) or ""

    def build_item(self, token_ids: list[int], place: int | None = None, **more: Any) -> ProcessedItem:
        """Build the processed item of a span of tokens. Embeddings replace the tokens with the id `place`, by
        default the image tokens; `more` are further fields of the item."""
        places = np.asarray(token_ids) == (self.image_id if place is None else place)
        edges = np.flatnonzero(np.diff(places, prepend=False, append=False)).reshape(-1, 2)
        runs = [(int(first), int(end - first)) for first, end in edges]
        return ProcessedItem(token_ids, [] if places.all() else runs, **more)

    def embeds_span(self, num_vectors: int) -> list[int]:
        """Return the span of placeholder tokens for `num_vectors` embeddings that a user sends."""
        return [self.image_id] * num_vectors

    def process_embeds(self, modality: str, embeds: Mapping[str, NDArray[Any]]) -> ProcessedItem:
        vectors = read_vectors(modality, embeds, self.hidden)
        return self.build_item(self.embeds_span(len(vectors)), arrays={"embeds": Array.of(vectors)})

    def positions(
        self, token_ids: Sequence[int], items: Sequence[MediaItem], facts: Sequence[Mapping[str, Any]]
    ) -> Array | None:
        return None


class ImageProcessor(SpanProcessor):
    """Base of processors that resize images with Pillow. Subclasses set class attributes and implement
    `process_image`."""

    arguments: ClassVar[Collection[str]] = IMAGE_ARGUMENTS
    """Names of the mm_processor_kwargs that a request may pass."""
    older_arguments: ClassVar[Mapping[str, str]] = {}
    """Current names of arguments by their older names."""
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    is_narrow: ClassVar[bool] = False
    """Whether pixels are normalized in bfloat16, not in float32."""
    resample: ClassVar[Image.Resampling] = Image.Resampling.BICUBIC
    facts: Any
    """Description of the vision encoder (`MediaFacts.tower`)."""

    def __init__(
        self,
        path: Path,
        facts: MediaFacts,
        tokenizer: Tokenizer,
        *,
        mark: int | None = None,
        image_id: int | None = None,
        **defaults: Any,
    ) -> None:
        """Read the settings of the checkpoint, which override `defaults`. `image_id` is the token that
        embeddings replace, by default the image token of config.json. `mark` is the placeholder in prompts,
        by default `image_id`."""
        self.facts = facts.tower
        image_id = self.facts.image_id if image_id is None else image_id
        super().__init__(image_id if mark is None else mark, image_id, self.facts.size_out, tokenizer)
        self.modalities = facts.modalities
        self.settings = stored_settings(path, **defaults)
        self.video_settings = video_settings(path, self.settings)

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        with argument_errors():
            keys = self.read_arguments(modality, arguments)
            scaling = PixelScaling.read(keys, self.mean, self.std, is_narrow=self.is_narrow)
            if isinstance(content, Video):
                return self.process_video(content, keys, scaling)
            assert isinstance(content, Image.Image)
            return self.process_image(content, keys, scaling)

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        raise NotImplementedError

    def process_video(self, video: Video, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        raise NotImplementedError

    def read_arguments(self, modality: str, arguments: Mapping[str, Any]) -> ConfigReader:
        """Return the settings of a modality, overridden by the mm_processor_kwargs of a request."""
        stored = self.video_settings if modality == "video" else self.settings
        keys = override_settings(stored, arguments, self.arguments)
        older = self.older_arguments
        return keys.but(**{older[name]: value for name, value in arguments.items() if name in older})

    def resize(self, image: Image.Image, size: Size, keys: ConfigReader) -> Pixels:
        return resized(image, size, resample_of(keys, self.resample))

    def resize_to_square(self, image: Image.Image, keys: ConfigReader) -> Pixels:
        """Resize an image to the square that the vision encoder reads."""
        side = self.facts.vit.image
        return self.resize(image, (side, side), keys)

    def resize_frames(self, video: Video, keys: ConfigReader) -> NDArray[np.uint8]:
        """Resize the frames of a video to the squares that the vision encoder reads, [frames, side, side, 3].
        `keys` is the preprocessor config."""
        return np.stack([self.resize_to_square(Image.fromarray(frame), keys) for frame in video.frames])

    def check_square(self, keys: ConfigReader) -> None:
        """Raise a ConfigError if the image size of the settings differs from that of the vision encoder."""
        side = self.facts.vit.image
        if fitted(size_of(keys), (side, side)) != (side, side):
            raise keys.wrong("size", f"{side} x {side} pixels")

    def expand(self, text: str) -> list[int]:
        """Return the tokens of the text of a span, in which each image token is repeated for all embeddings
        of an image or tile."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [i for i in token_ids for _ in range(self.facts.tokens if i == self.image_id else 1)]

    def max_vectors(self, modality: str) -> int:
        tokens: int = self.facts.tokens
        return tokens

    def largest(self, modality: str) -> tuple[int, ...]:
        return self.facts.vit.image, self.facts.vit.image
