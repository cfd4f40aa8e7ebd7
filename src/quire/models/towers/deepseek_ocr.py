"""Encoders of DeepSeek-OCR: SAM in windows of patches, and CLIP over its outputs."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.common import ViTFacts
from quire.checkpoint.multimodal.deepseek_ocr import DeepseekOCRFacts, SamFacts
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm
from quire.layers.patch_positions import resize_positions
from quire.layers.scope import Scope
from quire.layers.vision import Learned, PatchEmbedding, VisionMLP, VisionStyle, patches_of, vision_layers
from quire.models.towers import Tower

_EPS = 1e-6
"""Epsilon of the norms of SAM."""
_CLIP = VisionStyle(qkv=("qkv_proj",))
_RESIZED = {"mode": "bicubic", "antialias": True, "align_corners": False}
"""How position embeddings are interpolated for images of other sizes."""


class SamAttention(nn.Module):
    """Attention within images or windows, with learned relative positions of rows and of columns."""

    def __init__(self, facts: SamFacts, side: int, scope: Scope) -> None:
        super().__init__()
        self.heads, size = facts.heads, facts.hidden
        self.qkv = WholeLinear(size, 3 * size, scope / "qkv", bias=True)
        self.out = WholeLinear(size, size, scope / "proj", bias=True)
        self.relative = nn.ModuleList(
            Learned(scope / f"rel_pos_{axis}", 2 * side - 1, size // facts.heads) for axis in "hw"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention output for images or windows x [N, rows, columns, hidden]."""
        num, rows, columns, size = x.shape
        qkv = self.qkv(x.reshape(-1, size)).view(num, rows * columns, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        grid = q.unflatten(2, (rows, columns))
        by_row, by_column = (
            _relative(part.get_parameter("vectors"), count)
            for part, count in zip(self.relative, (rows, columns), strict=True)
        )
        rows_bias = torch.einsum("nhrcd,rkd->nhrck", grid, by_row)
        columns_bias = torch.einsum("nhrcd,ckd->nhrck", grid, by_column)
        bias = (rows_bias[..., None] + columns_bias[..., None, :]).flatten(4).flatten(2, 3)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).reshape(-1, size)).view(x.shape)


def _relative(table: Tensor, count: int) -> Tensor:
    """Return the vector of each pair of positions, [count, count, head_dim], from a table of distances."""
    if len(table) != 2 * count - 1:
        wide = table.float().T[None]
        table = F.interpolate(wide, 2 * count - 1, mode="linear")[0].T.to(table.dtype)
    places = torch.arange(count, device=table.device)
    return table[places[:, None] - places + count - 1]


