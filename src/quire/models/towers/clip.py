"""CLIP and SigLIP vision encoders over square images."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from quire.checkpoint.multimodal.parts import ViTFacts
from quire.kernels.reference.encoder import Spans, spans_of
from quire.layers.norm import LayerNorm
from quire.layers.scope import Scope
from quire.layers.vision import Learned, PatchEmbedding, VisionAttention, VisionMLP, patches_of

_NAMES = ("model.vision_tower.vision_model", "model.vision_tower", "model.vision_model")
"""Names of the encoder in checkpoints."""


def stored_scope(scope: Scope, names: Sequence[str], probe: str) -> Scope:
    """Return the scope of the first name under which the checkpoint has the tensor `probe`; by default of the
    first name."""
    stored = (name for name in names if scope.is_stored(f"{name}.{probe}"))
    return scope / next(stored, names[0])


class Layer(nn.Module):
    """Pre-norm layer: attention, then MLP, each with a residual."""

    def __init__(self, facts: ViTFacts, scope: Scope) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(facts.hidden, facts.norm_eps, scope / "layer_norm1")
        self.attention = VisionAttention(facts.hidden, facts.heads, scope / "self_attn")
        self.mlp_norm = LayerNorm(facts.hidden, facts.norm_eps, scope / "layer_norm2")
        self.mlp = VisionMLP(facts.hidden, facts.intermediate, scope / "mlp", activation=facts.activation)

    def forward(self, x: Tensor, images: Spans) -> Tensor:
        x = x + self.attention(self.attention_norm.alone(x), images)
        out: Tensor = x + self.mlp(self.mlp_norm.alone(x))
        return out


class ViT(nn.Module):
    """Patch and position embeddings, the first `depth` layers, and with `is_normed` the final norm.

    CLIP also has a class embedding at the front, a norm before the layers, and no bias of patches.
    """

    def __init__(self, facts: ViTFacts, depth: int, scope: Scope, *, is_normed: bool = False) -> None:
        super().__init__()
        scope = stored_scope(scope, _NAMES, "embeddings.patch_embedding.weight")
        self.facts = facts
        embeddings = scope / "embeddings"
        kernel = (3, facts.patch, facts.patch)
        self.patches = PatchEmbedding(
            kernel, facts.hidden, embeddings / "patch_embedding", bias=not facts.has_class
        )
        places = embeddings / "position_embedding" / "weight"
        self.places = Learned(places, facts.tokens, facts.hidden)
        self.order: Tensor | None = None
        """Position id of each patch; None for consecutive ids."""
        self.all: Learned | None = None
        self.first_norm: LayerNorm | None = None
        if facts.has_class:
            self.all = Learned(embeddings / "class_embedding", facts.hidden)
            self.first_norm = LayerNorm(facts.hidden, facts.norm_eps, scope / "pre_layrnorm")
        self.layers = nn.ModuleList(Layer(facts, scope / "encoder" / "layers" / i) for i in range(depth))
        self.last_norm: LayerNorm | None = None
        if is_normed:
            self.last_norm = LayerNorm(facts.hidden, facts.norm_eps, scope / "post_layernorm")

    def forward(self, pixels: Tensor, depths: Sequence[int] = ()) -> Tensor:
        """Encode [N, 3, side, side] to [N, tokens, hidden]; with `depths`, concatenate the outputs of these
        layers."""
        x = self.patches(patches_of(pixels, self.facts.patch))
        if self.all is not None:
            x = torch.cat((self.all.vectors.expand(len(x), 1, -1), x), 1)
        count = x.shape[1]
        places = self.places.vectors
        x = (x + (places if self.order is None else places[self.order])).flatten(0, 1)
        x = x if self.first_norm is None else self.first_norm.alone(x)
        images = spans_of(np.full(len(pixels), count, np.int32), x.device)
        states = [x]
        for layer in self.layers:
            x = layer(x, images)
            if depths:
                states.append(x)
        x = x if self.last_norm is None else self.last_norm.alone(x)
        out = torch.cat([states[depth] for depth in depths], -1) if depths else x
        return out.view(len(pixels), count, -1)
