"""Memory estimate: bytes on each device, term by term, and whether a model fits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from quire.checkpoint.layout import CacheSpec, cache_specs, layout
from quire.checkpoint.model import Checkpoint
from quire.checkpoint.quant.schemes import Fp8, Int8
from quire.checkpoint.weights import count_parameters
from quire.config.engine import EngineConfig, resolve
from quire.config.env import Env
from quire.config.machine import Machine
from quire.config.parallel import stage_layers
from quire.errors import ConfigError
from quire.memory import (
    DTYPE_BYTES,
    CacheRoom,
    CacheSize,
    OffloadedLayers,
    choose_offloaded,
    graph_bytes,
    human,
    size_cache,
    smallest_cache,
    step_bytes,
    tape_bytes,
)

LIBRARY_BYTES = 0.8 * 2**30
"""CUDA context and libraries: 0.74 to 0.90 GiB were measured on an H200."""


class Precision(NamedTuple):
    """A storage format of the weights, such as bf16, fp8 or int4."""

    bits: float
    """Bits per weight of a linear layer, including scales."""
    end_bits: int
    """Bits per weight of the embedding and the head."""
    flags: Mapping[str, Any]
    """Engine flags that select this precision."""
    note: str = ""


PRECISIONS = {
    "fp32": Precision(32, 32, {"dtype": "float32"}),
    "bf16": Precision(16, 16, {}),
    "fp8": Precision(8.02, 16, {"quantization": "fp8"}),
    "int8": Precision(8.02, 16, {"quantization": "int8"}),
    "int4": Precision(4.16, 16, {}, "a checkpoint of 4 bits, as `quire quantize --to int4` writes"),
}
STORED = "stored"
"""The precision of a GGUF file or of a quantized checkpoint."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that an engine needs on its most used device, by purpose, without the KV cache."""

    weights: int
    activations: int
    graphs: int
    libraries: int
    offloaded: OffloadedLayers = OffloadedLayers()
    """Layers with weights in host memory, which are not part of `weights`."""

    @property
    def beside(self) -> int:
        """Return the bytes of everything except the KV cache."""
        return sum(self._terms().values())

    def _terms(self) -> dict[str, int]:
        buffers = {"offload buffers": self.offloaded.buffer_bytes} if self.offloaded.layers else {}
        terms = {name: getattr(self, name) for name in ("weights", "activations", "graphs", "libraries")}
        return terms | buffers

    def terms(self, cache: CacheSize) -> dict[str, int]:
        """Return the estimated bytes of device memory by purpose (such as "weights"), including those of the
        KV cache `cache` and of its SSM state checkpoints."""
        terms = {**self._terms(), "KV cache": cache.num_bytes}
        return terms | ({"state checkpoints": size} if (size := cache.all_checkpoint_bytes) else {})


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """A precision and a parallel layout of a model, with their memory per device; they fit if `why_not` is
    empty."""

    precision: str
    tp: int
    pp: int
    memory: Memory | None = None
    cache: CacheSize | None = None
    config: EngineConfig | None = None
    why_not: str = ""

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class Wanted:
    """The workload that a plan is made for."""

    context: int
    """Tokens of the longest request."""
    concurrency: int
    """Number of concurrent requests of that length."""
    flags: Mapping[str, Any]
    """Engine flags given by the user, by name."""


class StageWeights(NamedTuple):
    """Bytes of the weights on one device of a pipeline stage. `layers` has the bytes of each of its
    layers."""

    layers: list[int]
    others: int
    """Bytes of the embedding, the head and the multimodal encoder."""

    @property
    def total(self) -> int:
        return sum(self.layers) + self.others


def stage_weights(checkpoint: Checkpoint, precision: str, tp: int = 1, pp: int = 1) -> list[StageWeights]:
    """Return the weight bytes of each pipeline stage. For a GGUF file, all weights count with its mean bits
    per weight."""
    whole = count_parameters(checkpoint.facts)
    bits, end_bits = (size / tp / 8 for size in _bits(checkpoint, precision))
    stages, result = stage_layers(len(whole.layers), pp), []
    for number, layers in enumerate(stages):
        is_first, is_last = number == 0, number == len(stages) - 1
        has_table = is_first or (is_last and not whole.head)
        others = whole.embedding * has_table + whole.head * is_last + whole.tower * is_first
        sizes = [int(bits * whole.layers[layer].total) for layer in layers]
        result.append(StageWeights(sizes, int(end_bits * others)))
    return result


