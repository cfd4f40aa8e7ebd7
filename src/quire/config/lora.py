"""Adapters: what was asked for, checked."""

from collections.abc import Mapping
from typing import Any

from quire.config.sections import LoRASection
from quire.errors import ConfigError

RANKS = 1, 8, 16, 32, 64, 128, 256, 320, 512
WHOLE = "embed_tokens", "lm_head"


def lora_section(given: Mapping[str, Any]) -> LoRASection:
    own = dict(given)
    rank, most = own.get("max_lora_rank", 16), own.get("max_loras", 1)
    if rank not in RANKS:
        raise ConfigError(
            f"max_lora_rank={rank} is not supported; known: {', '.join(map(str, RANKS))}: take the next"
            " above the largest rank of your adapters"
        )
    if own.setdefault("max_cpu_loras", most) < most:
        raise ConfigError(
            f"max_cpu_loras ({own['max_cpu_loras']}) must be at least max_loras ({most}): what is on the"
            " device is in host memory, too"
        )
    for name in own.get("lora_whole_modules", ()):
        if name not in WHOLE:
            raise ConfigError(f"lora_whole_modules has {name!r}; known: {', '.join(WHOLE)}")
    return LoRASection(**own)
