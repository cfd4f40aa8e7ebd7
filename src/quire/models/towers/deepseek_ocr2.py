"""Encoders of the second version of DeepSeek-OCR: SAM in windows of patches, and queries that attend to its
outputs."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.deepseek_ocr import DeepseekOCR2Facts, QueryEncoderFacts
from quire.kernels.reference.ops import rotate
from quire.layers.linear import WholeLinear
from quire.layers.norm import RMSNorm
from quire.layers.scope import Scope
from quire.layers.vision import Learned, VisionMLP
from quire.models.towers import Tower
from quire.models.towers.deepseek_ocr import Sam

Rotations = tuple[Tensor, Tensor]
"""Cosines and sines of the angles of each position, [positions, 1, head_dim / 2]."""


class QueryLayer(nn.Module):
    """Pre-norm layer of Qwen 2: attention with a mask, then MLP."""

    def __init__(self, facts: QueryEncoderFacts, scope: Scope) -> None:
        super().__init__()
        size, head_dim, attention = facts.hidden, facts.hidden // facts.heads, scope / "self_attn"
        self.facts = facts
        self.before, self.between = (
            RMSNorm(size, facts.norm_eps, scope / name)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        heads = {"q_proj": facts.heads, "k_proj": facts.kv_heads, "v_proj": facts.kv_heads}
        self.q, self.k, self.v = (
            WholeLinear(size, count * head_dim, attention / name, bias=True) for name, count in heads.items()
        )
        self.out = WholeLinear(size, size, attention / "o_proj")
        names = ("gate_proj", "up_proj", "down_proj")
        self.mlp = VisionMLP(
            size, facts.intermediate, scope / "mlp", names=names, activation="silu", bias=False
        )

    def forward(self, x: Tensor, rotations: Rotations, mask: Tensor) -> Tensor:
        """Run the layer on x [N, positions, hidden]; `mask` is [positions, positions]."""
        flat = x.flatten(0, 1)
        normed, head_dim = self.before.normalize(flat), self.facts.hidden // self.facts.heads
        q, k, v = (project(normed).view(*x.shape[:2], -1, head_dim) for project in (self.q, self.k, self.v))
        q, k = rotate(q, *rotations), rotate(k, *rotations)
        group = self.facts.heads // self.facts.kv_heads
        k, v = (part.repeat_interleave(group, 2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        flat = flat + self.out(mixed.transpose(1, 2).reshape(flat.shape))
        out: Tensor = flat + self.mlp(self.between.normalize(flat))
        return out.view(x.shape)


class QueryEncoder(nn.Module):
    """Patches that attend to each other, and queries after them that attend to all patches and to earlier
    queries."""

    def __init__(self, facts: DeepseekOCR2Facts, scope: Scope) -> None:
        super().__init__()
        self.facts, encoder = facts.encoder, facts.encoder
        self.queries = nn.ModuleList(
            Learned(scope / name / "weight", count, encoder.hidden) for name, count in facts.queries.items()
        )
        body = scope / "model" / "model"
        self.layers = nn.ModuleList(QueryLayer(encoder, body / "layers" / i) for i in range(encoder.layers))
        self.norm = RMSNorm(encoder.hidden, encoder.norm_eps, body / "norm")

    def forward(self, patches: Tensor) -> Tensor:
        """Encode patches [N, patches, hidden] to [N, queries, hidden]."""
        fewer, more = (part.get_parameter("vectors") for part in self.queries)
        queries = fewer if patches.shape[1] <= len(fewer) else more
        count, device = patches.shape[1], patches.device
        x = torch.cat((patches, queries.expand(len(patches), -1, -1)), 1)
        is_patch = torch.arange(x.shape[1], device=device) < count
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=device).tril() | is_patch
        mask = mask & ~(is_patch[:, None] & ~is_patch)
        rotations = self._rotations(x)
        for layer in self.layers:
            x = layer(x, rotations, mask)
        normed: Tensor = self.norm.normalize(x[:, count:].flatten(0, 1))
        return normed.view(len(x), len(queries), -1)

    def _rotations(self, x: Tensor) -> Rotations:
        dim = self.facts.hidden // self.facts.heads
        powers = torch.arange(0, dim, 2, device=x.device, dtype=torch.float32) / dim
        angles = torch.arange(x.shape[1], device=x.device)[:, None, None] / self.facts.theta**powers
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class DeepseekOCR2(Tower):
    """Encoder of DeepSeek-OCR 2: `pixels` is the whole image, [3, side, side], and `tiles` its tiles if it
    has any, [rows, columns, 3, side, side]. The tiles come first, then the whole image and a separator."""

    facts: DeepseekOCR2Facts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        tower, scope = self.facts, scope / "model"
        self.sam = Sam(tower.sam, scope / "sam_model")
        self.encoder = QueryEncoder(tower, scope / "qwen2_model")
        projector = scope / "projector" / "layers"
        self.project = WholeLinear(tower.encoder.hidden, tower.size_out, projector, bias=True)
        self.separator = Learned(scope / "view_seperator", tower.size_out)

    @staticmethod
    def heads(facts: DeepseekOCR2Facts) -> tuple[int, ...]:
        return ()

    def _encode_views(self, pixels: Tensor) -> Tensor:
        """Encode views [N, 3, side, side] to [N * queries, size_out]."""
        patches = self.sam(pixels).flatten(2).transpose(1, 2)
        vectors: Tensor = self.project(self.encoder(patches).flatten(0, 1))
        return vectors

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        out = []
        for item in items:
            parts = [self._encode_views(item["pixels"][None]), self.separator.vectors[None]]
            if "tiles" in item:
                parts.insert(0, self._encode_views(item["tiles"].flatten(0, 1)))
            out.append(torch.cat(parts))
        return out

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        """Return a blank image with tiles in one column, of 3/4 of its side as in the published model."""
        whole = self.facts.sam.image
        per_tile, per_image = self.facts.queries.values()
        tile, count = whole * 3 // 4, round((num_vectors - per_image - 1) / per_tile)
        item = {"pixels": torch.zeros(3, whole, whole, device=self.device)}
        if count > 0:
            item["tiles"] = torch.zeros(count, 1, 3, tile, tile, device=self.device)
        return item

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        return sum(shape[-1] ** 2 * (shape[0] * shape[1] if len(shape) > 3 else 1) for shape in item.values())