def weight_bytes(checkpoint: Checkpoint, precision: str) -> int:
    """Return the bytes of all weights."""
    (stage,) = stage_weights(checkpoint, precision, 1, 1)
    return stage.total


def stored_only(checkpoint: Checkpoint) -> bool:
    """Whether the weights can only be used as they are stored: in a GGUF file, or quantized."""
    return checkpoint.format == "gguf" or checkpoint.quant is not None


def computes_in_8_bits(checkpoint: Checkpoint, precision: str) -> bool:
    """Whether the matrices are multiplied in fp8 or int8."""
    scheme = checkpoint.quant.main_scheme if checkpoint.quant is not None else None
    if precision == STORED and isinstance(scheme, Fp8 | Int8):
        return scheme.activations != "none"
    return precision in ("fp8", "int8")


def _bits(checkpoint: Checkpoint, precision: str) -> tuple[float, float]:
    if precision != STORED:
        entry = PRECISIONS[precision]
        return entry.bits, entry.end_bits
    if checkpoint.format != "gguf":
        assert checkpoint.quant is not None, "only quantized checkpoints have a stored precision"
        scheme = checkpoint.quant.main_scheme
        return (16 if scheme is None else scheme.bits_per_weight), 16
    bits = 8 * checkpoint.path.stat().st_size / count_parameters(checkpoint.facts).total
    return bits, bits


def kv_bytes_per_token(checkpoint: Checkpoint, kv_dtype: str) -> dict[str, tuple[int, int]]:
    """Return {kind of layer: (number of layers, bytes per token)}; for SSM and cross-attention states, the
    bytes are those of a running request."""
    by_kind: dict[str, tuple[int, int]] = {}
    specs = (spec.parts for spec in cache_specs(checkpoint.facts) if spec is not None)
    for spec in chain.from_iterable(specs):
        kind = spec.kind if spec.window is None else f"{spec.kind} of {spec.window:,}"
        by_kind[kind] = (by_kind.get(kind, (0, 0))[0] + 1, _bytes_of(spec, kv_dtype))
    return by_kind


def _bytes_of(spec: CacheSpec, kv_dtype: str) -> int:
    return spec.bytes_per_row or spec.planes * spec.stored_as(kv_dtype).elements * DTYPE_BYTES[kv_dtype]


def fits(
    checkpoint: Checkpoint, machine: Machine, precision: str, wanted: Wanted, *, tp: int, pp: int
) -> MemoryFit:
    """Return the memory of a model in a precision on `tp` x `pp` devices, and why it does not fit if it does
    not, as `quire serve` would find on this machine. Nothing is loaded."""
    try:
        config = resolve(
            _settings(precision, wanted, tp, pp),
            checkpoint=checkpoint,
            machine=machine,
            usage="server",
            env=_QUIET,
        )
        memory = memory_of(config, precision)
        cache = cache_of(config, memory)
    except ConfigError as error:
        return MemoryFit(precision, tp, pp, why_not=str(error).split(". ")[0])
    needed = wanted.concurrency * wanted.context
    reason = ""
    if cache.num_tokens < needed:
        reason = f"{cache.num_tokens:,} tokens of KV cache fit, but {needed:,} are needed"
    return MemoryFit(precision, tp, pp, memory, cache, config, reason)


_QUIET = Env(cache_root=Env.read({}).cache_root)
"""Environment without variables, so that those of this process do not change a plan."""


def _settings(precision: str, wanted: Wanted, tp: int, pp: int) -> dict[str, Any]:
    flags = PRECISIONS[precision].flags if precision != STORED else {}
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    return {"max_model_len": wanted.context, **wanted.flags, **flags, **sizes}


