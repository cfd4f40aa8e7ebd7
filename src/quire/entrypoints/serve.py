"""The `quire serve` command: its flags, and the settings that they stand for."""

import argparse
import os

from quire.config.cli import FlagParser, add_engine_flags, engine_args_from
from quire.config.env import Env
from quire.errors import ConfigError
from quire.server.settings import add_server_flags, server_settings


def add_flags(parser: FlagParser) -> None:
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="Same as --model.")
    add_server_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until the server is stopped. The server is imported only here, so that `--help` is quick."""
    from quire.config.plugins import load_plugins
    from quire.configure import configure
    from quire.entrypoints.launch import launch
    from quire.server.api_keys import key_names

    values = engine_args_from(args)
    if args.model_tag is not None and values.setdefault("model", args.model_tag) != args.model_tag:
        raise ConfigError(f"two models: {args.model_tag!r} and --model {values['model']!r}; give one")
    load_plugins()  # it may register the parsers of the settings
    settings = server_settings(args, Env.read(os.environ))
    if key_names(settings.keys):
        values.setdefault("share_by_key", True)
    if settings.api.tokens_only:
        values["skip_tokenizer_init"] = True
    return launch(configure(values, usage="server"), settings)
