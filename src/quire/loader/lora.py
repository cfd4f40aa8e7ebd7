"""LoRA adapters in PEFT's format: read, checked against the model and sharded for this device."""

import math
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from quire.checkpoint.reader import ConfigReader
from quire.data.lora import AdapterFacts
from quire.errors import ConfigError, RequestError
from quire.layers.lora import AdapterSlots, lora_targets
from quire.layers.lora_layers import LoRAFactors, LoRAHeadLayer, LoRAStack, LoRATarget
from quire.layers.lora_tables import LoRAVocab
from quire.layers.scope import Target
from quire.loader.lora_files import CONFIG, LoRAFiles
from quire.loader.lora_vocab import LoRAVocabReader, token_indices
from quire.loader.source import is_of_other_stage, put
from quire.logs import get_logger

log = get_logger(__name__)
T = TypeVar("T")
_thread_lock = threading.Lock()

_MAX_ERROR_CHARS = 1000
"""Maximum number of characters of an error message about an adapter."""
_LONGEST, _MOST = 256, 3
_HARD = re.compile(r"\)\s*[*+?{]|\\[1-9]|\(\?")
_REPEATS = re.compile(r"[*+{]")
"""Limits of the regular expressions in an adapter's config, which must not take exponential time: no repeated
groups, at most `_MOST` repeats and `_LONGEST` characters."""
_THREADS, _BATCH = 8, 8
"""Threads that copy matrices, and the number of matrices copied per task."""
_MANY_BYTES = 1 << 30
"""Size limit of an adapter's file in bytes, to which eight times the size of a LoRA slot is added."""
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "biases",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "replicated layers",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "routed adapters",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
"""Configuration keys of unsupported methods, which need more than two matrices per weight: key -> method."""
_CHANGES_BASE = ("pissa", "corda", "olora", "lora_ga", "loftq")
"""Beginnings of unsupported values of init_lora_weights: initializations that also change the base model."""
_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<layer>.+?)\.lora_(?:embedding_)?(?P<which>[AB])(?:\.\w+)??(?:\.weight)?"
)
_COPY = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+?)(?:\.base_layer)?\.weight")
"""Name of a base weight (of an embedding or output head), which PEFT saves beside its LoRA matrices."""


class Pair(NamedTuple):
    """The LoRA matrices of a layer, with their names in the file."""

    names: tuple[str, str]
    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class LoRAWeights:
    """A LoRA adapter in host memory: the shards that this device needs, ready to be copied to an adapter
    slot."""

    facts: AdapterFacts
    factors: dict[str, LoRAFactors]
    """LoRA factors by the name of their LoRA layer."""
    tables: dict[str, Tensor]
    """Whole weights of the adapter (modules_to_save), by layer name."""
    vocab_rows: dict[str, LoRAVocab] = field(default_factory=dict)
    """Rows of added or individually trained tokens, for embed_tokens and lm_head."""


class LoRAPair(NamedTuple):
    """The LoRA matrices of one projection (target) of the model: `a` [rank, size_in] and `b` [size_out,
    rank], as in the checkpoint."""

    target: LoRATarget
    names: tuple[str, str]
    a: Tensor
    b: Tensor
    scale: float


