"""Mixture of experts in torch: routing and expert MLPs."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.checkpoint.facts import Routing
from quire.kernels.reference.activations import gated
from quire.kernels.reference.fp8 import Scaled, dequantize


class ExpertWeights(NamedTuple):
    """Weights of all experts of a layer. The first half of the rows of `gate_up` is the gate projection."""

    gate_up: Tensor
    """[experts, 2 * intermediate, hidden]"""
    down: Tensor
    """[experts, hidden, intermediate]"""
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate_up_scale: Tensor | None = None
    """Scales of weights in e4m3, in the format of `fp8.Scaled.scale`; None for other dtypes."""
    down_scale: Tensor | None = None

    @property
    def is_blocked(self) -> bool:
        return self.down_scale is not None and self.down_scale.ndim == self.down.ndim


class ExpertAdapters(NamedTuple):
    """LoRA matrices of the experts of a layer, for all adapter slots: `..._a` are [slots, experts, parts *
    rank, inputs] and `..._b` are [slots, experts, outputs, rank]. `gate_up` has two parts, `down` one."""

    gate_up_a: Tensor
    gate_up_b: Tensor
    down_a: Tensor
    down_b: Tensor
    tokens: Tensor
    """[T] int32, the adapter slot of each token, or -1."""


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose experts for T tokens from the router's logits [T, experts]. Return the expert ids [T, per_token]
    int32 and their weights [T, per_token] float32.

    `bias` [experts] affects the choice but not the weights.
    """
    wide = logits.float()
    scores = wide.softmax(-1) if routing.scoring == "softmax" else wide.sigmoid()
    choice = scores if bias is None else scores + bias.float()
    if routing.num_groups > 1:
        groups = choice.view(len(choice), routing.num_groups, -1)
        worth = groups.topk(routing.group_best, -1).values.sum(-1)
        best = worth.topk(routing.top_groups, -1).indices
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
        choice = groups.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)
    ids = choice.topk(routing.per_token, -1).indices
    weights = scores.gather(1, ids)
    if routing.renormalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids.to(torch.int32), weights * routing.scale


def mix(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    activation: str,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Return the weighted sum [T, hidden] of the chosen experts' outputs for x [T, hidden]; `ids` and
    `weights` [T, per_token] are those of `route`. A negative id is an expert of another rank."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in ids[ids >= 0].unique().tolist():
        tokens, place = (ids == expert).nonzero(as_tuple=True)
        gate_up = _dequantize(experts.gate_up[expert], _select(experts.gate_up_scale, expert), x.dtype)
        down = _dequantize(experts.down[expert], _select(experts.down_scale, expert), x.dtype)
        y = F.linear(x[tokens], gate_up, _select(experts.gate_up_bias, expert))
        if adapters is not None:
            slots = adapters.tokens[tokens]
            y += _lora(x[tokens], slots, adapters.gate_up_a[:, expert], adapters.gate_up_b[:, expert], 2)
        inner = gated(y, activation)
        y = F.linear(inner, down, _select(experts.down_bias, expert))
        if adapters is not None:
            y += _lora(inner, slots, adapters.down_a[:, expert], adapters.down_b[:, expert], 1)
        out.index_add_(0, tokens, y.float() * weights[tokens, place, None])
    return out.to(x.dtype)


def _lora(x: Tensor, slots: Tensor, a: Tensor, b: Tensor, num_parts: int) -> Tensor:
    """Return the LoRA outputs [T, outputs] of one expert for x [T, inputs] and the adapter slots [T] of its
    rows, with `a` [slots, parts * rank, inputs] and `b` [slots, outputs, rank]."""
    indices = slots.clamp(min=0)
    ranks = torch.einsum("ti,tri->tr", x.float(), a[indices].float()) * (slots >= 0)[:, None]
    parts = zip(ranks.chunk(num_parts, 1), b[indices].float().chunk(num_parts, 1), strict=True)
    return torch.cat([torch.einsum("tr,tor->to", *part) for part in parts], 1).to(x.dtype)


def _select(tensors: Tensor | None, expert: int) -> Tensor | None:
    return None if tensors is None else tensors[expert]


def _dequantize(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return weight if scale is None else dequantize(Scaled(weight, scale), dtype)
