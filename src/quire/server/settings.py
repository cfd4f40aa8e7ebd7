"""Settings of the HTTP server: addresses, access, API behaviour, LoRA adapters and logs."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from quire.config.args import check_value
from quire.config.cli import HIDDEN_TITLE, add_foreign_flag, add_section_flags
from quire.config.env import Env, MediaEnv, StoreLimits, TimeoutEnv
from quire.config.sections import Option, options_of
from quire.config.server_sections import (
    SERVER_SECTIONS,
    AccessSection,
    AdapterSection,
    ApiSection,
    HttpSection,
    LogSection,
    ModelsSection,
)
from quire.config.unsupported import UNSUPPORTED, check_supported, is_switch
from quire.data.params import MAX_SEQUENCES
from quire.errors import ConfigError
from quire.logs import get_logger, warn_once
from quire.server.api_keys import Key, read_keys
from quire.server.http.log_config import read_log_config
from quire.server.http.middleware import load_middleware
from quire.server.lora.modules import LoRAModule, read_modules

if TYPE_CHECKING:
    from quire.server.openai.answer_pieces import Parsers

logger = get_logger(__name__)

_PREFIX = "server."
"""Prefix of the server's flags in the argparse namespace, which also holds the engine's flags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """All settings of the HTTP server."""

    http: HttpSection = field(default_factory=HttpSection)
    access: AccessSection = field(default_factory=AccessSection)
    api: ApiSection = field(default_factory=ApiSection)
    log: LogSection = field(default_factory=LogSection)
    adapters: AdapterSection = field(default_factory=AdapterSection)
    models: ModelsSection = field(default_factory=ModelsSection)
    modules: tuple[LoRAModule, ...] = ()
    """LoRA adapters parsed from the option `lora_modules`."""
    changes_adapters: bool = False
    """Whether the routes that load and unload LoRA adapters exist."""
    keys: tuple[Key, ...] = ()
    """API keys parsed from the option `api_key`."""
    max_sequences: int = MAX_SEQUENCES
    """Maximum sequences of one request (prompts times n); a request with more is refused."""
    max_audio_bytes: int = 25 << 20
    """Maximum bytes of an audio file to transcribe or translate; a larger file is refused."""
    keep_alive_s: float = 5.0
    """Seconds after which a connection without requests is closed."""
    dev_mode: bool = False
    """Whether the developer routes exist: sleep, pause, collective_rpc."""
    responses: StoreLimits | None = None
    """Limits (count, bytes, age) of the store of /v1/responses; None disables the store."""

    @property
    def address(self) -> str:
        if self.http.uds:
            return f"unix:{self.http.uds}"
        scheme = "https" if self.http.ssl_certfile else "http"
        host = self.http.host or "0.0.0.0"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.http.port}{self.http.root_path}"


IGNORED: dict[str, bool] = {
    "data_parallel_supervisor_port": False,
    "enable_flash_late_interaction": True,
    "enable_log_deltas": True,
    "enable_offline_docs": True,
    "enable_ssl_refresh": True,
}
"""Flags of vLLM's server that are ignored with a warning, by name; True if the flag is a switch."""


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag of the server, one group per section. Call it before `add_engine_flags`, which skips
    flags that exist already."""
    add_section_flags(parser, SERVER_SECTIONS, prefix=_PREFIX)
    hidden = parser.add_argument_group(HIDDEN_TITLE)
    for name in sorted(IGNORED.keys() | UNSUPPORTED["server flag"].keys()):
        switch = IGNORED[name] if name in IGNORED else is_switch("server flag", name)
        add_foreign_flag(hidden, name, switch=switch, prefix=_PREFIX)


def add_api_flags(parser: argparse.ArgumentParser) -> None:
    """Add the API and adapter flags, for commands without a server. Call it before `add_engine_flags`."""
    add_section_flags(parser, {"api": ApiSection, "adapters": AdapterSection}, prefix=_PREFIX)


def server_settings(namespace: argparse.Namespace, env: Env | None = None) -> ServerSettings:
    """Build the settings from the flags of the command line."""
    return make_settings(server_flags(namespace), env=env)


def server_flags(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the server flags of the command line, by name without the prefix."""
    flags = vars(namespace).items()
    return {name.removeprefix(_PREFIX): value for name, value in flags if name.startswith(_PREFIX)}


