"""Memory estimates in bytes: activations, CUDA graphs, KV cache blocks, layers to offload. Uses no device."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.layout import DTYPE_BYTES as DTYPE_BYTES
from quire.checkpoint.layout import CacheLayout, cache_specs, has_ssm_state, layout
from quire.checkpoint.weights import count_parameters
from quire.config.engine import EngineConfig
from quire.config.expert_parallel import steps_together
from quire.errors import ConfigError

LOGITS_AT_ONCE = 1 << 24
"""Maximum number of logits (requests times vocabulary) that are sampled together with penalties, logprobs or
other options beyond temperature, top-k and top-p. It bounds the memory of sampling."""
_COPIES = 8
"""Maximum number of float32 copies of the logits during sampling (counted by
`tests/sampling/test_memory_probe.py`)."""
_PAIRS_AT_ONCE = 8192
"""Number of (token, expert) pairs of a mixture of experts that a CPU processes together."""
MAX_SAMPLES = 512
"""Maximum number of positions that a step with draft tokens samples on a GPU. With more, verifying the drafts
costs more time than they save."""
MAX_FORCED = 64
"""Maximum number of tokens forced by grammars that a step computes as draft tokens."""
GRAPH_BYTES = 8 << 20
"""Approximate number of bytes that the CUDA driver allocates for one CUDA graph."""
_MIXED_TOKENS = (32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Token counts of the CUDA graphs for steps that contain prompts."""
_MOST_SEQS = 128
"""Maximum number of sequences in a CUDA graph for steps that contain prompts."""
_LAUNCH_FLOPS = 7 * 10**12
"""FLOPs that a GPU computes while the host launches the kernels of a step with prompts."""
MAX_TAPED = 64
"""Maximum number of sequences of a decode step that a CPU records once and replays. In larger steps, the
overhead of Python calls does not matter."""
MAX_MIXED_ROWS, MAX_MIXED_DRAFTS = 16, 16
"""Most decodes, and most draft tokens of all of them, of a step that a CPU records although its rows have
different numbers of draft tokens. A tape takes about 0.7 MiB with 30 layers, so few shapes may have one."""
NUM_OFFLOAD_BUFFERS = 2
"""Number of device buffers for offloaded layers: one layer computes while the next is copied."""
_CHECKPOINT_SHARE = 4
"""Checkpoints of SSM states in the prefix cache get at most 1 / this number of the memory that the states of
running requests leave."""
_MAX_CHECKPOINTS = 4096
"""Maximum number of checkpoints of SSM states."""
_TAPED_TIMES = 2
"""Size of the memory pool of recorded CPU decode steps, as a multiple of the activations of the largest step.
Blocks are powers of two, and the pool may first fill with blocks for smaller steps."""


