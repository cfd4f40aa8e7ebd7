"""SamplingParams and related parameters of a request, which are validated on construction."""

import copy
import math
import operator
import reprlib
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, NoReturn, Self, TypeVar

import msgspec

from quire.config.unsupported import UNSUPPORTED, check_supported
from quire.data.timestamps import AlignmentHeads, TimestampTokens
from quire.errors import RequestError
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

MAX_SEQUENCES = 16384
MAX_LOGPROB_TOKEN_IDS, MAX_BAD_WORDS = 128, 128
MAX_STOP_TOKEN_IDS = 4096
MAX_PATTERN_SIZE = 256
"""Largest `max_pattern_size`: each new token is compared with up to this number of earlier tokens."""
MAX_SALT_CHARS = 256
"""Maximum characters of a `cache_salt`, which every sequence of a call copies."""
REPORT_MODE = "kv_cache_report_mode"
"""Key of `extra_args`. With `full`, KV events also report the cached blocks that a request reuses."""
MIN_TEMPERATURE, MIN_BIAS, MAX_BIAS = 0.01, -100.0, 100.0
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

S = TypeVar("S", bound=msgspec.Struct)


class RequestOutputKind(Enum):
    """Content of each output of a running request."""

    CUMULATIVE = 0
    """The whole text and all tokens so far."""
    DELTA = 1
    """Only text and tokens that are new since the last output."""
    FINAL_ONLY = 2
    """The whole text and all tokens, once, at the end."""


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True):
    """Constraint of the generated text: exactly one of `json`, `regex`, `choice`, `grammar`, `json_object`
    and `structural_tag` is set. The other fields are options of the constraint."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        where = "structured_outputs"
        constraints = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        present = [name for name in constraints if getattr(self, name) is not None]
        if len(present) != 1:
            listed = " and ".join(present) or "none"
            _fail(where, f"must have exactly one of {', '.join(constraints)}, but has {listed}")
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                _fail(where, f".{name} must be a string", value)
        if not isinstance(self.json, str | dict | None) or self.json == "":
            _fail(where, ".json must be a JSON schema, as an object or a non-empty string", self.json)
        if self.regex is not None and "\0" in self.regex:
            _fail(where, ".regex must not contain a NUL character")
        if self.choice is not None:
            if isinstance(self.choice, str):
                _fail(where, ".choice must be a list of strings; put a single choice in a list", self.choice)
            self.choice = _strings("structured_outputs.choice", self.choice)
            if not self.choice:
                _fail(where, ".choice must not be empty")
        if self.grammar is not None and not self.grammar.strip():
            _fail(where, ".grammar must not be empty")
        if self.json_object not in (None, True):
            _fail(where, ".json_object must be true when given", self.json_object)
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            _check_bool(f"{where}.{name}", getattr(self, name))


class RepetitionDetectionParams(msgspec.Struct, omit_defaults=True):
    """Stop a generation that ends in `min_count` copies of one token pattern; `max_pattern_size` 0: off."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        where = "repetition_detection"
        self.max_pattern_size = _integer(f"{where}.max_pattern_size", self.max_pattern_size, low=0)
        if self.max_pattern_size > MAX_PATTERN_SIZE:
            rule = f".max_pattern_size must be at most {MAX_PATTERN_SIZE} tokens; lower it"
            _fail(where, rule, self.max_pattern_size)
        self.min_pattern_size = _integer(f"{where}.min_pattern_size", self.min_pattern_size, low=0)
        self.min_count = _integer(f"{where}.min_count", self.min_count, low=0)
        if self.min_pattern_size > self.max_pattern_size:
            rule = f".min_pattern_size must be at most max_pattern_size={self.max_pattern_size}"
            _fail(where, rule, self.min_pattern_size)
        if self.max_pattern_size and self.min_count < 2:
            _fail(where, ".min_count must be at least 2", self.min_count)


