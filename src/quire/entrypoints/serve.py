"""The `quire serve` command: its flags, and the settings that they stand for."""

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

from quire.config.cli import FlagParser, add_engine_flags, engine_args_from
from quire.config.env import Env
from quire.errors import ConfigError
from quire.server.settings import ServerSettings, add_server_flags, server_flags, server_settings


def add_flags(parser: FlagParser) -> None:
    text = "Same as --model; several models share the server (docs/models_config.md)."
    parser.add_argument("model_tag", nargs="*", metavar="MODEL", help=text)
    add_server_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until the server is stopped. The server is imported only here, so that `--help` is quick."""
    from quire.config.plugins import load_plugins
    from quire.entrypoints.early_core import early_core
    from quire.server.http.sockets import check_is_free

    values = engine_args_from(args)
    load_plugins()  # plugins may register parsers that the settings name
    settings = server_settings(args, Env.read(os.environ))
    if settings.models.models_config is not None or len(args.model_tag) > 1:
        return _run_several(args.model_tag, values, server_flags(args), settings)
    for name in ("models_memory_gb", "models_sleep_after", "models_discard_after"):
        if getattr(settings.models, name) is not None:
            raise ConfigError(f"{name} is for several models: name them, or give --models-config")
    tag = next(iter(args.model_tag), None)
    if tag is not None and values.setdefault("model", tag) != tag:
        raise ConfigError(f"two models: {tag!r} and --model {values['model']!r}; give one")
    check_is_free(settings.http)
    with early_core(values, settings.http) as early:
        from quire.entrypoints.launch import launch  # here, while the process of the core imports the engine
        from quire.entrypoints.models_config import configure_server

        return launch(configure_server(values, settings), settings, early)


def _run_several(
    names: Sequence[str], engine: Mapping[str, Any], server: Mapping[str, Any], settings: ServerSettings
) -> int:
    """Serve the models of the command line and of --models-config, which may both name models."""
    from quire.entrypoints.launch_models import launch_models
    from quire.entrypoints.models_config import configure_models, entries_of_names, read_models
    from quire.server.http.sockets import check_is_free

    entries = entries_of_names(names)
    if (path := settings.models.models_config) is not None:
        parser = FlagParser(prog="quire serve")
        add_flags(parser)
        entries += read_models(path, parser)
    check_is_free(settings.http)
    models = configure_models(entries, engine=engine, server=server, env=Env.read(os.environ))
    return launch_models(models, settings)
