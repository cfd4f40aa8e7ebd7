"""The table of attention backends. Their modules are imported on first use; an unknown name is an error at
once."""

from quire.errors import ConfigError, nearest
from quire.logs import get_logger, warn_once
from quire.registry import LazyTable

logger = get_logger(__name__)

BACKENDS = LazyTable(
    "attention backend",
    {
        "CPU_ATTN": "quire.attention.cpu_attn:CPUAttention",
        "TRITON_ATTN": "quire.attention.triton_attn:TritonAttention",
        "FLASH_ATTN": "quire.attention.flash_attn:FlashAttention",
        "FLASHINFER": "quire.attention.flashinfer:FlashInfer",
        "TORCH_SDPA": "quire.attention.torch_sdpa:TorchSDPA",
    },
)
"""Backends in order of preference."""
_RETIRED = ("XFORMERS",)


def check_backend(name: str) -> str:
    """Return the name of a backend in upper case, or AUTO; raise if there is no backend of this name."""
    name = name.upper()
    if name in _RETIRED:
        warn_once(logger, f"attention backend {name} is retired; the default is used in its place")
        return "AUTO"
    if name != "AUTO" and name not in BACKENDS:
        raise ConfigError(
            f"unknown attention backend {name!r}{nearest(name, list(BACKENDS))}; known: AUTO, "
            f"{', '.join(BACKENDS)}"
        )
    return name
