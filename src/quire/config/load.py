"""Validation of the settings for loading weights."""

from collections.abc import Mapping
from typing import Any

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.model import Checkpoint
from quire.config.machine import Machine
from quire.config.sections import LoadSection, ParallelSection
from quire.errors import ConfigError
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

FIXED_WEIGHTS = (
    "weights cannot be updated with GGUF files, sharded_state, cpu_offload_gb, EPLB, or a model that runs"
    " through transformers"
)


def load_section(
    args: dict[str, Any], facts: ArchFacts, parallel: ParallelSection, machine: Machine
) -> LoadSection:
    """Return the section with the user's settings; raise if cpu_offload_gb is set and not supported."""
    section = LoadSection(**args)
    size = section.cpu_offload_gb
    if not size:
        return section
    if machine.device == "cpu":
        warn_once(logger, f"cpu_offload_gb={size:g} has no effect on a CPU: all weights are in host memory")
        return LoadSection(**{**args, "cpu_offload_gb": 0})
    is_cross = facts.media is not None and facts.media.num_cross_states > 0
    cannot = {
        "an encoder model": facts.encoder is not None,
        "a model that runs through transformers": facts.borrowed is not None,
        "a model with cross-attention": is_cross,
        "enable_eplb, which moves experts between GPUs": parallel.enable_eplb,
    }
    for kind in (kind for kind, applies in cannot.items() if applies):
        raise ConfigError(
            f"cpu_offload_gb={size:g} is not supported with {kind}: leave it out; quantized weights take less"
            " memory (quantization='fp8' or 'int8')"
        )
    return section


def has_fixed_weights(checkpoint: Checkpoint, load: LoadSection) -> bool:
    """Return whether the format of the weights, or how they are loaded, rules out updates of a running
    model."""
    is_fixed = checkpoint.format == "gguf" or load.load_format == "sharded_state"
    return is_fixed or bool(load.cpu_offload_gb) or checkpoint.facts.borrowed is not None


def check_weight_transfer(transfer: Mapping[str, Any], checkpoint: Checkpoint, load: LoadSection) -> None:
    """Raise if `transfer`, a weight_transfer_config, is set for weights that cannot be updated."""
    if transfer and has_fixed_weights(checkpoint, load):
        raise ConfigError(f"weight_transfer_config: {FIXED_WEIGHTS}; leave one of them out")
