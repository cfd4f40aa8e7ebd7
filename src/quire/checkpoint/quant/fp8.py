"""FP8 checkpoints: DeepSeek and AutoFP8 (`fp8`), and FBGEMM."""

from quire.checkpoint.quant.facts import QuantFacts, all_but
from quire.checkpoint.quant.schemes import Fp8
from quire.checkpoint.reader import ConfigReader

_BLOCK = [128, 128]


def read_fp8(keys: ConfigReader) -> QuantFacts:
    """Read the method `fp8`: one scale per tensor, or per block of 128 x 128 weights."""
    activations = keys.get("activation_scheme") or "dynamic"
    if activations not in ("static", "dynamic"):
        raise keys.wrong("activation_scheme", "'dynamic' or 'static'")
    block = keys.get("weight_block_size")
    if block not in (None, _BLOCK):
        raise keys.wrong("weight_block_size", f"{_BLOCK}, or null for one scale per tensor")
    if block is None:
        scheme = Fp8("tensor", "static" if activations == "static" else "token")
    elif activations == "static":
        raise keys.wrong("activation_scheme", "'dynamic', since weights have a scale per block")
    else:
        scheme = Fp8("block", "group", scale_name="weight_scale_inv")
    skipped = keys.names("modules_to_not_convert") + keys.names("ignored_layers")
    return QuantFacts("fp8", all_but(skipped, scheme))


def read_fbgemm(keys: ConfigReader) -> QuantFacts:
    """Read FBGEMM: one scale per output channel."""
    return QuantFacts("fbgemm_fp8", all_but(keys.names("modules_to_not_convert"), Fp8("channel", "token")))
