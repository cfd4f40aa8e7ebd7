"""What the deployer sets: environment variables, read once."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

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
    BATCH_INVARIANT CONFIGURE_LOGGING CONFIG_ROOT
    CPU_OMP_THREADS_BIND DEBUG_LOG_API_SERVER_RESPONSE DISABLE_COMPILE_CACHE
    DISABLE_REQUEST_ID_RANDOMIZATION DO_NOT_TRACK DP_MASTER_IP DP_MASTER_PORT DP_RANK DP_RANK_LOCAL DP_SIZE
    ENABLE_V1_MULTIPROCESSING HTTP_TIMEOUT_KEEP_ALIVE
    KEEP_ALIVE_ON_ENGINE_DEATH LOGGING_COLOR LOGGING_CONFIG_PATH LOGGING_PREFIX MAX_COMPLETION_PROMPTS
    MAX_NUM_BAD_WORDS MAX_STOP_STRINGS MEDIA_CACHE MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
    NO_USAGE_STATS PLUGINS RAY_DP_PACK_STRATEGY SKIP_MODEL_NAME_VALIDATION USE_DEEP_GEMM
    USE_FLASHINFER_SAMPLER USE_MODELSCOPE USE_RUST_FRONTEND USE_V1 USE_V2_MODEL_RUNNER
    WORKER_MULTIPROC_METHOD XGRAMMAR_CACHE_MB
    """,
    )
)
"""Variables of vLLM that people set, and that Quire has no use for."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How much the store of /v1/responses holds, and how long."""

    max_count: int = 4096
    max_bytes: int = 256 << 20
    ttl_s: float = 86400.0
    """For a response that is over."""


@dataclass(frozen=True, slots=True)
class AdapterEnv:
    """Where adapters are looked for by their names, and who may change them."""

    allow_runtime_lora_updating: bool = False
    """Let clients load and unload adapters."""
    lora_resolver_cache_dir: str | None = None
    lora_resolver_hf_repo_list: str = ""
    """Hub ids, with commas between them."""


@dataclass(frozen=True, slots=True)
class MediaEnv:
    """How media are fetched and decoded."""

    image_fetch_timeout: float = 5.0
    """Seconds for one image, from its name to its last byte, whatever is tried again."""
    video_fetch_timeout: float = 30.0
    audio_fetch_timeout: float = 10.0
    media_fetch_max_retries: int = 3
    media_url_allow_redirects: bool = True
    media_loading_thread_count: int = 8
    """Threads of each API process that decode and process."""
    media_max_mb: float = 256.0
    """MiB of one item, as it is sent or fetched, and of all of a request; four times as much of all requests
    that are on their way, and four times as much of what is decoded at once; others wait."""
    max_image_pixels: int = 178956970
    """Of an image, and of all frames of a video together twice as many."""
    max_audio_clip_filesize_mb: float = 25.0
    """MiB of a file that is to be written down (/v1/audio/transcriptions)."""


