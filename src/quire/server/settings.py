"""The settings of the HTTP server: where it listens, who may ask, what it answers and writes down."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from quire.config.args import checked_value
from quire.config.cli import HIDDEN_TITLE, add_foreign_flag, add_section_flags
from quire.config.env import Env, MediaEnv, StoreLimits
from quire.config.sections import FieldRule, Option, options_of
from quire.config.unsupported import UNBUILT, is_switch, refuse
from quire.data.params import MAX_SEQUENCES
from quire.errors import ConfigError
from quire.logs import get_logger, warn_once
from quire.server.api_keys import Key, read_keys
from quire.server.http.log_config import read_log_config
from quire.server.http.middleware import found
from quire.server.lora.modules import Module, read_modules
from quire.server.openai.parsing import Parsers

logger = get_logger(__name__)

_PREFIX = "server."
"""Keeps the server's names in a namespace apart from the engine's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSection:
    """Where the server listens, and how it ends."""

    host: str | None = None
    """Address to listen on. Default: every interface."""
    port: Annotated[int, FieldRule(at_least=0, at_most=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    uds: str | None = None
    """Path of a Unix socket to listen on, in place of host and port."""
    root_path: str = ""
    """Path under which a proxy offers this server."""
    api_server_count: Annotated[int | None, FieldRule(at_least=0, at_most=256, short="-asc")] = None
    """Processes that answer HTTP, all on one port and in front of the same engines. Default: as many as there
    are engines."""
    headless: bool = False
    """No API at all: engines for the server at data_parallel_address."""
    ssl_keyfile: str | None = None
    """Private key, for https."""
    ssl_certfile: str | None = None
    """Certificate, for https."""
    ssl_ca_certs: str | None = None
    """Certificates of the authorities that client certificates are checked against."""
    ssl_cert_reqs: Annotated[int, FieldRule(at_least=0, at_most=2)] = 0
    """Client certificates: 0 none, 1 checked if sent, 2 required."""
    ssl_ciphers: str | None = None
    """Allowed TLS ciphers, in OpenSSL's notation."""
    max_request_body_bytes: Annotated[int, FieldRule(at_least=1, human=True)] = 64 << 20
    """Largest body of a request; a larger one is answered with 413."""
    h11_max_incomplete_event_size: Annotated[int, FieldRule(at_least=1, human=True)] = 64 << 10
    """Most bytes of a request's first line and headers; more are answered with 431."""
    h11_max_header_count: Annotated[int, FieldRule(at_least=1)] = 128
    """Most headers of a request; more are answered with 431."""
    request_header_timeout: Annotated[float, FieldRule(above=0)] = 30.0
    """Seconds from the first byte of a request, or from a new connection, to the end of the headers."""
    request_body_timeout: Annotated[float, FieldRule(above=0)] = 30.0
    """Seconds between two pieces of a request's body."""
    max_connections: Annotated[int | None, FieldRule(at_least=1)] = None
    """Most open connections of each API process; further ones are answered with 503. Default: seven eighths
    of the files that a process may open, and at most 65536."""
    max_connections_per_address: Annotated[int | None, FieldRule(at_least=1)] = None
    """Most of them from one IPv4 address or IPv6 /64 network. Default: three quarters of max_connections."""
    shutdown_timeout: Annotated[float, FieldRule(at_least=0)] = 30.0
    """Seconds that running requests get to finish when the server is told to stop; 0 aborts them at once."""
    health_timeout: Annotated[float, FieldRule(above=0)] = 30.0
    """Seconds without progress of the engine after which /health says 503."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSection:
    """Who may ask."""

    api_key: tuple[str, ...] = field(default=(), repr=False)
    """Keys of which every request must carry one, as `Authorization: Bearer KEY`, or files of keys with
    names, weights and limits: `@FILE`, or a path that ends in .json, .toml, .yaml or .yml. Default:
    QUIRE_API_KEY, or no key."""
    api_key_exempt: str = "/health,/ping,/metrics"
    """Paths that need no key, with commas between them."""
    allow_credentials: bool = False
    """CORS: whether browsers may send cookies and keys from other origins."""
    allowed_origins: list[str] = field(default_factory=list)
    """CORS: JSON list of the origins whose web pages may ask. Default: all (`["*"]`) if there is an API key,
    else none but the server's own page."""
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    """CORS: JSON list of the methods that other origins may use."""
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    """CORS: JSON list of the headers that other origins may send."""
    middleware: Annotated[tuple[str, ...], FieldRule(repeats=True)] = ()
    """Import path of an ASGI class, or of an async function of a request and `call_next`, that stands around
    every request; may be given several times, the last one outermost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSection:
    """What is answered."""

    response_role: str = "assistant"
    """Role of the answer in a chat."""
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    """How a chat template gets a message's content: as one string, or as OpenAI's list of parts."""
    trust_request_chat_template: bool = False
    """Let requests bring a chat template of their own."""
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """JSON of chat template variables for requests that do not set them."""
    exclude_tools_when_tool_choice_none: bool = False
    """Leave a request's tools out of the prompt when its tool_choice is `none`."""
    enable_auto_tool_choice: bool = False
    """Let the model choose whether to call a tool; needs tool_call_parser."""
    tool_call_parser: str = ""
    """How this model writes tool calls: a name of docs/tools.md, or of the plugin."""
    tool_parser_plugin: str = ""
    """Python file that registers tool parsers."""
    reasoning_parser: str = ""
    """How this model marks its reasoning, which is then told apart from the answer."""
    reasoning_parser_plugin: str = ""
    """Python file that registers reasoning parsers."""
    return_tokens_as_token_ids: bool = False
    """Spell tokens in logprobs as `token_id:ID`."""
    enable_prompt_tokens_details: bool = False
    """Report in `usage` how many prompt tokens came out of the prefix cache."""
    enable_force_include_usage: bool = False
    """Report `usage` in every stream, chunk by chunk."""
    enable_request_id_headers: bool = False
    """Send X-Request-Id back."""
    enable_server_load_tracking: bool = False
    """Accepted for old scripts: /load always counts the running requests."""
    enable_tokenizer_info_endpoint: bool = False
    """Offer /tokenizer_info, which shows the chat template and the special tokens."""
    disable_fastapi_docs: bool = False
    """No /docs, /redoc and /openapi.json."""
    tokens_only: bool = False
    """Tokens in, tokens out: of the routes that generate only /inference/v1/generate, and /abort_requests;
    sets skip_tokenizer_init."""
    enable_per_request_metrics: bool = False
    """Tell the times of a request that has one answer, as `metrics` of the answer."""
    fingerprint_mode: Literal["full", "hash", "custom", "none"] = "full"
    """What `system_fingerprint` tells: version and a hash of what is served, the hash alone,
    fingerprint_value, or nothing."""
    fingerprint_value: str | None = None
    """The fingerprint of mode `custom`."""
    max_n: Annotated[int, FieldRule(at_least=1, at_most=16384)] = 128
    """Most answers that one request may ask for at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSection:
    """Which adapters the server answers with, and where they may come from."""

    lora_modules: tuple[str, ...] = ()
    """Adapters by name: `name=path`, or JSON with name, path and base_model_name; needs enable_lora. A path
    is a directory, a hub id or a url (s3://...)."""
    lora_roots: tuple[str, ...] = ()
    """Directories and urls below which clients may load adapters from. Default: those that hold the adapters
    of lora_modules, and the model's own."""
    lora_resolver_dir: str | None = None
    """Directory or url with a folder for each adapter: a model that is not known is looked for there by its
    name. Default: QUIRE_LORA_RESOLVER_CACHE_DIR, or none."""
    lora_resolver_hub: tuple[str, ...] = ()
    """Hub ids (org/name), or organizations, of adapters that clients may name. Default:
    QUIRE_LORA_RESOLVER_HF_REPO_LIST, or none."""
    lora_max_download_bytes: Annotated[int, FieldRule(at_least=1, human=True)] = 4 << 30
    """Largest adapter that is fetched from a url."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSection:
    """What is written down."""

    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "info"
    """Level of the HTTP server's own log."""
    disable_uvicorn_access_log: bool = False
    """No log line per HTTP request."""
    disable_access_log_for_endpoints: str = ""
    """Paths without such a line, with commas between them."""
    log_config_file: str | None = None
    """JSON file of a configuration for Python's `logging`, in the processes that answer HTTP. What it says of
    the logger `vllm` goes for `quire`."""
    enable_log_requests: bool = False
    """Log the id, parameters and prompt of every request."""
    enable_log_outputs: bool = False
    """Log the answers too; needs enable_log_requests."""
    max_log_len: Annotated[int | None, FieldRule(at_least=0)] = None
    """Most characters of a prompt or answer in the log. Default: all."""
    log_error_stack: bool = False
    """Log the stack of an error that is answered with 500 within the API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Everything the HTTP wing is told at the start."""

    http: HttpSection = field(default_factory=HttpSection)
    access: AccessSection = field(default_factory=AccessSection)
    api: ApiSection = field(default_factory=ApiSection)
    log: LogSection = field(default_factory=LogSection)
    adapters: AdapterSection = field(default_factory=AdapterSection)
    modules: tuple[Module, ...] = ()
    """Those of `lora_modules`, read."""
    changes_adapters: bool = False
    """Routes that load and unload adapters."""
    keys: tuple[Key, ...] = ()
    """Those of `api_key`, read."""
    max_sequences: int = MAX_SEQUENCES
    """Most sequences that one call may ask for: prompts times n."""
    max_audio_bytes: int = 25 << 20
    """Of a file that is to be written down."""
    dev_mode: bool = False
    """Routes for developers: sleep, pause, calls of workers."""
    responses: StoreLimits | None = None
    """Of the store of /v1/responses, if there is to be one."""

    @property
    def address(self) -> str:
        """Where a client finds the server."""
        if self.http.uds:
            return f"unix:{self.http.uds}"
        scheme = "https" if self.http.ssl_certfile else "http"
        host = self.http.host or "0.0.0.0"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.http.port}{self.http.root_path}"


SERVER_SECTIONS: dict[str, type] = {
    "http": HttpSection,
    "access": AccessSection,
    "api": ApiSection,
    "adapters": AdapterSection,
    "log": LogSection,
}

IGNORED: dict[str, bool] = {
    "data_parallel_supervisor_port": False,
    "enable_flash_late_interaction": True,
    "enable_log_deltas": True,
    "enable_offline_docs": True,
    "enable_ssl_refresh": True,
}
"""vLLM's server flags without a use here, and whether they are switches: accepted, with one warning."""


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Every flag of the server, one group per section. Call it before `add_engine_flags`, which leaves out
    what the server has made its own."""
    add_section_flags(parser, SERVER_SECTIONS, prefix=_PREFIX)
    hidden = parser.add_argument_group(HIDDEN_TITLE)
    for name in sorted(IGNORED.keys() | UNBUILT["server flag"].keys()):
        switch = IGNORED[name] if name in IGNORED else is_switch("server flag", name)
        add_foreign_flag(hidden, name, switch=switch, prefix=_PREFIX)


def add_api_flags(parser: argparse.ArgumentParser) -> None:
    """Those of what is answered, for commands that ask themselves. As above, before the engine's."""
    add_section_flags(parser, {"api": ApiSection, "adapters": AdapterSection}, prefix=_PREFIX)


def server_settings(namespace: argparse.Namespace, env: Env | None = None) -> ServerSettings:
    """The settings out of the flags that were given."""
    return make_settings(settings_given(namespace), env=env)


def settings_given(namespace: argparse.Namespace) -> dict[str, Any]:
    """The flags of the server that were given."""
    given = vars(namespace).items()
    return {name.removeprefix(_PREFIX): value for name, value in given if name.startswith(_PREFIX)}


def make_settings(given: Mapping[str, Any], *, env: Env | None = None) -> ServerSettings:
    """The settings out of names and values, checked; None counts as not given."""
    known, values = options_of(SERVER_SECTIONS), {}
    for name, value in given.items():
        if value is None:
            continue
        if name in known:
            check = _texts if known[name].kind is list else checked_value
            values[name] = check(known[name], value)
        elif name in UNBUILT["server flag"]:
            refuse("server flag", name, value)
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
    """What the deployer has set in place of flags."""
    if env is None:
        return {}
    found = {
        "api_key": (env.api_key,) if env.api_key else (),
        "lora_resolver_dir": env.adapters.lora_resolver_cache_dir,
        "lora_resolver_hub": tuple(sorted(paths(env.adapters.lora_resolver_hf_repo_list))),
    }
    return {name: value for name, value in found.items() if value}


def _texts(option: Option, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
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
    if settings.api.enable_auto_tool_choice and not settings.api.tool_call_parser:
        raise ConfigError("enable_auto_tool_choice needs tool_call_parser: give both")
    if (settings.api.fingerprint_mode == "custom") != (settings.api.fingerprint_value is not None):
        raise ConfigError("fingerprint_value goes with fingerprint_mode=custom: give both, or neither")
    if log.log_config_file is not None:
        read_log_config(log.log_config_file)
    for path in settings.access.middleware:
        found(path)
    parsers_of(settings.api)


def parsers_of(api: ApiSection) -> Parsers:
    """The parsers that are asked for; a ConfigError if there are none by these names."""
    return Parsers(
        reasoning=api.reasoning_parser,
        tools=api.tool_call_parser,
        auto=api.enable_auto_tool_choice,
        plugins=(api.reasoning_parser_plugin, api.tool_parser_plugin),
    )


def paths(text: str) -> frozenset[str]:
    """The paths of a setting such as `/health,/metrics`."""
    return frozenset(path.strip() for path in text.split(",") if path.strip())
