"""Runs unmodified vLLM scripts: `quire python SCRIPT` or `python -m quire.vllm SCRIPT`."""

import importlib
import importlib.machinery
import os
import runpy
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from quire.errors import QuireError, nearest
from quire.registry import LazyTable

if TYPE_CHECKING:
    from importlib.metadata import Distribution

_QUIRE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STARTERS = (__file__, runpy.__file__, "<frozen runpy>")
"""Source files of the stack frames between the command and the script, which are left out of tracebacks."""
_PARAMS = ("SamplingParams", "BeamSearchParams", "StructuredOutputsParams", "RequestOutputKind")
_OUTPUTS = ("RequestOutput", "CompletionOutput")
_POOLED = tuple(
    f"{kind}{what}"
    for kind in ("Pooling", "Embedding", "Classification", "Scoring")
    for what in ("Output", "RequestOutput")
)
_PROMPTS = ("PromptType", "TextPrompt", "TokensPrompt", "EmbedsPrompt")
_FUNCTIONS = "quire.entrypoints.vllm_functions"
_ARGS = dict.fromkeys(("EngineArgs", "AsyncEngineArgs"), f"{_FUNCTIONS}:VllmEngineArgs")
_ENGINES = {
    "LLMEngine": "quire.entrypoints.in_process:LocalEngine",
    "AsyncLLMEngine": "quire.entrypoints.async_llm:AsyncLLMEngine",
    "AsyncLLM": "quire.entrypoints.async_llm:AsyncLLMEngine",
}
_LLM = {"LLM": "quire.entrypoints.llm:LLM"}
_REGISTRY = {"ModelRegistry": "quire.plugins:ModelRegistry"}
_PARSER = {"FlexibleArgumentParser": "quire.config.cli:FlagParser"}
_PROCESSORS = {
    name: f"quire.sampling.logits_processors:{name}"
    for name in (
        *("AdapterLogitsProcessor", "BatchUpdate", "LogitsProcessor", "MoveDirectionality"),
        *("RequestLogitsProcessor", "process_dict_updates"),
    )
}
_LOGPROB = {"Logprob": "quire.data.outputs:Logprob"}
_VERSION = {
    "__version__": "quire.version:VLLM_VERSION",
    "__version_tuple__": "quire.version:VLLM_VERSION_TUPLE",
}
_METRICS = ("Counter", "Gauge", "Histogram", "Vector", "Metric")
_SECTIONS = (
    *("AttentionConfig", "CompilationConfig", "EPLBConfig", "KVEventsConfig", "KVTransferConfig"),
    *("PoolerConfig", "ProfilerConfig", "SpeculativeConfig", "StructuredOutputsConfig"),
    "WeightTransferConfig",
)


def _targets(module: str, names: Sequence[str]) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names}