class SamLayer(nn.Module):
    """Attention in windows, or in whole images, then an MLP, each with a norm before."""

    def __init__(self, facts: SamFacts, layer: int, scope: Scope) -> None:
        super().__init__()
        self.window = 0 if layer in facts.whole_layers else facts.window
        self.before, self.between = (LayerNorm(facts.hidden, _EPS, scope / f"norm{i}") for i in (1, 2))
        self.attention = SamAttention(facts, facts.sizes(layer), scope / "attn")
        self.mlp = VisionMLP(facts.hidden, 4 * facts.hidden, scope / "mlp", names=("lin1", "lin2"))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer on images x [N, rows, columns, hidden]."""
        normed = self.before.normalize(x.flatten(0, 2)).view(x.shape)
        x = x + (self._in_windows(normed) if self.window else torch.cat(list(map(self._whole, normed))))
        return x + self.mlp(self.between.normalize(x.flatten(0, 2))).view(x.shape)

    def _whole(self, image: Tensor) -> Tensor:
        """Attend within one image, since the scores of several would take much memory."""
        mixed: Tensor = self.attention(image[None])
        return mixed

    def _in_windows(self, x: Tensor) -> Tensor:
        num, rows, columns, size = x.shape
        side = self.window
        padded = F.pad(x, (0, 0, 0, -columns % side, 0, -rows % side))
        high, wide = padded.shape[1] // side, padded.shape[2] // side
        windows = padded.view(num, high, side, wide, side, size).transpose(2, 3).reshape(-1, side, side, size)
        mixed = self.attention(windows).view(num, high, wide, side, side, size).transpose(2, 3)
        return mixed.reshape(padded.shape)[:, :rows, :columns]


class Sam(nn.Module):
    """Image encoder of Segment Anything, with a neck and two convolutions that halve rows and columns."""

    def __init__(self, facts: SamFacts, scope: Scope) -> None:
        super().__init__()
        self.facts, neck = facts, scope / "neck"
        self.patches = PatchEmbedding(
            (3, facts.patch, facts.patch), facts.hidden, scope / "patch_embed" / "proj"
        )
        self.places = Learned(scope / "pos_embed", 1, facts.side, facts.side, facts.hidden)
        self.layers = nn.ModuleList(SamLayer(facts, i, scope / "blocks" / i) for i in range(facts.layers))
        first, second, third = facts.channels
        self.narrow = Learned(neck / 0 / "weight", first, facts.hidden, 1, 1)
        self.mix = Learned(neck / 2 / "weight", first, first, 3, 3)
        self.norms = nn.ModuleList(LayerNorm(first, _EPS, neck / i) for i in (1, 3))
        self.halvings = nn.ModuleList(
            Learned(scope / name / "weight", size_out, size_in, 3, 3)
            for name, size_in, size_out in (("net_2", first, second), ("net_3", second, third))
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode [N, 3, height, width] to [N, channels, rows, columns]."""
        rows, columns = (side // self.facts.patch for side in pixels.shape[2:])
        x = self.patches(patches_of(pixels, self.facts.patch))
        x = x + resize_positions(self.places.vectors[0], (rows, columns), **_RESIZED)
        x = x.unflatten(1, (rows, columns))
        for layer in self.layers:
            x = layer(x)
        x = x.permute(0, 3, 1, 2)
        for convolution, norm in zip((self.narrow, self.mix), self.norms, strict=True):
            weight = convolution.vectors
            x = F.conv2d(x, weight, padding=weight.shape[-1] // 2).permute(0, 2, 3, 1)
            x = norm.normalize(x.flatten(0, 2)).view(x.shape).permute(0, 3, 1, 2)  # type: ignore[operator]
        for halving in self.halvings:
            x = F.conv2d(x, halving.get_parameter("vectors"), stride=2, padding=1)
        return x


class ClipOverPatches(nn.Module):
    """CLIP's layers over given patch embeddings."""

    def __init__(self, facts: ViTFacts, scope: Scope) -> None:
        super().__init__()
        self.side, embeddings = facts.side, scope / "embeddings"
        self.all = Learned(embeddings / "class_embedding", facts.hidden)
        self.places = Learned(embeddings / "position_embedding" / "weight", facts.tokens, facts.hidden)
        self.norm = LayerNorm(facts.hidden, facts.norm_eps, scope / "pre_layrnorm")
        self.layers = vision_layers(facts, facts.layers, scope / "transformer" / "layers", _CLIP)

    def forward(self, patches: Tensor) -> Tensor:
        """Encode [N, hidden, rows, columns] to [N, rows * columns, hidden]."""
        (first, *_), (rows, columns) = (places := self.places.vectors), patches.shape[2:]
        table = places[1:].view(self.side, self.side, -1)
        positions = torch.cat((first[None], resize_positions(table, (rows, columns), **_RESIZED)))
        x = patches.flatten(2).transpose(1, 2)
        x = torch.cat((self.all.vectors.expand(len(x), 1, -1), x), 1) + positions
        x = self.norm.normalize(x.flatten(0, 1)).view(x.shape)
        return self.layers.on_squares(x)[:, 1:]


class DeepseekOCR(Tower):
    """Encoder of DeepSeek-OCR: `pixels` is the whole image, [3, side, side], and `tiles` its tiles if it has
    any, [rows, columns, 3, side, side]. Each row of embeddings ends with a newline."""

    facts: DeepseekOCRFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        tower, scope = self.facts, scope / "model"
        self.sam = Sam(tower.sam, scope / "sam_model")
        self.clip = ClipOverPatches(tower.clip, scope / "vision_model")
        width = tower.clip.hidden + tower.sam.channels[-1]
        self.project = WholeLinear(width, tower.size_out, scope / "projector" / "layers", bias=True)
        self.newline = Learned(scope / "image_newline", tower.size_out)
        self.separator = Learned(scope / "view_seperator", tower.size_out)

    @staticmethod
    def heads(facts: DeepseekOCRFacts) -> tuple[int, ...]:
        return ()

    def _encode_views(self, pixels: Tensor) -> Tensor:
        """Encode views [N, 3, side, side] to [N, rows, columns, size_out]."""
        seen = self.sam(pixels)
        both = torch.cat((self.clip(seen), seen.flatten(2).transpose(1, 2)), -1)
        out: Tensor = self.project(both.flatten(0, 1))
        return out.view(len(pixels), *seen.shape[2:], -1)

    def _lines(self, grid: Tensor) -> Tensor:
        """Append the newline to each row of [rows, columns, size_out], and return all rows."""
        newlines = self.newline.vectors.expand(len(grid), 1, -1)
        return torch.cat((grid, newlines), 1).flatten(0, 1)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        whole = self._encode_views(torch.stack([item["pixels"] for item in items]))
        out = []
        for view, item in zip(whole, items, strict=True):
            parts = [self._lines(view), self.separator.vectors[None]]
            if "tiles" in item:
                rows, columns, *_ = item["tiles"].shape
                tiles = self._encode_views(item["tiles"].flatten(0, 1)).unflatten(0, (rows, columns))
                parts.insert(0, self._lines(tiles.transpose(1, 2).flatten(0, 1).flatten(1, 2)))
            out.append(torch.cat(parts))
        return out

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        """Return a blank image with tiles in one column, of 5/8 of its side as in the published model."""
        whole = self.facts.sam.image
        tile = whole * 5 // 8
        left = num_vectors - self.facts.side(whole) * (self.facts.side(whole) + 1) - 1
        count = round(left / (self.facts.side(tile) * (self.facts.side(tile) + 1)))
        item = {"pixels": torch.zeros(3, whole, whole, device=self.device)}
        if count > 0:
            item["tiles"] = torch.zeros(count, 1, 3, tile, tile, device=self.device)
        return item

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        return sum(shape[-1] ** 2 * (shape[0] * shape[1] if len(shape) > 3 else 1) for shape in item.values())