def human(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if abs(num_bytes) >= 2**28 else f"{num_bytes / 2**20:.2f} MiB"


def activation_bytes(facts: ArchFacts, dtype: str, *, num_tokens: int, num_seqs: int) -> int:
    """Return the estimated peak memory of one step in bytes: the activations of the widest layer for all
    tokens, float32 logits, and their copies for sampling."""
    special = _COPIES * min(num_seqs, rows_at_once(facts.vocab))
    logits = (num_seqs + special) * facts.vocab * 4
    return num_tokens * _widest(facts) * DTYPE_BYTES[dtype] + _expert_bytes(facts, num_tokens) + logits


def max_forced(config: EngineConfig) -> int:
    """Return the most tokens forced by grammars that a step computes as draft tokens; 0 if it has none.

    On a GPU a step with them would leave the graph of its decodes, and with MLA on a CPU its tape. A draft
    model proposes drafts where they are computed, so that no others can be beside them. The other features
    cannot compute drafts, or not without a speculative decoding method."""
    spec, parallel, facts = config.speculation, config.parallel, config.checkpoint.facts
    without_drafts = (
        config.machine.device != "cpu",
        config.pooling is not None,
        spec is not None and spec.method not in ("ngram", "suffix"),
        parallel.pipeline_parallel_size > 1 or steps_together(parallel),
        len(config.extensions.logits_processors) > 0,
        config.extensions.return_sampling_mask,
        facts.borrowed is not None or facts.mla is not None or has_ssm_state(cache_specs(facts)),
    )
    return 0 if any(without_drafts) else MAX_FORCED


def step_bytes(config: EngineConfig) -> int:
    """Return the estimated peak memory of the largest step in bytes: the maximum number of tokens and
    requests."""
    limits = config.scheduler
    num_tokens, num_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    return activation_bytes(config.rank_facts, config.model.dtype, num_tokens=num_tokens, num_seqs=num_seqs)


def tape_bytes(config: EngineConfig, max_taped: int = MAX_TAPED) -> int:
    """Return the size in bytes of the memory pool of the decode steps that a CPU records and replays, with up
    to `max_taped` sequences; 0 in eager mode."""
    taped = 0 if config.model.enforce_eager else min(config.scheduler.max_num_seqs, max_taped)
    return _TAPED_TIMES * activation_bytes(
        config.rank_facts, config.model.dtype, num_tokens=taped, num_seqs=taped
    )


def ladder(largest: int) -> list[int]:
    """Return the batch sizes up to `largest` for which decode steps are captured as CUDA graphs. Up to 128,
    padding a batch to the next size costs little time, because memory bandwidth limits the step. Above that,
    the next size is at most a quarter larger."""
    sizes = [1, 2, 4, 8, 16, 32, 64, *range(128, 209, 16), *range(256, 513, 64), *range(640, 1025, 128)]
    return sorted({min(size, largest) for size in sizes})


def mixed_shapes(largest: int, most_tokens: int) -> list[tuple[int, int]]:
    """Return the (sequences, tokens) of each CUDA graph for steps that contain prompts, up to `largest`
    sequences and `most_tokens` tokens."""
    return [(min(largest, n // 2, _MOST_SEQS), n) for n in _MIXED_TOKENS if n <= most_tokens]


def max_mixed_tokens(config: EngineConfig) -> int:
    """Return the maximum number of tokens in a CUDA graph for steps with prompts. Up to this size, the GPU
    takes less time to compute a step than the host would take to launch its kernels."""
    flops = 2 * count_parameters(config.checkpoint.facts).active // config.parallel.tensor_parallel_size
    return min(config.scheduler.max_num_batched_tokens, _LAUNCH_FLOPS // flops)


def graph_bytes(config: EngineConfig) -> int:
    """Return the estimated bytes of all CUDA graphs, including the outputs that each graph keeps; 0 in eager
    mode."""
    facts, largest = config.checkpoint.facts, config.scheduler.max_num_seqs
    largest = 0 if config.model.enforce_eager else -(-largest // config.parallel.pipeline_parallel_size)
    if not largest:
        return 0
    mixed = sum(mixed_bytes(config, *shape) for shape in mixed_shapes(largest, max_mixed_tokens(config)))
    sizes, item = ladder(largest), DTYPE_BYTES[config.model.dtype]
    return mixed + len(sizes) * GRAPH_BYTES + sum(sizes) * (facts.vocab + facts.hidden) * item


def mixed_bytes(config: EngineConfig, num_seqs: int, num_tokens: int) -> int:
    """Return the bytes of one CUDA graph for steps with prompts: logits, hidden states, and the input
    embeddings of multimodal models."""
    facts, width = config.checkpoint.facts, config.checkpoint.facts.hidden
    if facts.media is not None:
        width += facts.hidden * (1 + facts.media.levels)
    numbers = num_seqs * facts.vocab + num_tokens * width
    return GRAPH_BYTES + numbers * DTYPE_BYTES[config.model.dtype]


def embeds_bytes(facts: ArchFacts, dtype: str, *, num_tokens: int) -> int:
    """Return the bytes of `num_tokens` prompt embeddings that requests supply: the input, in float32 at most,
    and a copy in the model's dtype."""
    return num_tokens * facts.hidden * (4 + DTYPE_BYTES[dtype])


def max_vectors(config: EngineConfig) -> int:
    """Return the maximum number of embedding vectors of images, videos and audio that one step computes."""
    return max([config.scheduler.max_num_batched_tokens, *config.largest_items.values()])


def max_kept(config: EngineConfig) -> int:
    """Return the size of the encoder cache as a number of embedding vectors. For cross-attention models, it
    has room for the encoder outputs of all running requests."""
    media = config.checkpoint.facts.media
    num_cross_states = 0 if media is None else media.num_cross_states
    return config.scheduler.max_num_seqs * num_cross_states or max_vectors(config)


def max_span(config: EngineConfig) -> int | None:
    """Return the maximum number of placeholder tokens of one image, video or audio clip; a request that
    exceeds it is rejected. None: no limit, since the placeholders may be split over steps."""
    media = config.checkpoint.facts.media
    is_whole = media is not None and (media.is_whole or config.multimodal.disable_chunked_mm_input)
    return config.scheduler.max_chunk if is_whole else None


def _widest(facts: ArchFacts) -> int:
    """Return the number of values per token that exist at the same time in the widest part (attention or MLP)
    of a layer."""
    variants = [facts, *{facts.of_layer(layer) for layer in facts.layers}]
    widths = [3 * max(x.intermediate for x in variants)]
    widths.append(2 * max((x.heads + 2 * x.kv_heads) * x.head_dim for x in variants))
    if facts.moe is not None:
        widths.append(3 * facts.moe.shared_intermediate)
    if (state := facts.state) is not None:
        inner = state.heads * state.head_dim
        widths.append(5 * inner + 4 * state.groups * state.state)
    return max(widths) + 4 * facts.hidden


def _expert_bytes(facts: ArchFacts, num_tokens: int) -> int:
    """Return the bytes of the (token, expert) pairs that a mixture of experts computes together, in float32:
    input, intermediate values and output."""
    if facts.moe is None:
        return 0
    pairs = min(num_tokens * facts.moe.routing.per_token, _PAIRS_AT_ONCE)
    return 4 * pairs * (2 * facts.hidden + 3 * facts.moe.intermediate)


def rows_at_once(vocab: int) -> int:
    """Return the number of logits rows, of `vocab` values each, that are sampled together: at most
    `LOGITS_AT_ONCE` values, but at least 16 rows. A multiple of 16, so that slices of columns stay
    aligned."""
    return max(LOGITS_AT_ONCE // vocab // 16 * 16, 16)


def processor_bytes(config: EngineConfig) -> int:
    """Return the bytes that custom logits processors take: float32 logits of the largest batch, and a
    copy."""
    limits = config.scheduler
    num_rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    return 2 * num_rows * config.checkpoint.facts.vocab * DTYPE_BYTES["float32"]


class OffloadedLayers(NamedTuple):
    """The indices of the layers of one device whose weights are kept in host memory, and their sizes."""

    layers: tuple[int, ...] = ()
    host_bytes: int = 0
    """Bytes of the weights of these layers, which are copied to the device in every step."""
    buffer_bytes: int = 0
    """Bytes of the buffers on the device, each as large as the largest of these layers."""


def choose_offloaded(sizes: Sequence[int], wanted_bytes: float) -> OffloadedLayers:
    """Choose the layers to offload: the fewest that free at least `wanted_bytes`, where `sizes` has the bytes
    of each layer. They are evenly spaced, so that the layers in between compute during the copies. No layers
    are chosen if the buffers would take as much memory as the offloaded weights."""
    if wanted_bytes <= 0:
        return OffloadedLayers()
    for count in range(NUM_OFFLOAD_BUFFERS + 1, len(sizes) + 1):
        layers = tuple((number + 1) * len(sizes) // count - 1 for number in range(count))
        host_bytes = sum(sizes[layer] for layer in layers)
        if host_bytes >= wanted_bytes or count == len(sizes):
            largest = max(sizes[layer] for layer in layers)
            return OffloadedLayers(layers, host_bytes, NUM_OFFLOAD_BUFFERS * largest)
    return OffloadedLayers()


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The size of the KV cache and the longest request that fits."""

    num_blocks: int
    """Number of blocks, including the unused block 0."""
    max_model_len: int
    num_tokens: int
    """Number of tokens that fit if all requests are decoding at `max_model_len` tokens. Layers with a sliding
    window cache only the tokens within it."""
    windows: tuple[int | None, ...] = (None,)
    """Sliding window in tokens of each group of layers; None: full attention."""
    num_bytes: int = 0
    """Bytes of the KV blocks and of the SSM states of running requests."""
    num_checkpoints: int = 0
    """Number of checkpoints of SSM states in the prefix cache that fit."""
    checkpoint_bytes: int = 0
    """Bytes of one checkpoint of SSM states."""

    @property
    def all_checkpoint_bytes(self) -> int:
        return self.num_checkpoints * self.checkpoint_bytes


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """Memory of one device that the KV cache may use, and settings that limit the number of KV blocks."""

    kv_bytes: int
    """Bytes for the KV cache."""
    other_bytes: int
    """Bytes for weights and activations."""
    total_bytes: int
    """Bytes of the device's memory."""
    num_blocks_override: int | None = None
    soft: bool = False
    """Whether `kv_bytes` is a default, not a user setting: then the cache gets no more blocks than all
    running requests can fill."""


def smallest_cache(sizes: Iterable[CacheSize]) -> CacheSize:
    """Return the cache size that fits on every device: the fewest blocks and checkpoints of all `sizes`,
    which has one entry per device."""
    sizes = list(sizes)
    smallest = min(sizes, key=lambda size: size.num_blocks)
    return replace(smallest, num_checkpoints=min(size.num_checkpoints for size in sizes))


def size_cache(
    layout: CacheLayout,
    *,
    kv_dtype: str,
    block_size: int,
    max_model_len: int,
    max_chunk: int,
    num_rows: int,
    auto_fit: bool,
    room: CacheRoom,
    checkpoint_unit: int | None = None,
) -> CacheSize:
    """Return the largest cache that fits into `room` together with the SSM states of `num_rows` requests. One
    request of `max_model_len` tokens must fit, in chunks of up to `max_chunk` tokens. Otherwise `auto_fit`
    reduces that length, or a ConfigError is raised. Part of the memory is for checkpoints of SSM states after
    multiples of `checkpoint_unit` tokens; None: no checkpoints."""

    def blocks_of(num_tokens: int, chunk: int = max_chunk) -> int:
        return layout.blocks_of(num_tokens, block_size=block_size, max_chunk=chunk)

    per_block = layout.block_bytes(block_size, DTYPE_BYTES[kv_dtype])
    per_row = layout.row_bytes(DTYPE_BYTES[kv_dtype])
    states = per_row * (num_rows + 1)
    num_checkpoints = 0
    if checkpoint_unit is not None:
        left = room.kv_bytes - states
        num_bytes = min(left // _CHECKPOINT_SHARE, left - (blocks_of(max_model_len) + 1) * per_block)
        most = min(_MAX_CHECKPOINTS, num_rows * max(max_model_len // checkpoint_unit, 1))
        fitting = max(num_bytes, 0) // layout.state_bytes if layout.state_bytes else most
        num_checkpoints = min(fitting, most)
    num_blocks = room.num_blocks_override
    if num_blocks is None:
        max_blocks = (num_rows - 1) * blocks_of(max_model_len, 1) + blocks_of(max_model_len) + 1
        left = room.kv_bytes - states - num_checkpoints * layout.state_bytes
        num_blocks = max(left, 0) // per_block if per_block else max_blocks
        if room.soft:
            num_blocks = min(num_blocks, max_blocks)
    usable = max(num_blocks - 1, 0)
    longest = bisect_right(range(1, max_model_len + 1), usable, key=blocks_of)
    if longest < max_model_len and not (auto_fit and longest > 0):
        needed_blocks = blocks_of(max_model_len) + 1
        needed = states + needed_blocks * per_block
        rows = (max(room.kv_bytes, 0) - needed_blocks * per_block) // max(per_row, 1) - 1
        fewer = f"--max-num-seqs {rows}" if states and 0 < rows < num_rows else ""
        raise ConfigError(_too_small(room, needed_blocks, needed, max_model_len, longest, fewer))
    num_tokens = usable * block_size * -(-longest // block_size) // blocks_of(longest, 1)
    return CacheSize(
        num_blocks=num_blocks,
        max_model_len=longest,
        num_tokens=num_tokens,
        windows=layout.windows,
        num_bytes=states + num_blocks * per_block,
        num_checkpoints=num_checkpoints,
        checkpoint_bytes=layout.state_bytes,
    )


def _too_small(
    room: CacheRoom, needed_blocks: int, needed: int, max_model_len: int, longest: int, fewer: str
) -> str:
    shorter = f"--max-model-len {longest} or --max-model-len auto" if longest else ""
    if room.num_blocks_override is not None:
        return (
            f"One request of max_model_len={max_model_len} needs {needed_blocks} KV cache blocks, but "
            f"num_gpu_blocks_override={room.num_blocks_override}. Use --num-gpu-blocks-override "
            f"{needed_blocks}" + (f" or more, or {shorter}." if shorter else " or more.")
        )
    available = max(room.kv_bytes, 0)
    remedies = [flag for flag in (fewer, shorter) if flag]
    share = (needed + room.other_bytes) / room.total_bytes
    if share <= 1.0:
        remedies.append(f"--gpu-memory-utilization {min(1.0, share + 0.0051):.2f}")
        remedies.append(f"--kv-cache-memory-bytes {needed}")
    return (
        f"To serve at least one request with the model's max seq len ({max_model_len}), {human(needed)} "
        f"of KV cache is "
        f"needed, but {human(available)} is available: {human(needed - available)} is missing. "
        f"The estimated maximum model length is {longest}. "
        + (f"Try {', or '.join(remedies)}." if remedies else "This model needs a device with more memory.")
    )


class ModelMemory(NamedTuple):
    """Estimated bytes of a model: of its weights, and of everything on its devices while it is awake."""

    weights: int
    awake: int


def model_memory(config: EngineConfig) -> ModelMemory:
    """Estimate the bytes that a model takes on each of its GPUs, or on a CPU for all its ranks together. If
    the size of its cache is not set, the model takes the fraction `gpu_memory_utilization` of the device's
    memory."""
    cache, machine, parallel = config.cache, config.machine, config.parallel
    num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    weights = _stored_bytes(config) // num_ranks
    sharing = num_ranks * parallel.data_parallel_size if machine.device == "cpu" else 1
    if cache.num_gpu_blocks_override is not None:
        whole = layout(
            cache_specs(config.rank_facts), config.model.max_model_len, kv_dtype=cache.kv_cache_dtype
        )
        item = DTYPE_BYTES.get(cache.kv_cache_dtype) or DTYPE_BYTES[config.model.dtype]
        kv_bytes = cache.num_gpu_blocks_override * whole.block_bytes(cache.block_size, item)
    elif (fixed := cache.kv_cache_memory_bytes or cache.kv_cache_memory_limit) is not None:
        kv_bytes = fixed
    else:
        share = int(machine.total_bytes * cache.gpu_memory_utilization)
        return ModelMemory(weights * sharing, share * sharing)
    return ModelMemory(weights * sharing, (weights + kv_bytes + step_bytes(config)) * sharing)


def check_weights_fit(config: EngineConfig) -> None:
    """Raise ConfigError if the weights alone exceed the memory of a CPU by a tenth: the kernel would end the
    process while it loads them. Weights that are quantized while they are loaded are not checked, nor are
    those of models that run through transformers, whose parameters are not counted exactly."""
    machine, checkpoint = config.machine, config.checkpoint
    is_exact = config.quant is checkpoint.quant and checkpoint.facts.borrowed is None
    if machine.device == "cpu" and is_exact:
        num_bytes = model_memory(config).weights
        if num_bytes > 1.1 * machine.total_bytes:
            raise ConfigError(weights_too_large(config, num_bytes))


def weights_too_large(config: EngineConfig, num_bytes: int) -> str:
    """Return the message for weights that do not fit, with remedies."""
    remedies = ["a smaller model", "a quantized checkpoint", "--quantization int8"]
    if config.machine.device != "cpu":
        remedies += ["a higher --tensor-parallel-size", "--cpu-offload-gb"]
    return (
        f"the weights take about {human(num_bytes)}, and the {config.machine.device} has "
        f"{human(config.machine.total_bytes)} of memory: use {', '.join(remedies[:-1])} or {remedies[-1]}; "
        "`quire plan MODEL` lists what fits"
    )


def _stored_bytes(config: EngineConfig) -> int:
    """Return the bytes of all weights: the size of the files of a quantized checkpoint, otherwise the number
    of parameters times the size of the dtype."""
    checkpoint = config.checkpoint
    if checkpoint.path.is_file():
        return checkpoint.path.stat().st_size
    num_bytes = count_parameters(checkpoint.facts).total * DTYPE_BYTES[config.model.dtype]
    files = sum(file.stat().st_size for file in checkpoint.path.glob("*.safetensors"))
    return files if checkpoint.quant is not None and files else num_bytes
