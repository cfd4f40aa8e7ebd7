"""Settings from environment variables."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from quire.config.cpu_kernels import CPU_KERNELS
from quire.errors import ConfigError, nearest
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

PREFIXES = ("QUIRE", "VLLM")
NO_EFFECT = frozenset(
    f"VLLM_{name}"
    for name in re.findall(
        r"\w+",
        """
    CONFIGURE_LOGGING CONFIG_ROOT
    CPU_OMP_THREADS_BIND DEBUG_LOG_API_SERVER_RESPONSE DISABLE_COMPILE_CACHE
    DISABLE_REQUEST_ID_RANDOMIZATION DO_NOT_TRACK DP_MASTER_IP DP_MASTER_PORT DP_RANK DP_RANK_LOCAL DP_SIZE
    ENABLE_V1_MULTIPROCESSING
    KEEP_ALIVE_ON_ENGINE_DEATH LOGGING_COLOR LOGGING_CONFIG_PATH LOGGING_PREFIX MAX_COMPLETION_PROMPTS
    MAX_NUM_BAD_WORDS MAX_STOP_STRINGS MEDIA_CACHE MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
    NO_USAGE_STATS RAY_DP_PACK_STRATEGY SKIP_MODEL_NAME_VALIDATION USE_DEEP_GEMM
    USE_FLASHINFER_SAMPLER USE_MODELSCOPE USE_RUST_FRONTEND USE_V1 USE_V2_MODEL_RUNNER
    WORKER_MULTIPROC_METHOD XGRAMMAR_CACHE_MB
    """,
    )
)
"""Common variables of vLLM that have no effect in Quire."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of the responses that /v1/responses stores."""

    max_count: int = 4096
    """Maximum number of kept responses; above it, the oldest ones that do not run are dropped."""
    max_bytes: int = 256 << 20
    """Maximum bytes of all kept responses; above it, the oldest ones that do not run are dropped."""
    ttl_s: float = 86400.0
    """Seconds that a finished response is kept."""


@dataclass(frozen=True, slots=True)
class AdapterEnv:
    """LoRA adapters: where they are looked up by name, and whether clients may load and unload them."""

    allow_runtime_lora_updating: bool = False
    """Let clients load and unload LoRA adapters."""
    lora_resolver_cache_dir: str | None = None
    """Folder in which adapters are searched by name."""
    lora_resolver_hf_repo_list: str = ""
    """Hub ids or organizations of adapters that clients may request, separated by commas."""


@dataclass(frozen=True, slots=True)
class MediaEnv:
    """Fetching and decoding of media."""

    image_fetch_timeout: float = 5.0
    """Seconds to fetch one image, including DNS and all retries."""
    video_fetch_timeout: float = 30.0
    """Seconds to fetch one video."""
    audio_fetch_timeout: float = 10.0
    """Seconds to fetch one audio file."""
    media_fetch_max_retries: int = 3
    """Further attempts to fetch a media item after the first attempt failed."""
    media_url_allow_redirects: bool = True
    """Follow redirects of media urls."""
    media_loading_thread_count: int = 8
    """Number of decoding threads per API server process."""
    media_max_mb: float = 256.0
    """Maximum MiB of all media items of a request, as sent or fetched. All requests in flight together may
    have four times as much, and so may the items that are being decoded; other requests wait."""
    max_image_pixels: int = 178956970
    """Maximum pixels of an image; all frames of a video together may have twice as many."""
    max_audio_clip_filesize_mb: float = 25.0
    """Maximum MiB of an audio file to transcribe (/v1/audio/transcriptions)."""


@dataclass(frozen=True, slots=True)
class TimeoutEnv:
    """Time limits after which an engine counts as failed, or a connection as unused."""

    engine_ready_timeout_s: float = 600.0
    """Seconds until all workers of an engine must be ready."""
    execute_model_timeout_seconds: float = 300.0
    """Seconds for one step; an engine that takes longer counts as hung and is restarted."""
    http_timeout_keep_alive: float = 5.0
    """Seconds after which the server closes a connection without requests."""


@dataclass(frozen=True, slots=True)
class KVEnv:
    """KV events, and prefill and decode in different engines."""

    kv_events_use_int_block_hashes: bool = True
    """KV events name a block by the last 64 bits of its hash, as a number; off: by all 32 bytes."""
    nixl_side_channel_host: str = "localhost"
    """Address at which other engines read the prefixes that this engine has computed."""
    nixl_side_channel_port: int = 5600
    """Port at nixl_side_channel_host; each data-parallel rank adds its number to the port."""
    nixl_abort_request_timeout: float = 480.0
    """Seconds after which a prefix that no engine has read is dropped."""


