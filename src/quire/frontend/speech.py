"""Speech: how models are asked to write down what they hear, and what their answers say of time."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.data.timestamps import AlignmentHeads, TimestampTokens
from quire.errors import RequestError
from quire.frontend.word_timestamps import UNSPACED, words_of
from quire.logs import get_logger
from quire.text.tokenizer import Tokenizer

log = get_logger(__name__)

RATE = 16000
"""Samples a second, as such models hear."""
MAX_SECONDS = 4 * 3600
_SEARCHED = RATE
"""At the end of a piece, for the quietest place."""
_WINDOW = 1600
_MOMENT_S = 0.02
"""From one token of time to the next, and from one state of a sound."""
_STATES_S = 50
TASKS = ("transcribe", "translate")
_MARKS = ("<|startoftranscript|>", "<|startofprev|>", "<|notimestamps|>")
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
_ASKED = ("<s>", "[INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[/INST]")
_WRITE = "[TRANSCRIBE]"
_SPOKEN = ("ar", "de", "en", "es", "fr", "hi", "it", "nl", "pt")
"""That Voxtral's makers name."""

Samples = NDArray[np.float32]


def pieces_of(samples: Samples, at_once: int) -> list[tuple[int, Samples]]:
    """A sound in pieces as long as what is heard at once, each with where it begins: cut where it is quietest
    in the last second."""
    found, start = [], 0
    while len(samples) - start > at_once:
        end = _quietest(samples, start + at_once - _SEARCHED)
        found.append((start, samples[start:end]))
        start = end
    return [*found, (start, samples[start:])]


def _quietest(samples: Samples, start: int) -> int:
    """Where the window begins that has the least power."""
    windows = samples[start : start + _SEARCHED // _WINDOW * _WINDOW].reshape(-1, _WINDOW)
    return start + _WINDOW * int(np.square(windows, dtype=np.float64).mean(axis=1).argmin())


@dataclass(frozen=True, slots=True)
class Segment:
    """What is said between two moments, in seconds."""

    start: float
    end: float
    text: str
    token_ids: list[int]
    places: list[int]
    """Where each of them stands in the answer."""
    place: slice
    """Where they do, and what is no text between them."""

    @property
    def compression_ratio(self) -> float:
        """Of texts that repeat themselves it is high."""
        raw = self.text.encode()
        return len(raw) / len(zlib.compress(raw))


@dataclass(frozen=True, slots=True)
class TimedWord:
    """A word, and when it was said, in seconds."""

    text: str
    start: float
    end: float


class Transcriber(Protocol):
    """How one model is asked."""

    @property
    def at_once(self) -> int:
        """Samples that are heard; more are pieces."""

    @property
    def languages(self) -> Mapping[str, int]:
        """By their codes, such as `en`: the tokens, if they have any."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Those of TASKS that it knows."""

    @property
    def asks_first(self) -> bool:
        """Whether it must be told the language, so that it is asked for that first."""

    @property
    def moments(self) -> TimestampTokens | None:
        """The tokens by which it tells the time; None: it does not."""

    @property
    def between(self) -> str:
        """What stands between the texts of two pieces."""

    def check_language(self, language: str) -> str:
        """Its code."""

    def prompt(self, task: str, language: str | None, *, timed: bool = False, before: str = "") -> list[int]:
        """The tokens that an answer begins with. `before`: a text that it might be the continuation of. No
        language: what follows tells which it is."""

    def segments(self, token_ids: Sequence[int], seconds: float) -> Iterator[Segment]:
        """What an answer with moments in it says, of a sound of so many seconds."""

    @property
    def no_speech(self) -> int | None:
        """The token that says, in place of a language, that nobody speaks."""

    def aligning(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], num_samples: int
    ) -> tuple[list[int], AlignmentHeads]:
        """The prompt that tells when the tokens of an answer were said."""

    def words(self, segment: Segment, begins: Sequence[int], language: str | None) -> Iterator[TimedWord]:
        """Of a segment, by the states at which what follows each token of the answer begins."""


def _checked(language: str, known: Mapping[str, int]) -> str:
    code = language.strip().lower()
    if code not in known:
        raise RequestError(
            f"Unsupported language: {language!r:.40}. Must be one of: {', '.join(known)}", "language"
        )
    return code


def _lacks(tokenizer: Tokenizer, names: Sequence[str]) -> bool:
    vocab = tokenizer.get_vocab()
    missing = [name for name in names if name not in vocab]
    if missing:
        log.warning("the tokenizer has no %s: there are no transcriptions", ", ".join(missing))
    return bool(missing)


