"""load_model: builds a model with empty tensors, fills them from the checkpoint, and finishes them."""

import math
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

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
from quire.layers.scope import Begins, Loads, Scope, Target, unchanged
from quire.loader.extra_modules import ExtraModules
from quire.loader.offload import LayerOffload
from quire.loader.sharded import ShardedSource, ShardedStateKey, bind_kernels
from quire.loader.source import FORMATS, Source, detect, is_of_other_stage
from quire.logs import get_logger
from quire.models import MODELS
from quire.models.towers import TOWERS
from quire.parallel.all2all import ExpertDispatch
from quire.parallel.group import Group
from quire.parallel.world import World
from quire.quant.format import Format
from quire.quant.formats import SchemeFormat
from quire.quant.unquantized import PlainFormat

logger = get_logger(__name__)

_WHOLE = Stage()
LayerTarget = tuple[Target, Loads]
"""The target that a checkpoint tensor fills, and the target's layer."""
_NUM_NAMED = 5
_ALONE = World()
_EXPERT = re.compile(r"(?<=\.experts)\.\d+\.")
"""Pattern of the expert's number in the name of a tensor."""
_OLD_NAMES = {
    "LayerNorm.weight": "LayerNorm.gamma",
    "LayerNorm.bias": "LayerNorm.beta",
    "in_proj.weight": "in_proj_weight",
    "in_proj.bias": "in_proj_bias",
}
_IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|^rope_(freqs|factors_\w+)\.weight$|\.att(n|ention)\.(masked_)?bias$|^(model\.)?mtp"
    r"|^(thinker\.)?(model\.)?(vision_tower|vision_model|visual|audio_tower|vpm|resampler|merger|connector|mlp1)\."
    r"|^(thinker\.)?(model\.)?(multi_modal_projector|mm_projector|vit_large_projector|projector|mlp_AR)\."
    r"|^(talker|token2wav|code2wav)\.|visual_embeddings_table\.|\.audio_bos_eos_token\."
    r"|^(thinker\.)?(model\.)?(vision_encoder|vision_projection|vision_projector)\."
    r"|^(thinker\.)?(model\.)?image_newline$|^model\.embed_tokens_extend\.|\.lora_[AB]\."
    r"|\.(q_scale|prob_scale|input_scale(_ub|_2)?|input_global_scale|activation_scale|input_zero_point|weight_zero_point|weight_format|g_idx)$"
    r"|\.weight_shape$"
    r"|\.(nbits|group_size|axis|shape|packing|unpack_view_dtype|view_as_float|quant_(scale|zero)|channel_wise)$"
    r"|\.(compute_dtype|offload_meta|encoded_state_dict|stores_quant_config|optimize|round_zero)$"
)
"""Weights that may be ignored: RoPE frequencies, the causal masks of GPT-2 and GPT-NeoX, MTP layers,
multimodal encoders, adapters, input scales where inputs are not quantized, zero points of symmetric weights,
and metadata of packed weights."""

_SMALL_BYTES = 1 << 16


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
    on_progress: Callable[[float], None] | None = None,
    world: World = _ALONE,
    stage: Stage = _WHOLE,
    ep: ExpertDispatch | None = None,
    adapters: AdapterSlots | None = None,
    partly: bool = False,
    tower_group: Group | None = None,
    offload: LayerOffload | None = None,
    on_built: Callable[[nn.Module, Mapping[str, tuple[int, ...]]], None] | None = None,
) -> Any:
    """Return the model of `checkpoint` with its weights on `device`, ready for `bind` and `forward`: a
    decoder, or the result of `build`. With several workers the model has this rank's shard of its stage.

    `packed` keeps the weights of a GGUF file as stored where the device can compute with them; `quant`
    describes the quantization of other files. `on_progress` receives the loaded fraction. With `ep` each
    worker has some experts; `partly`: most of the checkpoint belongs to another model. `tower_group` is the
    group that shards the multimodal encoder, `model.tower` of the first stage; None builds no encoder.
    `on_built` gets the model before its weights are loaded, and the shapes in the checkpoint."""
    source = _open_source(checkpoint, load_format, seed, with_modules=build is not None)
    if isinstance(source, ShardedSource):
        key = ShardedStateKey.of(checkpoint.facts.architecture, dtype, device, _method(quant), world.tp.size)
        _open_saved(source, key, world.tp.rank, spread=ep is not None, offloaded=offload is not None)
    stored, plain = source.shapes({}), PlainFormat(_weight_dtype(checkpoint, dtype, device))
    format = _format_of(source, stored, plain, packed, quant)
    scope = Scope(
        dtype=dtype,
        device=device,
        backend=backend,
        max_len=max_model_len,
        ops=choose(device, dtype),
        linear=format.linear,
        experts=format.experts,
        is_stored=lambda name: stored_name(name, stored) in stored,
        shape_of=lambda name: _stored_shape(stored, name) or (),
        group=world.tp,
        stage=stage,
        ep=ep,
        adapters=adapters,
        on_layer_built=unchanged if offload is None else offload.on_layer_built,
    )
    model = (build or MODELS[checkpoint.facts.architecture])(checkpoint.facts, scope)
    _add_tower(model, checkpoint.facts, scope, tower_group)
    if on_built is not None:
        on_built(model, stored)
    with torch.no_grad(), LoadProgress(on_progress, show=show_progress) as bar:
        _load(source, model, _Checks(checkpoint, stage, ep is not None, partly), bar, offload)
    return model.eval()


