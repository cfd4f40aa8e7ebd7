"""Sampling parameters, checked once for all prompts; checks of cache salts and of logits processors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.config.extensions import load_class
from quire.data.params import MAX_SALT_CHARS, SamplingParams
from quire.errors import EngineError, RequestError, one_line

_PROMPT_START = "routed_experts_prompt_start"
Validator = Callable[[SamplingParams], None]
"""A check of sampling parameters, which raises a RequestError."""


@dataclass(frozen=True, slots=True)
class CheckedParams:
    """Sampling parameters that were checked and completed for the model or a LoRA adapter. All prompts of a
    call share them; they are not modified any more."""

    params: SamplingParams
    eos_id: int
    """eos token id; -1 with ignore_eos or without an eos token."""
    top_id: int
    """Largest token id in the parameters, if they are for a LoRA adapter that may add tokens; else 0."""


def check_salt(salt: Any) -> None:
    """Refuse a `cache_salt` that is not a string, empty or too long."""
    if salt is not None and not (isinstance(salt, str) and salt):
        raise RequestError(f"cache_salt must be a non-empty string, got {salt!r:.80}", param="cache_salt")
    if salt is not None and len(salt) > MAX_SALT_CHARS:
        raise RequestError(
            f"cache_salt may have at most {MAX_SALT_CHARS} characters, got {len(salt)}; send its hash",
            param="cache_salt",
        )


def check_no_routed_experts(params: SamplingParams) -> None:
    """Refuse `routed_experts_prompt_start`, because routed experts are not returned by this engine."""
    if params.routed_experts_prompt_start:
        raise RequestError(
            "routed_experts_prompt_start needs --enable-return-routed-experts", param=_PROMPT_START
        )


def check_maskable(params: SamplingParams) -> None:
    """Refuse parameters that --return-sampling-mask does not support: greedy sampling, or no top_k."""
    if not params.temperature or params.top_k <= 0:
        raise RequestError(
            "--return-sampling-mask needs a temperature and a top_k above 0, got"
            f" temperature={params.temperature:g} and top_k={params.top_k}",
            param="top_k" if params.temperature else "temperature",
        )


def check_prompt_start(params: SamplingParams, num_prompt: int) -> None:
    """Refuse a `routed_experts_prompt_start` that is not below the number of prompt tokens."""
    if 0 < params.routed_experts_prompt_start >= num_prompt:
        raise RequestError(
            f"routed_experts_prompt_start must be less than the {num_prompt} tokens of the prompt, got"
            f" {params.routed_experts_prompt_start}",
            param=_PROMPT_START,
        )


def processor_validators(paths: Sequence[str]) -> list[Validator]:
    """Return the checks of the logits processors with these class paths. Their modules are imported here, and
    torch with them."""
    classes = [load_class(path, "logits_processors") for path in paths]
    return [partial(_validate, processor) for processor in classes]


def _validate(processor: Any, params: SamplingParams) -> None:
    try:
        processor.validate_params(params)
    except ValueError as error:
        raise RequestError(str(error), param="extra_args") from error
    except Exception as error:  # code of the operator, which may raise anything
        name = f"{processor.__module__}:{processor.__qualname__}"
        raise EngineError(f"logits processor {name} failed in validate_params: {one_line(error)}") from error