def memory_of(config: EngineConfig, precision: str) -> Memory:
    """Return the memory of a device without the KV cache."""
    parallel = config.parallel
    stages = stage_weights(
        config.checkpoint, precision, parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    )
    wanted_bytes = config.load.cpu_offload_gb * 2**30
    offloaded = [choose_offloaded(stage.layers, wanted_bytes) for stage in stages]
    resident = [stage.total - x.host_bytes for stage, x in zip(stages, offloaded, strict=True)]
    number = max(range(len(stages)), key=lambda n: resident[n] + offloaded[n].buffer_bytes)
    activations = step_bytes(config)
    if config.machine.device == "cpu":
        return Memory(resident[number], activations, tape_bytes(config), 0)
    graphs, libraries = graph_bytes(config), int(LIBRARY_BYTES)
    return Memory(resident[number], activations, graphs, libraries, offloaded[number])


def cache_of(config: EngineConfig, memory: Memory) -> CacheSize:
    """Return the KV cache that fits beside everything else, on the pipeline stage with the least space."""
    cache_room = _room(config, memory)
    if cache_room.kv_bytes <= 0:
        short = human(-cache_room.kv_bytes)
        raise ConfigError(f"weights, activations and libraries alone exceed the memory by {short}")
    facts = config.rank_facts
    stages = stage_layers(len(facts.layers), config.parallel.pipeline_parallel_size)
    specs, longest = cache_specs(facts), config.model.max_model_len
    whole = layout(specs, longest, config.states_per_row, kv_dtype(config))
    return smallest_cache(
        size_cache(
            whole.of({*layers, *range(len(facts.layers), len(whole.specs))}),
            kv_dtype=kv_dtype(config),
            block_size=config.cache.block_size,
            max_model_len=config.model.max_model_len,
            max_chunk=config.scheduler.max_chunk,
            num_rows=config.scheduler.max_num_seqs,
            auto_fit=False,
            room=cache_room,
            checkpoint_unit=config.cache.mamba_block_size,
        )
        for layers in stages
    )


def _room(config: EngineConfig, memory: Memory) -> CacheRoom:
    """Return the space for the KV cache on a device that no other process uses."""
    cache, total = config.cache, config.machine.total_bytes
    kv_bytes = int(total * cache.gpu_memory_utilization) - memory.beside
    if cache.kv_cache_memory_bytes is not None:
        kv_bytes = cache.kv_cache_memory_bytes
    elif cache.kv_cache_memory_limit is not None:
        kv_bytes = min(kv_bytes, cache.kv_cache_memory_limit)
    soft = cache.kv_cache_memory_limit is not None
    return CacheRoom(kv_bytes, memory.beside, total, cache.num_gpu_blocks_override, soft)


def kv_dtype(config: EngineConfig) -> str:
    """Return the KV cache dtype."""
    requested = config.cache.kv_cache_dtype
    return requested if requested in DTYPE_BYTES else config.model.dtype


def layouts(most: int, per_node: int) -> Iterator[tuple[int, int]]:
    """Yield parallel layouts (tp, pp) of up to `most` devices: first without pipeline stages on one machine
    of `per_node` devices, then with stages; the smallest come first."""
    powers = [1 << power for power in range(min(most, per_node).bit_length())]
    yield from ((tp, 1) for tp in powers)
    staged = ((tp, pp) for tp in powers for pp in range(2, most // tp + 1))
    yield from sorted(staged, key=lambda layout: (layout[0] * layout[1], layout[1]))


def smallest(
    checkpoint: Checkpoint,
    machine: Machine,
    wanted: Wanted,
    precisions: tuple[str, ...],
    *,
    most: int,
    per_node: int,
) -> list[MemoryFit]:
    """Return, for each precision, the smallest layout that fits, after the smaller layouts that do not."""
    tried = []
    for precision in precisions:
        for tp, pp in layouts(most, per_node):
            fit = fits(checkpoint, machine, precision, wanted, tp=tp, pp=pp)
            tried.append(fit)
            if not fit.why_not:
                break
    return tried
