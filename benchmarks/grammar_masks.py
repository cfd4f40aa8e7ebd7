"""Time the computation of grammar masks, without a model.

    python benchmarks/grammar_masks.py FOLDER [--slices general] [--rows 64 [--forget]]

FOLDER has a tokenizer.json. The figures are microseconds of one thread, for texts as a model would write
them, and for tokens drawn from all allowed ones, as a model with random weights would. Each mask is
computed a few times and the quickest counts, because other processes may use the same cores.

With --rows, the figures are the microseconds of all threads to fill the masks and to advance the grammars
in a step of so many rows, of a first batch and of a second one of the same grammar, and the share of masks
that were remembered. With --forget, no mask is remembered.
"""

import argparse
import json
import random
import time
from functools import partial
from pathlib import Path

import numpy as np
from structured_outputs import ASKED

from quire.configure import vocabulary_of
from quire.data.params import StructuredOutputsParams
from quire.text import grammar
from quire.text.grammar import Grammars
from quire.text.grammar_lexers import Matcher
from quire.text.tokenizer import Tokenizer, load_tokenizer

NUM_TEXTS = 8
NUM_TOKENS = 200
NUM_STEPS = 100
REPEATS = 3
PEOPLE = ["Alice", "Bob", "Carla", "Dmitri", "Eleanor", "Farid", "Hiroshi", "Ines", "Katarina", "Liam", "Mei"]
PLACES = ["Berlin", "Paris", "London", "Springfield", "Kyoto", "Oslo", "Madrid", "Zürich", "Boston", "Lagos"]
STREETS = ["Main", "Oak", "Elm", "High", "Park", "Lake", "Hill"]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "while", "nobody", "is", "watching"]


def record(draw: random.Random) -> dict[str, object]:
    return {
        "name": f"{draw.choice(PEOPLE)} {draw.choice(STREETS)}",
        "age": draw.randrange(100),
        "kind": draw.choice(["customer", "supplier", "employee"]),
        "tags": [draw.choice(["vip", "new", "late", "gold member"]) for _ in range(draw.randrange(4))],
        "address": {
            "street": f"{draw.randint(1, 99)} {draw.choice(STREETS)} Street",
            "city": draw.choice(PLACES),
            "zip": f"{draw.randrange(100000):05d}",
        },
    }


def text(kind: str, draw: random.Random) -> str:
    if kind in ("usual", "records"):
        separators = (",", ":") if kind == "records" else None
        return json.dumps([record(draw) for _ in range(20)], separators=separators, ensure_ascii=False)
    if kind == "text":
        return json.dumps([" ".join(draw.choices(WORDS, k=draw.randint(3, 12))) for _ in range(40)])
    if kind == "names":
        return json.dumps([" ".join(draw.choices(PEOPLE, k=draw.randint(1, 3))) for _ in range(60)])
    if kind == "times":
        return json.dumps([f"2026-0{draw.randint(1, 9)}-1{draw.randrange(10)}T09:30:00Z" for _ in range(40)])
    return " ".join(draw.choices(WORDS, k=399)) + " "


def draw_tokens(grammars: Grammars, matcher: Matcher, draw: random.Random) -> list[int]:
    """Return up to NUM_TOKENS random tokens that the grammar allows."""
    bits, token_ids = np.zeros((1, grammars.num_words), np.uint32), []
    for _ in range(NUM_TOKENS):
        grammars.fill([(matcher, 0)], bits)
        token_ids.append(draw_token(bits[0], draw))
        if matcher.advance(token_ids[-1]):
            break
    return token_ids


