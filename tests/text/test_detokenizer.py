"""Tests of the detokenizer: streamed text must equal the decoded text, in whole characters, up to a stop
string."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from quire.text.detokenizer import Detokenizer, token_text
from quire.text.gguf_vocab import read_vocab
from quire.text.tokenizer import Tokenizer

relaxed = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
BROKEN = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def bytes_tokenizer(byte_level: Backend) -> Tokenizer:
    return Tokenizer(Backend.from_str(byte_level.to_str()))


@pytest.fixture(scope="module")
def spm_tokenizer(spm_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(read_vocab(spm_metadata).backend)


@pytest.fixture(scope="module")
def other_tokenizer(spm_metadata: dict[str, Any]) -> Tokenizer:
    """Return a tokenizer with a decoder that no byte table describes: the window algorithm must handle
    it."""
    backend = read_vocab(spm_metadata).backend
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_bytes is None
    return tokenizer


KINDS = ["bytes_tokenizer", "spm_tokenizer", "other_tokenizer"]


def stream(detokenizer: Detokenizer, steps: Sequence[Sequence[int]]) -> list[str]:
    deltas = []
    for step in steps:
        stopped = detokenizer.push(step)
        deltas.append(detokenizer.take_delta(final=stopped is not None))
    detokenizer.push([], final=True)
    return [*deltas, detokenizer.take_delta(final=True)]


def one_by_one(ids: Sequence[int]) -> list[list[int]]:
    return [[i] for i in ids]


@pytest.mark.parametrize("kind", KINDS)
def test_deltas_join_to_the_decoded_text(request: pytest.FixtureRequest, kind: str, sample: str) -> None:
    """Catches lost spaces, doubled text and broken characters in a stream."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(sample, add_special_tokens=False)
    deltas = stream(Detokenizer(tokenizer, []), one_by_one(ids))
    assert "".join(deltas) == tokenizer.decode(ids) == sample
    assert all(BROKEN not in delta for delta in deltas)


@pytest.mark.parametrize("kind", KINDS)
def test_output_after_a_prompt_keeps_its_space(request: pytest.FixtureRequest, kind: str) -> None:
    """Catches 'lazydog': the space of the first output token lost because decoding restarts."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    prompt = tokenizer.encode("the lazy", add_special_tokens=False)
    full = tokenizer.encode("the lazy dog jumps", add_special_tokens=False)
    assert full[: len(prompt)] == prompt
    assert "".join(stream(Detokenizer(tokenizer, prompt), one_by_one(full[len(prompt) :]))) == " dog jumps"


def test_output_after_bos_alone_has_no_space(spm_tokenizer: Tokenizer) -> None:
    """Catches a text that begins with the space of the first piece when nothing is before it."""
    ids = spm_tokenizer.encode("the dog", add_special_tokens=False)
    assert "".join(stream(Detokenizer(spm_tokenizer, [1]), one_by_one(ids))) == "the dog"
    shown = Detokenizer(spm_tokenizer, [1], skip_special_tokens=False)
    assert "".join(stream(shown, one_by_one(ids))) == " the dog"


@relaxed
@given(ids=st.lists(st.integers(0, 520), max_size=25), seed=st.integers(0, 99))
def test_any_tokens_stream_as_they_decode(bytes_tokenizer: Tokenizer, ids: list[int], seed: int) -> None:
    """Catches a difference from decode(): on invalid bytes, unknown ids, several tokens at once."""
    rng = random.Random(seed)
    steps: list[list[int]] = []
    for i in ids:
        if steps and rng.random() < 0.5:
            steps[-1].append(i)
        else:
            steps.append([i])
    for skip in (True, False):
        detokenizer = Detokenizer(bytes_tokenizer, [], skip_special_tokens=skip)
        text = "".join(stream(detokenizer, steps))
        assert text == detokenizer.text == bytes_tokenizer.decode(ids, skip_special_tokens=skip)
        assert detokenizer.num_tokens == len(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_bytes_do_not_stall_the_stream(request: pytest.FixtureRequest, kind: str) -> None:
    """Catches a stream that waits forever for the end of a character."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    lead = tokenizer.convert_tokens_to_ids("Ã" if kind == "bytes_tokenizer" else "<0xC3>")
    assert lead is not None
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("the"))
    deltas = stream(detokenizer, [[lead]] * 40)
    assert all("".join(deltas[i : i + 5]) for i in range(35))
    after = tokenizer.encode("the dog 🙂", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("the"))
    assert "".join(stream(detokenizer, one_by_one([lead] * 9 + after))).endswith("the dog 🙂")


def test_partial_character_is_held_until_the_end(bytes_tokenizer: Tokenizer) -> None:
    """Catches U+FFFD in the middle of a stream, and a lost tail at its end."""
    ids = bytes_tokenizer.encode("🙂")
    assert len(ids) > 1
    detokenizer = Detokenizer(bytes_tokenizer, [])
    detokenizer.push(ids[:-1])
    assert detokenizer.text == detokenizer.take_delta() == ""
    detokenizer.push([], final=True)
    assert detokenizer.take_delta(final=True) == bytes_tokenizer.decode(ids[:-1]) == BROKEN


