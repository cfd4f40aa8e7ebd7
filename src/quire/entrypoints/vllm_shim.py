"""Run scripts written for vLLM as they are: `quire python SCRIPT` or `python -m quire.vllm SCRIPT`."""

import importlib.machinery
import logging
import os
import runpy
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

from quire.errors import ConfigError, nearest
from quire.models import MODELS
from quire.registry import LazyTable

_PARAMS = ("SamplingParams", "BeamSearchParams", "StructuredOutputsParams", "RequestOutputKind")
_OUTPUTS = ("RequestOutput", "CompletionOutput")
_POOLED = tuple(
    f"{kind}{what}"
    for kind in ("Pooling", "Embedding", "Classification", "Scoring")
    for what in ("Output", "RequestOutput")
)
_PROMPTS = ("PromptType", "TextPrompt", "TokensPrompt", "EmbedsPrompt")
_ARGS = {"EngineArgs": "quire.config.args:EngineArgs", "AsyncEngineArgs": "quire.config.args:EngineArgs"}
_ENGINES = {
    "LLMEngine": "quire.entrypoints.in_process:LocalEngine",
    "AsyncLLMEngine": "quire.entrypoints.async_llm:AsyncLLMEngine",
    "AsyncLLM": "quire.entrypoints.async_llm:AsyncLLMEngine",
}
_LLM = {"LLM": "quire.entrypoints.llm:LLM"}
_METRICS = ("Counter", "Gauge", "Histogram", "Vector", "Metric")
_SECTIONS = (
    *("AttentionConfig", "CompilationConfig", "EPLBConfig", "KVTransferConfig", "PoolerConfig"),
    *("ProfilerConfig", "SpeculativeConfig", "StructuredOutputsConfig"),
)


def _of(module: str, names: Sequence[str]) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names}


MODULES: dict[str, dict[str, str]] = {
    "vllm": {
        **_LLM,
        **_ARGS,
        **_ENGINES,
        **_of("quire", (*_PARAMS, *_OUTPUTS, *_POOLED, *_PROMPTS, "PoolingParams")),
        **_of("quire", ("__version__", "__version_tuple__")),
        **_of("quire.entrypoints.vllm_shim", ("ModelRegistry", "initialize_ray_cluster")),
    },
    "vllm.config": dict.fromkeys(_SECTIONS, "quire.entrypoints.vllm_shim:Section"),
    "vllm.model_executor.models": _of("quire.entrypoints.vllm_shim", ("ModelRegistry",)),
    "vllm.sampling_params": {
        **_of("quire", _PARAMS),
        "GuidedDecodingParams": "quire.data.params:StructuredOutputsParams",
        "RepetitionDetectionParams": "quire.data.params:RepetitionDetectionParams",
    },
    "vllm.pooling_params": _of("quire", ("PoolingParams",)),
    "vllm.outputs": _of("quire", (*_OUTPUTS, *_POOLED)),
    "vllm.inputs": _of("quire", _PROMPTS),
    "vllm.lora.request": _of("quire", ("LoRARequest",)),
    "vllm.engine.arg_utils": _ARGS,
    "vllm.engine.llm_engine": _ENGINES,
    "vllm.engine.async_llm_engine": _ENGINES,
    "vllm.v1.engine.async_llm": _ENGINES,
    "vllm.entrypoints.llm": _LLM,
    "vllm.v1.metrics.reader": _of("quire.metrics", _METRICS),
    "vllm.version": _of("quire", ("__version__", "__version_tuple__")),
}
"""Modules of vLLM that people import from: name -> "module:attribute" of Quire."""
_PACKAGES = {name[: name.rindex(".")] for name in MODULES if "." in name} | {
    "vllm.v1",
    "vllm.lora",
    "vllm.engine",
    "vllm.model_executor",
}


class Section(dict[str, Any]):
    """A part of the configuration as scripts make it: the dictionary that an engine argument takes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"{name} was not given; there is {', '.join(self) or 'nothing'}")
        return self[name]


class ModelRegistry:
    """Which architectures there are. None can be added by a script."""

    @staticmethod
    def get_supported_archs() -> list[str]:
        return sorted(MODELS)

    @staticmethod
    def register_model(architecture: str, model: Any) -> None:
        raise ConfigError(
            f"ModelRegistry.register_model({architecture!r}) is not in Quire, whose models are built of its"
            " own layers; a decoder that transformers can open needs none, with model_impl='transformers'"
        )


def initialize_ray_cluster(parallel_config: Any = None, ray_address: str | None = None) -> None:
    """Joins a Ray cluster, or starts one: an engine with distributed_executor_backend='ray' uses it. Without
    this call it does the same by itself."""
    try:
        import ray
    except ImportError:
        raise ConfigError("initialize_ray_cluster needs Ray: pip install 'quire[ray]'") from None
    if not ray.is_initialized():
        ray.init(address=ray_address, logging_level=logging.WARNING)


class _Module(ModuleType):
    """A module of vLLM: its names are Quire's, looked up when they are used."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "Names of vLLM that Quire has.")
        self.__path__: list[str] = []
        self.__dict__["_names"] = LazyTable("name", MODULES.get(name, {}))

    def __getattr__(self, name: str) -> Any:
        names: LazyTable = self.__dict__["_names"]
        if name in names:
            return names[name]
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self.__name__}.{name} is not in Quire{nearest(name, list(names))}; it has {', '.join(names)}"
        )

    def __dir__(self) -> list[str]:
        return sorted(self.__dict__["_names"])


class _Finder(MetaPathFinder, Loader):
    """Answers imports of `vllm` and of what is below it."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "vllm":
            return None
        if name in MODULES or name in _PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        parent, _, last = name.rpartition(".")
        below = [each.removeprefix(f"{parent}.") for each in MODULES if each.startswith(f"{parent}.")]
        names = [*MODULES.get(parent, ()), *below]
        # Not with the name of what is missing: Python would say less of `from vllm import X` than this does.
        raise ModuleNotFoundError(
            f"{name} is not in Quire{nearest(last, names)}; {parent} has {', '.join(names)}", name=parent
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def install() -> None:
    """From now on `import vllm` finds Quire, in this process and in those that it starts by spawning."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=REMAINDER, help="what the script is given")


def run(args: Namespace) -> int:
    return main([args.script, *args.arguments])


def main(words: Sequence[str]) -> int:
    """As python does it: the script is `__main__`, and sees its own arguments."""
    if not words:
        print("usage: python -m quire.vllm SCRIPT [arguments]", file=sys.stderr)
        return 2
    if not os.path.isfile(words[0]):
        print(f"quire python: error: there is no script {words[0]!r}", file=sys.stderr)
        return 2
    executed(words)
    return 0


def executed(words: Sequence[str]) -> dict[str, Any]:
    """What a script has named, once it has run with these arguments."""
    install()
    script, sys.argv = words[0], list(words)
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    return runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