def _scheme_marks() -> tuple[str, ...]:
    """Return the endings of tensor names that occur only in quantized layers."""
    marks = (mark for scheme in Scheme.__subclasses__() for mark in scheme.marks)
    return tuple(mark if mark[0] == "_" else f".{mark}" for mark in marks)


def _open_source(checkpoint: Checkpoint, load_format: str, seed: int, *, with_modules: bool) -> Source:
    """Open the source of the weights. Saved states include extra modules, and random weights need none."""
    format = detect(checkpoint, load_format)
    source: Source = FORMATS[format](checkpoint, seed)
    pooling = checkpoint.pooling
    has_modules = bool(pooling.dense) or any(head.file for head in pooling.task_heads)
    if with_modules and has_modules and format in ("safetensors", "pt"):
        return ExtraModules(source, checkpoint)
    return source


def _format_of(
    source: Source,
    stored: Mapping[str, tuple[int, ...]],
    plain: Format,
    packed: bool,
    quant: QuantFacts | None,
) -> Format:
    if quant is not None:
        return SchemeFormat(quant, plain, partial(_stored_shape, stored) if stored else None)
    return source.format(plain) if packed else plain


def _add_tower(model: Any, facts: ArchFacts, scope: Scope, group: Group | None) -> None:
    """Add the multimodal encoder as `model.tower` if `group` is set and this is the first pipeline stage.
    Tell the LoRA slots which layers the model does not load."""
    if scope.adapters is not None:
        scope.adapters.unused = facts.unused
    if facts.media is not None and group is not None and scope.stage.is_first:
        model.tower = TOWERS[facts.media.family](facts, replace(scope, adapters=None, group=group))


def _method(quant: QuantFacts | None) -> str | None:
    return None if quant is None else quant.method


def _open_saved(
    source: ShardedSource, key: ShardedStateKey, rank: int, *, spread: bool, offloaded: bool
) -> None:
    source.check(key)
    source.open(rank)
    if spread or offloaded:
        setting = "expert parallelism" if spread else "cpu_offload_gb"
        raise ConfigError(f"a saved state does not support {setting}: load the original checkpoint")


class LoadProgress:
    """Loading progress: a progress bar, and a callback with the loaded fraction (0 to 1)."""

    def __init__(self, on_progress: Callable[[float], None] | None, *, show: bool) -> None:
        self._bar = tqdm(desc="Loading weights", disable=not show or not sys.stderr.isatty())
        self._on_progress = on_progress
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
        if self._on_progress is not None and percent > self._percent:
            self._percent = percent
            self._on_progress(percent / 100)


class _Checks(NamedTuple):
    """Settings of the check that the tensors of a checkpoint are those that a model loads."""

    checkpoint: Checkpoint
    stage: Stage
    spread: bool
    """Whether other workers have other experts (expert parallelism)."""
    partly: bool
    """Whether most of the checkpoint belongs to another model."""

    def check(self, source: Source, targets: dict[str, Target]) -> None:
        """Compare the tensors of the checkpoint with those that the model loads. Raise if the checkpoint
        lacks a weight; warn about weights that are not used."""
        _check_needed(source, targets, self.checkpoint)
        if not self.partly:
            _check_unused(source, targets, self.checkpoint, self.stage, spread=self.spread)


