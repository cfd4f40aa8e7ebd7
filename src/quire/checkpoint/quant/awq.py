"""AWQ: 4-bit weights with a scale and a zero point per group of inputs."""

from quire.checkpoint.quant.facts import QuantFacts, all_but
from quire.checkpoint.quant.schemes import Grouped
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

_VERSIONS = "gemm", "marlin", "exllama"
"""Versions with the supported weight layout; `gemv` has another layout."""


def read_awq(keys: ConfigReader) -> QuantFacts:
    version = str(keys.get("version") or "gemm").lower()
    if version not in _VERSIONS:
        raise ConfigError(
            f"{keys.source}: version is {version!r}; only the layout of gemm is supported: save the "
            'model again with version "gemm"'
        )
    symmetric = not keys.flag("zero_point", True)
    bits = keys.size("w_bit" if keys.get("bits") is None else "bits")
    group = group_size(keys, "q_group_size" if keys.get("group_size") is None else "group_size")
    scheme = Grouped(bits, group, symmetric=symmetric, act_order=False, layout="awq")
    return QuantFacts("awq", all_but(keys.names("modules_to_not_convert"), scheme))


def group_size(keys: ConfigReader, key: str) -> int:
    """Return the number of inputs that share a scale; -1: all inputs of an output."""
    return -1 if keys.get(key) in (None, -1) else keys.size(key)
