"""Vision encoders of dots.ocr and PaddleOCR-VL: 2D RoPE over grids of patches of any shape."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.dots import DotsFacts
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.scope import Scope
from quire.layers.vision import Learned, vision_layers
from quire.models.towers.grid import QWEN2_5, GridTower, PatchGrid, PatchMerger, interpolate

_DOTS_EPS, _PADDLE_EPS = 1e-6, 1e-5
"""Epsilon of the merger's norm."""


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
        tower, scope, bias = self.facts, self.scope, self.facts.qkv_bias
        self.first_norm = RMSNorm(tower.hidden, tower.norm_eps, scope / "patch_embed" / "patchifier" / "norm")
        names = ("fc1", "fc3", "fc2")
        style = replace(QWEN2_5, mlp_names=names, bias=bias, out_bias=bias, mlp_bias=bias)
        self.layers = vision_layers(tower, tower.depth, scope / "blocks", style)
        if tower.is_normed:
            self.last_norm = RMSNorm(tower.hidden, tower.norm_eps, scope / "post_trunk_norm")
        norm = LayerNorm(tower.hidden, _DOTS_EPS, scope / "merger" / "ln_q")
        self.merger = PatchMerger(tower, norm, scope / "merger" / "mlp", ("0", "2"))


class PaddleOCRVL(GridTower):
    """PaddleOCR-VL encoder: SigLIP with 2D RoPE and interpolated positions, final norm, merger."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(
            facts,
            scope,
            patch_bias=True,
            root="model.visual.vision_model",
            embed="embeddings.patch_embedding",
            is_flat=True,
        )
        tower, vision = self.facts, self.scope
        table = vision / "embeddings" / "position_embedding" / "weight"
        self.learned = Learned(table, tower.positions**2, tower.hidden)
        self.layers = vision_layers(tower, tower.depth, vision / "encoder" / "layers")
        self.last_norm = LayerNorm(tower.hidden, tower.norm_eps, vision / "post_layernorm")
        # The original checkpoints have another name than the ones transformers saves.
        is_first = scope.is_stored("mlp_AR.linear_1.weight")
        projector = scope / ("mlp_AR" if is_first else "model.projector")
        norm = LayerNorm(tower.hidden, _PADDLE_EPS, projector / "pre_norm")
        self.merger = PatchMerger(tower, norm, projector, ("linear_1", "linear_2"))

    def positions(self, places: Tensor, grids: Sequence[PatchGrid]) -> Tensor:
        return interpolate(self.learned.vectors, places, self.sizes(grids), align_corners=False)