def _load(
    source: Source, model: nn.Module, checks: _Checks, progress: "LoadProgress", offload: LayerOffload | None
) -> None:
    if isinstance(source, ShardedSource):
        return _restore(source, model, progress)
    stored = source.shapes({})
    layers = [module for module in model.modules() if isinstance(module, Loads)]
    targets_of = methodcaller("targets") if offload is None else offload.targets
    layer_targets = _as_stored([(target, layer) for layer in layers for target in targets_of(layer)], stored)
    names = _read_order(source, layer_targets, checks, offload)
    progress.reset(len(names))
    left = Counter(id(layer) for _, layer in layer_targets.values())
    for name in _fill_targets(source, _begin_layers(names, layer_targets, stored, offload)):
        layer = layer_targets.pop(name)[1]  # the target holds memory that repacking frees
        left[id(layer)] -= 1
        if not left[id(layer)]:  # at once, so that memory freed by repacking is reused
            layer.finish()
            if offload is not None:
                offload.finish(layer)
        progress.update()


def _read_order(
    source: Source, layer_targets: dict[str, LayerTarget], checks: _Checks, offload: LayerOffload | None
) -> list[str]:
    """Check the targets and return their names in reading order; with `offload`, one layer after another."""
    targets = {name: target for name, (target, _) in layer_targets.items()}
    checks.check(source, targets)
    names = list(source.order(targets))
    if offload is None:
        return names
    numbers = {layer: offload.layer_number(layer) for _, layer in layer_targets.values()}
    return sorted(names, key=lambda name: numbers[layer_targets[name][1]])


def _restore(source: ShardedSource, model: nn.Module, progress: "LoadProgress") -> None:
    targets = source.targets(model)
    progress.reset(len(targets))
    for _ in _fill_targets(source, (targets[name] for name in source.order(targets))):
        progress.update()
    bind_kernels(model)


def _begin_layers(
    names: Iterable[str],
    layer_targets: dict[str, LayerTarget],
    stored: Mapping[str, Any],
    offload: LayerOffload | None,
) -> Iterator[Target]:
    """Yield the targets of these names. Before the first target of a layer, call the layer's `begin`, which
    may replace its targets, and update `layer_targets`."""
    begun = set[int]()
    for name in names:
        layer = layer_targets[name][1]
        is_first = id(layer) not in begun
        begun.add(id(layer))
        if is_first and offload is not None:
            offload.begin(layer)
        if is_first and isinstance(layer, Begins):
            layer.begin()
            layer_targets |= _as_stored([(target, layer) for target in layer.targets()], stored)
        yield layer_targets[name][0]


def _fill_targets(source: Source, targets: Iterator[Target]) -> Iterator[str]:
    """Fill all targets, several at a time, and yield their names in order. Small targets are filled in this
    thread: handing them to the pool would cost more."""
    reading: deque[tuple[str, Future[None] | None]] = deque()
    with ThreadPoolExecutor(source.num_readers, "quire-load") as pool:
        for target in targets:
            if is_small := target.tensor.nbytes <= _SMALL_BYTES:
                source.fill(target)
            filled = None if is_small else pool.submit(torch.no_grad()(source.fill), target)
            reading.append((target.name, filled))
            if len(reading) > source.num_readers:
                yield _wait_first(reading)
        while reading:
            yield _wait_first(reading)


def _wait_first(reading: deque[tuple[str, Future[None] | None]]) -> str:
    name, filled = reading.popleft()
    if filled is not None:
        filled.result()
    return name


