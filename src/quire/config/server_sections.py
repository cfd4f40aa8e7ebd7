"""The sections of the HTTP server: addresses, access, API behaviour, LoRA adapters, models and logs."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from quire.config.field_rule import FieldRule


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSection:
    """Address, TLS, connection limits and shutdown of the server."""

    host: str | None = None
    """Address to listen on. Default: every interface."""
    port: Annotated[int, FieldRule(at_least=0, at_most=65535)] = 8000
    """Port to listen on; 0 takes a free port."""
    uds: str | None = None
    """Path of a Unix socket to listen on, in place of host and port."""
    root_path: str = ""
    """Path prefix under which a proxy serves this server. Requests may have it or not."""
    api_server_count: Annotated[int | None, FieldRule(at_least=0, at_most=256, short="-asc")] = None
    """Number of API processes, which share one port and the same engines. Default: one per engine."""
    headless: bool = False
    """Start engines without an API, for the server at data_parallel_address."""
    ssl_keyfile: str | None = None
    """Private key file, for https."""
    ssl_certfile: str | None = None
    """Certificate file, for https."""
    ssl_ca_certs: str | None = None
    """File of CA certificates that verify client certificates."""
    ssl_cert_reqs: Annotated[int, FieldRule(at_least=0, at_most=2)] = 0
    """Client certificates: 0 none, 1 checked if sent, 2 required."""
    ssl_ciphers: str | None = None
    """Allowed TLS ciphers, in OpenSSL's notation."""
    max_request_body_bytes: Annotated[int, FieldRule(at_least=1, human=True)] = 64 << 20
    """Maximum bytes of a request body; a larger body is answered with 413."""
    h11_max_incomplete_event_size: Annotated[int, FieldRule(at_least=1, human=True)] = 64 << 10
    """Maximum bytes of the request line and headers; more are answered with 431."""
    h11_max_header_count: Annotated[int, FieldRule(at_least=1)] = 128
    """Maximum number of headers of a request; more are answered with 431."""
    request_header_timeout: Annotated[float, FieldRule(above=0)] = 30.0
    """Maximum seconds from the first byte of a request, or from a new connection, to the end of the
    headers."""
    request_body_timeout: Annotated[float, FieldRule(above=0)] = 30.0
    """Maximum seconds between two chunks of a request body."""
    max_connections: Annotated[int | None, FieldRule(at_least=1)] = None
    """Maximum open connections of each API process; more are answered with 503. Default: seven
    eighths of the open-file limit of the process, at most 65536."""
    max_connections_per_address: Annotated[int | None, FieldRule(at_least=1)] = None
    """Maximum connections of each API process from one IPv4 address or IPv6 /64 network; more are refused.
    Default: three quarters of max_connections."""
    shutdown_timeout: Annotated[float, FieldRule(at_least=0)] = 30.0
    """Seconds that running requests have to finish at shutdown; 0 aborts them at once."""
    health_timeout: Annotated[float, FieldRule(above=0)] = 30.0
    """Seconds without engine progress after which /health returns 503."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSection:
    """API keys, CORS and middleware."""

    api_key: tuple[str, ...] = field(default=(), repr=False)
    """API keys; every request must send one as `Authorization: Bearer KEY`. A value may also be a file of
    keys with names, weights and limits: `@FILE`, or a path that ends in .json, .toml, .yaml or .yml. Default:
    QUIRE_API_KEY, or no key."""
    api_key_exempt: str = "/health,/ping,/metrics"
    """Comma-separated paths that need no key."""
    allow_credentials: bool = False
    """CORS: allow browsers to send cookies and keys from other origins."""
    allowed_origins: list[str] = field(default_factory=list)
    """CORS: JSON list of allowed origins. Default: all (`["*"]`) if there is an API key, else only the
    server's own page."""
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    """CORS: JSON list of allowed methods."""
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    """CORS: JSON list of allowed request headers."""
    middleware: Annotated[tuple[str, ...], FieldRule(repeats=True)] = ()
    """Import path of a middleware: an ASGI class, or an async function of a request and `call_next`. May be
    repeated; the last one is outermost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSection:
    """Chat templates, parsers and content of the responses."""

    response_role: str = "assistant"
    """Role of the chat response message."""
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    """Format of the message content passed to the chat template: one string, or OpenAI's list of parts."""
    trust_request_chat_template: bool = False
    """Accept a chat template in the request."""
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """JSON of chat template variables for requests that do not set them."""
    exclude_tools_when_tool_choice_none: bool = False
    """Leave a request's tools out of the prompt when its tool_choice is `none`."""
    enable_auto_tool_choice: bool | None = None
    """Let the model choose whether to call a tool. Default: if there is a tool call parser."""
    tool_call_parser: str = ""
    """Parser of the model's tool calls: a name from docs/tools.md, or a name that the plugin registers.
    Default: the parser that fits the chat template."""
    tool_parser_plugin: str = ""
    """Python file that registers tool parsers."""
    reasoning_parser: str = ""
    """Parser that separates the model's reasoning from the answer; `identity` leaves it in the answer.
    Default: the parser that fits the chat template."""
    reasoning_parser_plugin: str = ""
    """Python file that registers reasoning parsers."""
    reasoning_config: dict[str, Any] = field(default_factory=dict)
    """JSON of the marks of reasoning: reasoning_parser, reasoning_start_str, and reasoning_end_str, the text
    by which a spent thinking_token_budget ends the reasoning."""
    return_tokens_as_token_ids: bool = False
    """Show tokens in logprobs as `token_id:ID`."""
    enable_prompt_tokens_details: bool = False
    """Report in `usage` the number of prompt tokens found in the prefix cache."""
    enable_force_include_usage: bool = False
    """Report `usage` in every chunk of every stream."""
    enable_request_id_headers: bool = False
    """Return the X-Request-Id header in responses: that of the request, or a new id."""
    enable_server_load_tracking: bool = False
    """Accepted for compatibility: /load always counts the running requests."""
    enable_tokenizer_info_endpoint: bool = False
    """Enable /tokenizer_info, which returns the chat template and the special tokens."""
    disable_fastapi_docs: bool = False
    """Disable /docs, /redoc and /openapi.json."""
    tokens_only: bool = False
    """Tokens in, tokens out: the only generating route is /inference/v1/generate, next to /abort_requests;
    sets skip_tokenizer_init."""
    enable_per_request_metrics: bool = False
    """Return the timings of a request with a single choice, in `metrics` of the response."""
    fingerprint_mode: Literal["full", "hash", "custom", "none"] = "full"
    """Content of `system_fingerprint`: the version and a hash of the served configuration, the hash alone,
    fingerprint_value, or nothing."""
    fingerprint_value: str | None = None
    """Fingerprint for fingerprint_mode `custom`."""
    max_n: Annotated[int, FieldRule(at_least=1, at_most=16384)] = 128
    """Maximum `n` of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSection:
    """LoRA adapters to serve, and the locations from which more may be loaded."""

    lora_modules: tuple[str, ...] = ()
    """LoRA adapters: `name=path`, or JSON with name, path and base_model_name; needs enable_lora. A path is a
    directory, a hub id or a URL (s3://...)."""
    lora_roots: tuple[str, ...] = ()
    """Directories and URLs below which clients may load adapters. Default: the locations of the adapters in
    lora_modules, and the model's directory."""
    lora_resolver_dir: str | None = None
    """Directory or URL with one folder per adapter, in which an unknown model name is looked up. Default:
    QUIRE_LORA_RESOLVER_CACHE_DIR, or none."""
    lora_resolver_hub: tuple[str, ...] = ()
    """Hub ids (org/name) or organizations of adapters that clients may request. Default:
    QUIRE_LORA_RESOLVER_HF_REPO_LIST, or none."""
    lora_max_download_bytes: Annotated[int, FieldRule(at_least=1, human=True)] = 4 << 30
    """Maximum size of an adapter downloaded from a URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsSection:
    """Several models in one server: their file, their memory, and the sleep of idle models."""

    models_config: str | None = None
    """YAML file with a list of models to serve and the flags of each (docs/models_config.md)."""
    models_memory_gb: Annotated[float | None, FieldRule(above=0)] = None
    """GiB for all loaded models together: of each GPU, or of host memory on a CPU. The least recently used
    models sleep to stay within it. Default: 95 % of the memory."""
    models_sleep_after: Annotated[float | None, FieldRule(at_least=0)] = None
    """Idle seconds after which a model sleeps at level 1: it frees its cache, and on a GPU its weights move
    to host memory. Default: only when another model needs the memory."""
    models_discard_after: Annotated[float | None, FieldRule(at_least=0)] = None
    """Idle seconds after which a model sleeps at level 2: it frees its weights, too, and reads them again on
    the next request. Default: only when another model needs the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSection:
    """Log levels, access log and request logging."""

    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "info"
    """Log level of uvicorn."""
    disable_uvicorn_access_log: bool = False
    """Disable the log line of each HTTP request."""
    disable_access_log_for_endpoints: str = ""
    """Comma-separated paths without an access log line."""
    log_config_file: str | None = None
    """JSON file with a configuration of Python's `logging` for the API processes. The logger name `vllm` in
    it means `quire`."""
    enable_log_requests: bool = False
    """Log the id, parameters and prompt of every request."""
    enable_log_outputs: bool = False
    """Log the generated outputs too; needs enable_log_requests."""
    max_log_len: Annotated[int | None, FieldRule(at_least=0)] = None
    """Maximum characters of a prompt or output in the log. Default: all."""
    log_error_stack: bool = False
    """Log the stack trace of errors that the API answers with 500."""


SERVER_SECTIONS: dict[str, type] = {
    "http": HttpSection,
    "access": AccessSection,
    "api": ApiSection,
    "adapters": AdapterSection,
    "models": ModelsSection,
    "log": LogSection,
}
