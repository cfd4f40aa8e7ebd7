"""The switch of the batch-invariant mode, which the plans of GPU kernels read.

In this mode the result of a row has the same bits in any batch. A plan may then depend on the weight and on
the layer, and on the number of rows only where it does not change a sum: the shape of a tile, but neither
split-K and split-KV nor the instruction that multiplies.
"""

_switch = {"on": False}


def is_on() -> bool:
    """Whether GPU kernels are batch-invariant in this process."""
    return _switch["on"]


def switch(on: bool) -> None:
    """Turn the mode on or off, before a model is loaded; all engines of a process share it."""
    _switch["on"] = on
