"""Packed weights of random bytes in GGUF layout."""

import numpy as np
import torch
from torch import Tensor

from quire.kernels.cpu.gguf import TYPES

HALVES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
    "NVFP4": (),
}
"""Offsets of the float16 numbers of a block, if not only at its start."""


def stored(kind: str, rows: int, columns: int, seed: int) -> Tensor:
    """Return random bytes with scales of a sensible size: every code and every small scale occurs."""
    form, rng = TYPES[kind], np.random.default_rng(seed)
    blocks = columns // form.stored_columns
    content = rng.integers(0, 256, (rows, blocks, form.stored_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        content[:, :, 0] = rng.integers(118, 126, (rows, blocks))
    for at in HALVES.get(kind, (0,)):
        scales = (rng.standard_normal((rows, blocks, 1)) * 0.05).astype(np.float16)
        content[:, :, at : at + 2] = scales.view(np.uint8)
    if kind == "MXFP4":  # a scale is the exponent of a power of two
        content[:, :, 0] = rng.integers(119, 127, (rows, blocks))
    if kind == "NVFP4":  # e4m3 scales without a sign
        content[:, :, :4] = rng.integers(0, 64, (rows, blocks, 4))
    return torch.from_numpy(content.reshape(rows, -1))
