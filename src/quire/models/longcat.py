"""LongCat-Flash: layers of two halves, and experts beside all of the second one; some experts do nothing."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.errors import ConfigError
from quire.layers.mlp import MLP
from quire.layers.moe import ChoiceBias, ExpertRouter, Experts
from quire.layers.norm import RMSNorm, norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import deepseek
from quire.models.decoder import Decoder


class LongcatMixture(nn.Module):
    """Experts, and such as say what they are given. The scope is the layer's."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        moe, scope = facts.moe, scope / "mlp"
        assert moe is not None
        self.num_experts, num = moe.experts, moe.experts + moe.idle
        self.choice = ChoiceBias(num, scope / "router" / "e_score_correction_bias", in_row=False)
        self.router = ExpertRouter(facts.hidden, replace(moe, experts=num), scope / "router" / "classifier")
        self.experts = Experts(moe, facts.hidden, facts.activation, scope)
        self.sum = scope.group.all_reduce if scope.group.size > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.router(x, self.choice.bias)
        is_idle = ids >= self.num_experts
        kept = torch.where(is_idle, weights, 0.0).sum(1, keepdim=True)
        ids = torch.where(is_idle, self._others(ids), ids)
        said: Tensor = self.experts(x, ids, torch.where(is_idle, 0.0, weights))
        said = said if self.sum is None else self.sum(said)
        return said + x * kept.to(x.dtype)

    def _others(self, ids: Tensor) -> Tensor:
        """As many experts of each token that it did not choose: none is given a token twice."""
        free = torch.ones(len(ids), self.num_experts + 1, device=ids.device)
        free.scatter_(1, ids.long().clamp(max=self.num_experts), 0.0)
        return free[:, :-1].topk(ids.shape[1], 1).indices.to(ids.dtype)


class LatentNorm(RMSNorm):
    """A factor on latents is in its weight."""

    scale = 1.0

    def finish(self) -> None:
        self.weight.mul_(self.scale)


class Attention(deepseek.Attention):
    """DeepSeek's with a factor on latents."""

    LatentNorm = LatentNorm

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        assert facts.mla is not None
        norm = self.mix.norm
        assert isinstance(norm, LatentNorm)
        norm.scale = facts.mla.scales[1]


class Half(nn.Module):
    """Attention, then feed-forward, each behind a norm and beside a residual. What the experts say to the
    first half of a layer is added behind the second."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        where, _, number = scope.name.rpartition(".")
        which = int(number) % 2
        scope = replace(scope, name=f"{where}.{int(number) // 2}")
        self.ops = scope.ops
        self.attention_norm = norm_of(facts, scope / "input_layernorm" / which)
        self.attention = Attention(facts, layer, rope, scope / "self_attn" / which)
        self.mlp_norm = norm_of(facts, scope / "post_attention_layernorm" / which)
        self.mlp = MLP(facts, scope / "mlps" / which)
        self.mixture = LongcatMixture(facts, scope) if layer.moe else None

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        x, residual = self.mlp_norm(self.attention(x, batch), residual)
        fed: Tensor = self.mlp(x)
        if self.mixture is not None:
            batch.beside = self.mixture(x)
        else:
            assert batch.beside is not None, "the second half comes behind the first"
            fed = self.ops.add(fed, batch.beside)
        return fed, residual


class LongCat(Decoder):
    """The model."""

    Layer = Half

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        if not (scope.stage.is_first and scope.stage.is_last):
            raise ConfigError(
                "pipeline_parallel_size cannot be had with LongCat-Flash, whose layers have two halves: "
                "leave it out, and use tensor_parallel_size"
            )
        super().__init__(facts, scope)
