"""Bytes: what activations and cache take, and how many blocks fit. Pure arithmetic, no device."""

from bisect import bisect_right
from dataclasses import dataclass

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.layout import DTYPE_BYTES as DTYPE_BYTES
from quire.checkpoint.layout import CacheLayout
from quire.checkpoint.weights import count
from quire.config.engine import EngineConfig
from quire.errors import ConfigError

LOGITS_AT_ONCE = 1 << 24
"""How many logits are worked on together for rows that ask for more than a plain sample: what that takes is
bounded, whatever the batch."""
_COPIES = 8
"""Of these in float32, at most, one beside the other: `tests/sampling/test_memory_probe.py` counts them."""
_PAIRS_AT_ONCE = 8192
"""Tokens beside an expert that a CPU works on together."""
MAX_DRAWS = 512
"""Of a step with drafts on a GPU: with more it computes longer for a draft than it would without."""
GRAPH_BYTES = 8 << 20
"""What the driver keeps for a captured graph, about."""
_SHORT = (32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens of the steps with prompts that are captured."""
_MOST_SEQS = 128
_LAUNCH_FLOPS = 7 * 10**12
"""What a GPU computes while its host launches, one by one, what a step with prompts does."""
MAX_TAPED = 64
"""Decodes of up to so many sequences are taped; larger ones have work enough to hide the calls."""
_TAPED_TIMES = 2
"""Blocks of their pool are powers of two, and smaller decodes may come first."""


def human(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if abs(num_bytes) >= 2**28 else f"{num_bytes / 2**20:.2f} MiB"


def activation_bytes(facts: ArchFacts, dtype: str, *, num_tokens: int, num_seqs: int) -> int:
    """Peak of one step: the widest layer for every token, float32 logits, and what sampling makes of them."""
    special = _COPIES * min(num_seqs, rows_at_once(facts.vocab))
    logits = (num_seqs + special) * facts.vocab * 4
    return num_tokens * _widest(facts) * DTYPE_BYTES[dtype] + _expert_bytes(facts, num_tokens) + logits


def tape_bytes(config: EngineConfig, max_taped: int = MAX_TAPED) -> int:
    """Of decodes on a CPU that are played again, of as many sequences as that is done for."""
    taped = 0 if config.model.enforce_eager else min(config.scheduler.max_num_seqs, max_taped)
    return _TAPED_TIMES * activation_bytes(
        config.own_facts, config.model.dtype, num_tokens=taped, num_seqs=taped
    )


def ladder(largest: int) -> list[int]:
    """The batch sizes whose decodes a GPU captures: close together where one sequence more costs. Up to 128
    what is read takes longer than what is computed, and a tile of the products lacks no rows."""
    sizes = [1, 2, 4, 8, 16, 32, 64, *range(128, 209, 16), *range(256, 513, 64), *range(640, 1025, 128)]
    return sorted({min(size, largest) for size in sizes})


def short_shapes(largest: int, most_tokens: int) -> list[tuple[int, int]]:
    """The steps with prompts that it captures, where none has more tokens: up to so many sequences and draws,
    and fewer tokens in all than that."""
    return [(min(largest, tokens // 2, _MOST_SEQS), tokens) for tokens in _SHORT if tokens <= most_tokens]


def longest_short(config: EngineConfig) -> int:
    """Tokens of the longest of them: it is done before the host would have launched it."""
    flops = 2 * count(config.checkpoint.facts).active // config.parallel.tensor_parallel_size
    return min(config.scheduler.max_num_batched_tokens, _LAUNCH_FLOPS // flops)


def graph_bytes(config: EngineConfig) -> int:
    """Of all that it captures, each of which keeps its results."""
    facts, largest = config.checkpoint.facts, config.scheduler.max_num_seqs
    largest = 0 if config.model.enforce_eager else -(-largest // config.parallel.pipeline_parallel_size)
    if not largest:
        return 0
    short = sum(short_bytes(config, *each) for each in short_shapes(largest, longest_short(config)))
    sizes, item = ladder(largest), DTYPE_BYTES[config.model.dtype]
    return short + len(sizes) * GRAPH_BYTES + sum(sizes) * (facts.vocab + facts.hidden) * item


def short_bytes(config: EngineConfig, num_seqs: int, num_tokens: int) -> int:
    """Of one with prompts: what it gives, and the vectors that tokens may stand for."""
    facts, each = config.checkpoint.facts, config.checkpoint.facts.hidden
    if facts.media is not None:
        each += facts.hidden * (1 + facts.media.levels)
    numbers = num_seqs * facts.vocab + num_tokens * each
    return GRAPH_BYTES + numbers * DTYPE_BYTES[config.model.dtype]


def embeds_bytes(facts: ArchFacts, dtype: str, *, num_tokens: int) -> int:
    """Of prompts that are vectors: as they came, in float32 at most, and in the model's own type."""
    return num_tokens * facts.hidden * (4 + DTYPE_BYTES[dtype])


def max_vectors(config: EngineConfig) -> int:
    """Of images, videos and sounds: the most that one step makes."""
    return max([config.scheduler.max_num_batched_tokens, *config.largest_items.values()])


def max_kept(config: EngineConfig) -> int:
    """The most that are kept: of items that no tokens stand for one for each row."""
    media = config.checkpoint.facts.media
    crossed = 0 if media is None else media.crossed
    return config.scheduler.max_num_seqs * crossed or max_vectors(config)


def max_span(config: EngineConfig) -> int | None:
    """The most tokens that one image, video or sound can stand for; None: any number, since steps divide
    them."""
    media = config.checkpoint.facts.media
    is_whole = media is not None and (media.is_whole or config.multimodal.disable_chunked_mm_input)
    return config.scheduler.max_chunk if is_whole else None


def _widest(facts: ArchFacts) -> int:
    """Numbers of a token that exist side by side in the widest half of a layer."""
    own = [facts, *{facts.of_layer(layer) for layer in facts.layers}]
    widths = [3 * max(each.intermediate for each in own)]
    widths.append(2 * max((each.heads + 2 * each.kv_heads) * each.head_dim for each in own))
    if facts.moe is not None:
        widths.append(3 * facts.moe.shared_intermediate)
    if (state := facts.state) is not None:
        inner = state.heads * state.head_dim
        widths.append(5 * inner + 4 * state.groups * state.state)
    return max(widths) + 4 * facts.hidden


def _expert_bytes(facts: ArchFacts, num_tokens: int) -> int:
    """A token beside each of its experts: in, between and out, in float32."""
    if facts.moe is None:
        return 0
    pairs = min(num_tokens * facts.moe.routing.per_token, _PAIRS_AT_ONCE)
    return 4 * pairs * (2 * facts.hidden + 3 * facts.moe.intermediate)


def rows_at_once(vocab: int) -> int:
    """For `LOGITS_AT_ONCE`; a multiple of 16, so that parts of columns are aligned as the whole is."""
    return max(LOGITS_AT_ONCE // vocab // 16 * 16, 16)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How large a cache came out, and the longest request that it holds."""

    num_blocks: int
    """Block 0, which holds nothing, counted in."""
    max_model_len: int
    num_tokens: int
    """Of requests of `max_model_len` that decode, all together. A token takes a slot in each group of layers,
    for as long as it is seen."""
    windows: tuple[int | None, ...] = (None,)
    """How far back each group of layers looks."""
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """What may be spent on the cache, and how the user could change it."""

    kv_bytes: int
    """Bytes for the cache."""
    other_bytes: int
    """Bytes for weights and activations."""
    total_bytes: int
    """Memory of the device."""
    num_blocks_override: int | None = None
    soft: bool = False
    """`kv_bytes` is a default that nobody asked for: a cache larger than all rows can ever fill is cut to
    that."""


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
) -> CacheSize:
    """As many blocks as fit beside the states of all rows. They must hold one request of `max_model_len`,
    whatever chunks it is computed in; with `auto_fit` that length gives way."""

    def blocks_of(num_tokens: int, chunk: int = max_chunk) -> int:
        return layout.blocks_of(num_tokens, block_size=block_size, max_chunk=chunk)

    per_block = layout.block_bytes(block_size, DTYPE_BYTES[kv_dtype])
    per_row = layout.row_bytes(DTYPE_BYTES[kv_dtype])
    states = per_row * (num_rows + 1)
    num_blocks = room.num_blocks_override
    if num_blocks is None:
        most = (num_rows - 1) * blocks_of(max_model_len, 1) + blocks_of(max_model_len) + 1
        num_blocks = max(room.kv_bytes - states, 0) // per_block if per_block else most
        if room.soft:
            num_blocks = min(num_blocks, most)
    usable = max(num_blocks - 1, 0)
    longest = bisect_right(range(1, max_model_len + 1), usable, key=blocks_of)
    if longest < max_model_len and not (auto_fit and longest > 0):
        needed_blocks = blocks_of(max_model_len) + 1
        needed = states + needed_blocks * per_block
        rows = (max(room.kv_bytes, 0) - needed_blocks * per_block) // max(per_row, 1) - 1
        fewer = f"--max-num-seqs {rows}" if states and 0 < rows < num_rows else ""
        raise ConfigError(_too_small(room, needed_blocks, needed, max_model_len, longest, fewer))
    num_tokens = usable * block_size * -(-longest // block_size) // blocks_of(longest, 1)
    return CacheSize(num_blocks, longest, num_tokens, layout.windows, states + num_blocks * per_block)


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
    have = max(room.kv_bytes, 0)
    ways = [way for way in (fewer, shorter) if way]
    share = (needed + room.other_bytes) / room.total_bytes
    if share <= 1.0:
        ways.append(f"--gpu-memory-utilization {min(1.0, share + 0.0051):.2f}")
        ways.append(f"--kv-cache-memory-bytes {needed}")
    return (
        f"To serve at least one request with the model's max seq len ({max_model_len}), {human(needed)} "
        f"of KV cache is "
        f"needed, but {human(have)} is available: {needed - have} bytes are missing. "
        f"The estimated maximum model length is {longest}. "
        + (f"Try {', or '.join(ways)}." if ways else "This model needs a device with more memory.")
    )
