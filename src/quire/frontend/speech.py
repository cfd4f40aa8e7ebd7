"""Prompts for transcription models, and the segments and words of their answers."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.data.timestamps import AlignmentHeads, TimestampTokens
from quire.errors import RequestError
from quire.frontend.word_timestamps import UNSPACED, words_of
from quire.logs import get_logger
from quire.text.tokenizer import Tokenizer

log = get_logger(__name__)

RATE = 16000
"""Samples per second of the audio input."""
MAX_SECONDS = 4 * 3600
_SEARCHED = RATE
"""Samples at the end of a piece that are searched for the quietest place."""
_WINDOW = 1600
_TIMESTAMP_S = 0.02
"""Seconds between two timestamp tokens, and between two encoder states."""
_STATES_S = 50
TASKS = ("transcribe", "translate")
_MARKS = ("<|startoftranscript|>", "<|startofprev|>", "<|notimestamps|>")
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
_DICTATION_BEGIN = ("<s>", "[INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[/INST]")
_DICTATION_TASK = "[TRANSCRIBE]"
_DICTATION_LANGUAGES = ("ar", "de", "en", "es", "fr", "hi", "it", "nl", "pt")
"""Languages that Voxtral's model card lists."""

Samples = NDArray[np.float32]


def split_audio(samples: Samples, max_samples: int) -> list[tuple[int, Samples]]:
    """Split audio into pieces of at most `max_samples`, each cut where its last second is quietest. Return
    the pieces, each with the index of its first sample."""
    pieces, start = [], 0
    while len(samples) - start > max_samples:
        end = _quietest(samples, start + max_samples - _SEARCHED)
        pieces.append((start, samples[start:end]))
        start = end
    return [*pieces, (start, samples[start:])]


def _quietest(samples: Samples, start: int) -> int:
    """Return the index of the first sample of the window with the least power, in the second after
    `start`."""
    windows = samples[start : start + _SEARCHED // _WINDOW * _WINDOW].reshape(-1, _WINDOW)
    return start + _WINDOW * int(np.square(windows, dtype=np.float64).mean(axis=1).argmin())


@dataclass(frozen=True, slots=True)
class Segment:
    """Transcribed text between two times, in seconds."""

    start: float
    end: float
    text: str
    token_ids: list[int]
    places: list[int]
    """Index of each of `token_ids` in the model's answer."""
    place: slice
    """Slice of the model's answer that the segment covers, including its special tokens."""

    @property
    def compression_ratio(self) -> float:
        """Return the compression ratio of the text, which is high for repetitive text."""
        raw = self.text.encode()
        return len(raw) / len(zlib.compress(raw))


@dataclass(frozen=True, slots=True)
class TimedWord:
    """A word with its start and end in seconds."""

    text: str
    start: float
    end: float


class Transcriber:
    """Builds the prompts of a transcription model and interprets its answers. There are no timestamps unless
    `timestamp_tokens` is set."""

    max_samples: int
    """Samples of one input; longer audio is split."""
    languages: Mapping[str, int]
    """Token id by language code, such as `en`; 0 if the language has no token."""
    tasks: tuple[str, ...]
    """Tasks (of TASKS) that the model supports."""
    detects_language_first: bool
    """Whether the prompt must contain the language: if a request does not name one, it is detected first."""
    separator: str
    """Separator between the transcripts of consecutive pieces of a long audio input."""
    timestamp_tokens: TimestampTokens | None = None
    """Timestamp tokens; None if the model has none."""
    no_speech: int | None = None
    """Token that replaces the language if there is no speech."""

    def check_language(self, language: str) -> str:
        """Return the language code; raise a RequestError if it is not supported."""
        code = language.strip().lower()
        if code not in self.languages:
            raise RequestError(
                f"Unsupported language: {language!r:.40}. Must be one of: {', '.join(self.languages)}",
                "language",
            )
        return code

    def prompt(self, task: str, language: str | None, *, timed: bool = False, before: str = "") -> list[int]:
        """Return the prompt tokens for a task. `timed` requests timestamps, and `before` is the transcript of
        the preceding audio. Without a language, the next token that the model generates may be the detected
        language."""
        raise NotImplementedError

    def segments(self, token_ids: Sequence[int], seconds: float) -> Iterator[Segment]:
        """Yield the segments of an answer with timestamps; the audio is `seconds` long."""
        raise NotImplementedError

    def aligning(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], num_samples: int
    ) -> tuple[list[int], AlignmentHeads]:
        """Return the tokens of a request and its answer (`token_ids`) as one prompt, and the parameters that
        make the engine align the answer with its `num_samples` audio samples."""
        raise NotImplementedError

    def words(self, segment: Segment, begins: Sequence[int], language: str | None) -> Iterator[TimedWord]:
        """Yield the words of a segment with their times. `begins` has the index of the encoder state at the
        end of each token of the answer."""
        raise NotImplementedError


def _lacks_tokens(tokenizer: Tokenizer, names: Sequence[str]) -> bool:
    vocab = tokenizer.get_vocab()
    missing = [name for name in names if name not in vocab]
    if missing:
        log.warning("The tokenizer has no %s: transcription is disabled", ", ".join(missing))
    return bool(missing)


