"""The switch of the batch-invariant mode, which the plans of GPU kernels read.

In this mode the result of a row has the same bits in any batch. The plan of a kernel then depends on the
weight and the layer. It may depend on the number of rows only where this does not change a sum: in the tile
shape, but not in split-K, split-KV or the multiply instruction.
"""

_switch = {"on": False}


def is_on() -> bool:
    """Whether the batch-invariant mode is on in this process."""
    return _switch["on"]


def switch(on: bool) -> None:
    """Turn the mode on or off, before a model is loaded; all engines of a process share it."""
    _switch["on"] = on