class ReasoningIds(msgspec.Struct, frozen=True):
    """Tokens that begin and end the reasoning of an answer."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    open: bool
    """Whether the prompt ends inside the reasoning."""
    last_words: tuple[int, ...] = ()
    """Tokens before `end` when it is forced because the budget of the reasoning is spent."""
    breaks: tuple[tuple[int, ...], ...] = ()
    """Other token sequences that end the reasoning if a grammar of the output may begin with them."""


class BeamSearchParams(msgspec.Struct, omit_defaults=True):
    """Parameters of beam search: width, length and scoring."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self.beam_width = _integer("beam_width", self.beam_width, low=1)
        self.max_tokens = _integer("max_tokens", self.max_tokens, low=1)
        self.temperature = _real("temperature", self.temperature, low=0.0, high=2.0)
        self.length_penalty = _real("length_penalty", self.length_penalty, low=-16.0, high=16.0)
        _check_bool("ignore_eos", self.ignore_eos)
        _check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        self.structured_outputs = _struct(
            "structured_outputs", self.structured_outputs, StructuredOutputsParams
        )


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """Sampling parameters of a request, validated on construction; `verify` checks against a model."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    """0 selects greedy sampling."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 and -1 turn it off."""
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    """Stop strings; a list after construction."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the output; a list without duplicates after construction."""
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """Maximum number of new tokens; None: as many as the model's context has room for."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of highest logprobs for each new token; -1: the whole vocabulary."""
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    """Token ids to report logprobs of, instead of the most likely tokens."""
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    """Whether `clone` may return this object, because the caller does not modify it."""
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    """Texts that must not be generated; a list after construction."""
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    """Whether to skip the prefix cache. None: with prompt_logprobs, which need all positions computed."""
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    """Internal: `bad_words` as token ids, with and without a leading space."""
    reasoning: ReasoningIds | None = None
    """Internal: tokens of the reasoning, which `structured_outputs` does not constrain and
    `thinking_token_budget` limits."""
    timestamps: bool = False
    """Whether to sample timestamps by Whisper's rules; the prompt then has no `<|notimestamps|>`."""
    timestamp_tokens: TimestampTokens | None = None
    """Internal: timestamp tokens of the model."""
    aligning: AlignmentHeads | None = None
    """Internal: request to align the tokens of the prompt with the audio."""

    @classmethod
    def from_optional(cls, **fields: Any) -> Self:
        """Build params from the fields of an HTTP body. A field that is None gets its default, except
        `max_tokens`, where None means no limit. logit_bias may have string keys, and its values are clamped
        to [-100, 100]."""
        values = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        if "logit_bias" in values:
            values["logit_bias"] = _with_token_ids(values["logit_bias"])
        params = cls(**values)
        if bias := params.logit_bias:
            params.logit_bias = {id: min(MAX_BIAS, max(MIN_BIAS, value)) for id, value in bias.items()}
        return params

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_switches()
        self._check_text()
        self._check_logprobs()
        self._check_tokens()
        if self.temperature == 0.0:
            self._make_greedy()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def clone(self) -> Self:
        """Return a copy without shared mutable values, or this object if `skip_clone` is set."""
        if self.skip_clone:
            return self
        params = copy.copy(self)
        for name in (*_MUTABLE, *_FLAT):
            if (value := getattr(self, name)) is not None:
                setattr(params, name, copy.copy(value) if name in _FLAT else copy.deepcopy(value))
        return params

    @property
    def top_id(self) -> int:
        """Return the largest token id in the parameters; 0 if they contain no token id."""
        listed = (self.logprob_token_ids, self.allowed_token_ids, self.logit_bias, self.stop_token_ids)
        words = self.bad_words_token_ids or ()
        return max((id for ids in (*listed, *words) for id in ids or ()), default=0)

    def verify(self, *, vocab: int, max_logprobs: int, num_extra_vocab: int = 0) -> None:
        """Check the parameters against the model; raise a RequestError. A `max_logprobs` of -1 means the
        whole vocabulary. A LoRA adapter may add `num_extra_vocab` tokens."""
        for name in UNSUPPORTED["sampling field"]:
            check_supported("sampling field", name, getattr(self, name))
        limit = vocab if max_logprobs == -1 else max_logprobs
        for name, kind in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
            wanted = getattr(self, name)
            wanted = vocab if wanted == -1 else wanted
            if wanted is not None and wanted > limit:
                raise RequestError(
                    f"Requested {kind} logprobs of {wanted}, which is greater than max allowed: {limit}. "
                    f"Request fewer or raise --max-logprobs.",
                    name,
                )
        end = vocab + num_extra_vocab
        for name in ("logprob_token_ids", "allowed_token_ids", "logit_bias", "stop_token_ids"):
            _check_in_vocab(name, getattr(self, name) or (), end)
        if (marks := self.reasoning) is not None:
            if not marks.end:
                _fail("reasoning", ".end must not be empty")
            _check_in_vocab("reasoning", (*marks.start, *marks.last_words, *marks.end), end)
        elif self.thinking_token_budget is not None:
            _fail("thinking_token_budget", "needs a reasoning parser: set one")
        words = self.bad_words_token_ids or ()
        if len(words) > MAX_BAD_WORDS:
            _fail("bad_words", f"may be at most {MAX_BAD_WORDS} once tokenized, got {len(words)}")
        for word in words:
            _check_in_vocab("bad_words", word, end)

    def _check_numbers(self) -> None:
        self.n = _integer("n", self.n, low=1, high=MAX_SEQUENCES)
        self.presence_penalty = _real("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        self.frequency_penalty = _real("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        self.repetition_penalty = _real("repetition_penalty", self.repetition_penalty)
        if self.repetition_penalty <= 0.0:
            _fail("repetition_penalty", "must be greater than zero", self.repetition_penalty)
        self.temperature = _real("temperature", self.temperature, low=0.0, high=2.0)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            warn_once(logger, f"temperatures below {MIN_TEMPERATURE} are unstable and are raised to it")
            self.temperature = MIN_TEMPERATURE
        self.top_p = _real("top_p", self.top_p)
        if not 0.0 < self.top_p <= 1.0:
            _fail("top_p", "must be in (0, 1]", self.top_p)
        self.top_k = _integer("top_k", self.top_k, low=-1)
        self.min_p = _real("min_p", self.min_p, low=0.0, high=1.0)
        self.seed = _optional_integer("seed", self.seed)
        if self.seed == -1:
            self.seed = None
        self.max_tokens = _optional_integer("max_tokens", self.max_tokens, low=1)
        self.min_tokens = _integer("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            rule = f"must be less than or equal to max_tokens={self.max_tokens}"
            _fail("min_tokens", rule, self.min_tokens)
        self.stream_interval = _optional_integer("stream_interval", self.stream_interval, low=1)
        self.thinking_token_budget = _optional_integer(
            "thinking_token_budget", self.thinking_token_budget, low=-1
        )
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        self.routed_experts_prompt_start = _integer(
            "routed_experts_prompt_start", self.routed_experts_prompt_start, low=0
        )

    def _check_switches(self) -> None:
        for name in _SWITCHES:
            _check_bool(name, getattr(self, name))
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None
        _check_bool("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
        if not isinstance(self.output_kind, RequestOutputKind):
            _fail("output_kind", "must be a RequestOutputKind", self.output_kind)
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            _fail("extra_args", "must be an object", self.extra_args)
        report_mode = (self.extra_args or {}).get(REPORT_MODE, "incremental")
        if report_mode not in ("incremental", "full"):
            _fail("extra_args", f"{REPORT_MODE} must be incremental or full", report_mode)
        try:
            msgspec.msgpack.encode(self.extra_args)
        except Exception as error:  # any value may be in it
            _fail("extra_args", f"cannot be sent to the engine: {error}")
        if self.structured_outputs is not None:
            self.structured_outputs = _struct(
                "structured_outputs", self.structured_outputs, StructuredOutputsParams
            )
        if self.repetition_detection is not None:
            self.repetition_detection = _struct(
                "repetition_detection", self.repetition_detection, RepetitionDetectionParams
            )

    def _check_text(self) -> None:
        self.stop = _strings("stop", self.stop)
        if "" in self.stop:
            _fail("stop", "cannot contain an empty string")
        if self.stop and not self.detokenize:
            _fail("stop", "strings are only supported when detokenize is True; set it to use stop")
        self.bad_words = _strings("bad_words", self.bad_words)
        if "" in self.bad_words:
            _fail("bad_words", "cannot contain an empty string")
        if len(self.bad_words) > MAX_BAD_WORDS:
            _fail("bad_words", f"may be at most {MAX_BAD_WORDS}, got {len(self.bad_words)}")

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is None:
                continue
            value = 1 if value is True else _integer(name, value)
            if value < -1:
                _fail(name, "must be non-negative or -1", value)
            setattr(self, name, value)
        if self.logprob_token_ids is None:
            return
        self.logprob_token_ids = _ids("logprob_token_ids", self.logprob_token_ids)
        count = len(self.logprob_token_ids)
        if count > MAX_LOGPROB_TOKEN_IDS:
            _fail("logprob_token_ids", f"may be at most {MAX_LOGPROB_TOKEN_IDS} ids, got {count}")
        if self.logprobs is not None and self.logprobs != count:
            _fail("logprobs", f"must equal the {count} logprob_token_ids when both are given", self.logprobs)

    def _check_tokens(self) -> None:
        self.stop_token_ids = list(dict.fromkeys(_ids("stop_token_ids", self.stop_token_ids or ())))
        if (count := len(self.stop_token_ids)) > MAX_STOP_TOKEN_IDS:
            _fail("stop_token_ids", f"may be at most {MAX_STOP_TOKEN_IDS} different ids; send fewer", count)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                _fail("allowed_token_ids", "is not None and empty! Set at least one id or remove it")
        if self.logit_bias is not None:
            self.logit_bias = _bias(self.logit_bias)
        if self.trace_decode_token_ids is not None:
            self.trace_decode_token_ids = _ids("trace_decode_token_ids", self.trace_decode_token_ids)

    def _make_greedy(self) -> None:
        if self.n > 1:
            _fail("n", "must be 1 when using greedy sampling", self.n)
        self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0


_SWITCHES = (
    "ignore_eos", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "skip_clone", "timestamps",
)  # fmt: skip


_MUTABLE = ("structured_outputs", "extra_args", "repetition_detection", "bad_words_token_ids")
"""Fields with nested mutable values, which `clone` copies deeply."""
_FLAT = (
    "stop", "stop_token_ids", "logprob_token_ids", "logit_bias", "allowed_token_ids", "bad_words",
    "trace_decode_token_ids",
)  # fmt: skip
"""Fields with flat lists and dicts of numbers or strings, which `clone` copies."""


def _fail(name: str, rule: str, *got: object) -> NoReturn:
    """Raise a RequestError with the message `{name} {rule}, got {got}.` A rule that begins with a dot names a
    field of `name`."""
    gap = "" if rule.startswith(".") else " "
    suffix = f", got {reprlib.repr(got[0])}" if got else ""
    raise RequestError(f"{name}{gap}{rule}{suffix}.", param=name.partition(".")[0])


def _real(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    if type(value) is not float:
        if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
            _fail(name, "must be a number", value)
        try:
            value = float(value)
        except (TypeError, ValueError, OverflowError):
            _fail(name, "must be a number", value)
    if not math.isfinite(value):
        _fail(name, "must be a finite number", value)
    if not low <= value <= high:
        _fail(name, f"must be in [{low:g}, {high:g}]", value)
    return value  # type: ignore[no-any-return]


def _integer(name: str, value: Any, low: int = INT64_MIN, high: int = INT64_MAX) -> int:
    if type(value) is not int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            _fail(name, "must be an integer", value)
        value = operator.index(value)
    if value < low:
        _fail(name, f"must be at least {low}", value)
    if value > high:
        _fail(name, f"must be at most {high}", value)
    return value  # type: ignore[no-any-return]


def _optional_integer(name: str, value: Any, low: int = INT64_MIN) -> int | None:
    return None if value is None else _integer(name, value, low=low)


def _check_bool(name: str, value: object) -> None:
    if value is not True and value is not False:
        _fail(name, "must be true or false", value)


def _strings(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        _fail(name, "must be a string or a list of strings", value)
    return list(value)


def _ids(name: str, value: Any) -> list[int]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        _fail(name, "must be a list of token ids", value)
    return [_integer(name, item, low=0) for item in value]


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        _fail("logit_bias", "must be an object of token ids to numbers", value)
    return {_integer("logit_bias", key): _real("logit_bias", bias) for key, bias in value.items()}


def _with_token_ids(value: Any) -> Any:
    """Return logit biases with integer keys; the keys of a JSON object are strings."""
    if not isinstance(value, Mapping):
        return value
    biases = {}
    for key, bias in value.items():
        try:
            biases[int(key)] = bias
        except (TypeError, ValueError, OverflowError):
            _fail("logit_bias", "must have token ids as keys", key)
    return biases


def _struct(name: str, value: Any, kind: type[S]) -> S | None:
    """Return the value as a struct of this kind; a dict from an HTTP body is converted."""
    if value is None or isinstance(value, kind):
        return value
    if not isinstance(value, dict):
        _fail(name, "must be an object", value)
    if unknown := sorted(set(value) - set(kind.__struct_fields__)):
        _fail(name, f"has unknown keys {', '.join(unknown)}; known: {', '.join(kind.__struct_fields__)}")
    return kind(**value)


def _check_in_vocab(name: str, ids: Iterable[int], vocab: int) -> None:
    if unknown := [token_id for token_id in ids if not 0 <= token_id < vocab]:
        raise RequestError(
            f"token_id(s) {reprlib.repr(unknown)} in {name} contain out-of-vocab token ids. Vocabulary size: "
            f"{vocab}",
            param=name,
        )
