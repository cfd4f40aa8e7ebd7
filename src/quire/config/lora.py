"""Validation of LoRA settings."""

from collections.abc import Mapping
from typing import Any

from quire.config.sections import LoRASection
from quire.errors import ConfigError

RANKS = 1, 8, 16, 32, 64, 128, 256, 320, 512
WHOLE = "embed_tokens", "lm_head"


def lora_section(args: Mapping[str, Any]) -> LoRASection:
    settings = dict(args)
    rank, most = settings.get("max_lora_rank", 16), settings.get("max_loras", 1)
    if rank not in RANKS:
        raise ConfigError(
            f"max_lora_rank={rank} is not supported; known: {', '.join(map(str, RANKS))}: take the next"
            " above the largest rank of your adapters"
        )
    if settings.setdefault("max_cpu_loras", most) < most:
        raise ConfigError(
            f"max_cpu_loras ({settings['max_cpu_loras']}) must be at least max_loras ({most}): adapters on"
            " the device are in host memory, too"
        )
    for name in settings.get("lora_whole_modules", ()):
        if name not in WHOLE:
            raise ConfigError(f"lora_whole_modules has {name!r}; known: {', '.join(WHOLE)}")
    return LoRASection(**settings)
