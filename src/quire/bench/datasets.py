"""Prompts for benchmarks."""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quire.errors import ConfigError
from quire.text.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt as token ids, and the number of tokens to generate."""

    prompt_ids: list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class Query:
    """A prompt as sent to a server (text or token ids), and the number of tokens to generate."""

    prompt: str | list[int]
    prompt_len: int
    """Number of tokens of the prompt; 0 for a text if there is no tokenizer to count them."""
    output_len: int
    media: Sequence[dict[str, Any]] = ()
    """Image and video parts to add to the chat message."""


def random_samples(
    count: int,
    *,
    vocab: int,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
) -> list[Sample]:
    """Return `count` prompts of random ids. Lengths vary evenly by the share `range_ratio` around
    `input_len` and `output_len`; each prompt begins with the same `prefix_len` further ids."""
    draw = random.Random(seed)
    prefix = [draw.randrange(vocab) for _ in range(prefix_len)]

    def length(mean: int) -> int:
        return max(1, draw.randint(round(mean * (1 - range_ratio)), round(mean * (1 + range_ratio))))

    return [
        Sample(prefix + [draw.randrange(vocab) for _ in range(length(input_len))], length(output_len))
        for _ in range(count)
    ]


def prefix_samples(
    count: int,
    *,
    vocab: int,
    num_prefixes: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
    seed: int = 0,
) -> list[Sample]:
    """Return prompts of random ids in random order: each prefix equally often, with a different suffix every
    time."""
    draw = random.Random(seed)
    prefixes = [[draw.randrange(vocab) for _ in range(prefix_len)] for _ in range(num_prefixes)]
    samples = [
        Sample(prefixes[i % num_prefixes] + [draw.randrange(vocab) for _ in range(suffix_len)], output_len)
        for i in range(count)
    ]
    draw.shuffle(samples)
    return samples


def sharegpt_samples(
    count: int, path: Path, tokenizer: Tokenizer, *, output_len: int | None = None
) -> list[Sample]:
    """Return the first questions of ShareGPT-style conversations, with the lengths of their answers; very
    short and very long ones are left out."""
    queries = sharegpt_queries(count, path, tokenizer, output_len=output_len)
    return [Sample(tokenizer.encode(str(query.prompt)), query.output_len) for query in queries]


def random_queries(samples: Iterable[Sample], tokenizer: Tokenizer | None) -> list[Query]:
    """Convert samples to queries of token ids or, with a tokenizer, of texts with the same number of tokens
    where possible."""
    if tokenizer is None:
        return [Query(sample.prompt_ids, len(sample.prompt_ids), sample.output_len) for sample in samples]
    plain = _plain_ids(tokenizer)
    queries = []
    for sample in samples:
        text = _text_of([plain[token_id % len(plain)] for token_id in sample.prompt_ids], tokenizer)
        queries.append(Query(text, len(tokenizer.encode(text)), sample.output_len))
    return queries


def sharegpt_queries(
    count: int, path: Path, tokenizer: Tokenizer | None, *, output_len: int | None = None, seed: int = 0
) -> list[Query]:
    """Return the first questions of ShareGPT-style conversations as texts. Without a tokenizer, four bytes
    count as a token for the length limits."""
    queries: list[Query] = []

    def num_tokens(text: str) -> int:
        return len(tokenizer.encode(text)) if tokenizer is not None else len(text.encode()) // 4

    for question, answer in _first_turns(path, seed):
        if len(queries) == count:
            break
        length, num_wanted = num_tokens(question), output_len or num_tokens(answer)
        if _usable(length, num_wanted):
            queries.append(Query(question, length if tokenizer is not None else 0, num_wanted))
    return _repeat_to(queries, count, path)


def custom_queries(
    count: int, path: Path, tokenizer: Tokenizer | None, *, output_len: int, seed: int = 0
) -> list[Query]:
    """Read queries from JSON lines, each with a `prompt` and optionally `output_tokens`."""
    queries = []
    for number, line in enumerate(_lines(path), 1):
        try:
            entry = json.loads(line)
            prompt, num_wanted = entry["prompt"], int(entry.get("output_tokens") or output_len)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise ConfigError(f"{path}, line {number}: not an object with a `prompt` ({reason})") from None
        if not isinstance(prompt, str):
            raise ConfigError(f"{path}, line {number}: `prompt` must be a text, got {prompt!r:.40}")
        queries.append(
            Query(prompt, len(tokenizer.encode(prompt)) if tokenizer is not None else 0, num_wanted)
        )
    random.Random(seed).shuffle(queries)
    return _repeat_to(queries, count, path)


def _first_turns(path: Path, seed: int) -> list[tuple[str, str]]:
    try:
        conversations = json.loads(path.read_text(encoding="utf-8"))
        turns = [
            (entry["conversations"][0]["value"], entry["conversations"][1]["value"])
            for entry in conversations
            if len(entry.get("conversations", ())) >= 2
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a ShareGPT-style JSON file: {error}") from None
    random.Random(seed).shuffle(turns)
    return turns


def _usable(prompt_len: int, output_len: int) -> bool:
    """Whether the lengths are within the limits of published ShareGPT results."""
    return 4 <= prompt_len <= 1024 and output_len >= 4 and prompt_len + output_len <= 2048


def _repeat_to(entries: list[T], count: int, path: Path) -> list[T]:
    """Return `count` entries; if there are fewer, they are repeated."""
    if not entries:
        raise ConfigError(f"{path} has no prompt of a usable length")
    return [entries[i % len(entries)] for i in range(count)]


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from (line for line in file if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _plain_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the tokens that stand for printable ASCII text."""
    texts = {i: tokenizer.decode([i]) for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids}
    return [i for i, text in texts.items() if text and text.isascii() and text.isprintable()]


def _text_of(token_ids: list[int], tokenizer: Tokenizer) -> str:
    """Return a text of `len(token_ids)` tokens. Encoding may merge decoded tokens, so the result is padded or
    cut a few times, which mostly reaches that length."""
    ids = token_ids
    for _ in range(10):
        text = tokenizer.decode(ids)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == len(token_ids):
            break
        ids = ids[: len(token_ids)] + token_ids[: max(0, len(token_ids) - len(ids))]
    return text
