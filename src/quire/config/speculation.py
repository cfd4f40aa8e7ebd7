"""Validation of the speculative decoding settings (`speculative_config`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from quire.config.args import check_value
from quire.config.field_rule import FieldRule
from quire.config.sections import options_of
from quire.config.unsupported import UNSUPPORTED, check_supported
from quire.errors import ConfigError, check_keys, nearest
from quire.logs import get_logger, warn_once

log = get_logger(__name__)

METHODS = (
    *("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "dflash"),
    *("dspark", "extract_hidden_states", "custom_class"),
)
ALIASES = {"[ngram]": "ngram", "ngram_gpu": "ngram"}
"""Other names of methods, in addition to `*_mtp`."""
IGNORED = (
    *("code_revision", "disable_by_batch_size", "disable_logprobs", "disable_padded_drafter_batch"),
    "moe_backend",
)
"""Keys without effect: accepted, with one warning."""
_SHORT_SETTINGS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
_LENGTH_KEYS = ("n_predict", "num_lookahead_tokens", "num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys in the config.json of a draft model for the number of draft tokens that it was trained for."""

_KIND_KEYS = ("architectures", "model_type", "speculators_model_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecFacts:
    """Resolved settings of speculative decoding."""

    method: str
    """Drafting method, one of METHODS."""
    num_speculative_tokens: Annotated[int, FieldRule(at_least=1)]
    """Most draft tokens of a request in a step."""
    model: str | None = None
    """Directory or hub id of the draft model."""
    revision: str | None = None
    quantization: str | None = None
    max_model_len: Annotated[int | None, FieldRule(at_least=1)] = None
    """Longest sequence, in tokens, that the draft model is used for."""
    draft_tensor_parallel_size: Annotated[int | None, FieldRule(at_least=1)] = None
    enforce_eager: bool | None = None
    attention_backend: str | None = None
    kv_cache_dtype: str | None = None
    prompt_lookup_min: Annotated[int | None, FieldRule(at_least=1)] = None
    """Fewest tokens of an n-gram that is looked up in the earlier text."""
    prompt_lookup_max: Annotated[int | None, FieldRule(at_least=1)] = None
    num_speculative_tokens_per_batch_size: Annotated[
        tuple[tuple[int, int, int], ...], FieldRule(derived=True)
    ] = ()
    """Most draft tokens of a request, by range of batch sizes: (first size, last size, most draft tokens)."""
    parallel_drafting: bool = False
    use_heterogeneous_vocab: bool = False
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    rejection_sample_method: Literal["standard", "block", "synthetic"] = "standard"
    """`synthetic`: draft tokens are accepted at given rates, regardless of their values; for benchmarks."""
    synthetic_acceptance_rates: Annotated[tuple[float, ...], FieldRule(derived=True)] = ()
    """For each draft position, probability that it and all positions before it are accepted."""
    synthetic_acceptance_length: Annotated[float | None, FieldRule(at_least=1)] = None
    """Mean number of accepted tokens per step, including the token that the target model samples."""
    suffix_decoding_max_tree_depth: Annotated[int, FieldRule(at_least=1)] = 24
    suffix_decoding_max_cached_requests: Annotated[int, FieldRule(at_least=0)] = 10000
    suffix_decoding_max_spec_factor: Annotated[float, FieldRule(at_least=0)] = 1.0
    suffix_decoding_min_token_prob: Annotated[float, FieldRule(at_least=0, at_most=1)] = 0.1

    @staticmethod
    def of(
        values: Mapping[str, Any],
        *,
        max_model_len: int,
        tensor_parallel_size: int = 1,
        draft: Mapping[str, Any] | None = None,
    ) -> "SpecFacts | None":
        """Resolve the settings; None if speculation is off. `draft` is the config.json of the draft model, if
        there is one."""
        known = read_settings(values)
        if not known:
            return None
        method = known["method"] = known["method"] or _detect_method(draft or {})
        check_supported("speculative key", "speculative_config.method", method)
        if method == "ngram":
            _resolve_lookup(known)
        num_tokens = known["num_speculative_tokens"] = _num_tokens(known, draft or {})
        for name, read in (
            ("num_speculative_tokens_per_batch_size", _read_ranges),
            ("synthetic_acceptance_rates", _read_rates),
        ):
            known[name] = read(known.get(name, ()), num_tokens)
        facts = SpecFacts(**known)
        _check_facts(facts, max_model_len, tensor_parallel_size)
        return facts if facts.rejection_sample_method != "synthetic" else _add_rates(facts)

    def most(self, num_rows: int) -> int:
        """Return the most draft tokens of a request in a batch of `num_rows` requests."""
        for low, high, most in self.num_speculative_tokens_per_batch_size:
            if low <= num_rows <= high:
                return most
        return self.num_speculative_tokens


def read_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merged settings of speculative decoding, validated as far as possible without the draft
    model. If the method depends on the draft's config.json, `method` is None."""
    config = _merge_settings(values)
    if not config:
        return {}
    known = _check_keys(config)
    known["method"] = _resolve_method(known)
    for name in UNSUPPORTED["speculative key"]:
        check_supported("speculative key", name, known.get(name.removeprefix("speculative_config.")))
    return known


def _merge_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `speculative_config` merged with spec_method, spec_model and spec_tokens."""
    config = {
        name: value for name, value in values.get("speculative_config", {}).items() if value is not None
    }
    for short, name in _SHORT_SETTINGS.items():
        if values.get(short) is None:
            continue
        if name in config:
            raise ConfigError(f"{name} is given twice: in speculative_config and as {short}; leave one out")
        config[name] = values[short]
    return config


def _check_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Check that every key is known, has its type and is within its bounds."""
    known = options_of({"speculative_config": SpecFacts})
    check_keys("speculative_config", config, [*SpecFacts.__dataclass_fields__, *IGNORED])
    checked = {}
    for name, value in config.items():
        if name in IGNORED:
            warn_once(log, f"speculative_config.{name}={value!r} has no effect in Quire and is ignored")
        elif name in known:
            checked[name] = check_value(replace(known[name], name=f"speculative_config.{name}"), value)
        else:
            checked[name] = value
    return checked


def _resolve_method(known: Mapping[str, Any]) -> str | None:
    named = known.get("method")
    if named is None:
        model = known.get("model")
        if model is None:
            raise ConfigError(
                "speculative_config has neither a method nor a model: add for example "
                '"method": "ngram", or the draft "model"'
            )
        return "ngram" if model in ("ngram", "[ngram]") else None
    named = "mtp" if named.endswith("_mtp") else ALIASES.get(named, named)
    if named not in METHODS:
        supported = UNSUPPORTED["speculative key"]["speculative_config.method"]
        raise ConfigError(
            f"unknown speculative method {named!r}; known: {', '.join(supported)}{nearest(named, supported)}"
        )
    return named


def _detect_method(draft: Mapping[str, Any]) -> str:
    """Return the drafting method that the config.json of the draft model stands for."""
    kind = " ".join(str(draft.get(name)) for name in _KIND_KEYS).lower()
    return next((method for method in ("eagle3", "eagle", "mtp", "medusa") if method in kind), "draft_model")


def _num_tokens(known: Mapping[str, Any], draft: Mapping[str, Any]) -> int:
    num_tokens = known.get("num_speculative_tokens")
    if num_tokens is not None:
        return int(num_tokens)
    if known["method"] == "suffix":
        default = SpecFacts.__dataclass_fields__["suffix_decoding_max_tree_depth"].default
        return int(known.get("suffix_decoding_max_tree_depth", default))
    for name in _LENGTH_KEYS if known["method"] != "ngram" else ():
        if isinstance(length := draft.get(name), int) and length > 0:
            return length
    raise ConfigError(
        "speculative_config needs num_speculative_tokens, the most draft tokens per step, unless the"
        " config.json of the draft model has an n_predict: add it, for example 5"
    )


def _resolve_lookup(known: dict[str, Any]) -> None:
    low, high = known.get("prompt_lookup_min"), known.get("prompt_lookup_max")
    low, high = low or high or 5, high or low or 5
    if low > high:
        raise ConfigError(f"prompt_lookup_min={low} must be <= prompt_lookup_max={high}")
    known.update(prompt_lookup_min=low, prompt_lookup_max=high, model=None)


def _read_ranges(value: Any, num_tokens: int) -> tuple[tuple[int, int, int], ...]:
    name, last = "num_speculative_tokens_per_batch_size", 0
    for entry in value if isinstance(value, Sequence) else [value]:
        is_range = (
            isinstance(entry, Sequence) and len(entry) == 3 and all(type(number) is int for number in entry)
        )
        if not is_range or not last < entry[0] <= entry[1] or not 0 <= entry[2] <= num_tokens:
            raise ConfigError(
                f"speculative_config.{name}={value!r} must be a list of [first, last, drafts]: batch sizes"
                f" from 1 that rise, and drafts from 0 to num_speculative_tokens ({num_tokens})"
            )
        last = entry[1]
    return tuple((low, high, most) for low, high, most in value)


def _read_rates(value: Any, num_tokens: int) -> tuple[float, ...]:
    rates: Sequence[Any] = value if isinstance(value, list | tuple) else [None]
    is_rate = all(isinstance(rate, int | float) and 0 <= rate <= 1 for rate in rates)
    if not is_rate or len(rates) not in (0, num_tokens) or list(rates) != sorted(rates, reverse=True):
        raise ConfigError(
            f"speculative_config.synthetic_acceptance_rates={value!r} must be num_speculative_tokens"
            f" ({num_tokens}) numbers from 1 to 0, none above the one before it"
        )
    return tuple(float(rate) for rate in rates)


def _check_facts(facts: SpecFacts, max_model_len: int, tensor_parallel_size: int) -> None:
    draft_tp = facts.draft_tensor_parallel_size
    if draft_tp not in (None, 1, tensor_parallel_size):
        raise ConfigError(
            f"speculative_config.draft_tensor_parallel_size={draft_tp} cannot be other value than 1 or target"
            f" model tensor_parallel_size ({tensor_parallel_size})"
        )
    if facts.max_model_len is not None and facts.max_model_len > max_model_len:
        raise ConfigError(
            f"speculative_config.max_model_len={facts.max_model_len} is above the target's max_model_len"
            f" ({max_model_len}); lower it or leave it out"
        )
    if facts.model is None and facts.method in ("draft_model", "eagle", "eagle3", "medusa"):
        raise ConfigError(f"speculative_config.method={facts.method!r} needs a draft model: add model")


def _add_rates(facts: SpecFacts) -> SpecFacts:
    """Return the settings with synthetic_acceptance_rates. If synthetic_acceptance_length is set instead,
    every draft token whose predecessors are accepted gets the same probability."""
    length, num_tokens = facts.synthetic_acceptance_length, facts.num_speculative_tokens
    if (length is None) == (not facts.synthetic_acceptance_rates):
        raise ConfigError(
            "rejection_sample_method='synthetic' needs either synthetic_acceptance_rates or"
            " synthetic_acceptance_length"
        )
    if length is None:
        return facts
    if length > num_tokens + 1:
        raise ConfigError(
            f"speculative_config.synthetic_acceptance_length={length} is above num_speculative_tokens + 1"
            f" ({num_tokens + 1})"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        is_less = sum(middle**place for place in range(num_tokens + 1)) < length
        low, high = (middle, high) if is_less else (low, middle)
    return replace(facts, synthetic_acceptance_rates=tuple(high ** (at + 1) for at in range(num_tokens)))
