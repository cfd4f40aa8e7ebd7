"""Adapters as PEFT saves them: read, checked against the model, cut to what this device has of it."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from quire.checkpoint.reader import ConfigReader
from quire.data.lora import AdapterFacts
from quire.errors import ConfigError, RequestError
from quire.layers.lora import AdapterSlots, places
from quire.layers.lora_layers import LoRAFactors, LoRAHeadLayer, LoRAStack, LoRATarget
from quire.layers.lora_vocab import LoRAVocab
from quire.layers.scope import Target
from quire.loader.lora_files import CONFIG, LoRAFiles
from quire.loader.lora_vocab import LoRAVocabReader, token_indices
from quire.loader.source import put
from quire.loader.threads import single_threads
from quire.logs import get_logger

log = get_logger(__name__)
T = TypeVar("T")

_MOST_SAID = 1000
"""Characters of what is wrong."""
_LONGEST, _MOST = 256, 3
_HARD = re.compile(r"\)\s*[*+?{]|\\[1-9]|\(\?")
_REPEATS = re.compile(r"[*+{]")
"""Patterns that take for ever to match: repeated groups, many repeats; and more than names of layers need."""
_THREADS, _TOGETHER = 8, 8
"""That copy matrices to their places, and how many of these one takes at a time."""
_MANY_BYTES = 1 << 30
"""Of an adapter of few points; slots that are larger may be filled by larger ones."""
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "biases",
    "alora_invocation_tokens": "adapters that begin at a token",
    "layer_replication": "layers that are there several times",
    "use_qalora": "QALoRA",
    "use_bdlora": "adapters in blocks",
    "arrow_config": "adapters that a router mixes",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
"""Keys of the configuration that ask for more than two matrices beside a weight, and what for."""
_CHANGES_BASE = ("pissa", "corda", "olora", "lora_ga", "loftq")
"""Ways to begin a training with that change the weights of the model as well."""
_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<layer>.+?)\.lora_(?:embedding_)?(?P<which>[AB])(?:\.\w+)??(?:\.weight)?"
)
_COPY = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+?)(?:\.base_layer)?\.weight")
"""Of an embedding or head beside its adapter: PEFT saves both."""


class Pair(NamedTuple):
    """Both matrices for one layer, by the names that the file has for them."""

    names: tuple[str, str]
    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class LoRAWeights:
    """An adapter in host memory: what of it this device needs, ready for a slot."""

    facts: AdapterFacts
    factors: dict[str, LoRAFactors]
    """By the name of their point."""
    tables: dict[str, Tensor]
    """What it brings as a whole, by the name of the layer."""
    own: dict[str, LoRAVocab] = field(default_factory=dict)
    """Rows of tokens that it brings or has trained by themselves: of embed_tokens and lm_head."""


class LoRAPair(NamedTuple):
    """What goes to one place: `a` [rank, size_in] and `b` [size_out, rank] as in the checkpoint."""

    place: LoRATarget
    names: tuple[str, str]
    a: Tensor
    b: Tensor
    scale: float


class LoRAReader:
    """Reads adapters for the layers of one model that `slots` has points in. `layers` is the range of those
    that are here, where other devices have others."""

    def __init__(self, slots: AdapterSlots, layers: range | None = None) -> None:
        self.slots = slots
        self.layers = layers
        self._places = {alias: place for name, place in places(slots) for alias in _aliases(name)}
        self._stacks = {alias: stack for name, stack in slots.stacks.items() for alias in _aliases(name)}
        self._tables = {
            alias: name
            for name, table in slots.tables.items()
            for each in table.names
            for alias in _aliases(each)
        }
        rooms = {
            alias: kind
            for kind, room in slots.owned.items()
            for name in room.names
            for alias in _aliases(name)
        }
        self._own = LoRAVocabReader(slots, rooms)
        self._refused = {alias: why for name, why in slots.refused.items() for alias in _aliases(name)}
        self._pool = single_threads(_THREADS, "quire-adapter-copy")

    def read(self, name: str, path: Path, within: Sequence[str] = ()) -> LoRAWeights:
        """The adapter in that folder; FileNotFoundError if there is none, RequestError if it does not fit, or
        if it does not lie `within` what is allowed."""
        try:
            with LoRAFiles(path, within) as files:
                return self._read(files)
        except (RequestError, FileNotFoundError):
            raise
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
            said = str(error).encode(errors="backslashreplace").decode()  # names and values may be anything
            raise RequestError(f"adapter {name!r}: {said:.{_MOST_SAID}}", param="lora_request") from error

    def _read(self, files: LoRAFiles) -> LoRAWeights:
        files.check_sizes(_MANY_BYTES + 8 * self.slots.num_bytes // max(self.slots.max_slots, 1))
        settings = LoRAConfigFile.of(ConfigReader(CONFIG, files.config()))
        digest, tensors = files.contents()
        own = self._own.take(tensors, settings.token_ids, settings.scale)
        tables = self._whole(tensors, settings)
        fits = list(self._fits(tensors, settings))
        if not fits and not tables and not own and self.layers is None and not self.slots.only:
            raise ConfigError(f"{files.tensors_name} has no LoRA tensors")
        factors = self._factors(fits)
        rank = max((len(fit.a) for fit in fits), default=settings.rank)
        parts = *factors.values(), tables.values(), *own.values()
        num_bytes = sum(each.nbytes for part in parts for each in part)
        facts = AdapterFacts(digest, rank, num_bytes, self._own.num_new(own))
        return LoRAWeights(facts, factors, tables, own)

    def _whole(self, tensors: dict[str, Tensor], settings: "LoRAConfigFile") -> dict[str, Tensor]:
        """What `modules_to_save` names is taken out of the tensors."""
        found: dict[str, Tensor] = {}
        for module in settings.saved:
            names = [name for name in tensors if _is_of(name, module)]
            matches = [_COPY.fullmatch(name) for name in names]
            layers = [self._tables.get(match["layer"]) if match else None for match in matches]
            is_elsewhere = self.layers is not None and module.rpartition(".")[2] in self.slots.whole
            if not names or not all(matches) or (None in layers and not is_elsewhere):
                raise ConfigError(f"modules_to_save {module!r} is not supported: {_why_not(self.slots)}")
            for name, layer in zip(names, layers, strict=True):
                tensor = tensors.pop(name)
                if layer is not None:
                    found[layer] = self._table(name, layer, tensor)
        return found

    def _table(self, name: str, layer: str, tensor: Tensor) -> Tensor:
        table, room = self.slots.tables[layer], self.slots.table_room(layer)
        if tuple(tensor.shape) != (table.own.all, table.hidden):
            raise ConfigError(
                f"{name} has the shape {tuple(tensor.shape)}, the model's {(table.own.all, table.hidden)}"
                f"{self._own.why_not(tensor, table.own.all)}"
            )
        put(tensor, Target(name, room, 0, (table.own,)))
        return room

    # ---- which tensor is for what

    def _fits(self, tensors: dict[str, Tensor], settings: "LoRAConfigFile") -> Iterator[LoRAPair]:
        pairs, left_out = self._pairs(tensors), []
        for layer, pair in pairs.items():
            found = list(self._fits_of(layer, pair, settings))
            if not found:
                left_out.append(layer)
            yield from found
        if left_out and self.slots.only:
            log.warning("lora_target_modules leaves out %d layers of an adapter", len(left_out))

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
        """A tensor that is no adapter's is a copy of what the model has, or cannot be had."""
        match = _COPY.fullmatch(name)
        place = match and self._places.get(match["layer"])
        is_elsewhere = match and self.layers is not None and not place
        if place and (place.is_table or isinstance(place.point, LoRAHeadLayer)):
            sizes = place.sizes if place.is_table else place.sizes[::-1]
            if tuple(tensor.shape) != sizes:
                raise ConfigError(
                    f"{name} has the shape {tuple(tensor.shape)}, the model's {sizes}"
                    f"{self._own.why_not(tensor, sizes[0])}"
                )
        elif not is_elsewhere:
            raise ConfigError(f"{name} is not a LoRA tensor")

    def _fits_of(self, layer: str, pair: Pair, settings: "LoRAConfigFile") -> Iterator[LoRAPair]:
        """Nothing of a layer that is left out or on another device."""
        name = re.sub(r"(\.base_layer)+$", "", layer)
        if (place := self._places.get(name)) is not None:
            yield settings.fit(name, place, pair)
        elif (stack := self._stacks.get(name)) is not None:
            yield from _of_stack(name, stack, pair, settings)
        elif why := self._why_refused(name):
            raise ConfigError(f"{pair.names[0]}: {why}")
        elif not self._is_elsewhere(name) and not self._is_unused(name) and self.slots.takes(name):
            raise ConfigError(
                f"{pair.names[0]} is for a layer that the model does not have, or that takes none"
            )

    def _why_refused(self, name: str) -> str | None:
        return next((why for at, why in self._refused.items() if f"{name}.".startswith(f"{at}.")), None)

    def _is_unused(self, name: str) -> bool:
        return bool(self.slots.unused and re.search(self.slots.unused, f".{name}."))

    def _is_elsewhere(self, name: str) -> bool:
        number = re.search(r"\.(\d+)\.", name)
        return self.layers is not None and (number is None or int(number[1]) not in self.layers)

    # ---- into host memory

    def _factors(self, fits: list[LoRAPair]) -> dict[str, LoRAFactors]:
        ranks: dict[str, int] = {}
        filled: Counter[str] = Counter()
        for fit in fits:
            rank, name = len(fit.a), fit.place.point.name
            if rank > self.slots.max_rank:
                raise RequestError(
                    f"LoRA rank {rank} is greater than max_lora_rank {self.slots.max_rank}.",
                    param="lora_request",
                )
            ranks[name] = max(rank, ranks.get(name, 0))
            filled[name] += rank * fit.place.num_parts
        found = self.slots.room(ranks)
        for name, factors in found.items():
            if filled[name] < factors.num_ranks:
                factors.zero()
        pieces = [fits[first : first + _TOGETHER] for first in range(0, len(fits), _TOGETHER)]
        for _ in self._pool.map(partial(_fill_all, found), pieces):
            pass
        return found


