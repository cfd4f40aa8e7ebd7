"""Known settings that are not supported, by the place where they can be set, and their error message."""

from typing import Any, Literal

from quire.errors import ConfigError, RequestError

Place = Literal[
    "engine argument",
    "speculative key",
    "server flag",
    "body field",
    "sampling field",
    "call argument",
]

UNSUPPORTED: dict[Place, dict[str, tuple[Any, ...]]] = {
    "engine argument": {
        "config_format": ("auto", "hf"),
        "data_parallel_backend": ("mp",),
        "data_parallel_multi_port_external_lb": (False,),
        "decode_context_parallel_size": (1,),
        "distributed_executor_backend": ("uni", "mp", "ray"),
        "disable_sliding_window": (False,),
        "ec_transfer_config": (),
        "io_processor_plugin": (),
        "kv_cache_dtype_skip_layers": ([], ()),
        "model_class_overrides": ({},),
        "offload_group_size": (0,),
        "prefill_context_parallel_size": (1,),
        "quantization_config": (),
        "reasoning_config": ({},),
        "reasoning_parser": ("",),
        "reasoning_parser_plugin": ("",),
        "scheduler_cls": (),
        "worker_cls": ("auto",),
    },
    "speculative key": {
        "speculative_config.method": ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp"),
        "speculative_config.parallel_drafting": (False,),
        "speculative_config.rejection_sample_method": ("standard", "synthetic"),
        "speculative_config.use_heterogeneous_vocab": (False,),
    },
    "server flag": {
        "grpc": (False,),
        "tool_server": (),
    },
    "body field": {
        "ec_transfer_params": (),
        "features": (),
        "lora_request": (),
        "modalities": (["text"],),
        "return_assistant_tokens_mask": (False,),
    },
    "sampling field": {
        "trace_decode_token_ids": (),
    },
    "call argument": {
        "structured_outputs": (),
    },
}
"""Unsupported settings by place and name, each with the values (besides None) that are accepted, since they
leave the feature off."""

_ALTERNATIVES = {
    "lora_request": "use the name of an adapter as `model`",
}
"""Alternatives to some unsupported names, for the error message."""
_AT_START: tuple[Place, ...] = ("engine argument", "speculative key", "server flag")


def check_supported(place: Place, name: str, value: Any) -> None:
    """Raise if `value` is not supported: a ConfigError at start, a RequestError for one request."""
    allowed = UNSUPPORTED[place][name]
    if value is None or value in allowed:
        return
    choices = " or ".join(repr(choice) for choice in allowed)
    remedy = f"leave it out or set it to {choices}" if choices else "leave it out"
    if name in _ALTERNATIVES:
        remedy = f"{remedy}; {_ALTERNATIVES[name]}"
    if place in _AT_START:
        raise ConfigError(f"{name}={value!r} is not supported yet; {remedy}")
    raise RequestError(f"`{name}` is not supported yet; {remedy}", param=name)


def is_switch(place: Place, name: str) -> bool:
    """Return whether the setting is a boolean switch."""
    return [type(value) for value in UNSUPPORTED[place].get(name, ())] == [bool]