def test_prompt_that_ends_inside_a_character(bytes_tokenizer: Tokenizer) -> None:
    """Catches a broken character where a prompt of token ids ends in the middle of one."""
    ids = bytes_tokenizer.encode("🙂 dog")
    assert "".join(stream(Detokenizer(bytes_tokenizer, ids[:1]), one_by_one(ids[1:]))) == "🙂 dog"


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return one id per byte, so that every boundary is between tokens."""
    alphabet = {tokenizer.token_bytes[i]: i for i in range(2, 258)}  # type: ignore[index]
    return [alphabet[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("stop", "include", "text", "met"),
    [
        (["END"], False, "hello ", "END"),
        (["END"], True, "hello END", "END"),
        (["nope"], False, "hello ENDless", None),
        (["ENDless", "END"], False, "hello ", "END"),
        (["lo EN", "END"], False, "hel", "lo EN"),
        (["o END", "END"], False, "hell", "o END"),
        (["h"], False, "", "h"),
    ],
)
def test_stop_strings(
    bytes_tokenizer: Tokenizer, stop: list[str], include: bool, text: str, met: str | None, whole: bool
) -> None:
    """Catches stop strings missed across tokens, cut at the wrong place, or dependent on how tokens
    arrive."""
    ids = ids_of(bytes_tokenizer, "hello ENDless")
    detokenizer = Detokenizer(bytes_tokenizer, [], stop=stop, include_stop_str_in_output=include)
    deltas = stream(detokenizer, [ids] if whole else one_by_one(ids))
    assert "".join(deltas) == detokenizer.text == text
    assert detokenizer.stopped_by == met
    assert detokenizer.num_tokens == ("hello ENDless".index(met) + len(met) if met else len(ids))


def test_stop_inside_a_token_drops_the_rest_of_it(bytes_tokenizer: Tokenizer) -> None:
    """Catches text after the stop string that came with the same token."""
    ids = bytes_tokenizer.encode("gathering")
    assert len(ids) < len("gathering")
    detokenizer = Detokenizer(bytes_tokenizer, [], stop=["ther"])
    assert detokenizer.push(ids) == "ther"
    assert detokenizer.text == "ga"


def test_partial_stop_string_is_not_streamed(bytes_tokenizer: Tokenizer) -> None:
    """Catches the beginning of a stop string sent to the client before its end is known."""
    detokenizer = Detokenizer(bytes_tokenizer, [], stop=["END"])
    sent = ""
    for i in ids_of(bytes_tokenizer, "abEN"):
        detokenizer.push([i])
        sent += detokenizer.take_delta()
    assert sent == "ab"
    detokenizer.push(ids_of(bytes_tokenizer, "x"), final=True)
    assert sent + detokenizer.take_delta(final=True) == "abENx"


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (2, "a"), (3, "a.b"), (4, "a.b"), (5, "a.b.c")])
def test_stop_strings_wait_for_min_tokens(bytes_tokenizer: Tokenizer, min_tokens: int, text: str) -> None:
    """Catches a stop before min_tokens, and an old match that applies once they are reached."""
    detokenizer = Detokenizer(bytes_tokenizer, [], stop=["."], min_tokens=min_tokens)
    detokenizer.push(ids_of(bytes_tokenizer, "a.b.c"))
    assert detokenizer.text == text


def test_tokens_after_a_stop_are_ignored(bytes_tokenizer: Tokenizer) -> None:
    """Catches text that grows after the request has ended: steps in flight still deliver tokens."""
    detokenizer = Detokenizer(bytes_tokenizer, [], stop=["."])
    assert detokenizer.push(ids_of(bytes_tokenizer, "a.")) == "."
    assert detokenizer.push(ids_of(bytes_tokenizer, "bc"), final=True) == "."
    assert (detokenizer.text, detokenizer.num_tokens) == ("a", 2)


def test_special_tokens_skipped_or_shown(bytes_tokenizer: Tokenizer) -> None:
    """Catches chat markers in the output, or their loss when the caller requested them."""
    ids = bytes_tokenizer.encode("the<|im_end|>")
    assert "".join(stream(Detokenizer(bytes_tokenizer, []), [ids])) == "the"
    shown = Detokenizer(bytes_tokenizer, [], skip_special_tokens=False)
    assert "".join(stream(shown, [ids])) == "the<|im_end|>"


def test_spaces_between_special_tokens(byte_level: Backend) -> None:
    """Catches `spaces_between_special_tokens` being ignored where a decoder joins tokens with spaces."""
    backend = Backend.from_str(byte_level.to_str())
    backend.decoder = None  # type: ignore[assignment]
    tokenizer = Tokenizer(backend)
    for spaces, text in ((True, "<|im_end|> <|endoftext|>"), (False, "<|im_end|><|endoftext|>")):
        detokenizer = Detokenizer(
            tokenizer, [], skip_special_tokens=False, spaces_between_special_tokens=spaces
        )
        assert "".join(stream(detokenizer, [[1], [0]])) == text


@pytest.mark.parametrize("kind", KINDS)
def test_ids_outside_the_vocabulary_are_ignored(request: pytest.FixtureRequest, kind: str) -> None:
    """Catches a crash on the padding rows of an embedding."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("the dog", add_special_tokens=False)
    assert "".join(stream(Detokenizer(tokenizer, []), one_by_one([9999, *ids, 9999]))) == "the dog"
    assert token_text(tokenizer, 9999) == ""


def test_token_text(bytes_tokenizer: Tokenizer, spm_tokenizer: Tokenizer) -> None:
    """Catches logprobs with a token without its space, or an empty special token."""
    space = spm_tokenizer.convert_tokens_to_ids("▁the")
    assert space is not None and token_text(spm_tokenizer, space) == " the"
    assert token_text(bytes_tokenizer, 1) == "<|im_end|>"
    assert token_text(bytes_tokenizer, bytes_tokenizer.encode("🙂")[0]) == BROKEN