def _of_stack(name: str, stack: LoRAStack, pair: Pair, settings: "LoRAConfigFile") -> Iterator[LoRAPair]:
    """The matrices of all experts at once: A has the ranks of one expert beside each other, B the experts of
    one rank. Some versions of PEFT take inputs for outputs here."""
    (rows, size_a), (size_b, columns) = pair.a.shape, pair.b.shape
    sizes = {by_expert[0].sizes: key for key, by_expert in stack.products.items()}
    turned = (size_b, size_a) in sizes and (size_a, size_b) not in sizes
    key = sizes.get((size_b, size_a) if turned else (size_a, size_b), "")
    found = stack.products.get(key, [])
    num = len(found)
    if not num or rows % num or rows != columns:
        raise ConfigError(
            f"{pair.names[0]} and {pair.names[1]} have the shapes {tuple(pair.a.shape)} and "
            f"{tuple(pair.b.shape)}: no product of the experts has such"
        )
    a, b = pair.a.view(num, -1, size_a), pair.b.view(size_b, -1, num).permute(2, 0, 1)
    if turned:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    for place, one_a, one_b in zip(found, a, b, strict=True):
        yield settings.fit(f"{name}.{key}", place, Pair(pair.names, one_a, one_b))


@torch.inference_mode()  # a thread of a pool does not know in which mode the tensors were made
def _fill_all(found: Mapping[str, LoRAFactors], fits: Sequence[LoRAPair]) -> None:
    for fit in fits:
        _fill(fit, fit.place.of(found[fit.place.point.name]))


