"""Weights: storage and matmuls of linear layers and experts, one file per format."""

from quire.registry import LazyTable

SCHEMES = LazyTable(
    "weight scheme",
    {
        "BitsAndBytes": "quire.quant.bitsandbytes:BitsAndBytesFormat",
        "BlockFloat": "quire.quant.block_float:BlockFloatFormat",
        "Fp8": "quire.quant.fp8:Fp8Format",
        "Grouped": "quire.quant.int4:Int4Format",
        "Hqq": "quire.quant.hqq:HqqFormat",
        "Int8": "quire.quant.int8:Int8Format",
        "Mxfp4": "quire.quant.mxfp4:Mxfp4Format",
    },
)
"""Maps the class name of a quantization scheme to a callable that returns its `Format`, given the scheme and
the format of unquantized weights."""
