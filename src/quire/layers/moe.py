"""Mixture of experts: router, routed experts and shared expert."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, MoeFacts
from quire.kernels.reference.moe import ExpertAdapters
from quire.layers.expert_router import ExpertRouter
from quire.layers.linear import WholeLinear
from quire.layers.lora import AdapterSlots
from quire.layers.lora_layers import LoRALayer, LoRAStack, LoRATarget, alias_targets, in_order
from quire.layers.mlp import MLP, PlainMLP
from quire.layers.scope import LoadedModule, Scope, Target, target_of, zero_on_other_ranks
from quire.parallel.group import ALONE
from quire.quant.experts import ExpertShape
from quire.quant.sharding import Runs, Shard, divided, shards_of
from quire.quant.weight import Piece, frozen_parameter

_FEW = 1024
"""Maximum number of tokens of a step that is captured in a CUDA graph or, on a CPU, recorded for replay."""


class MoENames(NamedTuple):
    """Checkpoint names of the parts of an MoE block for one model family."""

    block: str = "mlp"
    """Name of the MoE block, relative to the layer."""
    router: str = "gate"
    layout: str = "per_expert"
    """Layout of the experts. `per_expert`: each projection of each expert is a tensor. In the other layouts a
    tensor holds all experts. `stacked`: gate and up are two tensors; `fused`: they are one tensor;
    `fused_bare`: as `fused`, without the suffix ".weight" of names; `fused_transposed`: as `fused_bare`, with
    transposed matrices; `interleaved`: as `fused_transposed`, with gate and up interleaved; `flat`: each
    projection is one matrix of all experts, with `down` transposed."""
    experts: tuple[str, ...] = ("experts", "gate_proj", "up_proj", "down_proj")
    """Name of the experts' module, then of their tensors."""
    choice_bias: str = "gate.e_score_correction_bias"
    choice_in_row: bool = False
    """Whether the choice bias is stored as a matrix of one row."""
    shared: str = "mlp.shared_expert"
    """Name of the shared expert, relative to the layer."""
    shared_parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared_gate: str = "shared_expert_gate"
    shared_alias: str = ""
    """Name of the shared expert in transformers, if it differs."""


_WEIGHTS = ("weight", "weight_packed", "qweight")
"""Suffixes of a layer's weight in checkpoints."""
_FACTORS = {"relu2": "relu"}
"""Map of an activation f to the activation g with f(x) = g(x) * x. By it, experts without a gate run in the
kernels of gated experts: with activation g, and with the weight of `up` also as gate."""
NAMES = {
    "mlp": MoENames(),
    "apart": MoENames(layout="stacked"),
    "apart_deepseek": MoENames(layout="stacked", shared="mlp.shared_experts"),
    "apart_gemma4": MoENames("", "router.proj", "stacked"),
    "across": MoENames(layout="fused_transposed", experts=("experts", "gate_up_proj", "down_proj")),
    "mixtral": MoENames("block_sparse_moe", experts=("experts", "w1", "w3", "w2")),
    "deepseek": MoENames(shared="mlp.shared_experts"),
    "kimi_linear": MoENames(
        "block_sparse_moe",
        experts=("experts", "w1", "w3", "w2"),
        shared="block_sparse_moe.shared_experts",
        shared_alias="mlp.shared_experts",
    ),
    "ernie": MoENames(
        choice_bias="moe_statics.e_score_correction_bias", choice_in_row=True, shared="mlp.shared_experts"
    ),
    "exaone": MoENames(choice_bias="e_score_correction_bias", shared="mlp.shared_experts"),
    "minimax": MoENames(
        "block_sparse_moe", experts=("experts", "w1", "w3", "w2"), choice_bias="e_score_correction_bias"
    ),
    "step": MoENames(
        "moe",
        layout="stacked",
        experts=("", "gate_proj", "up_proj", "down_proj"),
        choice_bias="router_bias",
        shared="share_expert",
        shared_alias="mlp.shared_experts",
    ),
    "gemma4": MoENames("", "router.proj", "fused_bare", ("experts", "gate_up_proj", "down_proj")),
    "longcat": MoENames(router="router.classifier", choice_bias="router.e_score_correction_bias"),
    "hunyuan": MoENames(router="gate.wg", shared="mlp.shared_mlp"),
    "granite": MoENames(
        "block_sparse_moe",
        "router.layer",
        "fused",
        ("", "input_linear", "output_linear"),
        shared="shared_mlp",
        shared_parts=("input_linear", "output_linear"),
    ),
    "granite_swa": MoENames(
        "block_sparse_moe",
        "router",
        "fused_bare",
        ("experts", "gate_up_proj", "down_proj"),
        shared="shared_mlp",
        shared_parts=("input_linear", "output_linear"),
    ),
    "nemotron_h": MoENames(
        "mixer",
        experts=("experts", "up_proj", "down_proj"),
        shared="mixer.shared_experts",
        shared_parts=("up_proj", "down_proj"),
    ),
    "jamba": MoENames("feed_forward", "router"),
    "lfm2": MoENames("feed_forward", experts=("experts", "w1", "w3", "w2"), choice_bias="expert_bias"),
    "gpt_oss": MoENames("mlp", "router", "interleaved", ("experts", "gate_up_proj", "down_proj")),
    "afmoe": MoENames(router="router.gate", choice_bias="expert_bias", shared="mlp.shared_experts"),
    "hy3": MoENames(
        router="router.gate",
        choice_bias="expert_bias",
        shared="mlp.shared_mlp",
        shared_alias="mlp.shared_experts",
    ),
    "laguna": MoENames(choice_bias="experts.e_score_correction_bias", shared_alias="mlp.shared_experts"),
    "bailing": MoENames(choice_bias="gate.expert_bias", shared="mlp.shared_experts"),
    "dbrx": MoENames("ffn", "router.layer", "flat", ("experts.mlp", "w1", "v1", "w2")),
    "llama4": MoENames(
        "feed_forward",
        "router",
        "fused_transposed",
        ("experts", "gate_up_proj", "down_proj"),
        shared="feed_forward.shared_expert",
    ),
}
NAMES["apart_nemotron_h"] = NAMES["nemotron_h"]._replace(layout="stacked")