_DISTRIBUTED = _targets(
    "quire.worker.vllm_worker",
    (
        *("get_pp_group", "get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size"),
        *("get_tp_group", "get_world_group"),
    ),
) | _targets(
    _FUNCTIONS,
    ("cleanup_dist_env_and_memory", "destroy_distributed_environment", "destroy_model_parallel"),
)
_TRANSFER_BASES = _targets(
    "quire.worker.vllm_weight_transfer",
    ("WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo"),
)
_TRANSFER = {
    **_targets(_FUNCTIONS, ("WeightTransferEngineFactory",)),
    "WeightTransferEngine": _TRANSFER_BASES["WeightTransferEngine"],
}
MODULES: dict[str, dict[str, str]] = {
    "vllm": {
        **_LLM,
        **_ARGS,
        **_ENGINES,
        **_targets("quire", (*_PARAMS, *_OUTPUTS, *_POOLED, *_PROMPTS, "PoolingParams")),
        **_VERSION,
        **_REGISTRY,
        **_targets(_FUNCTIONS, ("initialize_ray_cluster",)),
    },
    "vllm.config": {
        **dict.fromkeys(_SECTIONS, f"{_FUNCTIONS}:Section"),
        "VllmConfig": "quire.worker.extensions:VllmConfig",
        **_targets(_FUNCTIONS, ("set_current_vllm_config",)),
    },
    "vllm.config.weight_transfer": {"WeightTransferConfig": f"{_FUNCTIONS}:Section"},
    "vllm.logger": _targets(_FUNCTIONS, ("init_logger",)),
    "vllm.logprobs": _LOGPROB,
    "vllm.platforms": _targets(_FUNCTIONS, ("current_platform",)),
    "vllm.plugins": {"load_general_plugins": "quire.config.plugins:load_plugins"},
    "vllm.sequence": _LOGPROB,
    "vllm.tokenizers": _targets(_FUNCTIONS, ("get_tokenizer",)),
    "vllm.transformers_utils.tokenizer": _targets(_FUNCTIONS, ("get_tokenizer",)),
    "vllm.usage.usage_lib": _targets(_FUNCTIONS, ("UsageContext",)),
    "vllm.model_executor.model_loader.reload": _targets(
        _FUNCTIONS, ("finalize_layerwise_reload", "initialize_layerwise_reload")
    ),
    "vllm.v1.sample.logits_processor": _PROCESSORS,
    "vllm.v1.sample.logits_processor.builtin": _PROCESSORS,
    "vllm.v1.sample.logits_processor.interface": _PROCESSORS,
    "vllm.model_executor.models": _REGISTRY,
    "vllm.model_executor.models.registry": _REGISTRY,
    "vllm.sampling_params": {
        **_targets("quire", _PARAMS),
        "GuidedDecodingParams": "quire.data.params:StructuredOutputsParams",
        "RepetitionDetectionParams": "quire.data.params:RepetitionDetectionParams",
    },
    "vllm.pooling_params": _targets("quire", ("PoolingParams",)),
    "vllm.outputs": _targets("quire", (*_OUTPUTS, *_POOLED)),
    "vllm.inputs": _targets("quire", _PROMPTS),
    "vllm.inputs.data": _targets("quire", _PROMPTS),
    "vllm.lora.request": _targets("quire", ("LoRARequest",)),
    "vllm.engine.arg_utils": _ARGS,
    "vllm.engine.llm_engine": _ENGINES,
    "vllm.engine.async_llm_engine": _ENGINES,
    "vllm.engine.protocol": {"EngineClient": _ENGINES["AsyncLLM"]},
    "vllm.v1.engine.async_llm": _ENGINES,
    "vllm.v1.engine.exceptions": {
        "EngineDeadError": "quire.errors:EngineDead",
        "EngineGenerateError": "quire.errors:EngineError",
    },
    "vllm.v1.engine.llm_engine": _ENGINES,
    "vllm.entrypoints.llm": _LLM,
    "vllm.v1.metrics.loggers": _targets("quire.frontend.stat_loggers", ("StatLoggerBase",)),
    "vllm.v1.metrics.stats": _targets(
        "quire.frontend.stat_loggers",
        (
            *("FinishedRequestStats", "IterationStats", "PrefixCacheStats"),
            *("SchedulerStats", "SpecDecodingStats"),
        ),
    ),
    "vllm.v1.metrics.reader": _targets("quire.metrics.reader", _METRICS),
    "vllm.version": _VERSION,
    "vllm.distributed.weight_transfer": _TRANSFER,
    "vllm.distributed.weight_transfer.factory": _TRANSFER,
    "vllm.distributed.weight_transfer.base": {
        **_targets(
            "quire.entrypoints.llm_control", ("WeightTransferInitRequest", "WeightTransferUpdateRequest")
        ),
        **_TRANSFER_BASES,
    },
    "vllm.distributed.weight_transfer.nccl_engine": _targets(
        "quire.parallel.broadcast", ("NCCLTrainerSendWeightsArgs", "NCCLWeightTransferEngine")
    ),
    "vllm.distributed.device_communicators.pynccl": {
        "PyNcclCommunicator": "quire.parallel.broadcast:BroadcastGroup"
    },
    "vllm.distributed": _DISTRIBUTED,
    "vllm.distributed.parallel_state": _DISTRIBUTED,
    "vllm.distributed.utils": _targets("quire.parallel.broadcast", ("StatelessProcessGroup",)),
    "vllm.utils": {**_PARSER, **_targets(_FUNCTIONS, ("get_ip", "get_open_port", "random_uuid"))},
    "vllm.utils.network_utils": _targets(_FUNCTIONS, ("get_ip", "get_open_port")),
    "vllm.utils.argparse_utils": _PARSER,
    "vllm.assets.image": _targets("quire.entrypoints.vllm_assets", ("ImageAsset",)),
    "vllm.assets.video": _targets("quire.entrypoints.vllm_assets", ("VideoAsset",)),
    "vllm.assets.audio": _targets("quire.entrypoints.vllm_assets", ("AudioAsset",)),
}
"""Modules of vLLM that scripts import from: name -> "module:attribute" of Quire."""
_PACKAGES = {
    name.rsplit(".", count)[0] for name in MODULES for count in range(1, name.count(".") + 1)
} - MODULES.keys()
"""Packages of these modules that have no names themselves."""