@dataclass(frozen=True, slots=True)
class Env:
    """Settings from environment variables. Each field, also of the groups, is read from QUIRE_NAME, or else
    from VLLM_NAME."""

    cache_root: Path
    """Folder of downloaded models and compiled kernels."""
    logging_level: str = "INFO"
    """Lowest level of log lines: DEBUG, INFO, WARNING or ERROR."""
    log_stats_interval: float = 10.0
    """Seconds between two lines of statistics."""
    api_key: str | None = field(default=None, repr=False)
    """API key of the server, as `--api-key`."""
    cluster_token: str | None = field(default=None, repr=False)
    """Secret shared by the machines of one deployment: only processes that have it may join its data-parallel
    ranks or its nodes. Machines without it accept every peer, and warn."""
    host_ip: str | None = None
    """Address of this machine that other machines of the deployment connect to."""
    port: int | None = None
    """First port for messages between processes."""
    cpu_kvcache_space: float | None = None
    """Size of the KV cache on a CPU in GiB."""
    cpu_kernels: str = "native"
    """Instruction set of the C kernels: `native` (all that the CPU supports), `avx512` (AVX-512 without
    VNNI), `avx2`, `c` (plain C), or `torch` (no C kernels). An unsupported set is an error. For tests and for
    tracing a fault; every path gives the same answers up to rounding, `native` is the fastest."""
    allow_long_max_model_len: bool = False
    """Allow a `max_model_len` beyond the maximum of the checkpoint."""
    attention_backend: str | None = None
    """Attention backend, as `--attention-backend`."""
    batch_invariant: bool = False
    """Compute the same bits for a request in any batch, as `--batch-invariant`."""
    allow_insecure_serialization: bool = False
    """Allow pickles, which can run any code: functions of `collective_rpc`, and CUDA IPC handles of weight
    updates."""
    server_dev_mode: bool = False
    """Enable the routes for developers: sleep, pause, worker calls, resets."""
    max_n_sequences: int = 16384
    """Maximum number of sequences of one API call: prompts times n."""
    enable_responses_api_store: bool = False
    """Keep responses of /v1/responses in memory, so that they can be retrieved."""
    responses_store: StoreLimits = StoreLimits()
    adapters: AdapterEnv = AdapterEnv()
    media: MediaEnv = MediaEnv()
    timeouts: TimeoutEnv = TimeoutEnv()
    kv: KVEnv = KVEnv()
    pp_layer_partition: str = ""
    """Number of layers of each pipeline stage, as `8,8,6`."""
    plugins: tuple[str, ...] | None = None
    """Names of the plugins to load, separated by commas; empty: none. By default all installed plugins are
    loaded. The start is refused if a plugin of this list fails."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "Env":
        values: dict[str, Any] = {}
        for name, kind in _ENV_KINDS.items():
            variables = (f"{prefix}_{name.upper()}" for prefix in PREFIXES)
            is_set = environ.__contains__ if name in _MAY_BE_EMPTY else environ.get
            variable = next(filter(is_set, variables), "")
            if not variable:
                continue
            try:
                values[name] = kind(environ[variable])
            except ValueError:
                is_choice = isinstance(kind, _Choice)
                remedy = f"choose from {', '.join(kind.words)}" if is_choice else "unset it or correct it"
                raise ConfigError(
                    f"{variable}={environ[variable]!r} is not a valid value; {remedy}"
                ) from None
        cache_home = environ.get("XDG_CACHE_HOME") or "~/.cache"
        values.setdefault("cache_root", Path(cache_home).expanduser() / "quire")
        for group, (kind, prefix) in _GROUPS.items():
            names = {prefix + item.name: item.name for item in fields(kind)}
            values[group] = kind(**{names[name]: values.pop(name) for name in names.keys() & values.keys()})
        return cls(**values)


def _parse_switch(text: str) -> bool:
    if text.lower() not in ("0", "1", "true", "false"):
        raise ValueError(text)
    return text.lower() in ("1", "true")


def _parse_count(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


@dataclass(frozen=True, slots=True)
class _Choice:
    """A parser that accepts one of several words, in upper or lower case."""

    words: tuple[str, ...]

    def __call__(self, text: str) -> str:
        if text.lower() not in self.words:
            raise ValueError(text)
        return text.lower()


_PARSERS: dict[Any, Any] = {bool: _parse_switch, int: int, float: float, str: str}
"""Parsers of variables, by the type of a field."""
_SPECIAL_PARSERS: dict[str, Any] = {
    "cache_root": lambda text: Path(text).expanduser(),
    "cpu_kernels": _Choice(CPU_KERNELS),
    "max_image_pixels": _parse_count,
    "media_loading_thread_count": _parse_count,
    "plugins": lambda text: tuple(name.strip() for name in text.split(",") if name.strip()),
}
_MAY_BE_EMPTY = ("plugins",)
"""Variables for which an empty text is a value; other variables with an empty text count as unset."""
_GROUPS: dict[str, tuple[type, str]] = {
    "responses_store": (StoreLimits, "responses_store_"),
    "adapters": (AdapterEnv, ""),
    "media": (MediaEnv, ""),
    "timeouts": (TimeoutEnv, ""),
    "kv": (KVEnv, ""),
}
"""Fields that consist of several variables: their class, and the prefix of the variables' names."""


def _env_kinds() -> dict[str, Any]:
    """Return the parser of each variable, by its name without the prefix."""
    kinds = {}
    for section, prefix in ((Env, ""), *_GROUPS.values()):
        for name, hint in get_type_hints(section).items():
            if name not in _GROUPS:
                plain, *_ = get_args(hint) or (hint,)
                kinds[prefix + name] = _SPECIAL_PARSERS.get(name) or _PARSERS[plain]
    return kinds


_ENV_KINDS = _env_kinds()
_REPLACED = {"VLLM_USE_DEEP_GEMM": "block FP8 always uses Quire's own kernel"}
"""Variables that have no effect because Quire has the feature in another form."""


def warn_unknown(environ: Mapping[str, str]) -> None:
    """Warn once about each variable with a prefix of `PREFIXES` that Quire does not read."""
    known = {f"{prefix}_{name.upper()}" for prefix in PREFIXES for name in _ENV_KINDS}
    for name in sorted(environ.keys() - known):
        if not environ[name] or name.partition("_")[0] not in PREFIXES or name.startswith("QUIRE_TEST_"):
            continue
        if name in NO_EFFECT:
            reason = f": {_REPLACED[name]}" if name in _REPLACED else ""
            warn_once(logger, f"{name} has no effect in Quire{reason}")
        else:
            warn_once(logger, f"unknown environment variable {name} is ignored{nearest(name, sorted(known))}")