def _detect_layout(names: MoENames, moe: MoeFacts, hidden: int, scope: Scope) -> MoENames:
    """Return the names with the layout that this checkpoint has: converted checkpoints may differ from the
    family's (all experts in one tensor, one tensor per expert, or transposed)."""
    where, is_per_expert = names.experts[0], names.layout == "per_expert"
    is_fused = scope.is_stored(f"{scope.name}.{where}.gate_up_proj")
    shape = scope.shape_of(f"{scope.name}.{where}.down_proj")
    is_bare = names.layout == "fused_transposed" and shape == (moe.experts, hidden, moe.intermediate)
    if (is_per_expert and is_fused) or (is_bare and hidden != moe.intermediate):
        return names._replace(layout="fused_bare", experts=(where, "gate_up_proj", "down_proj"))
    first = f"{scope.name}.experts.0.gate_proj"
    if names == NAMES["across"] and scope.is_stored(f"{first}.weight"):
        return MoENames()
    if names == NAMES["step"] and any(scope.is_stored(f"{first}.{kind}") for kind in _WEIGHTS):
        return names._replace(layout="per_expert", experts=("experts", *names.experts[1:]))
    return names


class ExpertLoRALayers:
    """LoRA layers of all routed experts of an MoE layer: one for gate and up, one for down."""

    def __init__(self, slots: AdapterSlots, hidden: int, scope: Scope) -> None:
        self.slots = slots
        self.hidden = hidden
        self.ops = scope.ops
        self.aliases = (f"{scope.name}.experts", f"{scope.sibling('mlp')}.experts")
        """Names of the experts in transformers, which adapters may use."""
        self.gate_up: LoRALayer | None = None
        self.down: LoRALayer | None = None

    def of(self, batch: Batch | None) -> ExpertAdapters | None:
        """Return the LoRA adapters of the batch's tokens for the experts; None if no token has an adapter."""
        if self.gate_up is None or self.down is None:
            return None
        assert batch is not None, "experts that take adapters need the batch: call layer(x, batch)"
        if batch.lora is None:
            return None
        gate_up, down = self.gate_up, self.down
        return ExpertAdapters(gate_up.a, gate_up.b, down.a, down.b, batch.lora.slots)

    def register(self, experts: "Experts") -> None:
        """Register the LoRA layers once the kernel of the experts is chosen: not all kernels support LoRA."""
        if self.gate_up is not None:
            return
        names = experts.stored_names()
        where = names[0][0].rpartition(".")[0] if experts.names.experts[0] else names[0][0]
        if not self.slots.takes(where, *(name for name, _ in names), "gate_up_proj"):
            return
        reason = "" if experts.weights.adapts else "experts of this format take no adapters on this device"
        if experts.places:
            reason = "experts that are spread over devices take no adapters"
        if reason:
            self.slots.refused |= dict.fromkeys((where, *self.aliases), reason)
            return
        inner, num = experts.shard, experts.num_experts
        first, last = f"{where}.gate_up", f"{where}.down"
        self.gate_up = LoRALayer(first, self.slots, self.hidden, (inner.size,) * 2, self.ops, num_experts=num)
        self.down = LoRALayer(last, self.slots, inner.size, (self.hidden,), self.ops, num_experts=num)
        for i in range(num):
            self._add_targets(i, experts)
        stack = LoRAStack(
            {
                "gate_up_proj": list(self._gate_up_targets(experts)),
                "down_proj": [self._down_target(experts, i) for i in range(num)],
            }
        )
        for name in (where, *self.aliases, *(name for name, _ in names)):
            self.slots.stacks[name] = stack

    def _add_targets(self, expert: int, experts: "Experts") -> None:
        """Add the LoRA targets of one expert, named as in a checkpoint with one tensor per expert."""
        assert self.gate_up is not None and self.down is not None
        for name, part in experts.stored_names():
            front, _, last = name.rpartition(".")
            if part == "down":
                self.down.targets[f"{front}.{expert}.{last}"] = self._down_target(experts, expert)
                continue
            lasts = {"gate_up": ("gate_proj", "up_proj")}.get(part, (last,))
            for number, suffix in enumerate(lasts, start=part == "up"):
                parts, order = slice(number, number + 1), in_order
                if experts.plain:
                    parts, order = slice(0, 2), partial(_order_twice, experts.shard.size)
                self.gate_up.targets[f"{front}.{expert}.{suffix}"] = LoRATarget(
                    self.gate_up, parts, Shard(self.hidden), (experts.shard,), order, expert
                )

    def _down_target(self, experts: "Experts", expert: int) -> LoRATarget:
        assert self.down is not None
        return LoRATarget(self.down, slice(0, 1), experts.shard, (Shard(self.hidden),), expert=expert)

    def _gate_up_targets(self, experts: "Experts") -> Iterator[LoRATarget]:
        assert self.gate_up is not None
        runs, order = experts.gate_up_shards(), in_order
        if experts.plain:
            runs, order = (experts.shard,), partial(_order_twice, experts.shard.size)
        elif experts.names.layout == "interleaved":
            order = partial(_order_apart, experts.shard.size)
        for i in range(experts.num_experts):
            yield LoRATarget(self.gate_up, slice(0, 2), Shard(self.hidden), runs, order, i)


