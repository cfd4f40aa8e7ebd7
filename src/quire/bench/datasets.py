"""Prompts to measure with."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt as token ids, and how many tokens are to be generated for it."""

    prompt_ids: list[int]
    output_len: int


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
    """Random ids. Lengths vary by `range_ratio` around their mean; the first `prefix_len` ids are common
    to all."""
    draw = random.Random(seed)
    prefix = [draw.randrange(vocab) for _ in range(prefix_len)]

    def length(mean: int) -> int:
        return max(1, draw.randint(round(mean * (1 - range_ratio)), round(mean * (1 + range_ratio))))

    return [
        Sample(prefix + [draw.randrange(vocab) for _ in range(length(input_len))], length(output_len))
        for _ in range(count)
    ]


def sharegpt_samples(
    count: int, path: Path, tokenizer: Tokenizer, *, output_len: int | None = None, seed: int = 0
) -> list[Sample]:
    """First question and answer of ShareGPT-style conversations, too short and too long ones left out."""
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
    samples: list[Sample] = []
    for question, answer in turns:
        if len(samples) == count:
            break
        prompt, wanted = tokenizer.encode(question), output_len or len(tokenizer.encode(answer))
        if 4 <= len(prompt) <= 1024 and wanted >= 4 and len(prompt) + wanted <= 2048:
            samples.append(Sample(prompt, wanted))
    if not samples:
        raise ConfigError(f"{path} has no conversation of a usable length")
    return [samples[i % len(samples)] for i in range(count)]
