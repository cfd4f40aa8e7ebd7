"""Reads the models of a server with several models, from --models-config or from the command line."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config.cli import FlagParser, engine_args_from
from quire.config.engine import EngineConfig
from quire.config.env import Env
from quire.config.sections import options_of
from quire.config.server_sections import SERVER_SECTIONS
from quire.configure import configure
from quire.errors import ConfigError
from quire.server.api_keys import key_names
from quire.server.lora.modules import check_modules
from quire.server.settings import ServerSettings, make_settings, server_flags

PER_MODEL = ("api", "adapters")
"""Sections of the server with flags that may differ between models."""
_SHARED_ENGINE_FLAGS = ("device", "device_ids", "config")
"""Engine flags that cannot differ between the models of a server."""
_ONE_MODEL_FLAGS = ("model", "served_model_name", "tokenizer", "lora_modules")
"""Flags that describe one model, and so cannot be shared by several."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model to serve, with its flags. `where` (file and line) and `lines` (line by field) are for error
    messages."""

    where: str
    engine: Mapping[str, Any]
    server: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = False
    lines: Mapping[str, int] = field(default_factory=dict)

    def locate(self, error: ConfigError) -> ConfigError:
        """Return the error with a line number: that of the field that the message begins with, or else of the
        model."""
        message = str(error)
        first = re.match(r"\W*(\w+)", message)
        line = self.lines.get(first[1]) if first else None
        where = re.sub(r"line \d+", f"line {line}", self.where) if line else self.where
        return ConfigError(f"{where}: {message}")


@dataclass(frozen=True, slots=True)
class ConfiguredModel:
    """A model with all of its settings resolved."""

    config: EngineConfig
    settings: ServerSettings
    pinned: bool

    @property
    def name(self) -> str:
        return self.config.model.served_model_name[0]


def read_models(path: str, parser: FlagParser) -> list[ModelEntry]:
    """Read the file of --models-config. Errors name the file, the line and the field."""
    import yaml  # slow to import

    where = f"--models-config {path}"
    try:
        loader = yaml.SafeLoader(Path(path).expanduser().read_text(encoding="utf-8"))
        node = loader.get_single_node()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise _yaml_error(where, error) from None
    if not isinstance(node, yaml.SequenceNode) or not node.value:
        line = "" if node is None else f", line {node.start_mark.line + 1}"
        raise ConfigError(f"{where}{line}: the file must hold a list of models, `- model: NAME`")
    entries = []
    for item in node.value:
        at = f"{where}, line {item.start_mark.line + 1}"
        fields, lines = _fields(loader, item, at, where)
        entries.append(_read_entry(fields, lines, at, where, parser))
    return entries


def _yaml_error(where: str, error: Exception) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    line = "" if mark is None else f", line {mark.line + 1}"
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return ConfigError(f"{where}{line}: the file is not valid YAML: {problem}")


def _fields(loader: Any, item: Any, at: str, where: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the values of a model's YAML node by field, and the line number of each field. A plain name
    stands for the field `model`. `at` and `where` are the place for error messages."""
    if item.id == "scalar" and isinstance(name := _value(loader, item, where), str):
        return {"model": name}, {"model": item.start_mark.line + 1}
    if item.id != "mapping":
        raise ConfigError(f"{at}: a model must be a name, or fields such as `model: NAME`")
    fields, lines = dict[str, Any](), dict[str, int]()
    for key_node, value_node in item.value:
        key = str(_value(loader, key_node, where)).replace("-", "_")
        line = key_node.start_mark.line + 1
        if key in fields:
            raise ConfigError(f"{where}, line {line}: {key} is given twice, first in line {lines[key]}")
        fields[key], lines[key] = _value(loader, value_node, where), line
    return fields, lines


def _value(loader: Any, node: Any, where: str) -> Any:
    """Return the Python value of a YAML node; raise a ConfigError with `where` and its line if it is
    invalid."""
    try:
        return loader.construct_object(node, deep=True)
    except Exception as error:  # yaml raises several classes
        line = node.start_mark.line + 1
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{where}, line {line}: the file is not valid YAML: {problem}") from None