def _order_twice(size: int) -> Tensor | None:
    """Return the checkpoint index of each of the 2 * `size` outputs of gate and up, for experts without a
    gate, whose `up` also stands for the gate."""
    return torch.arange(size).repeat(2)


def _order_apart(size: int) -> Tensor | None:
    """Return the checkpoint index of each of the 2 * `size` gate and up outputs, which the checkpoint
    interleaves."""
    return torch.arange(2 * size).view(-1, 2).t().flatten()


class Experts(nn.Module):
    """All routed experts of a layer."""

    mix: Callable[..., Tensor]
    """Kernel that computes the weighted sum of the outputs of each token's experts; set by `finish`."""
    loads: Tensor | None
    """Number of tokens routed to each expert, [experts]; None if tokens are not counted (no EPLB)."""

    def __init__(self, moe: MoeFacts, hidden: int, activation: str, scope: Scope) -> None:
        super().__init__()
        self.names = _detect_layout(NAMES[moe.names], moe, hidden, scope)
        self.plain = moe.plain
        self.scope_name = scope.name
        self.dispatch = scope.ep
        self.places = None if scope.ep is None else scope.ep.place(moe.experts, scope.device)
        """Placement of the experts on devices; None without expert parallelism."""
        self.group = scope.group if self.places is None else ALONE
        self.shard = divided(self.group, moe.intermediate)
        self.num_experts = moe.experts
        counted = scope.ep is not None and scope.ep.is_counted
        loads = torch.zeros(moe.experts, dtype=torch.int32, device=scope.device) if counted else None
        self.register_buffer("loads", loads, persistent=False)
        shape = ExpertShape(
            experts=len(self.local_experts),
            hidden=hidden,
            intermediate=self.shard.size,
            activation=_FACTORS[activation] if moe.plain else activation,
            bias=moe.expert_bias,
            dtype=scope.dtype,
            device=scope.device,
            inner=self.shard,
        )
        self.weights = scope.experts(tuple(name for name, _ in self.stored_names()), shape)
        self.adapters = None if scope.adapters is None else ExpertLoRALayers(scope.adapters, hidden, scope)

    @property
    def local_experts(self) -> Sequence[int]:
        """Return the indices of this device's experts; ascending until EPLB moves experts between devices."""
        if self.places is None:
            return range(self.num_experts)
        return self.places.placement.by_rank[self.places.rank]

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, batch: Batch | None = None) -> Tensor:
        if self.adapters is not None and (adapters := self.adapters.of(batch)) is not None:
            return self.mix(x, ids, weights, adapters=adapters)
        if self.dispatch is None or self.places is None:
            return self.mix(x, ids, weights)
        if self.loads is not None:
            chosen = ids.flatten()
            self.loads.index_add_(0, chosen, torch.ones_like(chosen))
        assert batch is not None, "expert parallelism needs the batch: call layer(x, batch)"
        return self.dispatch(x, ids, weights, self.places, self.mix, batch.ep)

    def targets(self) -> Iterator[Target]:
        parts = self.weights.parts()
        for name, part in self.stored_names():
            for suffix, piece in parts[part].items():
                yield from self._piece_targets(name, part, suffix, piece)
        if biases := self.weights.bias_parts():
            yield from map(self._select_local, self._bias_targets(biases))

    def _select_local(self, target: Target) -> Target:
        """Return the load target of a tensor with all experts, limited to the experts of this device."""
        if self.places is None:
            return target
        return target._replace(axis=0, runs=shards_of(self.local_experts, self.num_experts))

    def _piece_targets(self, name: str, part: str, suffix: str, piece: Piece) -> Iterator[Target]:
        runs = self.gate_up_shards() if part == "gate_up" else (self.shard,)
        target = target_of(f"{name}.{suffix}", piece, runs, by_inputs=part == "down")
        if self.names.layout == "per_expert":
            where, _, last = name.rpartition(".")
            axis = None if target.axis is None else target.axis - 1
            for i, expert in zip(self.local_experts, piece.tensor, strict=True):
                yield target._replace(name=f"{where}.{i}.{last}.{suffix}", tensor=expert, axis=axis)
            return
        if suffix.startswith("_"):
            target = target._replace(name=f"{name}{suffix}")
        elif self.names.layout in ("fused_transposed", "interleaved") and suffix == "weight":
            axis = None if target.axis is None else 3 - target.axis
            target = target._replace(name=name, tensor=piece.tensor.transpose(1, 2), axis=axis)
        elif self.names.layout == "flat" and suffix == "weight":
            target = target._replace(name=name, is_flat=True)
            if part == "down":
                axis = None if target.axis is None else 3 - target.axis
                target = target._replace(tensor=piece.tensor.transpose(1, 2), axis=axis)
        elif self.names.layout == "fused_bare" and suffix == "weight":
            target = target._replace(name=name)
        yield self._select_local(target)

    def _bias_targets(self, parts: dict[str, Piece]) -> Iterator[Target]:
        where = ".".join((self.scope_name, self.names.experts[0]))
        (gate_up, axis, *_), down = parts["gate_up"], parts["down"].tensor
        if self.names.layout != "stacked":
            yield Target(f"{where}.gate_up_proj_bias", gate_up, axis, self.gate_up_shards())
            yield Target(f"{where}.down_proj_bias", down)
            return
        gate, up, last = (f"{where}.{name}.bias" for name in self.names.experts[1:])
        for name, bias in zip((gate, up), gate_up.chunk(2, dim=1), strict=True):
            yield Target(name, bias, axis, (self.shard,))
        yield Target(last, down)

    def gate_up_shards(self) -> Runs:
        """Return the ranges of a fused gate and up tensor that this tensor-parallel rank loads; gate and up
        are concatenated or interleaved in the tensor."""
        size, start, total = self.shard
        if self.names.layout == "interleaved":
            return (Shard(2 * size, 2 * start, 2 * total),)
        return (self.shard,) * 2

    def stored_names(self) -> list[tuple[str, str]]:
        """Return the dotted name and the kind (gate_up, gate, up or down) of each stored projection."""
        where, *parts = self.names.experts
        kinds = ("gate_up", "down") if len(parts) == 2 else ("gate", "up", "down")
        kinds = ("up", "down") if self.plain else kinds
        names = [".".join(filter(None, (self.scope_name, where, name))) for name in parts]
        return list(zip(names, kinds, strict=True))

    def begin(self) -> None:
        self.weights.begin()

    def finish(self) -> None:
        if self.plain:
            self.weights.copy_up_to_gate()
        if self.names.layout == "interleaved":
            outputs = 2 * self.weights.shape.intermediate
            self.weights.reorder(torch.arange(outputs).view(-1, 2).t().flatten())
        if "down" in (biases := self.weights.bias_parts()):
            zero_on_other_ranks(self.group, biases["down"].tensor)
        self.weights.finish()
        self.bind_kernels()

    def bind_kernels(self) -> None:
        self.mix = self.weights.mix
        if self.adapters is not None:
            self.adapters.register(self)


