"""Vision encoder of dots.ocr: Qwen2-VL's with gated MLPs and RMS norms."""

from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.dots import DotsFacts
from quire.checkpoint.multimodal.qwen import GridFacts
from quire.kernels.reference.encoder import Spans
from quire.layers.norm import LayerNorm, Norm, RMSNorm
from quire.layers.scope import Scope
from quire.layers.vision import Angles, VisionAttention, VisionMLP
from quire.models.towers import qwen2_vl
from quire.models.towers.grid import GridTower

_EPS = 1e-6


class Layer(qwen2_vl.Layer):
    """Qwen2-VL layer with RMS norms, a gated MLP and optional biases."""

    def norm(self, facts: GridFacts, scope: Scope) -> Norm:
        return RMSNorm(facts.hidden, facts.norm_eps, scope)

    def mixer(self, facts: GridFacts, scope: Scope) -> VisionAttention:
        bias = facts.qkv_bias
        return VisionAttention(
            facts.hidden, facts.heads, scope, names=("qkv",), out="proj", bias=bias, out_bias=bias
        )

    def feed(self, facts: GridFacts, scope: Scope) -> VisionMLP:
        names, bias = ("fc1", "fc3", "fc2"), facts.qkv_bias
        return VisionMLP(
            facts.hidden, facts.intermediate, scope, names=names, activation=facts.activation, bias=bias
        )


class DotsOCR(GridTower):
    """dots.ocr encoder: patch embedding, norm, layers, optional final norm, merger."""

    facts: DotsFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(
            facts,
            scope,
            patch_bias=True,
            root="vision_tower",
            embed="patch_embed.patchifier.proj",
            is_flat=True,
        )
        tower, scope = self.facts, self.scope
        first = scope / "patch_embed" / "patchifier" / "norm"
        self.first_norm = RMSNorm(tower.hidden, tower.norm_eps, first)
        self.layers = nn.ModuleList(Layer(tower, scope / "blocks" / i) for i in range(tower.depth))
        last = scope / "post_trunk_norm"
        self.last_norm = RMSNorm(tower.hidden, tower.norm_eps, last) if tower.is_normed else None
        merger = scope / "merger"
        self.merger = qwen2_vl.Qwen2VLMerger(tower, LayerNorm(tower.hidden, _EPS, merger / "ln_q"), merger)

    def forward(self, x: Tensor, layout: tuple[Spans, Angles]) -> Tensor:
        """Encode patches [T, hidden] of all items to [T / merge^2, size_out]."""
        images, angles = layout
        x = self.first_norm.alone(x)
        for layer in self.layers:
            x = layer(x, images, angles)
        x = x if self.last_norm is None else self.last_norm.alone(x)
        out: Tensor = self.merger(x)
        return out
