"""Quire: an LLM inference and serving engine. Names are imported on first use."""

from typing import Any

from quire.registry import LazyTable
from quire.version import __version__

__version_tuple__ = tuple(int(part) for part in __version__.split("."))

_EXPORTS = LazyTable(
    "name",
    {
        "LLM": "quire.entrypoints.llm:LLM",
        "LLMEngine": "quire.entrypoints.in_process:LocalEngine",
        "AsyncLLMEngine": "quire.entrypoints.async_llm:AsyncLLMEngine",
        "EngineArgs": "quire.config.engine_args:EngineArgs",
        "AsyncEngineArgs": "quire.config.engine_args:EngineArgs",
        "SamplingParams": "quire.data.params:SamplingParams",
        "BeamSearchParams": "quire.data.params:BeamSearchParams",
        "StructuredOutputsParams": "quire.data.params:StructuredOutputsParams",
        "RequestOutputKind": "quire.data.params:RequestOutputKind",
        "RequestOutput": "quire.data.outputs:RequestOutput",
        "CompletionOutput": "quire.data.outputs:CompletionOutput",
        "ModelRegistry": "quire.plugins:ModelRegistry",
        "LoRARequest": "quire.data.lora:LoRARequest",
        "PoolingParams": "quire.data.pooling:PoolingParams",
        **{
            name: f"quire.data.pooling_outputs:{name}"
            for kind in ("Pooling", "Embedding", "Classification", "Scoring")
            for name in (f"{kind}Output", f"{kind}RequestOutput")
        },
        "PromptType": "quire.frontend.inputs:PromptType",
        "TextPrompt": "quire.frontend.inputs:TextPrompt",
        "TokensPrompt": "quire.frontend.inputs:TokensPrompt",
        "EmbedsPrompt": "quire.frontend.inputs:EmbedsPrompt",
    },
)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return _EXPORTS[name]
    raise AttributeError(f"module 'quire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
