"""Vision encoder of Qwen2-VL: 2D RoPE, and attention over the whole image."""

from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.qwen import GridFacts
from quire.kernels.reference.encoder import Spans
from quire.layers.norm import LayerNorm, Norm
from quire.layers.scope import Scope
from quire.layers.vision import Angles, VisionAttention, VisionMLP
from quire.models.towers.grid import GridTower


class Layer(nn.Module):
    """Pre-norm layer: attention, then MLP, each with a residual."""

    def __init__(self, facts: GridFacts, scope: Scope) -> None:
        super().__init__()
        self.attention_norm = self.norm(facts, scope / "norm1")
        self.attention = self.mixer(facts, scope / "attn")
        self.mlp_norm = self.norm(facts, scope / "norm2")
        self.mlp = self.feed(facts, scope / "mlp")

    def norm(self, facts: GridFacts, scope: Scope) -> Norm:
        return LayerNorm(facts.hidden, facts.norm_eps, scope)

    def mixer(self, facts: GridFacts, scope: Scope) -> VisionAttention:
        return VisionAttention(facts.hidden, facts.heads, scope, names=("qkv",), out="proj")

    def feed(self, facts: GridFacts, scope: Scope) -> VisionMLP:
        return VisionMLP(facts.hidden, facts.intermediate, scope, activation=facts.activation)

    def forward(self, x: Tensor, images: Spans, angles: Angles) -> Tensor:
        x = x + self.attention(self.attention_norm.alone(x), images, angles)
        out: Tensor = x + self.mlp(self.mlp_norm.alone(x))
        return out


class Qwen2VLMerger(nn.Module):
    """Norm and MLP that merge squares of patches to vectors of the decoder's size."""

    def __init__(self, facts: GridFacts, norm: Norm, scope: Scope) -> None:
        super().__init__()
        self.norm = norm
        self.size = facts.hidden * facts.merge**2
        self.mlp = VisionMLP(self.size, self.size, scope / "mlp", size_out=facts.size_out, names=("0", "2"))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.norm.alone(x).view(-1, self.size))
        return out


class Qwen2VL(GridTower):
    """Qwen2-VL encoder: patch embedding, layers, merger."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope, patch_bias=False)
        tower, scope = self.facts, self.scope
        self.layers = nn.ModuleList(Layer(tower, scope / "blocks" / i) for i in range(tower.depth))
        merger = scope / "merger"
        self.merger = Qwen2VLMerger(tower, LayerNorm(tower.hidden, tower.norm_eps, merger / "ln_q"), merger)

    def forward(self, x: Tensor, layout: tuple[Spans, Angles]) -> Tensor:
        """Encode patches [T, hidden] of all items to [T / merge^2, size_out]."""
        images, angles = layout
        for layer in self.layers:
            x = layer(x, images, angles)
        out: Tensor = self.merger(x)
        return out