@dataclass(frozen=True, slots=True)
class Env:
    """What the deployer sets. Each is read as QUIRE_NAME, then as VLLM_NAME; so is each of a group."""

    cache_root: Path
    logging_level: str = "INFO"
    log_stats_interval: float = 10.0
    """Seconds between two lines of statistics."""
    api_key: str | None = field(default=None, repr=False)
    cluster_token: str | None = field(default=None, repr=False)
    """Secret that the machines of one deployment share: only processes that know it may join its
    data-parallel ranks or its nodes. Machines without it accept every peer, and warn."""
    host_ip: str | None = None
    port: int | None = None
    """First port for messages between processes."""
    cpu_kvcache_space: float | None = None
    """KV cache on a CPU, GiB."""
    cpu_kernels: str = "native"
    """Which instructions the C kernels use: `native` (all that the CPU has), `avx512` (AVX-512 without VNNI),
    `avx2`, `c` (plain C), or `torch` (no C kernels). What the CPU lacks is refused. For tests and for tracing
    a fault; every path gives the same answers up to rounding, `native` the fastest."""
    allow_long_max_model_len: bool = False
    attention_backend: str | None = None
    server_dev_mode: bool = False
    max_n_sequences: int = 16384
    """Most sequences that one call of the API may ask for: prompts times n."""
    enable_responses_api_store: bool = False
    """Keep responses of /v1/responses in memory, so that they can be asked for again."""
    responses_store: StoreLimits = StoreLimits()
    adapters: AdapterEnv = AdapterEnv()
    media: MediaEnv = MediaEnv()
    engine_ready_timeout_s: float = 600.0
    """For all workers of an engine to be there and ready."""
    execute_model_timeout_seconds: float = 300.0
    """For one step; an engine that takes longer counts as hung and is started again."""
    pp_layer_partition: str = ""
    """Layers of each stage of a pipeline, as `8,8,6`."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "Env":
        found: dict[str, Any] = {}
        for name, kind in _ENV_KINDS.items():
            variable = next(
                (f"{p}_{name.upper()}" for p in PREFIXES if environ.get(f"{p}_{name.upper()}")), ""
            )
            if not variable:
                continue
            try:
                found[name] = kind(environ[variable])
            except ValueError:
                is_choice = isinstance(kind, _Choice)
                remedy = f"choose from {', '.join(kind.words)}" if is_choice else "unset it or correct it"
                raise ConfigError(
                    f"{variable}={environ[variable]!r} is not a valid value; {remedy}"
                ) from None
        cache_home = environ.get("XDG_CACHE_HOME") or "~/.cache"
        found.setdefault("cache_root", Path(cache_home).expanduser() / "quire")
        for group, (kind, prefix) in _GROUPS.items():
            names = {prefix + each.name: each.name for each in fields(kind)}
            found[group] = kind(**{names[name]: found.pop(name) for name in names.keys() & found.keys()})
        return cls(**found)


def _switch(text: str) -> bool:
    if text.lower() not in ("0", "1", "true", "false"):
        raise ValueError(text)
    return text.lower() in ("1", "true")


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


@dataclass(frozen=True, slots=True)
class _Choice:
    """One of some words, in either case."""

    words: tuple[str, ...]

    def __call__(self, text: str) -> str:
        if text.lower() not in self.words:
            raise ValueError(text)
        return text.lower()


_ENV_KINDS: dict[str, Any] = {
    "cache_root": lambda text: Path(text).expanduser(),
    "logging_level": str,
    "log_stats_interval": float,
    "api_key": str,
    "cluster_token": str,
    "host_ip": str,
    "port": int,
    "cpu_kvcache_space": float,
    "cpu_kernels": _Choice(CPU_KERNELS),
    "allow_long_max_model_len": _switch,
    "attention_backend": str,
    "server_dev_mode": _switch,
    "max_n_sequences": int,
    "enable_responses_api_store": _switch,
    "responses_store_max_count": int,
    "responses_store_max_bytes": int,
    "responses_store_ttl_s": float,
    "allow_runtime_lora_updating": _switch,
    "lora_resolver_cache_dir": str,
    "lora_resolver_hf_repo_list": str,
    "image_fetch_timeout": float,
    "video_fetch_timeout": float,
    "audio_fetch_timeout": float,
    "media_fetch_max_retries": int,
    "media_url_allow_redirects": _switch,
    "media_loading_thread_count": _count,
    "media_max_mb": float,
    "max_image_pixels": _count,
    "max_audio_clip_filesize_mb": float,
    "engine_ready_timeout_s": float,
    "execute_model_timeout_seconds": float,
    "pp_layer_partition": str,
}
_GROUPS: dict[str, tuple[type, str]] = {
    "responses_store": (StoreLimits, "responses_store_"),
    "adapters": (AdapterEnv, ""),
    "media": (MediaEnv, ""),
}
"""Fields that are made of several variables, and what their names have in front of those of the class."""


def warn_unknown(environ: Mapping[str, str]) -> None:
    """Say once of each variable under our prefixes that nobody reads it."""
    known = {f"{prefix}_{name.upper()}" for prefix in PREFIXES for name in _ENV_KINDS}
    for name in sorted(environ.keys() - known):
        if not environ[name] or name.partition("_")[0] not in PREFIXES or name.startswith("QUIRE_TEST_"):
            continue
        if name in NO_EFFECT:
            warn_once(logger, f"{name} has no effect in Quire")
        else:
            warn_once(logger, f"unknown environment variable {name} is ignored{nearest(name, sorted(known))}")
