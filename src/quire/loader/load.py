"""load_model: build with unfilled tensors, fill them one by one from the checkpoint, finish."""

import math
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from quire.attention.backend import AttentionBackend
from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.model import Checkpoint
from quire.checkpoint.quant.facts import QuantFacts
from quire.checkpoint.quant.schemes import Scheme
from quire.config.parallel import Stage
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.kernels.ops import choose
from quire.layers.lora import AdapterSlots
from quire.layers.scope import Begins, Loads, Scope, Target
from quire.loader.extra_modules import ExtraModules
from quire.loader.sharded import ShardedSource, ShardedStateKey, equip
from quire.loader.source import FORMATS, Source, detect
from quire.logs import get_logger
from quire.models import MODELS
from quire.models.towers import TOWERS
from quire.parallel.all2all import ExpertDispatch
from quire.parallel.group import Group
from quire.parallel.world import World
from quire.quant.formats import SchemeFormat
from quire.quant.plain import PlainFormat

logger = get_logger(__name__)

_MARKS = tuple(
    mark if mark[0] == "_" else f".{mark}" for scheme in Scheme.__subclasses__() for mark in scheme.marks
)
"""How the names of tensors end that only quantized layers have."""
_WHOLE = Stage()
Found = tuple[Target, Loads]
"""What a tensor of the checkpoint fills, and the layer that it is of."""
_NUM_NAMED = 5
_ALONE = World()
_EXPERT = re.compile(r"(?<=\.experts)\.\d+\.")
"""The number of one."""
_BEFORE = {
    "LayerNorm.weight": "LayerNorm.gamma",
    "LayerNorm.bias": "LayerNorm.beta",
    "in_proj.weight": "in_proj_weight",
    "in_proj.bias": "in_proj_bias",
}
_HARMLESS = re.compile(
    r"rotary_emb\.inv_freq$|^rope_(freqs|factors_\w+)\.weight$|\.att(n|ention)\.(masked_)?bias$|^(model\.)?mtp"
    r"|^(thinker\.)?(model\.)?(vision_tower|vision_model|visual|audio_tower|vpm|resampler|merger|connector|mlp1)\."
    r"|^(thinker\.)?(model\.)?(multi_modal_projector|mm_projector|vit_large_projector|projector|mlp_AR)\."
    r"|^(talker|token2wav|code2wav)\.|visual_embeddings_table\.|\.audio_bos_eos_token\."
    r"|^(thinker\.)?(model\.)?(vision_encoder|vision_projection)\."
    r"|^(thinker\.)?(model\.)?image_newline$"
    r"|\.(q_scale|prob_scale|input_scale(_ub)?|activation_scale|input_zero_point|weight_format|g_idx)$"
    r"|\.weight_shape$"
)
"""The angles of rotations, the causal mask of GPT-2 and GPT-NeoX, layers that draft tokens, those that see,
scales of inputs where these are not narrowed, and what is known of packed weights anyway."""


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend,
    max_model_len: int,
    load_format: str = "auto",
    show_progress: bool = True,
    seed: int = 0,
    packed: bool = False,
    quant: QuantFacts | None = None,
    build: Callable[[ArchFacts, Scope], Any] | None = None,
    tell: Callable[[float], None] | None = None,
    world: World = _ALONE,
    stage: Stage = _WHOLE,
    ep: ExpertDispatch | None = None,
    adapters: AdapterSlots | None = None,
    partly: bool = False,
    tower_group: Group | None = None,
) -> Any:
    """The model of `checkpoint` with its weights on `device`, ready for `bind` and `forward`: a CausalLM, or
    what `build` makes; in a `world` of several workers what this one has of the layers of its stage.

    `packed` keeps the weights of a GGUF file as they are stored where the device can compute with them;
    `quant` is how those of other files are stored, or are to be kept. How much is there is told to `tell`.
    With `ep` each worker has some experts; `partly`: most of the checkpoint is another model's. What the
    first stage sees or hears with is its `tower`, whose layers `tower_group` shares; None: there is none.
    """
    source = _opened(checkpoint, load_format, seed, with_modules=build is not None)
    if isinstance(source, ShardedSource):
        kept = ShardedStateKey.of(checkpoint.facts.architecture, dtype, device, _method(quant), world.tp.size)
        _open_saved(source, kept, world.tp.rank, spread=ep is not None)
    stored, plain = source.shapes({}), PlainFormat(_narrow(checkpoint, dtype, device))
    format = source.format(plain) if packed else plain
    if quant is not None:
        format = SchemeFormat(quant, plain, partial(_is_stored, stored) if stored else None)
    scope = Scope(
        dtype=dtype,
        device=device,
        backend=backend,
        max_len=max_model_len,
        ops=choose(device, dtype),
        linear=format.linear,
        experts=format.experts,
        is_stored=partial(_is_stored, stored),
        shape_of=lambda name: stored.get(_stored_name(name, stored), ()),
        group=world.tp,
        stage=stage,
        ep=ep,
        adapters=adapters,
    )
    model = (build or MODELS[checkpoint.facts.architecture])(checkpoint.facts, scope)
    _complete(model, checkpoint.facts, scope, tower_group)
    with torch.no_grad(), LoadProgress(tell, disable=not show_progress or not sys.stderr.isatty()) as bar:
        if isinstance(source, ShardedSource):
            _restore(source, model, bar)
        else:
            _load(source, model, checkpoint, stage, bar, spread=ep is not None, partly=partly)
    return model.eval()


