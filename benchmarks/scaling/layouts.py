"""Layouts: a model over many GPUs, the duration of its steps, and whether it fits."""

import re
from dataclasses import dataclass

from shapes import SHAPES
from step_costs import LayerCost, Links, StepShape, correction, fitted

from quire.config.parallel import stage_layers
from quire.errors import ConfigError

GPU_BYTES, USED_SHARE, OTHER_BYTES = 150e9, 0.9, 4e9
"""Memory of an H200; the share of it that is used; activations, graphs and libraries."""


@dataclass(frozen=True, slots=True)
class GpuLayout:
    """Parallel sizes of a deployment."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: bool = False

    @property
    def num_gpus(self) -> int:
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        sizes = {"dp": self.dp, "tp": self.tp, "pp": self.pp}
        named = "".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
        return (named or "tp1") + ("ep" if self.ep else "")

    @staticmethod
    def of(text: str) -> "GpuLayout":
        """Parse `dp2tp8`, `tp8pp2` or `dp16tp1ep`; parts may be in any order."""
        parts = re.findall(r"(dp|tp|pp)([1-9][0-9]*)|(ep)", text)
        if not parts or "".join("".join(part) for part in parts) != text:
            raise ConfigError(f"{text!r} is not a layout such as tp8, tp8pp2, dp16tp8 or dp8tp1ep")
        return GpuLayout(**{name: int(size) for name, size, _ in parts if name}, ep="ep" in text)


class StepCost:
    """Duration of a step of one engine core: the measured time of its shard, and the time of collectives
    between GPUs."""

    def __init__(self, model: str, layout: GpuLayout, links: Links, all_to_all: bool = False) -> None:
        self.layout, self.links, self.all_to_all = layout, links, all_to_all
        self.shape = shape = SHAPES[model]
        ep = layout.tp * layout.dp if layout.ep else 1
        self.layer = LayerCost(shape, layout.tp, fitted(), ep)
        self.correction = correction(model, layout.tp)
        self.stages = stage_layers(shape.layers, layout.pp)

    def stage_s(self, step: StepShape, all_tokens: float = 0.0) -> list[float]:
        """Return the seconds of a step in each pipeline stage, including its send to the next stage.
        `all_tokens` is the number of tokens of all cores in lockstep."""
        factor = self.correction.at(step.num_tokens)
        shared = self.layout.ep and self.layout.dp > 1
        meeting = max(all_tokens, step.num_tokens) if shared else step.num_tokens
        by_kind = [self._layer_s(layer, step, meeting, factor) for layer in (0, self.shape.layers - 1)]
        stage_times = []
        for number, layers in enumerate(self.stages):
            plain = sum(layer < self.shape.dense_layers for layer in layers)
            took_s = plain * by_kind[0] + (len(layers) - plain) * by_kind[1]
            is_last = number == len(self.stages) - 1
            stage_times.append(
                took_s + (self._head_s(step, factor) if is_last else self._send_s(number, step))
            )
        return stage_times

    def _layer_s(self, layer: int, step: StepShape, meeting: float, factor: float) -> float:
        shape, tp, dp = self.shape, self.layout.tp, self.layout.dp
        computed_s = self.layer.products_s(layer, step) + self.layer.experts_s(layer, meeting)
        sum_s = self.links.all_reduce_s(2 * step.num_tokens * shape.hidden, tp)
        sums_s = 2 * sum_s
        if shape.is_mixture(layer) and self.layout.ep and dp > 1:
            sums_s = sum_s + 2 * self._dispatch_s(step, meeting)
        return factor * computed_s + self.layer.attention_s(step) + sums_s

    def _dispatch_s(self, step: StepShape, meeting: float) -> float:
        """Return the seconds to send the tokens of a step to the experts, or to send results back: to all
        ranks or, with all-to-all, only to those with the chosen experts."""
        layout, row_bytes = self.layout, 2 * self.shape.hidden
        size = layout.tp * layout.dp
        if self.all_to_all:
            copies = min(self.shape.experts_per_token, size) * (1 - 1 / size)
            return self.links.scattered_s(step.num_tokens / layout.tp * copies * row_bytes, size)
        return self.links.exchange_s(meeting * (1 - 1 / layout.dp) * row_bytes, size)

    def _head_s(self, step: StepShape, factor: float) -> float:
        logits = 4 * step.num_sampled * self.shape.vocab * (1 - 1 / self.layout.tp)
        return factor * self.layer.head_s(step) + self.links.exchange_s(logits, self.layout.tp)

    def _send_s(self, number: int, step: StepShape) -> float:
        """Return the seconds to send hidden states and residuals from each device to its peer."""
        tp, node = self.layout.tp, self.links.gpus_per_node
        other_node = (number * tp + tp - 1) // node != ((number + 2) * tp - 1) // node
        return self.links.sent_s(2 * 2 * step.num_tokens * self.shape.hidden, other_node=other_node)

    # ---- memory

    def weights_bytes(self) -> float:
        """Return the weight bytes of the GPU that has the most."""
        return max(self._stage_bytes(number) for number in range(len(self.stages)))

    def _stage_bytes(self, number: int) -> float:
        shape, tp = self.shape, self.layout.tp
        parts = tp * (self.layout.dp if self.layout.ep else 1)
        numbers = 0.0
        for layer in self.stages[number]:
            experts = shape.experts * shape.expert_weights if shape.is_mixture(layer) else 0
            numbers += (shape.attention_weights + shape.mlp_weights(layer)) / tp + experts / parts
        ends = {0, len(self.stages) - 1}
        times = (number in ends) + (number == 0 and len(ends) == 1 and not shape.tied)
        return numbers * shape.weight_bytes + times * 2 * shape.head_weights / tp

    def kv_tokens(self) -> int:
        """Return the number of KV cache tokens that fit beside the weights; negative if the weights do not
        fit."""
        room = USED_SHARE * GPU_BYTES - OTHER_BYTES - self.weights_bytes()
        return int(room // (max(map(len, self.stages)) * self.shape.kv_bytes(self.layout.tp)))

    def why_not(self, longest: int) -> str | None:
        """Return why this layout cannot run requests of `longest` tokens; None if it can."""
        shape, tp = self.shape, self.layout.tp
        if shape.heads % tp or (shape.kv_heads % tp and tp % shape.kv_heads):
            return f"tp {tp} does not divide {shape.heads} heads and {shape.kv_heads} KV heads"
        if self.layout.ep and not shape.experts:
            return "there are no experts"
        if (fits := self.kv_tokens()) < longest:
            have = (USED_SHARE * GPU_BYTES - OTHER_BYTES) / 1e9
            room = f"leave room for {fits:,} tokens" if fits > 0 else "do not fit"
            return f"{self.weights_bytes() / 1e9:.0f} GB of weights on a GPU with {have:.0f} GB {room}"
        return None
