"""Tensor parallelism: the shard of a model on one rank, and the numbers of ranks that divide its layers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.errors import ConfigError

_ATTENDING = ("attention", "attention+mamba")


class _Count(NamedTuple):
    """A size that is divided between tensor-parallel ranks; `what` names it in errors. If `repeats`, a size
    below the number of ranks is possible: several ranks then have the same part."""

    number: int
    what: str
    repeats: bool = False

    def fits(self, size: int) -> bool:
        return self.number % size == 0 or (self.repeats and size % self.number == 0)


def _counts(facts: ArchFacts, *, with_experts: bool) -> Iterator[_Count]:
    mixers = {layer.mixer for layer in facts.layers}
    if mixers & {*_ATTENDING, "latent"}:
        for heads in sorted({layer.heads or facts.heads for layer in facts.layers}):
            yield _Count(heads, "attention heads")
    if mixers & {*_ATTENDING}:
        for heads in sorted({layer.kv_heads or facts.kv_heads for layer in facts.layers}):
            yield _Count(heads, "key and value heads", repeats=True)
    if facts.intermediate and _has_dense(facts):
        yield _Count(facts.intermediate, "numbers of the intermediate size")
    if (moe := facts.moe) is not None:
        if with_experts:
            yield _Count(moe.intermediate, "numbers of the experts' intermediate size")
        if moe.shared_intermediate:
            yield _Count(moe.shared_intermediate, "numbers of the shared experts' intermediate size")
    if (state := facts.state) is not None:
        yield _Count(state.heads, "state heads")
        yield _Count(state.groups, "groups of state heads", repeats=True)
        yield _Count(state.norm_groups, "groups of norms", repeats=True)


def _has_dense(facts: ArchFacts) -> bool:
    """Return whether any layer has a dense feed-forward part. If each layer is either a mixer or a
    feed-forward part, only layers without a mixer can have one."""
    has_split_layers = any(layer.mixer == "none" for layer in facts.layers)
    return any(not layer.moe and (layer.mixer == "none" or not has_split_layers) for layer in facts.layers)


def check_divisible(facts: ArchFacts, size: int, *, with_experts: bool = True) -> None:
    """Raise a ConfigError if layers cannot be divided evenly between `size` ranks. `with_experts`: whether
    each expert is divided too (tensor parallel), not kept whole on one rank (expert parallel)."""
    if size == 1:
        return
    if facts.borrowed is not None:
        raise ConfigError(
            f"tensor_parallel_size={size} is not supported for a model that runs through transformers; "
            "leave it out, and use data_parallel_size for more devices"
        )
    counts = list(_counts(facts, with_experts=with_experts))
    misfits = [count for count in counts if not count.fits(size)]
    if not misfits:
        return
    most = max(count.number for count in counts if not count.repeats)
    fitting = [str(n) for n in range(1, most + 1) if all(count.fits(n) for count in counts)]
    ways = fitting[0] if len(fitting) == 1 else f"{', '.join(fitting[:-1])} or {fitting[-1]}"
    raise ConfigError(
        f"tensor_parallel_size={size} does not divide {misfits[0].number} {misfits[0].what}; use {ways}"
    )


def shard_facts(facts: ArchFacts, size: int, *, with_experts: bool = True) -> ArchFacts:
    """Return the facts of one rank's shard of the model. `with_experts`: whether each expert is divided too
    (tensor parallel), not kept whole on one rank (expert parallel)."""
    if size == 1:
        return facts
    moe, state = facts.moe, facts.state
    if moe is not None:
        moe = replace(
            moe,
            intermediate=_share(moe.intermediate, size) if with_experts else moe.intermediate,
            shared_intermediate=_share(moe.shared_intermediate, size),
        )
    if state is not None:
        heads, groups = _share(state.heads, size), _share(state.groups, size)
        state = replace(state, heads=heads, groups=groups, norm_groups=_share(state.norm_groups, size))
    return replace(
        facts,
        heads=_share(facts.heads, size),
        kv_heads=_share(facts.kv_heads, size),
        intermediate=_share(facts.intermediate, size),
        layers=tuple(_of_layer(layer, size) for layer in facts.layers),
        moe=moe,
        state=state,
    )


def _of_layer(layer: LayerFacts, size: int) -> LayerFacts:
    heads, kv_heads = _share(layer.heads, size), _share(layer.kv_heads, size)
    return replace(layer, heads=heads, kv_heads=kv_heads, intermediate=_share(layer.intermediate, size))


def _share(number: int, size: int) -> int:
    """Return the size of one rank's shard of `number`, rounded up."""
    return -(-number // size)