def _opened(checkpoint: Checkpoint, load_format: str, seed: int, *, with_modules: bool) -> Source:
    """A saved state has the weights of modules, too, and random ones need none."""
    format = detect(checkpoint, load_format)
    source: Source = FORMATS[format](checkpoint, seed)
    if with_modules and checkpoint.pooling.dense and format in ("safetensors", "pt"):
        return ExtraModules(source, checkpoint)
    return source


def _complete(model: Any, facts: ArchFacts, scope: Scope, group: Group | None) -> None:
    """Give it its tower, and adapters the names of what it has no layers for."""
    if scope.adapters is not None:
        scope.adapters.unused = facts.unused
    if facts.media is not None and group is not None and scope.stage.is_first:
        model.tower = TOWERS[facts.media.family](facts, replace(scope, adapters=None, group=group))


def _method(quant: QuantFacts | None) -> str | None:
    return None if quant is None else quant.method


def _open_saved(source: ShardedSource, kept: ShardedStateKey, rank: int, *, spread: bool) -> None:
    source.check(kept)
    source.open(rank)
    if spread:
        raise ConfigError("a saved state has a share of each expert: load the checkpoint it was made of")


class LoadProgress:
    """How much is loaded: as a bar, and told to who asked."""

    def __init__(self, tell: Callable[[float], None] | None, *, disable: bool) -> None:
        self._bar = tqdm(desc="Loading weights", disable=disable)
        self._tell = tell
        self._count = self._total = self._percent = 0

    def __enter__(self) -> "LoadProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def reset(self, total: int) -> None:
        self._total = total
        self._bar.reset(total)

    def update(self) -> None:
        self._count += 1
        self._bar.update()
        percent = 100 * self._count // self._total
        if self._tell is not None and percent > self._percent:
            self._percent = percent
            self._tell(percent / 100)


def _load(
    source: Source,
    model: nn.Module,
    checkpoint: Checkpoint,
    stage: Stage,
    progress: "LoadProgress",
    *,
    spread: bool,
    partly: bool,
) -> None:
    stored = source.shapes({})
    layers = [module for module in model.modules() if isinstance(module, Loads)]
    found = _as_stored([(target, layer) for layer in layers for target in layer.targets()], stored)
    targets = {name: target for name, (target, _) in found.items()}
    _check_needed(source, targets, checkpoint)
    if not partly:
        _check_others(source, targets, checkpoint, stage, spread=spread)
    progress.reset(len(targets))
    left = Counter(id(layer) for _, layer in found.values())
    for name in _filled(source, _begun(source.order(targets), found, stored)):
        layer = found[name][1]
        left[id(layer)] -= 1
        if not left[id(layer)]:  # at once: the memory of what is repacked serves the next
            layer.finish()
        progress.update()


def _restore(source: ShardedSource, model: nn.Module, progress: "LoadProgress") -> None:
    targets = source.targets(model)
    progress.reset(len(targets))
    for _ in _filled(source, (targets[name] for name in source.order(targets))):
        progress.update()
    equip(model)


def _begun(names: Iterable[str], found: dict[str, Found], stored: Mapping[str, Any]) -> Iterator[Target]:
    """The targets of these names, each layer told before its first; `found` follows."""
    begun = set[int]()
    for name in names:
        layer = found[name][1]
        if isinstance(layer, Begins) and id(layer) not in begun:
            begun.add(id(layer))
            layer.begin()
            found |= _as_stored([(target, layer) for target in layer.targets()], stored)
        yield found[name][0]


def _filled(source: Source, targets: Iterator[Target]) -> Iterator[str]:
    """Fill all targets, the next few at a time, and name each in the same order."""
    ahead: deque[tuple[str, Future[None]]] = deque()
    with ThreadPoolExecutor(source.num_readers, "quire-load") as pool:
        for target in targets:
            ahead.append((target.name, pool.submit(torch.no_grad()(source.fill), target)))
            if len(ahead) > source.num_readers:
                yield _first(ahead)
        while ahead:
            yield _first(ahead)


