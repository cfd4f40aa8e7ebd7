"""Protocol of the encoders that convert outputs to HTTP responses, one per route."""

from typing import Any, Protocol

from quire.data.outputs import RequestOutput


class AnswerEncoder(Protocol):
    """Encoder of the response of one API, as the events of a stream or as one body."""

    @property
    def text_only(self) -> bool:
        """Whether `encode_text` can encode most outputs."""

    def encode(self, output: RequestOutput) -> bytes:
        """Return the events of an output."""

    def encode_text(self, text: str, num_tokens: int) -> bytes:
        """Return the events of a text-only output of a single choice, neither first nor last."""

    def finish(self) -> bytes:
        """Return the last events of a successful stream."""

    def fail(self, error: Exception) -> bytes:
        """Return the last events of a failed stream."""

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the body of a response that is not streamed, from the last output of each prompt."""
