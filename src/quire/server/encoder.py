"""What writes an answer down: one encoder a route."""

from typing import Any, Protocol

from quire.data.outputs import RequestOutput


class AnswerEncoder(Protocol):
    """An answer in the words of one API: as the events of a stream, or whole."""

    @property
    def text_only(self) -> bool:
        """Whether `encode_text` can say what most outputs say."""

    def encode(self, output: RequestOutput) -> bytes:
        """Events for what is new."""

    def encode_text(self, text: str, num_tokens: int) -> bytes:
        """The same for an output of one choice that is neither first nor last."""

    def finish(self) -> bytes:
        """The last events of a stream that went well."""

    def fail(self, error: Exception) -> bytes:
        """The last events of one that did not."""

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The body of an answer that is not streamed, from the last output of each prompt."""