def _read_entry(
    fields: dict[str, Any], lines: dict[str, int], at: str, where: str, parser: FlagParser
) -> ModelEntry:
    pinned = fields.pop("pin", False)
    if not isinstance(pinned, bool):
        raise ConfigError(f"{where}, line {lines['pin']}: pin must be true or false, not {pinned!r}")
    if not isinstance(fields.get("model"), str) or not fields["model"]:
        line = f"{where}, line {lines['model']}" if "model" in lines else at
        raise ConfigError(f"{line}: model must be the name or the path of a model")
    shared = {name for name, option in options_of(SERVER_SECTIONS).items() if option.section not in PER_MODEL}
    namespace = argparse.Namespace()
    for name, value in fields.items():
        line = f"{where}, line {lines[name]}"
        if name in shared or name in _SHARED_ENGINE_FLAGS:
            flag = name.replace("_", "-")
            raise ConfigError(
                f"{line}: {name} is a setting of the whole server: give --{flag} on the command line"
            )
        parser.apply({name: value}, line, namespace)
    return ModelEntry(at, engine_args_from(namespace), server_flags(namespace), pinned, lines)


def entries_of_names(names: Sequence[str]) -> list[ModelEntry]:
    """Return an entry for each model named on the command line."""
    return [ModelEntry(f"model {name!r}", {"model": name}) for name in names]


def configure_models(
    entries: Sequence[ModelEntry], *, engine: Mapping[str, Any], server: Mapping[str, Any], env: Env
) -> list[ConfiguredModel]:
    """Resolve the settings of all models. Command-line flags apply to each model that does not set them."""
    for name in _ONE_MODEL_FLAGS:
        if engine.get(name) is not None or server.get(name):
            flag = name.replace("_", "-")
            raise ConfigError(
                f"--{flag} is for one model: with several, give it in the file of --models-config"
            )
    models = []
    for entry in entries:
        try:
            models.append(_configure(entry, engine, server, env))
        except ConfigError as error:
            raise entry.locate(error) from None
    _check_names(models, entries)
    return models


def _configure(
    entry: ModelEntry, engine: Mapping[str, Any], server: Mapping[str, Any], env: Env
) -> ConfiguredModel:
    settings = make_settings({**server, **entry.server}, env=env)
    config = configure_server({"enable_sleep_mode": True, **engine, **entry.engine}, settings)
    if config.parallel.nnodes > 1:
        raise ConfigError("nnodes: several models run on one machine only; serve this model on its own")
    return ConfiguredModel(config, settings, entry.pinned)


def configure_server(values: dict[str, Any], settings: ServerSettings) -> EngineConfig:
    """Resolve the settings of an engine from its flags. Some server settings, such as `tokens_only`, also set
    engine arguments."""
    check_modules(settings.modules, enabled=bool(values.get("enable_lora")), served=())
    if key_names(settings.keys):
        values.setdefault("share_by_key", True)
    if settings.api.tokens_only:
        values["skip_tokenizer_init"] = True
    config = configure(values, usage="server")
    check_modules(settings.modules, enabled=True, served=config.model.served_model_name)
    if not config.scheduler.has_targets and any(key.target for key in settings.keys):
        raise ConfigError(
            "api_key: keys have slo_ttft_ms or slo_itl_ms, which need --slo-ttft-ms or --slo-itl-ms"
        )
    return config


def _check_names(models: Sequence[ConfiguredModel], entries: Sequence[ModelEntry]) -> None:
    """Raise a ConfigError if a name stands for two models or adapters."""
    owners = dict[str, str]()
    for model, entry in zip(models, entries, strict=True):
        names = [*model.config.model.served_model_name, *(module.name for module in model.settings.modules)]
        for name in names:
            if name in owners:
                error = ConfigError(
                    f"served_model_name: {name!r} is also a name of {owners[name]}; give another"
                )
                raise entry.locate(error)
            owners[name] = entry.where
