"""Packers of group-quantized weights in the layouts of AutoAWQ, AutoGPTQ and compressed-tensors."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.checkpoint.quant.schemes import Grouped
from quire.kernels.reference.int4 import Int4Codes

Stored = dict[str, Tensor]


def rounded(weight: Tensor, scheme: Grouped, group_of: Tensor | None = None) -> Int4Codes:
    """Return the nearest codes for inputs sorted by group."""
    inputs = weight.shape[1]
    group = inputs if scheme.group < 0 else scheme.group
    sorted_ = weight if group_of is None else weight[:, group_of.argsort(stable=True)]
    cut, most = sorted_.float().view(len(weight), -1, group), (1 << scheme.bits) - 1
    if scheme.symmetric:
        scales = cut.abs().amax(-1) / (most // 2)
        zeros = torch.full_like(scales, (most + 1) // 2)
    else:
        low, high = cut.amin(-1).clamp(max=0), cut.amax(-1).clamp(min=0)
        scales = (high - low) / most
        zeros = (-low / scales).round().clamp(1, most)
    scales = scales.half().float()
    codes = (cut / scales[..., None] + zeros[..., None]).round().clamp(0, most)
    return Int4Codes(codes.flatten(1).to(torch.uint8), scales, zeros.to(torch.int32), scheme.bits)


def in_words(codes: Tensor, bits: int, axis: int, order: list[int] | None = None) -> Tensor:
    """Pack successive codes along `axis` into words, the first in the lowest bits."""
    per = 32 // bits
    padded = list(codes.shape)
    padded[axis] = -(-padded[axis] // per) * per
    full = torch.zeros(padded, dtype=torch.int64)
    full.narrow(axis, 0, codes.shape[axis]).copy_(codes)
    cut = full.unflatten(axis, (-1, per))
    words = sum(cut.select(axis + 1, of) << bits * i for i, of in enumerate(order or range(per)))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def stored(weight: Int4Codes, scheme: Grouped, group_of: Tensor | None = None) -> Stored:
    """Return the tensors of a file. `weight` has its inputs sorted by group."""
    codes, scales, zeros, bits = weight
    if group_of is not None:
        codes = torch.empty_like(codes).index_copy_(1, group_of.argsort(stable=True), codes)
    if scheme.layout == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return {
            "qweight": in_words(codes.t(), bits, 1, order),
            "qzeros": in_words(zeros.t(), bits, 1, order),
            "scales": scales.t().half().contiguous(),
        }
    if scheme.layout == "compressed":
        packed = {"weight_packed": in_words(codes, bits, 1), "weight_scale": scales.half()}
        packed |= {} if scheme.symmetric else {"weight_zero_point": in_words(zeros, bits, 0)}
        packed |= {} if group_of is None else {"weight_g_idx": group_of.int()}
        return packed | {"weight_shape": torch.tensor(codes.shape)}
    inputs = torch.arange(codes.shape[1]) // weight.group
    return {
        "qweight": in_words(codes.t(), bits, 0),
        "qzeros": in_words(zeros.t() - int(scheme.layout == "gptq"), bits, 1),
        "scales": scales.t().half().contiguous(),
        "g_idx": (inputs if group_of is None else group_of).int(),
    }


def values(weight: Int4Codes, group_of: Tensor | None = None) -> Tensor:
    """Return the dequantized values of the file."""
    full = weight.values()
    return (
        full
        if group_of is None
        else torch.empty_like(full).index_copy_(1, group_of.argsort(stable=True), full)
    )


def shuffled(inputs: int, group: int, generator: torch.Generator) -> Tensor:
    """Return the group of each input where groups are not contiguous (act-order)."""
    return torch.randperm(inputs, generator=generator) // (inputs if group < 0 else group)


def quantize_files(path: Path, model: Any, scheme: Grouped, config: dict[str, Any]) -> None:
    """Rewrite a saved model with packed linear weights, and give `model` the dequantized values."""
    generator = torch.Generator().manual_seed(0)
    file = path / "model.safetensors"
    tensors, state = load_file(file), model.state_dict()
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight, prefix = tensors.pop(name), name.removesuffix("weight")
        group_of = shuffled(weight.shape[1], scheme.group, generator) if scheme.act_order else None
        codes = rounded(weight, scheme, group_of)
        tensors |= {prefix + suffix: tensor for suffix, tensor in stored(codes, scheme, group_of).items()}
        tensors_of_model(state, name).copy_(values(codes, group_of))
    save_file(tensors, file, metadata={"format": "pt"})
    output = json.loads((path / "config.json").read_text()) | {"quantization_config": config}
    (path / "config.json").write_text(json.dumps(output))


def tensors_of_model(state: dict[str, Tensor], name: str) -> Tensor:
    """Return the tensors of the model in memory for a name in the file; experts may be one tensor."""
    if name in state:
        return state[name]
    where, _, rest = name.partition(".experts.")
    index, part, _ = rest.split(".")
    if part == "down_proj":
        return state[f"{where}.experts.down_proj"][int(index)]
    both = state[f"{where}.experts.gate_up_proj"][int(index)]
    return both.chunk(2)[part == "up_proj"]