class Speech:
    """The tokens by which Whisper is told what to do: languages, tasks, and whether to tell the time."""

    tasks = TASKS
    asks_first = True
    between = ""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_len: int,
        at_once: int,
        is_english: bool = False,
        end: int | None = None,
        max_first: int | None = None,
    ) -> None:
        """`max_len`: of a prompt and its answer; `at_once`: samples that are heard. `is_english`: models that
        know no other language are not told of it, nor of tasks. `end` ends an answer, and `max_first` is how
        late one begins, in moments."""
        self._tokenizer, self._max_len, self.at_once = tokenizer, max_len, at_once
        self._is_english = is_english
        vocab = tokenizer.get_vocab()
        self._start, self._before, self._untimed = (vocab[name] for name in _MARKS)
        self.no_speech = next((vocab[name] for name in _NO_SPEECH if name in vocab), None)
        end = self._start - 1 if end is None else end
        self.moments = TimestampTokens(self._untimed + 1, end, max_first)
        self._tasks = {task: vocab[f"<|{task}|>"] for task in TASKS}
        between = range(self._start + 1, min(self._tasks.values()))
        names = tokenizer.convert_ids_to_tokens(between)
        self.languages = {
            name.strip("<|>"): id
            for name, id in zip(names, between, strict=True)
            if name is not None and (name == "<|en|>" or not is_english)
        }
        """By their codes, such as `en`: the tokens."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, **facts: Any) -> "Speech | None":
        """None where there are no such tokens."""
        if _lacks(tokenizer, (*_MARKS, *(f"<|{task}|>" for task in TASKS))):
            return None
        return cls(tokenizer, **facts)

    def check_language(self, language: str) -> str:
        return _checked(language, self.languages)

    def prompt(self, task: str, language: str | None, *, timed: bool = False, before: str = "") -> list[int]:
        told = [*self._said_before(before), self._start]
        if language is None:
            return told
        told += [] if self._is_english else [self.languages[language], self._tasks[task]]
        return told if timed else [*told, self._untimed]

    def _said_before(self, text: str) -> list[int]:
        """As much of its end as is heard."""
        if not text.strip():
            return []
        found = self._tokenizer.encode(" " + text.strip(), add_special_tokens=False)
        if any(id >= self._start or self._tokenizer.is_special(id) for id in found):
            raise RequestError("`prompt` may not have special tokens in it", param="prompt")
        return [self._before, *found[-(self._max_len // 2 - 1) :]]

    def segments(self, token_ids: Sequence[int], seconds: float) -> Iterator[Segment]:
        zero = self.moments.zero
        moments = [(place, (id - zero) * _MOMENT_S) for place, id in enumerate(token_ids) if id >= zero]
        start, first = 0.0, 0
        for place, moment in [*moments, (len(token_ids), seconds)]:
            end = max(start, min(moment, seconds))
            places = [at for at in range(first, place) if not self._tokenizer.is_special(token_ids[at])]
            said = [token_ids[at] for at in places]
            text = self._tokenizer.decode(said)
            if text:
                yield Segment(start, end, text, said, places, slice(first, place))
            start, first = end, place + 1

    def aligning(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], num_samples: int
    ) -> tuple[list[int], AlignmentHeads]:
        told = [*prompt_ids, *token_ids][: self._max_len - 1]
        num_states = max(min(num_samples, self.at_once) * _STATES_S // RATE, 1)
        return told, AlignmentHeads(len(prompt_ids), num_states)

    def words(self, segment: Segment, begins: Sequence[int], language: str | None) -> Iterator[TimedWord]:
        moments = [max(begin * _MOMENT_S, segment.start) for begin in begins]
        for word in words_of(self._tokenizer, segment.token_ids, spaced=language not in UNSPACED):
            start, end = (
                moments[at] if 0 <= at < len(moments) else (segment.start if at < 0 else segment.end)
                for at in (segment.places[word.place.start] - 1, segment.places[word.place.stop - 1])
            )
            yield TimedWord(word.text, start, max(start, end))


class Dictation:
    """The form by which Voxtral is asked: the sound is a user's message, and a token asks for its words, in a
    language that may be named. It finds that by itself, and knows nothing of what was said before."""

    tasks = ("transcribe",)
    asks_first = False
    moments = no_speech = None
    between = " "

    def __init__(self, tokenizer: Tokenizer, *, at_once: int) -> None:
        self._tokenizer, self.at_once = tokenizer, at_once
        vocab = tokenizer.get_vocab()
        self._asked, self._write = [vocab[name] for name in _ASKED], vocab[_WRITE]
        self.languages = dict.fromkeys(_SPOKEN, 0)

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, max_len: int, at_once: int, num_vectors: int) -> "Dictation | None":
        """None where there are no such tokens. Of `at_once` samples, which stand for so many vectors, as many
        as leave half of the length to the answer."""
        if _lacks(tokenizer, (*_ASKED, _WRITE)):
            return None
        fitting = at_once * (max_len // 2) // num_vectors
        return cls(tokenizer, at_once=max(min(at_once, fitting), 2 * _SEARCHED))

    def check_language(self, language: str) -> str:
        return _checked(language, self.languages)

    def prompt(self, task: str, language: str | None, *, timed: bool = False, before: str = "") -> list[int]:
        named = f"lang:{language}" if language else ""
        return [*self._asked, *self._tokenizer.encode(named, add_special_tokens=False), self._write]

    def segments(self, token_ids: Sequence[int], seconds: float) -> Iterator[Segment]:
        raise AssertionError("it tells no time")

    def aligning(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], num_samples: int
    ) -> tuple[list[int], AlignmentHeads]:
        raise AssertionError("it tells no time")

    def words(self, segment: Segment, begins: Sequence[int], language: str | None) -> Iterator[TimedWord]:
        raise AssertionError("it tells no time")