def _fill(fit: LoRAPair, into: LoRAFactors) -> None:
    rank, place, (name_a, name_b) = fit.a.shape[0], fit.place, fit.names
    if place.is_table:
        into.a[:, :rank].copy_(fit.a.t())
    else:
        first, *others = into.a.narrow(1, 0, rank).unbind()
        put(fit.a, Target(name_a, first, 1, (place.inputs,)))
        for other in others:
            other.copy_(first)
    order, target = place.order(), Target(name_b, into.b.narrow(1, 0, rank), 0, place.outputs)
    if order is None and target.is_whole and fit.b.dtype == into.b.dtype:
        torch.mul(fit.b, fit.scale, out=target.tensor)
        return
    scaled = fit.b.float() * fit.scale
    own = scaled.new_empty(sum(run.size for run in place.outputs), rank)
    put(scaled, target._replace(tensor=own))
    target.tensor.copy_(own if order is None else own[order])


@dataclass(frozen=True, slots=True)
class LoRAConfigFile:
    """What adapter_config.json says."""

    rank: int
    alpha: float
    by_root: bool
    """rsLoRA: the scale is by the root of the rank."""
    ranks: dict[str, int]
    alphas: dict[str, float]
    """Of layers that differ: patterns of their names."""
    saved: list[str]
    """Layers that it brings as a whole, by the ends of their names."""
    token_ids: dict[str, list[int]]
    """Of tokens that were trained by themselves, likewise; '' is the embedding."""

    @staticmethod
    def of(keys: ConfigReader) -> "LoRAConfigFile":
        if (kind := keys.get("peft_type")) not in (None, "LORA"):
            raise ConfigError(f"peft_type {kind} is not supported: it must be LORA")
        for key, what in _REFUSED.items():
            if keys.get(key):
                raise ConfigError(f"{key} ({what}) is not supported")
        if (bias := keys.get("bias")) not in (None, "none"):
            raise ConfigError(f"bias {bias!r} is not supported: it must be 'none'")
        begun = keys.get("init_lora_weights")
        if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
            raise ConfigError(
                f"init_lora_weights {begun!r} is not supported, since it changes the model as well: "
                "have PEFT convert the adapter as it saves it"
            )
        ranks, alphas = (_pattern(keys, key) for key in ("rank_pattern", "alpha_pattern"))
        return LoRAConfigFile(
            keys.size("r"),
            keys.number("lora_alpha"),
            bool(keys.get("use_rslora")),
            {name: int(rank) for name, rank in ranks.items()},
            alphas,
            _saved(keys),
            token_indices(keys),
        )

    def scale(self, layer: str) -> tuple[int, float]:
        """The rank of a layer's matrices, and what they are multiplied by."""
        rank, alpha = _by_pattern(layer, self.ranks, self.rank), _by_pattern(layer, self.alphas, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.by_root else rank)

    def fit(self, layer: str, place: LoRATarget, pair: Pair) -> LoRAPair:
        """The pair for a place, once its shapes are right."""
        rank, scale = self.scale(layer)
        size_in, size_out = place.sizes
        for name, tensor, expected in zip(
            pair.names, (pair.a, pair.b), ((rank, size_in), (size_out, rank)), strict=True
        ):
            if tuple(tensor.shape) != expected:
                raise ConfigError(f"{name} has the shape {tuple(tensor.shape)}, expected {expected}")
        return LoRAPair(place, pair.names, pair.a, pair.b, scale)


