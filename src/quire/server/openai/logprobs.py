"""Logprobs in the API's formats for chats, completions and prompts."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.data.outputs import Logprob
from quire.text.tokenizer import Tokenizer

_MIN_LOGPROB = -9999.0
"""Replacement for minus infinity, which JSON cannot represent."""

Position = Mapping[int, Logprob]


@dataclass(frozen=True, slots=True)
class TokenFormatter:
    """Formatter of tokens, as text or as `token_id:ID`."""

    tokenizer: Tokenizer | None
    as_ids: bool = False

    def token(self, token_id: int, entry: Logprob) -> str:
        return f"token_id:{token_id}" if self.as_ids else entry.decoded_token or ""

    def bytes(self, token_id: int, entry: Logprob) -> list[int]:
        """Return the bytes of a token as integers, from the vocabulary if possible: in the token's text, a
        replacement character may stand for the bytes of a partial character."""
        spelled = self.tokenizer and self.tokenizer.token_bytes
        if spelled:
            return list(spelled[token_id])
        return list((entry.decoded_token or "").encode("utf-8", "replace"))


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Iterable[Position | None],
    num_top: int,
    token_formatter: TokenFormatter,
) -> dict[str, Any]:
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        assert position is not None
        ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
        top = ranked if num_top == -1 else ranked[:num_top]
        chosen = _entry(token_id, position[token_id], token_formatter)
        content.append(chosen | {"top_logprobs": [_entry(i, item, token_formatter) for i, item in top]})
    return {"content": content}


def _entry(token_id: int, entry: Logprob, token_formatter: TokenFormatter) -> dict[str, Any]:
    return {
        "token": token_formatter.token(token_id, entry),
        "logprob": finite_logprob(entry.logprob),
        "bytes": token_formatter.bytes(token_id, entry),
    }


@dataclass(slots=True)
class LogprobColumns:
    """Logprobs in the format of completions: four lists (tokens, token_logprobs, top_logprobs, text_offset)
    with an entry per token. Text offsets, in characters, continue from chunk to chunk of a stream."""

    num_top: int
    token_formatter: TokenFormatter
    offset: int = 0
    columns: dict[str, list[Any]] = field(default_factory=lambda: _no_columns())

    def add(self, token_ids: Sequence[int], positions: Iterable[Position | None]) -> None:
        columns = self.columns
        for token_id, position in zip(token_ids, positions, strict=True):
            text = self._add(columns, token_id, position or {})
            columns["text_offset"].append(self.offset)
            self.offset += len(text)

    def _add(self, columns: dict[str, list[Any]], token_id: int, position: Position) -> str:
        chosen = position.get(token_id)
        if chosen is None:  # the first token of a prompt has no logprob
            tokenizer = self.token_formatter.tokenizer
            text = tokenizer.decode([token_id], skip_special_tokens=False) if tokenizer else ""
            chosen = Logprob(0.0, None, text)
            columns["token_logprobs"].append(None)
            columns["top_logprobs"].append(None)
        else:
            columns["token_logprobs"].append(finite_logprob(chosen.logprob))
            num_shown = len(position) if self.num_top == -1 else self.num_top + 1
            shown = itertools.islice(position.items(), num_shown)
            columns["top_logprobs"].append(
                {self.token_formatter.token(i, entry): finite_logprob(entry.logprob) for i, entry in shown}
            )
        token = self.token_formatter.token(token_id, chosen)
        columns["tokens"].append(token)
        return token

    def pop(self) -> dict[str, list[Any]]:
        """Return the four lists, with the tokens added since the last call of this method."""
        columns, self.columns = self.columns, _no_columns()
        return columns


def _no_columns() -> dict[str, list[Any]]:
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def prompt_logprobs(positions: Iterable[Position | None] | None) -> list[dict[str, Any] | None] | None:
    if positions is None:
        return None
    return [None if position is None else _prompt_position(position) for position in positions]


def _prompt_position(position: Position) -> dict[str, Any]:
    return {
        str(token_id): {
            "logprob": finite_logprob(entry.logprob),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token_id, entry in position.items()
    }


def finite_logprob(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