class LoRAReader:
    """Reader of adapters for the LoRA layers of `slots`; `layers` are the indices of the decoder layers of
    this pipeline stage (None: all)."""

    def __init__(self, slots: AdapterSlots, layers: range | None = None) -> None:
        self.slots = slots
        self.layers = layers
        self._targets = _by_alias(lora_targets(slots))
        self._stacks = _by_alias(slots.stacks.items())
        self._refused = _by_alias(slots.refused.items())
        tables = slots.tables.items()
        self._tables = _by_alias((alias, name) for name, table in tables for alias in table.names)
        kinds = _by_alias((alias, kind) for kind, rows in slots.vocab_rows.items() for alias in rows.names)
        self._vocab_reader = LoRAVocabReader(slots, kinds)
        self._pool = single_threads(_THREADS, "quire-adapter-copy")

    def read(self, name: str, path: Path, within: Sequence[str] = ()) -> LoRAWeights:
        """Return the adapter in a folder. Raise FileNotFoundError if there is none, and RequestError if it
        does not fit the model or lies outside the directories `within`."""
        try:
            with LoRAFiles(path, within) as files:
                return self._read(files)
        except (RequestError, FileNotFoundError):
            raise
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
            message = str(error).encode(errors="backslashreplace").decode()  # it may quote any bytes
            raise RequestError(
                f"adapter {name!r}: {message:.{_MAX_ERROR_CHARS}}", param="lora_request"
            ) from error

    def _read(self, files: LoRAFiles) -> LoRAWeights:
        files.check_sizes(_MANY_BYTES + 8 * self.slots.num_bytes // max(self.slots.max_slots, 1))
        settings = LoRAConfigFile.of(ConfigReader(CONFIG, files.config()))
        digest, tensors = files.contents()
        vocab_rows = self._vocab_reader.take(tensors, settings.token_ids, settings.scale)
        tables = self._take_saved_modules(tensors, settings)
        pairs = list(self._match_targets(tensors, settings))
        if not pairs and not tables and not vocab_rows and self.layers is None and not self.slots.only:
            raise ConfigError(f"{files.tensors_name} has no LoRA tensors")
        factors = self._copy_factors(pairs)
        rank = max((len(pair.a) for pair in pairs), default=settings.rank)
        parts = *factors.values(), tables.values(), *vocab_rows.values()
        num_bytes = sum(tensor.nbytes for part in parts for tensor in part)
        facts = AdapterFacts(digest, rank, num_bytes, self.slots.count_new(vocab_rows))
        return LoRAWeights(facts, factors, tables, vocab_rows)

    def _take_saved_modules(
        self, tensors: dict[str, Tensor], settings: "LoRAConfigFile"
    ) -> dict[str, Tensor]:
        """Remove the tensors of `modules_to_save` from `tensors` and return them by layer."""
        tables: dict[str, Tensor] = {}
        for module in settings.saved:
            names = [name for name in tensors if _is_of(name, module)]
            matches = [_COPY.fullmatch(name) for name in names]
            layers = [self._tables.get(match["layer"]) if match else None for match in matches]
            is_elsewhere = self.layers is not None and module.rpartition(".")[2] in self.slots.whole_modules
            if not names or not all(matches) or (None in layers and not is_elsewhere):
                raise ConfigError(
                    f"modules_to_save {module!r} is not supported: {_supported_modules(self.slots)}"
                )
            for name, layer in zip(names, layers, strict=True):
                tensor = tensors.pop(name)
                if layer is not None:
                    tables[layer] = self._shard_table(name, layer, tensor)
        return tables

    def _shard_table(self, name: str, layer: str, tensor: Tensor) -> Tensor:
        table, buffer = self.slots.tables[layer], self.slots.table_room(layer)
        if tuple(tensor.shape) != (table.shard.all, table.hidden):
            raise ConfigError(
                f"{name} has the shape {tuple(tensor.shape)}, the model's {(table.shard.all, table.hidden)}"
                f"{self._vocab_reader.why_not(tensor, table.shard.all)}"
            )
        put(tensor, Target(name, buffer, 0, (table.shard,)))
        return buffer

    # ---- matching tensors to layers

    def _match_targets(self, tensors: dict[str, Tensor], settings: "LoRAConfigFile") -> Iterator[LoRAPair]:
        """Yield the matrices of all targets on this device, without layers outside of lora_target_modules."""
        num_ignored = 0
        for layer, pair in self._pairs(tensors).items():
            name = re.sub(r"(\.base_layer)+$", "", layer)  # several weights of a module have such layers
            if (target := self._targets.get(name)) is not None:
                yield settings.check(name, target, pair)
            elif (stack := self._stacks.get(name)) is not None:
                yield from _split_stack(name, stack, pair, settings)
            elif reason := self._refusal(name):
                raise ConfigError(f"{pair.names[0]}: {reason}")
            elif is_of_other_stage(name, self.layers) or self._is_unused(name):
                continue
            elif self.slots.takes(name):
                raise ConfigError(
                    f"{pair.names[0]} is for a layer that the model does not have, "
                    "or one without LoRA support"
                )
            else:
                num_ignored += 1
        if num_ignored:
            log.warning(
                "Ignored %d layers of a LoRA adapter that are not in lora_target_modules", num_ignored
            )

    def _pairs(self, tensors: dict[str, Tensor]) -> dict[str, Pair]:
        names: dict[str, dict[str, str]] = {}
        for name, tensor in tensors.items():
            match = _NAME.fullmatch(name)
            if match is None:
                self._check_copy(name, tensor)
                continue
            names.setdefault(match["layer"], {})[match["which"]] = name
            if tensor.ndim != 2 or not tensor.is_floating_point():
                raise ConfigError(
                    f"{name} is {tensor.dtype} of the shape {tuple(tensor.shape)}, expected a matrix"
                )
        pairs = {}
        for layer, both in names.items():
            if len(both) < 2:
                (name,) = both.values()
                raise ConfigError(f"{name} has no counterpart")
            pairs[layer] = Pair((both["A"], both["B"]), tensors[both["A"]], tensors[both["B"]])
        return pairs

    def _check_copy(self, name: str, tensor: Tensor) -> None:
        """Check a tensor that is no LoRA matrix. PEFT saves base weights of embeddings and output heads
        beside LoRA matrices; raise a ConfigError for any other name, or another shape than that of the base
        weight."""
        match = _COPY.fullmatch(name)
        target = match and self._targets.get(match["layer"])
        is_elsewhere = match and self.layers is not None and not target
        if target and (target.is_table or isinstance(target.lora_layer, LoRAHeadLayer)):
            sizes = target.sizes if target.is_table else target.sizes[::-1]
            if tuple(tensor.shape) != sizes:
                raise ConfigError(
                    f"{name} has the shape {tuple(tensor.shape)}, the model's {sizes}"
                    f"{self._vocab_reader.why_not(tensor, sizes[0])}"
                )
        elif not is_elsewhere:
            raise ConfigError(f"{name} is not a LoRA tensor")

    def _refusal(self, name: str) -> str | None:
        return next((reason for at, reason in self._refused.items() if f"{name}.".startswith(f"{at}.")), None)

    def _is_unused(self, name: str) -> bool:
        return bool(self.slots.unused and re.search(self.slots.unused, f".{name}."))

    # ---- copying to host memory

    def _copy_factors(self, pairs: list[LoRAPair]) -> dict[str, LoRAFactors]:
        ranks: dict[str, int] = {}
        filled: Counter[str] = Counter()
        for pair in pairs:
            rank, name = len(pair.a), pair.target.lora_layer.name
            if rank > self.slots.max_rank:
                raise RequestError(
                    f"LoRA rank {rank} is greater than max_lora_rank {self.slots.max_rank}.",
                    param="lora_request",
                )
            ranks[name] = max(rank, ranks.get(name, 0))
            filled[name] += rank * pair.target.num_parts
        by_layer = self.slots.room(ranks)
        for name, factors in by_layer.items():
            if filled[name] < factors.num_ranks:
                factors.zero()
        pieces = [pairs[first : first + _BATCH] for first in range(0, len(pairs), _BATCH)]
        for _ in self._pool.map(partial(_fill_all, by_layer), pieces):
            pass
        return by_layer


def single_threads(most: int, name: str) -> ThreadPoolExecutor:
    """Return a pool with single-threaded torch in each thread; by default each would use all cores. All
    threads have started when this function returns."""
    count = min(most, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(count, name, initializer=_use_one_thread)
    barrier = threading.Barrier(count)
    for begun in [pool.submit(barrier.wait) for _ in range(count)]:
        begun.result()
    return pool


def _use_one_thread() -> None:
    # The setting applies to the thread that makes it and to threads started later.
    with _thread_lock:
        count = torch.get_num_threads()
        torch.set_num_threads(1)
        restore = threading.Thread(target=torch.set_num_threads, args=(count,))
        restore.start()
        restore.join()


def _split_stack(name: str, stack: LoRAStack, pair: Pair, settings: "LoRAConfigFile") -> Iterator[LoRAPair]:
    """Yield one pair of LoRA matrices per expert from the single pair of a weight that combines all experts.
    Rows of A are ordered by expert, then rank; columns of B by rank, then expert. Some versions of PEFT swap
    inputs and outputs."""
    (rows, size_a), (size_b, columns) = pair.a.shape, pair.b.shape
    sizes = {by_expert[0].sizes: key for key, by_expert in stack.products.items()}
    is_swapped = (size_b, size_a) in sizes and (size_a, size_b) not in sizes
    key = sizes.get((size_b, size_a) if is_swapped else (size_a, size_b), "")
    targets = stack.products.get(key, [])
    num_experts = len(targets)
    if not num_experts or rows % num_experts or rows != columns:
        raise ConfigError(
            f"{pair.names[0]} and {pair.names[1]} have the shapes {tuple(pair.a.shape)} and "
            f"{tuple(pair.b.shape)}, which match no weight of the experts"
        )
    a, b = pair.a.view(num_experts, -1, size_a), pair.b.view(size_b, -1, num_experts).permute(2, 0, 1)
    if is_swapped:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    for target, one_a, one_b in zip(targets, a, b, strict=True):
        yield settings.check(f"{name}.{key}", target, Pair(pair.names, one_a, one_b))


@torch.inference_mode()  # a pool thread may run in another mode than the one the tensors were made in
def _fill_all(factors: Mapping[str, LoRAFactors], pairs: Sequence[LoRAPair]) -> None:
    for pair in pairs:
        _fill(pair, pair.target.of(factors[pair.target.lora_layer.name]))


def _fill(pair: LoRAPair, into: LoRAFactors) -> None:
    rank, lora_target, (name_a, name_b) = pair.a.shape[0], pair.target, pair.names
    if lora_target.is_table:
        into.a[:, :rank].copy_(pair.a.t())
    else:
        first, *others = into.a.narrow(1, 0, rank).unbind()
        put(pair.a, Target(name_a, first, 1, (lora_target.inputs,)))
        for other in others:
            other.copy_(first)
    order, target = lora_target.order(), Target(name_b, into.b.narrow(1, 0, rank), 0, lora_target.outputs)
    if order is None and target.is_whole and pair.b.dtype == into.b.dtype:
        torch.mul(pair.b, pair.scale, out=target.tensor)
        return
    scaled = pair.b.float() * pair.scale
    shard = scaled.new_empty(sum(run.size for run in lora_target.outputs), rank)
    put(scaled, target._replace(tensor=shard))
    target.tensor.copy_(shard if order is None else shard[order])


@dataclass(frozen=True, slots=True)
class LoRAConfigFile:
    """The contents of adapter_config.json."""

    rank: int
    alpha: float
    by_root: bool
    """Whether the scale is divided by the square root of the rank (rsLoRA)."""
    ranks: dict[str, int]
    alphas: dict[str, float]
    """`ranks` and `alphas`: values that differ from `rank` and `alpha`, by pattern of layer names."""
    saved: list[str]
    """Layers that the adapter replaces as a whole, by suffixes of their names."""
    token_ids: dict[str, list[int]]
    """Ids of individually trained tokens, by suffixes of layer names; '' stands for the embedding."""

    @staticmethod
    def of(keys: ConfigReader) -> "LoRAConfigFile":
        if (kind := keys.get("peft_type")) not in (None, "LORA"):
            raise ConfigError(f"peft_type {kind} is not supported: it must be LORA")
        for key, what in _REFUSED.items():
            if keys.get(key):
                raise ConfigError(f"{key} ({what}) is not supported")
        if (bias := keys.get("bias")) not in (None, "none"):
            raise ConfigError(f"bias {bias!r} is not supported: it must be 'none'")
        init = keys.get("init_lora_weights")
        if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
            raise ConfigError(
                f"init_lora_weights {init!r} is not supported, since it changes the model as well: "
                "have PEFT convert the adapter as it saves it"
            )
        ranks, alphas = (_pattern(keys, key) for key in ("rank_pattern", "alpha_pattern"))
        return LoRAConfigFile(
            keys.size("r"),
            keys.number("lora_alpha"),
            bool(keys.get("use_rslora")),
            {name: int(rank) for name, rank in ranks.items()},
            alphas,
            _modules_to_save(keys),
            token_indices(keys),
        )

    def scale(self, layer: str) -> tuple[int, float]:
        """Return (rank, scale) of a layer's LoRA update, which is scale * B A."""
        rank, alpha = _by_pattern(layer, self.ranks, self.rank), _by_pattern(layer, self.alphas, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.by_root else rank)

    def check(self, layer: str, target: LoRATarget, pair: Pair) -> LoRAPair:
        """Raise a ConfigError if the matrices of a layer have wrong shapes; otherwise return them as a
        `LoRAPair`."""
        rank, scale = self.scale(layer)
        size_in, size_out = target.sizes
        for name, tensor, expected in zip(
            pair.names, (pair.a, pair.b), ((rank, size_in), (size_out, rank)), strict=True
        ):
            if tuple(tensor.shape) != expected:
                raise ConfigError(f"{name} has the shape {tuple(tensor.shape)}, expected {expected}")
        return LoRAPair(target, pair.names, pair.a, pair.b, scale)


def _modules_to_save(keys: ConfigReader) -> list[str]:
    modules = keys.get("modules_to_save") or []
    if not isinstance(modules, list) or not all(isinstance(name, str) and name for name in modules):
        raise keys.wrong("modules_to_save", "a list of names")
    if modules and keys.get("ensure_weight_tying"):
        raise ConfigError("ensure_weight_tying with modules_to_save is not supported")
    return modules


def _is_of(name: str, module: str) -> bool:
    """Return whether a tensor belongs to the module that PEFT finds by this name."""
    return f".{name}".rpartition(".")[0].endswith(f".{module}")


def _supported_modules(slots: AdapterSlots) -> str:
    modules = " and ".join(sorted(slots.whole_modules))
    return (
        f"adapters may bring {modules} whole"
        if modules
        else "--lora-whole-modules names none that slots have room for"
    )


def _pattern(keys: ConfigReader, key: str) -> dict[str, float]:
    patterns = keys.get(key) or {}
    are_numbers = isinstance(patterns, dict) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        for value in patterns.values()
    )
    if not are_numbers:
        raise keys.wrong(key, "positive numbers by pattern")
    try:
        for pattern in patterns:
            re.compile(pattern)
            if len(pattern) > _LONGEST or _HARD.search(pattern) or len(_REPEATS.findall(pattern)) > _MOST:
                raise ConfigError(f"{keys.source}: {key} has a pattern that is too complex: {pattern!r:.80}")
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{keys.source}: {key} has an invalid pattern: {error}") from error
    return dict(patterns)


def _by_pattern(layer: str, patterns: Mapping[str, T], otherwise: T) -> T:
    """Return the value of the first pattern that matches the layer's name or its end behind a dot, as in
    PEFT; `otherwise` if no pattern matches."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)), otherwise)


def _by_alias(items: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Map every name that adapters may use for a layer to the value that `items` has for the layer."""
    return {alias: value for name, value in items for alias in _aliases(name)}


def _aliases(name: str) -> list[str]:
    """Return the names that adapters may use for a layer: with and without the prefixes of a multimodal
    model, and with `model` as the name of the decoder."""
    body, _, rest = name.partition(".")
    if not rest:
        return [name]
    return [name, rest, f"model.{rest}", f"{body}.language_model.{rest}", f"language_model.{name}"]
