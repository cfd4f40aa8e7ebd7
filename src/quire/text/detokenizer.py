"""Detokenizer: converts a growing output to text incrementally, and finds stop strings."""

import codecs
from collections.abc import Iterable, Sequence

from quire.text.tokenizer import TokenBytes, Tokenizer

_MAX_PARTIAL = 3
"""Maximum number of tokens that wait for the rest of a UTF-8 character of at most four bytes."""
_CONTEXT = 6
"""Number of prompt tokens used as context, which is enough for a partial character and the word before it."""


class Detokenizer:
    """Incremental detokenizer of the output of one request. Without stop strings, `read` returns the new
    text; with stop strings, `push` searches for them, and `take_delta` returns the new text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.text = ""
        """Output text so far, truncated at a stop string."""
        self.num_tokens = 0
        """Number of output tokens in `text`, up to the token that completed a stop string."""
        self.stopped_by: str | None = None
        self._stop = list(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_held = max(map(len, stop), default=1) - 1 if not include_stop_str_in_output else 0
        self._num_streamed = 0
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stream: _ByteStream | _WindowStream
        if tokenizer.token_bytes is not None:
            self._stream = _ByteStream(tokenizer.token_bytes, skipped, prompt_ids)
        else:
            joined_ids = frozenset() if spaces_between_special_tokens else frozenset(tokenizer.added_tokens)
            self._stream = _WindowStream(tokenizer, skipped, joined_ids, prompt_ids)

    def read(self, token_ids: Sequence[int], *, final: bool = False) -> str:
        """Return the text that these tokens add. `final` flushes a partial character."""
        text = self._stream.feed(token_ids)
        return text + self._stream.flush() if final else text

    def push(self, token_ids: Sequence[int], *, final: bool = False) -> str | None:
        """Append tokens; return the stop string, if one was found. `final` flushes a partial character."""
        if self.stopped_by is not None:
            return self.stopped_by
        # Token by token only with stop strings, to find the token that completed a stop string.
        for step in ([i] for i in token_ids) if self._stop else (token_ids,):
            self.num_tokens += len(step)
            if self._grow(self._stream.feed(step)):
                return self.stopped_by
        if final:
            self._grow(self._stream.flush())
        return self.stopped_by

    def take_delta(self, final: bool = False) -> str:
        """Return the new text since the last call, to stream it. Its end is held back while it may be the
        beginning of a stop string; with `final`, the end is returned, too."""
        num_held = 0 if final or self.stopped_by is not None else self._num_held
        end = max(self._num_streamed, len(self.text) - num_held)
        delta = self.text[self._num_streamed : end]
        self._num_streamed = end
        return delta

    def _grow(self, new_text: str) -> bool:
        """Add text and return whether it completed a stop string."""
        if not new_text:
            return False
        # With no second reference to the string, += grows it in place instead of copying it.
        text, self.text = self.text, ""
        num_before = len(text)
        text += new_text
        self.text = text
        if not self._stop or self.num_tokens < self._min_tokens:
            return False
        match = _first_stop(text, num_before, self._stop)
        if match is None:
            return False
        start, self.stopped_by = match
        self.text = text[: start + len(self.stopped_by) if self._include_stop else start]
        return True


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of a single token, with its leading space, for logprobs."""
    table = tokenizer.token_bytes
    if table is None:
        return tokenizer.decode([token_id], skip_special_tokens=False)
    return table[token_id].decode("utf-8", "replace")


def _first_stop(text: str, num_before: int, stops: Iterable[str]) -> tuple[int, str] | None:
    """Return start and text of the stop string that ends first after `num_before` characters. Of two with the
    same end, return the longer."""
    matches = [
        (start + len(stop), start, stop)
        for stop in stops
        if (start := text.find(stop, max(0, num_before - len(stop) + 1))) >= 0
    ]
    return min(matches)[1:] if matches else None


class _ByteStream:
    """Stream for token-by-token decoders: joins the bytes of tokens and decodes UTF-8 incrementally."""

    def __init__(self, table: TokenBytes, skipped: frozenset[int], prompt_ids: Sequence[int]) -> None:
        self._table = table
        self._texts = table.texts(skipped)
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(self._bytes(prompt_ids[-_CONTEXT:]))
        self._at_start = table.strips_first_space and not any(self._bytes([i]) for i in prompt_ids)
        self._at_boundary = self._is_at_boundary()
        """Whether the next token begins a new character, so that it has the same text as alone."""

    def feed(self, token_ids: Sequence[int]) -> str:
        if self._at_boundary:
            texts = [self._texts[i] for i in token_ids]
            if None not in texts:
                return "".join(texts)  # type: ignore[arg-type]
        text = self._decode(token_ids)
        self._at_boundary = self._is_at_boundary()
        return text

    def _is_at_boundary(self) -> bool:
        return not self._at_start and not self._utf8.getstate()[0]

    def _decode(self, token_ids: Sequence[int]) -> str:
        data = self._bytes(token_ids)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", True)

    def _bytes(self, token_ids: Iterable[int]) -> bytes:
        return b"".join([self._table[i] for i in token_ids if i not in self._skipped])


class _WindowStream:
    """Stream for decoders that do not work token by token: decodes the previous and the new tokens together,
    and removes the text of the previous tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skipped: frozenset[int],
        joined_ids: frozenset[int],
        prompt_ids: Sequence[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._joined_ids = joined_ids
        self._pending: list[int] = []
        self._set_context([i for i in prompt_ids[-_CONTEXT:] if i not in skipped])

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(self._step(i) for i in token_ids if i not in self._skipped)

    def flush(self) -> str:
        return self._emit(self._new_text()) if self._pending else ""

    def _step(self, token_id: int) -> str:
        self._pending.append(token_id)
        new_text = self._new_text()
        is_partial = not new_text or new_text.endswith("\N{REPLACEMENT CHARACTER}")
        return "" if is_partial and len(self._pending) <= _MAX_PARTIAL else self._emit(new_text)

    def _new_text(self) -> str:
        text = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)
        return text[len(self._context_text) :]

    def _emit(self, new_text: str) -> str:
        if self._context and self._joined_ids.issuperset((self._context[-1], self._pending[0])):
            new_text = new_text.removeprefix(" ")
        self._set_context(self._pending)
        self._pending = []
        return new_text

    def _set_context(self, token_ids: list[int]) -> None:
        self._context = token_ids
        self._context_text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