def _first(ahead: deque[tuple[str, Future[None]]]) -> str:
    name, filled = ahead.popleft()
    filled.result()
    return name


def _narrow(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """On a CPU that computes a bfloat16 checkpoint in float32, weights stay as narrow as they are stored: the
    kernels widen them, and half the bytes are read."""
    fits = device.type == "cpu" and dtype == torch.float32 and checkpoint.dtype == "bfloat16"
    return torch.bfloat16 if fits and native.library() is not None else None


def _stored_name(name: str, stored: Mapping[str, tuple[int, ...]]) -> str:
    """Checkpoints of a body alone do not have its name in front of all others; those of models that also see
    or hear have one more there, or two; those of the first BERTs call a norm's weight gamma, and its bias
    beta; torch has queries, keys and values in one, whose name ends in another way."""
    if name in stored:
        return name
    body, _, rest = name.partition(".")
    inner = [f"{body}.{part}.{rest}" for part in ("language_model", "text_model")]
    known = [name, rest, *inner, f"language_model.{name}", f"language_model.{body}.{name}", f"llm.{name}"]
    known += [f"{part}.{each}" for part in ("thinker", "vlm", "vlm.language_model") for each in (name, rest)]
    for today, before in _BEFORE.items():
        known += [each.removesuffix(today) + before for each in known if each.endswith(today)]
    return next((each for each in known if each in stored), name)


def _is_stored(stored: Mapping[str, tuple[int, ...]], name: str) -> bool:
    return _stored_name(name, stored) in stored


def _as_stored(found: list[Found], stored: Mapping[str, tuple[int, ...]]) -> dict[str, Found]:
    named = [(target._replace(name=_stored_name(target.name, stored)), layer) for target, layer in found]
    return {target.name: (_cut(target, stored), layer) for target, layer in named}


def _cut(target: Target, stored: Mapping[str, tuple[int, ...]]) -> Target:
    """A text is as long as the checkpoint has it."""
    shape = stored.get(target.name, ())
    return target._replace(tensor=target.tensor[: shape[0]]) if target.is_text and shape else target


def _check_needed(source: Source, targets: dict[str, Target], checkpoint: Checkpoint) -> None:
    """Compare names and shapes before a byte is read."""
    shapes = source.shapes(targets)
    missing = [name for name in targets if name not in shapes]
    if missing:
        raise ConfigError(
            f"{checkpoint.path} lacks {len(missing)} of the {len(targets)} weights that a "
            f"{checkpoint.facts.architecture} needs: {_some(missing)}"
        )
    for name, target in targets.items():
        if not _fits(shapes[name], target):
            raise ConfigError(
                f"{checkpoint.path}: {name} has the shape {shapes[name]}, but the model's configuration says "
                f"{target.shape}"
            )


def _check_others(
    source: Source, targets: dict[str, Target], checkpoint: Checkpoint, stage: Stage, *, spread: bool
) -> None:
    """What the checkpoint has beside the targets; `spread`: other workers have other experts."""
    shapes = source.shapes(targets)
    known = stage.layers(len(checkpoint.facts.layers)) if stage.count > 1 else None
    shared = {_EXPERT.sub(".*.", name) for name in targets} if spread else set()
    extra = [
        name
        for name in shapes
        if name not in targets
        and not _is_harmless(name, checkpoint)
        and not _is_elsewhere(name, known)
        and _EXPERT.sub(".*.", name) not in shared
    ]
    if odd := [name for name in extra if name.endswith(_MARKS)]:
        raise ConfigError(
            f"{checkpoint.path} has {len(odd)} quantized weights that a {checkpoint.facts.architecture} does "
            f"not have, or has unquantized: {_some(odd)}; config.json and the weights are not of one model"
        )
    if extra:
        logger.warning("%s: %d weights are not used: %s", checkpoint.path, len(extra), _some(extra))


def _fits(shape: tuple[int, ...], target: Target) -> bool:
    """A single number may be stored as a vector, too."""
    whole = target.shape
    as_row = target.is_flat or math.prod(whole) == 1
    return shape == whole or (as_row and math.prod(shape) == math.prod(whole))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more


def _is_elsewhere(name: str, layers: range | None) -> bool:
    """Whether a tensor is none of these layers': other stages have it."""
    number = re.search(r"\.(\d+)\.", name)
    return layers is not None and (number is None or int(number[1]) not in layers)


def _is_harmless(name: str, checkpoint: Checkpoint) -> bool:
    """Tensors that some checkpoints carry although they follow from the rest, or do nothing here."""
    facts = checkpoint.facts
    if name == "lm_head.weight":
        return facts.tied
    return bool(_HARMLESS.search(name) or (facts.unused and re.search(facts.unused, name)))