def _weight_dtype(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Return the dtype of weights if it differs from the compute dtype. A CPU that computes a bfloat16
    checkpoint in float32 keeps bfloat16 weights: the kernels widen them and read half the bytes."""
    fits = device.type == "cpu" and dtype == torch.float32 and checkpoint.dtype == "bfloat16"
    return torch.bfloat16 if fits and native.library() is not None else None


def stored_name(name: str, stored: Mapping[str, tuple[int, ...]]) -> str:
    """Return the name that the model's tensor `name` has in the checkpoint, whose names and shapes are
    `stored`. Checkpoints without an output head omit the decoder's prefix (such as `model.`); multimodal
    checkpoints add one or two prefixes; layers that are stored with their adapters have `base_layer`. Early
    BERTs name norm weights gamma and beta, and torch's fused attention has `in_proj_weight`."""
    if name in stored:
        return name
    body, _, rest = name.partition(".")
    inner = [f"{body}.{part}.{rest}" for part in ("language_model", "text_model")]
    inner.append(f"model.language_model.{name}")
    known = [name, rest, *inner, f"language_model.{name}", f"language_model.{body}.{name}", f"llm.{name}"]
    known += [f"{part}.{tail}" for part in ("thinker", "vlm", "vlm.language_model") for tail in (name, rest)]
    layer, _, kind = name.rpartition(".")
    known.append(f"{layer}.base_layer.{kind}")
    for new, old in _OLD_NAMES.items():
        known += [alias.removesuffix(new) + old for alias in known if alias.endswith(new)]
    return next((alias for alias in known if alias in stored), name)


def _stored_shape(stored: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, ...] | None:
    return stored.get(stored_name(name, stored))


def _as_stored(
    layer_targets: list[LayerTarget], stored: Mapping[str, tuple[int, ...]]
) -> dict[str, LayerTarget]:
    named = [
        (target._replace(name=stored_name(target.name, stored)), layer) for target, layer in layer_targets
    ]
    return {target.name: (_trim_text(target, stored), layer) for target, layer in named}


def _trim_text(target: Target, stored: Mapping[str, tuple[int, ...]]) -> Target:
    """Return a target for a text (the settings of a quantized weight) with its buffer cut to the length of
    the text in the checkpoint; return other targets unchanged."""
    shape = stored.get(target.name, ())
    return target._replace(tensor=target.tensor[: shape[0]]) if target.is_text and shape else target


def _check_needed(source: Source, targets: dict[str, Target], checkpoint: Checkpoint) -> None:
    """Raise if the checkpoint lacks a target or has another shape, before any tensor is read."""
    shapes = source.shapes(targets)
    missing = [name for name in targets if name not in shapes]
    if missing:
        raise ConfigError(
            f"{checkpoint.path} lacks {len(missing)} of the {len(targets)} weights that a "
            f"{checkpoint.facts.architecture} needs: {list_names(missing)}"
        )
    for name, target in targets.items():
        if not _fits(shapes[name], target):
            raise ConfigError(
                f"{checkpoint.path}: {name} has the shape {shapes[name]}, but the model's configuration says "
                f"{target.shape}"
            )


def _check_unused(
    source: Source, targets: dict[str, Target], checkpoint: Checkpoint, stage: Stage, *, spread: bool
) -> None:
    """Raise for quantized tensors of the checkpoint that no target uses, and warn about others. With
    `spread`, other workers have other experts, which are not reported."""
    shapes = source.shapes(targets)
    known = stage.layers(len(checkpoint.facts.layers)) if stage.count > 1 else None
    shared = {_EXPERT.sub(".*.", name) for name in targets} if spread else set()
    extra = [
        name
        for name in shapes
        if name not in targets
        and not is_ignored(name, checkpoint)
        and not is_of_other_stage(name, known)
        and _EXPERT.sub(".*.", name) not in shared
    ]
    if odd := [name for name in extra if name.endswith(_scheme_marks())]:
        raise ConfigError(
            f"{checkpoint.path} has {len(odd)} quantized weights that a {checkpoint.facts.architecture} does "
            f"not have, or has unquantized: {list_names(odd)}; config.json does not match the weights"
        )
    if extra:
        logger.warning("%s: %d weights are not used: %s", checkpoint.path, len(extra), list_names(extra))


def _fits(shape: tuple[int, ...], target: Target) -> bool:
    """Return whether a stored tensor of this shape can fill a target; axes of length 1 may be added or
    missing."""
    target_shape = target.shape
    is_same = [size for size in shape if size != 1] == [size for size in target_shape if size != 1]
    return is_same or (target.is_flat and math.prod(shape) == math.prod(target_shape))


def list_names(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more


def is_ignored(name: str, checkpoint: Checkpoint) -> bool:
    """Return whether a tensor can be ignored, because it follows from other tensors or the model has no use
    for it."""
    facts = checkpoint.facts
    if name == "lm_head.weight":
        return facts.tied
    return bool(_IGNORED.search(name) or (facts.unused and re.search(facts.unused, name)))
