"""ExpertRouter: the choice of the experts of each token in a mixture of experts."""

from dataclasses import replace

import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.checkpoint.facts import MoeFacts
from quire.layers.linear import Linear
from quire.layers.scope import Scope
from quire.quant.weight import Routes


class ExpertRouter(Linear):
    """Router: chooses the experts of each token and their weights."""

    quantizable = False

    def __init__(self, hidden: int, moe: MoeFacts, scope: Scope) -> None:
        if moe.wide_router:  # float32, for which there is no LoRA
            scope = replace(scope, dtype=torch.float32, adapters=None)
        super().__init__(hidden, {scope.name: moe.experts}, scope, bias=moe.router_bias)
        if self.lora_layer is not None and scope.name in self.lora_layer.targets:
            layer, _, last = scope.name.rsplit(".", 2)
            # Adapters use the name of transformers.
            self.lora_layer.targets[f"{layer}.mlp.{last}"] = self.lora_layer.targets[scope.name]
        self.ops = scope.ops
        self.routing = moe.routing
        self.chosen: Routes | None = None
        """Fused kernel of router GEMM and top-k; None if the weight has no such kernel."""

    def bind_kernels(self) -> None:
        super().bind_kernels()
        self.chosen = self.weight.chosen

    def forward(self, x: Tensor, bias: Tensor | None, batch: Batch | None = None) -> tuple[Tensor, Tensor]:
        """Return the ids of the chosen experts and their weights, [T, experts per token] each. `bias`
        [experts] affects only the choice. Record the ids in `batch.routes` if requests return them."""
        ids, weights = self.choose(x, bias, batch)
        if batch is not None and batch.routes is not None:
            batch.routes.append(ids)
        return ids, weights

    def choose(self, x: Tensor, bias: Tensor | None, batch: Batch | None = None) -> tuple[Tensor, Tensor]:
        """Return the chosen experts' ids and weights, as `forward` does, but do not record the ids in the
        batch."""
        if self.chosen is not None and self.adapters_of(batch) is None:
            return self.chosen(x, routing=self.routing, bias=bias)
        return self.ops.route(self.multiply(x, batch), self.routing, bias)
