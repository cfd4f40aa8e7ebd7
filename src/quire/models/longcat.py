"""LongCat-Flash: two attention + MLP blocks per layer, experts parallel to the second, identity experts."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.expert_router import ExpertRouter
from quire.layers.mlp import MLP
from quire.layers.moe import ChoiceBias, Experts
from quire.layers.norm import RMSNorm, norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import deepseek
from quire.models.decoder import Decoder, refuse_pipeline


class LongcatMixture(nn.Module):
    """MoE block with identity experts, which return their input. `scope` is that of the layer."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        moe, scope = facts.moe, scope / "mlp"
        assert moe is not None
        self.num_experts, num = moe.experts, moe.experts + moe.num_identity_experts
        self.choice = ChoiceBias(num, scope / "router" / "e_score_correction_bias", in_row=False)
        self.router = ExpertRouter(facts.hidden, replace(moe, experts=num), scope / "router" / "classifier")
        self.experts = Experts(moe, facts.hidden, facts.activation, scope)
        self.sum = scope.group.all_reduce

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        ids, weights = self.router(x, self.choice.bias, batch)
        is_idle = ids >= self.num_experts
        identity_weight = torch.where(is_idle, weights, 0.0).sum(1, keepdim=True)
        ids = torch.where(is_idle, self._find_unused(ids), ids)
        out: Tensor = self.experts(x, ids, torch.where(is_idle, 0.0, weights), batch)
        return self.sum(out) + x * identity_weight.to(x.dtype)

    def _find_unused(self, ids: Tensor) -> Tensor:
        """Return for each token as many ids of experts that it did not choose as it chose experts, in the
        shape of `ids`. They replace identity experts, since an expert must not appear twice for a token."""
        free = torch.ones(len(ids), self.num_experts + 1, device=ids.device)
        free.scatter_(1, ids.long().clamp(max=self.num_experts), 0.0)
        return free[:, :-1].topk(ids.shape[1], 1).indices.to(ids.dtype)


class LatentNorm(RMSNorm):
    """RMS norm of KV latents with the model's latent scale folded into its weight."""

    scale = 1.0

    def finish(self) -> None:
        self.weight.mul_(self.scale)


class Attention(deepseek.Attention):
    """DeepSeek attention with a scale on KV latents."""

    LatentNorm = LatentNorm

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        assert facts.mla is not None
        norm = self.mix.norm
        assert isinstance(norm, LatentNorm)
        norm.scale = facts.mla.scales[1]


@dataclass(slots=True)
class ExpertOutput:
    """Holder of the output [T, hidden] of a layer's experts, from its computation in the first half of the
    layer to its addition in the second."""

    of_layer: Tensor | None = None


class LayerHalf(nn.Module):
    """Pre-norm half of a layer: attention, then MLP, each with a residual. The experts read the
    input of the first half's MLP; their output is added to the output of the second half's MLP."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        stack, _, number = scope.name.rpartition(".")
        half = int(number) % 2
        scope = replace(scope, name=f"{stack}.{int(number) // 2}")
        self.ops = scope.ops
        self.attention_norm = norm_of(facts, scope / "input_layernorm" / half)
        self.attention = Attention(facts, layer, rope, scope / "self_attn" / half)
        self.mlp_norm = norm_of(facts, scope / "post_attention_layernorm" / half)
        self.mlp = MLP(facts, scope / "mlps" / half)
        self.mixture = LongcatMixture(facts, scope) if layer.moe else None

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, experts: ExpertOutput
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        x, residual = self.mlp_norm(self.attention(x, batch), residual)
        out: Tensor = self.mlp(x, batch)
        if self.mixture is not None:
            experts.of_layer = self.mixture(x, batch)
        else:
            assert experts.of_layer is not None, "the first half must run before the second"
            out = self.ops.add(out, experts.of_layer)
        return out, residual


class LongCat(Decoder):
    """LongCat-Flash decoder."""

    Layer = LayerHalf

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        refuse_pipeline(scope, "LongCat-Flash, where experts are added across layer halves")
        super().__init__(facts, scope)

    def layer_inputs(self, x: Tensor, batch: Batch) -> tuple[ExpertOutput]:
        return (ExpertOutput(),)