def _saved(keys: ConfigReader) -> list[str]:
    found = keys.get("modules_to_save") or []
    if not isinstance(found, list) or not all(isinstance(name, str) and name for name in found):
        raise keys.wrong("modules_to_save", "a list of names")
    if found and keys.get("ensure_weight_tying"):
        raise ConfigError("ensure_weight_tying with modules_to_save is not supported")
    return found


def _is_of(name: str, module: str) -> bool:
    """Whether a tensor is of the module that PEFT would find by this name."""
    return f".{name}".rpartition(".")[0].endswith(f".{module}")


def _why_not(slots: AdapterSlots) -> str:
    can = " and ".join(sorted(slots.whole))
    return (
        f"adapters may bring {can} whole"
        if can
        else "--lora-whole-modules names none that slots have room for"
    )


def _pattern(keys: ConfigReader, key: str) -> dict[str, float]:
    found = keys.get(key) or {}
    are_numbers = isinstance(found, dict) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        for value in found.values()
    )
    if not are_numbers:
        raise keys.wrong(key, "positive numbers by pattern")
    try:
        for pattern in found:
            re.compile(pattern)
            if len(pattern) > _LONGEST or _HARD.search(pattern) or len(_REPEATS.findall(pattern)) > _MOST:
                raise ConfigError(f"{keys.source}: {key} has a pattern that is too complex: {pattern!r:.80}")
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{keys.source}: {key} has a pattern that is none: {error}") from error
    return dict(found)


def _by_pattern(layer: str, patterns: Mapping[str, T], otherwise: T) -> T:
    """As PEFT matches: the whole name, or its end behind a dot."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)), otherwise)


def _aliases(name: str) -> list[str]:
    """What the same layer is called where the body is by itself, or beside one that sees; transformers calls
    it the model, whatever the checkpoint does."""
    body, _, rest = name.partition(".")
    if not rest:
        return [name]
    return [name, rest, f"model.{rest}", f"{body}.language_model.{rest}", f"language_model.{name}"]
