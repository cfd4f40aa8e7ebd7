"""Registration of models, weight formats, backends, parsers and stat loggers by plugins.

A plugin is loaded in every process, also in those without torch. So classes are registered as
`"module:Class"` strings, which are imported when they are first used."""

from typing import Any

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.families import ALIASES, FAMILIES, Family
from quire.checkpoint.multimodal import MEDIA_FAMILIES
from quire.checkpoint.quant import METHODS
from quire.checkpoint.reader import ConfigReader
from quire.config.attention_backends import BACKENDS
from quire.config.extensions import TRANSFER_BACKENDS
from quire.data.stats import STAT_LOGGERS, IntervalStats
from quire.errors import ConfigError
from quire.models import MODELS
from quire.quant import SCHEMES
from quire.registry import imported_on_call
from quire.text.parsers import REASONING, TOOLS, reasoning_parser, tool_parser

__all__ = [
    "IntervalStats",
    "ModelRegistry",
    "reasoning_parser",
    "register_attention_backend",
    "register_quantization",
    "register_reasoning_parser",
    "register_stat_logger",
    "register_tool_parser",
    "register_weight_transfer",
    "tool_parser",
]


class ModelRegistry:
    """The supported architectures."""

    @staticmethod
    def get_supported_archs() -> list[str]:
        return sorted(MODELS)

    @staticmethod
    def register_model(model_arch: str, model_cls: Any, *, config: Any = None) -> None:
        """Add an architecture, or replace one. `model_cls` is a decoder of Quire's layers, as a class or as
        `"module:Class"`. It is called with the `ArchFacts` of the model and the `Scope` in which layers are
        built.

        `config` reads config.json into `ArchFacts`: a function, `"module:function"`, or the name of a known
        architecture that has the same keys. By default, the reader of the replaced architecture is used, or
        the reader of a known architecture with the same model_type."""
        if not isinstance(model_cls, str | type):
            kind = type(model_cls).__name__
            raise TypeError(f"model_cls must be a class or 'module:Class', not a value of type {kind}")
        if model_arch in MEDIA_FAMILIES:
            raise ConfigError(
                f"{model_arch!r} is a multimodal architecture, which plugins cannot replace: register another"
                " name, and set hf_overrides={'architectures': [...]}"
            )
        family = _family(model_arch, config)
        MODELS.register(model_arch, model_cls)
        FAMILIES[model_arch] = family
        ALIASES.pop(model_arch, None)


def _family(architecture: str, config: Any) -> Family:
    """Return the `Family` of a plugin's architecture: its model_type and the reader of its config.json."""
    if config is None:
        known = ALIASES.get(architecture, architecture)
        return FAMILIES.get(known) or Family(architecture, _read_by_model_type)
    if isinstance(config, str) and ":" not in config:
        if config not in FAMILIES:
            raise ConfigError(
                f"config={config!r} of {architecture!r} is not a known architecture; pass the name of one, a"
                " function, or 'module:function'"
            )
        return Family(architecture, FAMILIES[config].read)
    return Family(architecture, imported_on_call(f"config reader of {architecture!r}", config))


def _read_by_model_type(keys: ConfigReader) -> ArchFacts:
    """Read a config.json with the reader of a known architecture that has the same model_type."""
    model_type = keys.get("model_type")
    for family in FAMILIES.values():
        if family.model_type == model_type and family.read is not _read_by_model_type:
            return family.read(keys)
    raise ConfigError(
        f"{keys.source}: the plugin has registered its architecture without `config`, and no known one has"
        f" the model_type {model_type!r}; pass config= to register_model"
    )


def register_quantization(method: str, *, config: Any, scheme: str, format: Any) -> None:
    """Add a weight format. `config` reads the `quantization_config` of checkpoints with this quant_method
    into `QuantFacts`, as a function or as `"module:function"`. `scheme` is the name of the `Scheme` class
    that these facts give to a layer. `format` is the `Format` that builds the weights of layers with that
    scheme."""
    read = imported_on_call(f"config reader of the quantization {method!r}", config)
    SCHEMES.register(scheme, format)
    METHODS[method] = read


def register_attention_backend(name: str, backend: Any) -> None:
    """Add a backend for `--attention-backend`, as a class or as `"module:Class"`. Without that flag it is
    used if no other backend fits."""
    BACKENDS.register(name.upper(), backend)


def register_tool_parser(name: str, parser: Any) -> None:
    """Add a parser for `--tool-call-parser`, as a class or as `"module:Class"`."""
    TOOLS.register(name, parser)


def register_reasoning_parser(name: str, parser: Any) -> None:
    """Add a parser for `--reasoning-parser`, as a class or as `"module:Class"`."""
    REASONING.register(name, parser)


def register_stat_logger(name: str, logger: Any) -> None:
    """Add a function that engine cores call with `IntervalStats` every VLLM_LOG_STATS_INTERVAL seconds."""
    STAT_LOGGERS.register(name, logger)


def register_weight_transfer(name: str, transport: Any) -> None:
    """Add a `backend` of `--weight-transfer-config`, as a class or as `"module:Class"`: a subclass of
    `quire.worker.weight_transfer.WeightTransport`, or of vLLM's `WeightTransferEngine`."""
    TRANSFER_BACKENDS.register(name, transport)