class WhisperTranscriber(Transcriber):
    """Transcriber for Whisper models, which have control tokens for languages, tasks and timestamps."""

    tasks = TASKS
    detects_language_first = True
    separator = ""
    timestamp_tokens: TimestampTokens

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_len: int,
        max_samples: int,
        is_english: bool = False,
        end: int | None = None,
        max_first: int | None = None,
    ) -> None:
        """Build the prompts of a Whisper model. A prompt and its answer have at most `max_len` tokens, and a
        piece of audio at most `max_samples` samples. Prompts of an English model (`is_english`) have no
        tokens for language and task. `end` is the eos token; `max_first` is the index of the latest timestamp
        that an answer may begin with."""
        self._tokenizer, self._max_len, self.max_samples = tokenizer, max_len, max_samples
        self._is_english = is_english
        vocab = tokenizer.get_vocab()
        self._start, self._before, self._untimed = (vocab[name] for name in _MARKS)
        self.no_speech = next((vocab[name] for name in _NO_SPEECH if name in vocab), None)
        end = self._start - 1 if end is None else end
        self.timestamp_tokens = TimestampTokens(self._untimed + 1, end, max_first)
        self._tasks = {task: vocab[f"<|{task}|>"] for task in TASKS}
        between = range(self._start + 1, min(self._tasks.values()))
        names = tokenizer.convert_ids_to_tokens(between)
        self.languages = {
            name.strip("<|>"): id
            for name, id in zip(names, between, strict=True)
            if name is not None and (name == "<|en|>" or not is_english)
        }
        """Language tokens by code, such as `en`."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, **facts: Any) -> "WhisperTranscriber | None":
        """Build the transcriber with the constructor's arguments `facts`; return None if the tokenizer lacks
        Whisper's tokens."""
        if _lacks_tokens(tokenizer, (*_MARKS, *(f"<|{task}|>" for task in TASKS))):
            return None
        return cls(tokenizer, **facts)

    def prompt(self, task: str, language: str | None, *, timed: bool = False, before: str = "") -> list[int]:
        prompt = [*self._previous_text(before), self._start]
        if language is None:
            return prompt
        prompt += [] if self._is_english else [self.languages[language], self._tasks[task]]
        return prompt if timed else [*prompt, self._untimed]

    def _previous_text(self, text: str) -> list[int]:
        """Return the tokens of the end of the previous text that fit half of the context."""
        if not text.strip():
            return []
        token_ids = self._tokenizer.encode(" " + text.strip(), add_special_tokens=False)
        if any(id >= self._start or self._tokenizer.is_special(id) for id in token_ids):
            raise RequestError("`prompt` may not contain special tokens", param="prompt")
        return [self._before, *token_ids[-(self._max_len // 2 - 1) :]]

    def segments(self, token_ids: Sequence[int], seconds: float) -> Iterator[Segment]:
        zero = self.timestamp_tokens.zero
        times = [(place, (id - zero) * _TIMESTAMP_S) for place, id in enumerate(token_ids) if id >= zero]
        start, first = 0.0, 0
        for place, time in [*times, (len(token_ids), seconds)]:
            end = max(start, min(time, seconds))
            places = [at for at in range(first, place) if not self._tokenizer.is_special(token_ids[at])]
            text_ids = [token_ids[at] for at in places]
            text = self._tokenizer.decode(text_ids)
            if text:
                yield Segment(start, end, text, text_ids, places, slice(first, place))
            start, first = end, place + 1

    def aligning(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], num_samples: int
    ) -> tuple[list[int], AlignmentHeads]:
        sequence = [*prompt_ids, *token_ids][: self._max_len - 1]
        num_states = max(min(num_samples, self.max_samples) * _STATES_S // RATE, 1)
        return sequence, AlignmentHeads(len(prompt_ids), num_states)

    def words(self, segment: Segment, begins: Sequence[int], language: str | None) -> Iterator[TimedWord]:
        times = [max(begin * _TIMESTAMP_S, segment.start) for begin in begins]
        for word in words_of(self._tokenizer, segment.token_ids, spaced=language not in UNSPACED):
            start, end = (
                times[at] if 0 <= at < len(times) else (segment.start if at < 0 else segment.end)
                for at in (segment.places[word.place.start] - 1, segment.places[word.place.stop - 1])
            )
            yield TimedWord(word.text, start, max(start, end))


class VoxtralTranscriber(Transcriber):
    """Transcriber for Voxtral models: the audio is a user's message, followed by an optional language and a
    token for the task. The model detects the language itself, and takes no previous text."""

    tasks = ("transcribe",)
    detects_language_first = False
    separator = " "

    def __init__(self, tokenizer: Tokenizer, *, max_samples: int) -> None:
        self._tokenizer, self.max_samples = tokenizer, max_samples
        vocab = tokenizer.get_vocab()
        self._begin, self._write = [vocab[name] for name in _DICTATION_BEGIN], vocab[_DICTATION_TASK]
        self.languages = dict.fromkeys(_DICTATION_LANGUAGES, 0)

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, *, max_len: int, max_samples: int, num_vectors: int
    ) -> "VoxtralTranscriber | None":
        """Build the transcriber; return None if the tokenizer lacks Voxtral's control tokens. The encoder
        makes `num_vectors` of `max_samples` samples; pieces are shortened so that they take at most half of
        `max_len`."""
        if _lacks_tokens(tokenizer, (*_DICTATION_BEGIN, _DICTATION_TASK)):
            return None
        fitting = max_samples * (max_len // 2) // num_vectors
        return cls(tokenizer, max_samples=max(min(max_samples, fitting), 2 * _SEARCHED))

    def prompt(self, task: str, language: str | None, *, timed: bool = False, before: str = "") -> list[int]:
        named = f"lang:{language}" if language else ""
        return [*self._begin, *self._tokenizer.encode(named, add_special_tokens=False), self._write]