def follow(grammars: Grammars, matcher: Matcher, token_ids: list[int]) -> list[float]:
    """Feed the tokens to the grammar, and return the microseconds to compute the mask before each."""
    bits, spent = np.zeros((1, grammars.num_words), np.uint32), []
    for token_id in token_ids:
        started = time.thread_time()
        grammars.fill([(matcher, 0)], bits)
        spent.append((time.thread_time() - started) * 1e6)
        assert bits[0, token_id // 32] >> token_id % 32 & 1, "the text does not fit"
        matcher.advance(token_id)
    return spent


def rows_of(grammars: Grammars, tokenizer: Tokenizer, kind: str, is_random: bool, num_rows: int) -> str:
    """Return the figures of two batches of `num_rows` rows."""
    asked = StructuredOutputsParams(**(ASKED[kind] or {}))
    parts = []
    for batch in range(2):
        matchers = [grammars.compile(asked) for _ in range(num_rows)]
        draws = [random.Random(batch * num_rows + row) for row in range(num_rows)]
        texts = [
            tokenizer.encode(text(kind, draw), add_special_tokens=False)[:NUM_TOKENS]
            if not is_random
            else None
            for draw in draws
        ]
        num_steps = min(NUM_STEPS, *(len(token_ids or range(NUM_STEPS)) for token_ids in texts))
        bits, spent, num_computed = np.zeros((num_rows, grammars.num_words), np.uint32), 0.0, 0
        for step in range(num_steps):
            started = time.process_time()
            rest = grammars.fill_remembered([(matcher, row) for row, matcher in enumerate(matchers)], bits)
            if rest:
                grammars.fill(rest, bits)
            spent += time.process_time() - started
            num_computed += len(rest)
            moves = [
                (matcher, token_ids[step] if token_ids is not None else draw_token(bits[row], draw))
                for row, (matcher, token_ids, draw) in enumerate(zip(matchers, texts, draws, strict=True))
            ]
            started = time.process_time()
            grammars.advance(moves)
            spent += time.process_time() - started
        remembered = 1 - num_computed / (num_steps * num_rows)
        parts.append(f"{spent / num_steps * 1e6:.0f} ({100 * remembered:.0f} %)")
    return ", ".join(parts)


def draw_token(mask: np.ndarray, draw: random.Random) -> int:
    return int(draw.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))


def measure(grammars: Grammars, tokenizer: Tokenizer, kind: str, is_random: bool) -> str:
    draw, spent = random.Random(1), []
    asked = StructuredOutputsParams(**(ASKED[kind] or {}))
    for _ in range(NUM_TEXTS):
        if is_random:
            token_ids = draw_tokens(grammars, grammars.compile(asked), draw)
        else:
            token_ids = tokenizer.encode(text(kind, draw), add_special_tokens=False)[:NUM_TOKENS]
        runs = [follow(grammars, grammars.compile(asked), token_ids) for _ in range(REPEATS)]
        spent += np.min(runs, axis=0).tolist()
    return f"{np.mean(spent):.0f}, {np.median(spent):.0f}, {np.percentile(spent, 99):.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slices", choices=["ours", "general"], default="ours")
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--forget", action="store_true")
    args = parser.parse_args()
    if args.forget:
        grammar._states_of = lambda params, tokens: None
    if args.slices == "general":
        from llguidance import LLTokenizer

        grammar.SLICES[:] = LLTokenizer.general_slices()
    tokenizer = load_tokenizer(args.folder, "hf")
    end = tokenizer.eos_token_id
    vocabulary = vocabulary_of(tokenizer, 0, (tokenizer.max_token_id if end is None else end,))
    grammars = Grammars(lambda: vocabulary)
    started = time.thread_time()
    grammars.open()
    print(f"{len(vocabulary.tokens)} tokens, opened in {time.thread_time() - started:.2f} s")
    if args.rows:
        print(
            f"us of processors a step of {args.rows} rows: first batch, second batch | of texts | at random"
        )
    else:
        print("us a mask: mean, median, 99th percentile | of texts | at random")
    for kind, asked in ASKED.items():
        if asked is not None:
            figures = partial(rows_of, num_rows=args.rows) if args.rows else measure
            row = [figures(grammars, tokenizer, kind, is_random) for is_random in (False, True)]
            print(" | ".join([kind, *row]), flush=True)


if __name__ == "__main__":
    main()