def make_settings(options: Mapping[str, Any], *, env: Env | None = None) -> ServerSettings:
    """Build and check the settings from `options`, the values by name; a value of None means the default."""
    known, values = options_of(SERVER_SECTIONS), {}
    for name, value in options.items():
        if value is None:
            continue
        if name in known:
            check = _check_strings if known[name].kind is list else check_value
            values[name] = check(known[name], value)
        elif name in UNSUPPORTED["server flag"]:
            check_supported("server flag", name, value)
        elif name in IGNORED:
            warn_once(logger, f"{name}={value!r} has no effect in Quire and is ignored")
        else:
            raise ConfigError(f"unknown server setting {name!r}")
    for name, value in _from_env(env).items():
        values.setdefault(name, value)
    keys = read_keys(values.get("api_key", ()))
    values.setdefault("allowed_origins", ["*"] if keys else [])
    settings = ServerSettings(
        keys=keys,
        modules=read_modules(values.get("lora_modules", ())),
        changes_adapters=env is not None and env.adapters.allow_runtime_lora_updating,
        max_sequences=MAX_SEQUENCES if env is None else env.max_n_sequences,
        max_audio_bytes=int((MediaEnv() if env is None else env.media).max_audio_clip_filesize_mb * 2**20),
        keep_alive_s=(TimeoutEnv() if env is None else env.timeouts).http_timeout_keep_alive,
        dev_mode=env is not None and env.server_dev_mode,
        responses=env.responses_store if env is not None and env.enable_responses_api_store else None,
        **{
            section: cls(**{item.name: values[item.name] for item in fields(cls) if item.name in values})
            for section, cls in SERVER_SECTIONS.items()
        },
    )
    _check(settings)
    return settings


def _from_env(env: Env | None) -> dict[str, Any]:
    if env is None:
        return {}
    settings = {
        "api_key": (env.api_key,) if env.api_key else (),
        "lora_resolver_dir": env.adapters.lora_resolver_cache_dir,
        "lora_resolver_hub": tuple(sorted(paths(env.adapters.lora_resolver_hf_repo_list))),
    }
    return {name: value for name, value in settings.items() if value}


def _check_strings(option: Option, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{option.name}={value!r} must be a JSON list of strings, such as '[\"*\"]'")
    return list(value)


def _check(settings: ServerSettings) -> None:
    http, log = settings.http, settings.log
    if bool(http.ssl_keyfile) != bool(http.ssl_certfile):
        raise ConfigError("ssl_keyfile and ssl_certfile go together: give both, or neither")
    if http.root_path and not http.root_path.startswith("/"):
        raise ConfigError(f"root_path={http.root_path!r} must start with '/'")
    if log.enable_log_outputs and not log.enable_log_requests:
        raise ConfigError("enable_log_outputs needs enable_log_requests: give both")
    if (settings.api.fingerprint_mode == "custom") != (settings.api.fingerprint_value is not None):
        raise ConfigError("fingerprint_value goes with fingerprint_mode=custom: give both, or neither")
    if log.log_config_file is not None:
        read_log_config(log.log_config_file)
    for path in settings.access.middleware:
        load_middleware(path)
    parsers_of(settings.api)


def parsers_of(api: ApiSection) -> "Parsers":
    """Return the reasoning parser and the tool call parser that the settings name; raise ConfigError for an
    unknown name."""
    from quire.server.openai.answer_pieces import Parsers  # slow to import
    from quire.text.parsers.reasoning_marks import ReasoningMarks

    marks = ReasoningMarks.of(api.reasoning_config)
    if api.reasoning_parser and marks.parser and api.reasoning_parser != marks.parser:
        raise ConfigError(
            f"reasoning_parser is given twice: {api.reasoning_parser!r}, and {marks.parser!r} in "
            "reasoning_config; leave one out"
        )
    parsers = Parsers(
        reasoning=api.reasoning_parser or marks.parser,
        tools=api.tool_call_parser,
        auto=api.enable_auto_tool_choice,
        plugins=(api.reasoning_parser_plugin, api.tool_parser_plugin),
        marks=marks,
    )
    marks.check(parsers.reasoning or "")
    return parsers


def paths(text: str) -> frozenset[str]:
    """Return the paths of a comma-separated setting such as `/health,/metrics`."""
    return frozenset(path.strip() for path in text.split(",") if path.strip())
