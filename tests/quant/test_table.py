"""Every way to store weights x linear layers, fused ones, experts: as a plain model of the same numbers.

The same on a GPU: tests/gpu/test_formats.py. GGUF files are in test_gguf.py, MXFP4 is in test_mxfp4.py.
"""

from pathlib import Path

import pytest
from formats import SIZES, STORED
from requantized import error_of, loaded, requantize

from quire.config.quant import METHODS
from quire.config.quant.schemes import Scheme
from quire.quant.plain import Plain, PlainExperts

ELSEWHERE = {"modelopt": "test_fp8.py", "mxfp4": "test_mxfp4.py"}


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("name", STORED)
def test_logits(name: str, family: str, tmp_path: Path) -> None:
    """The scale of another part, expert or block; a layer that was left out; codes in another order."""
    config, pack = STORED[name]
    path, twin = requantize(family, tmp_path, config, pack, **SIZES[family])
    model = loaded(path)
    plain = {name for name, module in model.named_modules() if isinstance(module, Plain | PlainExperts)}
    unpacked = {"nf4", "fp4", "gptq act-order"}
    assert all("proj" not in each for each in plain) or name in unpacked, plain
    assert error_of(model, twin) < 5e-3


def test_nothing_is_left_out() -> None:
    methods = {config["quant_method"] for config, _ in STORED.values()}
    assert methods | {*ELSEWHERE} == {*METHODS}
    assert {scheme.__name__ for scheme in Scheme.__subclasses__()} == {
        "BitsAndBytes",
        "Fp8",
        "Grouped",
        "Int8",
        "Mxfp4",
    }, "a scheme that this table does not know"
