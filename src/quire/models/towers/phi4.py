"""Encoders of Phi-4-multimodal: SigLIP over an image and its tiles, and a conformer over audio."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.common import ViTFacts
from quire.checkpoint.multimodal.phi4 import Phi4AudioFacts, Phi4Facts
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm
from quire.layers.patch_positions import position_ids
from quire.layers.scope import Scope
from quire.layers.vision import Learned, PatchEmbedding, VisionMLP, patches_of, vision_layers
from quire.models.towers import Tower

_EPS = 1e-5
"""Epsilon of the norms of the conformer."""
_LONGEST = 500
"""Number of audio states that attend to each other; longer audio is cut into pieces of this length."""


def attend_to_valid(q: Tensor, k: Tensor, v: Tensor, is_valid: Tensor, window: None) -> Tensor:
    """Return the attention [T, heads, head_dim] within squares, in which all patches attend to the valid
    patches only: `is_valid` is [squares, patches]."""
    q, k, v = (part.unflatten(0, is_valid.shape).transpose(1, 2) for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=is_valid[:, None, None])
    return mixed.transpose(1, 2).flatten(0, 1)


class TiledViT(nn.Module):
    """SigLIP over squares that an image may fill only partly. Positions are relative to the filled part."""

    def __init__(self, facts: ViTFacts, depth: int, scope: Scope) -> None:
        super().__init__()
        self.facts, embeddings = facts, scope / "embeddings"
        kernel = (3, facts.patch, facts.patch)
        self.patches = PatchEmbedding(kernel, facts.hidden, embeddings / "patch_embedding")
        self.places = Learned(embeddings / "position_embedding" / "weight", facts.tokens, facts.hidden)
        self.layers = vision_layers(facts, depth, scope / "encoder" / "layers")
        for layer in self.layers:
            layer.attention.attend = attend_to_valid  # type: ignore[union-attr]

    def forward(self, pixels: Tensor, filled: Sequence[tuple[int, int]]) -> Tensor:
        """Encode squares [N, 3, side, side] to [N, side, side, hidden] of patches; `filled` has the numbers
        of rows and columns of patches that the image fills in each square."""
        side, device = self.facts.side, pixels.device
        x = self.patches(patches_of(pixels, self.facts.patch))
        masks, ids = torch.zeros(len(x), side, side, dtype=torch.bool), torch.zeros(len(x), side, side)
        for mask, places, (rows, columns) in zip(masks, ids, filled, strict=True):
            mask[:rows, :columns] = True
            starts = [
                (torch.arange(n) * (1.0 / torch.tensor(n))).clamp(max=1 - 1e-6) for n in (rows, columns)
            ]
            places[:rows, :columns] = position_ids(starts, side).view(rows, columns)
        x = x + self.places.vectors[ids.flatten(1).long().to(device)]
        is_valid, flat = masks.flatten(1).to(device), x.flatten(0, 1)
        for layer in self.layers:
            flat = layer(flat, is_valid)
        return flat.view(len(x), side, side, -1)


class Phi4ImageEncoder(nn.Module):
    """Encoder of images: pairs of rows and columns of patches are averaged, and each row ends with a
    separator."""

    def __init__(self, facts: Phi4Facts, scope: Scope) -> None:
        super().__init__()
        self.facts, hidden = facts, facts.vit.hidden
        is_published = scope.is_stored(f"{scope.name}.glb_GN")
        whole, row, *projection = (
            ("glb_GN", "sub_GN", "img_projection.0", "img_projection.2")
            if is_published
            else (
                "global_img_feature_extensor",
                "sub_img_feature_extensor",
                "img_projection_up",
                "img_projection_down",
            )
        )
        self.vit = TiledViT(facts.vit, facts.depth, scope / "img_processor")
        self.separator = Learned(scope / whole, 1, 1, hidden)
        self.row_end = Learned(scope / row, 1, 1, 1, hidden)
        self.project = VisionMLP(
            hidden, facts.size_out, scope, size_out=facts.size_out, names=tuple(projection), activation="gelu"
        )

    def forward(self, whole: Tensor, tiles: Tensor, filled: tuple[int, int]) -> Tensor:
        """Return the vectors of an image: its tiles, a separator, the whole image."""
        rows, columns, side = *tiles.shape[:2], self.facts.vit.side
        places = [(row * side, column * side) for row in range(rows) for column in range(columns)]
        parts = [
            tuple(min(max(n - at, 0), side) for n, at in zip(filled, place, strict=True)) for place in places
        ]
        sizes = [(side, side), *((high, wide) if high and wide else (side, side) for high, wide in parts)]
        pixels = torch.cat((whole[None].to(tiles.dtype), tiles.flatten(0, 1)))
        x = self.vit(pixels, sizes).permute(0, 3, 1, 2)
        squares = F.avg_pool2d(x, 2).permute(0, 2, 3, 1)
        grid = squares[1:].unflatten(0, (rows, columns)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        high, wide = (-(-size // 2) for size in filled)
        lines = self._lines(grid[:high, :wide]), self.separator.vectors[0], self._lines(squares[0])
        vectors: Tensor = self.project(torch.cat(lines))
        return vectors

    def _lines(self, grid: Tensor) -> Tensor:
        """Append the separator to each row of [rows, columns, hidden], and return all rows."""
        ends = self.row_end.vectors[0].expand(len(grid), 1, -1)
        return torch.cat((grid, ends), 1).flatten(0, 1)


class GatedHalfStep(nn.Module):
    """Gated feed-forward block with half a residual step."""

    def __init__(self, facts: Phi4AudioFacts, scope: Scope, names: tuple[str, str]) -> None:
        super().__init__()
        self.norm = LayerNorm(facts.hidden, _EPS, scope / "layer_norm")
        self.up = WholeLinear(facts.hidden, 2 * facts.intermediate, scope / names[0], bias=True)
        self.down = WholeLinear(facts.intermediate, facts.hidden, scope / names[1], bias=True)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.up(self.norm.normalize(x)).chunk(2, -1)
        return x + 0.5 * self.down(up * F.silu(gate))


class CausalConvolutionBlock(nn.Module):
    """Gated causal depthwise convolution over time, between products."""

    def __init__(self, facts: Phi4AudioFacts, scope: Scope) -> None:
        super().__init__()
        self.facts, size = facts, facts.hidden
        gate, inner = scope / "glu", scope / "dw_sep_conv_1d"
        self.norm = LayerNorm(size, _EPS, scope / "layer_norm")
        self.up = WholeLinear(size, 2 * size, gate / "ext_pw_conv_1d", bias=True)
        self.biases = nn.ModuleList(Learned(gate / name, 1, size, 1) for name in ("b1", "b2"))
        self.kernel = Learned(inner / "dw_conv" / "weight", size, 1, facts.kernel)
        self.kernel_bias = Learned(inner / "dw_conv" / "bias", size)
        self.mix = WholeLinear(size, size, inner / "pw_conv", bias=True)
        self.down = WholeLinear(size, size, scope / "ext_pw_conv_1d", bias=True)

    def forward(self, x: Tensor, count: int) -> Tensor:
        """Run the block on pieces of `count` states each, x [pieces * count, hidden]."""
        bias, gate_bias = (part.get_parameter("vectors").flatten() for part in self.biases)
        out, gate = self.up(self.norm.normalize(x)).chunk(2, -1)
        gated = ((out + bias) * F.silu(gate + gate_bias)).unflatten(0, (-1, count)).transpose(1, 2)
        padded = F.pad(gated, (self.facts.kernel - 1, 0))
        mixed = F.conv1d(padded, self.kernel.vectors, self.kernel_bias.vectors, groups=self.facts.hidden)
        return x + self.down(F.silu(self.mix(mixed.transpose(1, 2).flatten(0, 1).contiguous())))


class Phi4AudioLayer(nn.Module):
    """Feed-forward, attention, convolution, feed-forward, norm."""

    def __init__(self, facts: Phi4AudioFacts, scope: Scope) -> None:
        super().__init__()
        self.heads, size, attention = facts.heads, facts.hidden, scope / "self_attn"
        is_published = scope.is_stored(f"{attention.name}.linear_q.weight")
        out, qkv = ("linear_out", "linear_{}") if is_published else ("o_proj", "{}_proj")
        names = ("net.0.linear", "net.2") if is_published else ("gate_up_proj", "down_proj")
        self.first = GatedHalfStep(facts, scope / "feed_forward_in", names)
        self.norm = LayerNorm(size, _EPS, scope / "layer_norm_att")
        self.q, self.k, self.v = (
            WholeLinear(size, size, attention / qkv.format(part), bias=True) for part in "qkv"
        )
        self.out = WholeLinear(size, size, attention / out, bias=True)
        self.near = CausalConvolutionBlock(facts, scope / "conv")
        self.last = GatedHalfStep(facts, scope / "feed_forward_out", names)
        self.last_norm = LayerNorm(size, _EPS, scope / "layer_norm")

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        count = bias.shape[-1]
        x = self.first(x)
        normed = self.norm.normalize(x)
        q, k, v = (
            project(normed).view(-1, count, self.heads, x.shape[-1] // self.heads).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = self.near(x + self.out(mixed.transpose(1, 2).reshape(x.shape)), count)
        return self.last_norm.normalize(self.last(x))


class Phi4AudioEncoder(nn.Module):
    """Encoder of audio: convolutions that reduce time and mel bins, then a conformer."""

    def __init__(self, facts: Phi4AudioFacts, scope: Scope) -> None:
        super().__init__()
        self.facts, first = facts, scope / "embed"
        means = scope / "encoder_embedding"
        self.mean = Learned(means / "global_mean", facts.mels)
        self.inverse_deviation = Learned(means / "global_invstd", facts.mels)
        width, convolutions = facts.channels, first / "conv"
        self.convolutions = nn.ModuleList()
        for i in range(facts.halvings):
            self._add(convolutions / max(3 * i - 1, 0), width, 1, 3, 3)
            if i:
                self._add(convolutions / (3 * i), width, width, 1, 1)
        self.flat = WholeLinear(width * facts.num_bins, facts.hidden, first / "out", bias=True)
        places = scope / "relative_attention_bias_layer" / "bias_values" / "weight"
        self.places = Learned(places, 2 * facts.distance, facts.heads)
        self.layers = nn.ModuleList(
            Phi4AudioLayer(facts, scope / "encoders" / i) for i in range(facts.layers)
        )

    def _add(self, scope: Scope, *shape: int) -> None:
        self.convolutions.append(Learned(scope / "weight", *shape))
        self.convolutions.append(Learned(scope / "bias", shape[0]))

    def forward(self, mel: Tensor) -> Tensor:
        """Encode a spectrogram [frames, mels] to [states, hidden]."""
        mean = self.mean.vectors
        x = ((mel.to(mean.dtype) - mean) * self.inverse_deviation.vectors)[None]
        tensors = [part.get_parameter("vectors") for part in self.convolutions]
        for number, (weight, bias) in enumerate(zip(tensors[::2], tensors[1::2], strict=True)):
            if weight.shape[-1] == 1:
                x = F.relu(F.conv2d(x, weight, bias))
                continue
            x = F.conv2d(x, weight, bias, stride=2, padding=1, groups=len(x))
            x = x if number else F.relu(x)
        x = self.flat(x.transpose(0, 1).flatten(1).contiguous())
        count = len(x)
        size = min(count, _LONGEST)
        x = F.pad(x, (0, 0, 0, -count % size))
        places = self._bias(size)
        for layer in self.layers:
            x = layer(x, places)
        return x[:count]

    def _bias(self, count: int) -> Tensor:
        """Return the attention bias of relative positions, [heads, count, count]."""
        at, most = torch.arange(count, device=self.places.vectors.device), self.facts.distance
        relative = (at - at[:, None]).clamp(-most, most - 1)
        return self.places.vectors[relative + most].permute(2, 0, 1)


class Phi4(Tower):
    """Encoders of Phi-4-multimodal. An image has `pixels` [rows, columns, 3, side, side], its tiles; `whole`
    [3, side, side]; and `filled` [2], the rows and columns of patches of the tiles that it fills. Audio has
    `mel` [frames, mels]; with an array `beside_image` it uses the projector for audio beside images."""

    facts: Phi4Facts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        tower, scope = self.facts, scope / "model" / "embed_tokens_extend"
        sound = scope / "audio_embed"
        self.image = Phi4ImageEncoder(tower, scope / "image_embed")
        self.audio = Phi4AudioEncoder(tower.sound, sound / "encoder")
        is_published = sound.is_stored(f"{sound.name}.audio_projection.speech.0.weight")
        names = {"": ("up_proj_for_speech", "down_proj_for_speech")}
        names["beside_image"] = ("up_proj_for_vision_speech", "down_proj_for_vision_speech")
        if is_published:
            kinds = {"": "speech", "beside_image": "vision"}
            names = {
                key: (f"audio_projection.{kind}.0", f"audio_projection.{kind}.2")
                for key, kind in kinds.items()
            }
        size, size_out = tower.sound.hidden, tower.size_out
        self.projectors = nn.ModuleList(
            VisionMLP(size, size_out, sound, size_out=size_out, names=names[key], activation="gelu")
            for key in ("", "beside_image")
        )

    @staticmethod
    def heads(facts: Phi4Facts) -> tuple[int, ...]:
        return ()

    def _encode_one(self, item: Mapping[str, Tensor]) -> Tensor:
        if "mel" in item:
            vectors: Tensor = self.projectors["beside_image" in item](self.audio(item["mel"]))
            return vectors
        rows, columns = item["filled"].tolist()
        out: Tensor = self.image(item["whole"], item["pixels"], (rows, columns))
        return out

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        return [self._encode_one(item) for item in items]

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        """Return blank audio, or an image with tiles in one column."""
        if modality == "audio":
            frames = num_vectors * 2**self.facts.sound.halvings
            return {"mel": torch.zeros(frames, self.facts.sound.mels, device=self.device)}
        vit, side = self.facts.vit, self.facts.side
        count = max(1, round((num_vectors - side * (side + 1) - 1) / (side * (side + 1))))
        return {
            "pixels": torch.zeros(count, 1, 3, vit.image, vit.image, device=self.device),
            "whole": torch.zeros(3, vit.image, vit.image, device=self.device),
            "filled": torch.tensor([count * vit.side, vit.side], dtype=torch.int32, device=self.device),
        }

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        if modality == "audio":
            return item["mel"][0]
        return 1000 * (1 + item["pixels"][0] * item["pixels"][1])