class Back(WholeLinear):
    """Projection of the experts' output from their latent size back to the hidden size."""

    is_summed = True


class MoE(nn.Module):
    """MoE block of a layer: router, experts, shared expert, all-reduce. `scope` is that of the layer."""

    Chooser: type[ExpertRouter] = ExpertRouter
    ones: Tensor | None
    """Expert weights of 1, for models where the router's weights scale the input of experts and not their
    output."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        moe = facts.moe
        assert moe is not None
        names = NAMES[moe.names]
        layer, scope = scope, scope / names.block
        self.ops = scope.ops
        ones = torch.ones(_FEW, moe.routing.per_token, device=scope.device) if moe.weighs_input else None
        self.register_buffer("ones", ones, persistent=False)
        self.shared_mean = moe.shared_mean
        self.choice = None
        if moe.choice_bias:
            self.choice = ChoiceBias(moe.experts, scope / names.choice_bias, in_row=names.choice_in_row)
        self.router = self.Chooser(facts.hidden, moe, scope / names.router)
        self.into = self.back = None
        if moe.latent:
            self.into = WholeLinear(facts.hidden, moe.latent, scope / "fc1_latent_proj", bias=facts.mlp_bias)
            self.back = Back(moe.latent, facts.hidden, scope / "fc2_latent_proj", bias=facts.mlp_bias)
        width = moe.latent or facts.hidden
        self.experts = Experts(moe, width, moe.activation or facts.activation, scope)
        self.shared = self.shared_gate = None
        if moe.shared_intermediate:
            kind = PlainMLP if moe.plain else MLP
            self.shared = kind(
                facts,
                layer / names.shared,
                intermediate=moe.shared_intermediate,
                names=names.shared_parts,
                sums=False,
            )
            if names.shared_alias:
                alias_targets(self.shared, (layer / names.shared).name, (layer / names.shared_alias).name)
            if moe.shared_gate:
                self.shared_gate = WholeLinear(facts.hidden, 1, scope / names.shared_gate)
        self.sum = scope.group.all_reduce

    def forward(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        """Return the output of the block, [T, hidden]. `x` [T, hidden] may be scaled in place if the model
        weighs the input of experts (`MoeFacts.weighs_input`)."""
        num_tokens = len(x)
        ids, weights = self.router(x, None if self.choice is None else self.choice.bias, batch)
        shared = None if self.shared is None else self._shared(x, batch)
        if self.ones is not None and weights.shape[1] > 1:
            # One row for each chosen expert, scaled by its weight.
            x = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
            ids, weights = ids.view(-1, 1), torch.ones_like(weights).view(-1, 1)
        elif self.ones is not None:
            ones = self.ones[: len(x)] if len(x) <= len(self.ones) else torch.ones_like(weights)
            x, weights = self.ops.scale_rows(x, weights), ones
        x = x if self.into is None else self.into(x, batch)
        out: Tensor = self.experts(x, ids, weights, batch)
        if len(out) > num_tokens:
            out = out.unflatten(0, (num_tokens, -1)).sum(1)
        if self.back is not None:
            out = self.back(out, batch)
        if shared is not None:
            out = self.ops.add(out, shared)
            out = self.ops.scale(out, 0.5) if self.shared_mean else out
        return self.sum(out)

    def _shared(self, x: Tensor, batch: Batch | None) -> Tensor:
        assert self.shared is not None
        shared: Tensor = self.shared(x, batch)
        return shared if self.shared_gate is None else self.ops.weigh(shared, self.shared_gate(x, batch))


class ChoiceBias(LoadedModule):
    """Bias added to the router's scores for the choice of experts only (e_score_correction_bias)."""

    def __init__(self, experts: int, scope: Scope, *, in_row: bool) -> None:
        super().__init__()
        self.name = scope.name
        self.in_row = in_row
        bias = torch.empty(experts, dtype=torch.float32, device=scope.device)
        self.bias = frozen_parameter(bias)

    def targets(self) -> Iterator[Target]:
        yield Target(self.name, self.bias[None] if self.in_row else self.bias)