class _Module(ModuleType):
    """Stand-in for a module of vLLM: its names are objects of Quire, which are imported on first use."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "Names of vLLM that Quire has.")
        self.__path__: list[str] = []
        self.__dict__["_names"] = LazyTable("name", MODULES.get(name, {}))

    def __getattr__(self, name: str) -> Any:
        names: LazyTable = self.__dict__["_names"]
        if name in names:
            return names[name]
        if (below := f"{self.__name__}.{name}") in MODULES or below in _PACKAGES:
            return importlib.import_module(below)
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self.__name__}.{name} is not in Quire{nearest(name, list(names))}; it has {', '.join(names)}"
        )

    def __dir__(self) -> list[str]:
        return sorted(self.__dict__["_names"])


class _Finder(MetaPathFinder, Loader):
    """Handles imports of `vllm` and its submodules."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "vllm":
            return None
        if name in MODULES or name in _PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        parent, _, last = name.rpartition(".")
        below = [name.removeprefix(f"{parent}.") for name in MODULES if name.startswith(f"{parent}.")]
        names = [*MODULES.get(parent, ()), *below]
        # `name` is the parent, since Python hides this message for the name of the missing module.
        raise ModuleNotFoundError(
            f"{name} is not in Quire{nearest(last, names)}; {parent} has {', '.join(names)}", name=parent
        )

    def find_distributions(self, context: Any) -> "Iterator[Distribution]":
        """Yield the metadata of `vllm`, for libraries that ask for its version."""
        if context.name in (None, "vllm"):
            from quire.entrypoints.vllm_metadata import VllmDistribution

            yield VllmDistribution()

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing: the names of the module are resolved on first use."""


def install() -> None:
    """Make `import vllm` resolve to Quire, in this process and in processes that it spawns."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=REMAINDER, help="arguments of the script")


def run(args: Namespace) -> int:
    return main([args.script, *args.arguments])


def main(arguments: Sequence[str]) -> int:
    """Run a script as python does: as `__main__`, with its arguments in sys.argv."""
    if not arguments:
        print("usage: python -m quire.vllm SCRIPT [arguments]", file=sys.stderr)
        return 2
    if not os.path.isfile(arguments[0]):
        print(f"quire python: error: there is no script {arguments[0]!r}", file=sys.stderr)
        return 2
    try:
        run_script(arguments)
    except Exception as error:
        _show(error)
        return 1
    return 0


def _show(error: Exception) -> None:
    """Print an error of the script as Python does, without the frames that started the script. The traceback
    of a `QuireError` ends at the line of the script that caused it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _STARTERS:
        frames = frames.tb_next
    if isinstance(error, QuireError):
        error.__cause__, error.__suppress_context__ = None, True
        frames = _until_quire(frames)
    sys.excepthook(type(error), error.with_traceback(frames), frames)


def _until_quire(frames: TracebackType | None) -> TracebackType | None:
    """Return the frames up to the first one inside Quire."""
    if frames is None or frames.tb_frame.f_code.co_filename.startswith(_QUIRE):
        return None
    frames.tb_next = _until_quire(frames.tb_next)
    return frames


def run_script(arguments: Sequence[str]) -> dict[str, Any]:
    """Run a script with these arguments and return its globals."""
    install()
    script, sys.argv = arguments[0], list(arguments)
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    return runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
