"""CLIP and SigLIP: an image as a prompt of its own, with one placeholder token."""

from collections.abc import Sequence
from pathlib import Path

from quire.checkpoint.facts import MediaFacts
from quire.errors import RequestError
from quire.multimodal.processors.llava import LlavaProcessor
from quire.text.tokenizer import Tokenizer


class DualProcessor(LlavaProcessor):
    """Processor of CLIP and SigLIP, which resizes images to the encoder's size. A prompt is a text, or one
    image with an empty text."""

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        super().__init__(path, facts, tokenizer)
        self.empty = {*tokenizer.encode("")}
        """Ids of the special tokens to which an empty text is encoded."""

    def text(self, modality: str, number: int) -> str:
        return ""

    def check_alone(self, token_ids: Sequence[int], num_items: int) -> None:
        if num_items > 1:
            raise RequestError(
                f"this model embeds one image at a time, got {num_items}: send a request for each",
                param="prompt",
            )
        if not ({*token_ids} <= self.empty or [*token_ids] == [self.image_id]):
            raise RequestError(
                "this model embeds a text or an image, not both in one prompt: send the image with an "
                "empty text",
                param="prompt",
            )
