"""What a model of transformers needs to live here: construction, stored names, attention, a trial."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, Borrowed
from quire.checkpoint.layout import CacheSpec, cache_specs
from quire.errors import ConfigError
from quire.kernels.ops import HeadEntry
from quire.layers.attention import PagedAttention, attention_layers
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.logs import get_logger

logger = get_logger(__name__)

_NAME = "quire"
"""Of our attention, in transformers' table."""
_BLOCK_SIZE = 16
_TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.3, torch.float16: 0.3}
"""Of logits: the length of the difference, as a part of their own."""


class AttentionCall(NamedTuple):
    """What an attention module of transformers hands over."""

    q: Tensor
    """[1, heads, T, head_dim]; keys and values likewise"""
    k: Tensor
    v: Tensor
    spec: dict[str, Any]
    sinks: Tensor | None


class TransformersStep(NamedTuple):
    """Goes down through a model's keyword arguments to every attention: the batch, and the way into slots."""

    batch: Batch
    write: Callable[[Tensor, HeadEntry], Tensor]

    def attend(self, module: Any, asked: AttentionCall) -> Tensor:
        """[1, T, heads, head_dim]"""
        joined = torch.cat(asked[:3], 1)[0].transpose(0, 1).flatten(1)
        out: Tensor = module.quire_attention(joined, self.write, self.batch)
        return out.view(1, len(out), *asked.q.shape[1::2])


class _Census:
    """Takes a step's place once: who attends, and how."""

    def __init__(self) -> None:
        self.specs: dict[nn.Module, AttentionSpec] = {}
        self.sinks: list[Tensor | None] = []
        self.twice = False
        self.masks: set[str] = set()
        """The kinds of masks that were made meanwhile."""

    def attend(self, module: nn.Module, asked: AttentionCall) -> Tensor:
        q, k, v, spec, sinks = asked
        if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
            raise ConfigError(f"its keys {tuple(k.shape)} and values {tuple(v.shape)} differ in size")
        self.twice |= module in self.specs
        self.specs[module] = AttentionSpec(
            q.shape[1], k.shape[1], q.shape[-1], q.dtype, sinks=sinks is not None, **spec
        )
        self.sinks.append(sinks)
        return q.transpose(1, 2)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    quire_step: TransformersStep | _Census | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """In transformers' attention interface."""
    if quire_step is None:
        raise ConfigError("it does not pass keyword arguments down to its attention")
    odd = [name for name in ("position_bias", "alibi") if rest.get(name) is not None]
    if odd or attention_mask is not None or rest.get("is_causal") is False:
        raise ConfigError(f"its attention needs {odd[0] if odd else 'a mask of its own'}")
    spec = {"window": sliding_window, "scale": scaling, "softcap": softcap}
    return quire_step.attend(module, AttentionCall(query, key, value, spec, s_aux)), None


@contextmanager
def named(name: str) -> Iterator[None]:
    """Their code may raise anything: it comes out as one error that names the model."""
    try:
        yield
    except Exception as error:
        why = (str(error).strip().splitlines() or [""])[0]
        if isinstance(error, KeyError) and error.args == (_NAME,):
            why = "it chooses among attentions of its own"
        elif not isinstance(error, ConfigError):
            why = f"its code raises {type(error).__name__}, {why}"
        raise ConfigError(f"{name} cannot run through transformers' attention interface: {why}") from error


def build(borrowed: Borrowed, scope: Scope) -> Any:
    """The model with its weights unfilled, and all that is reckoned from its configuration in place."""
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        raise ConfigError(
            f"transformers {transformers.__version__} is too old to run models: install 5 or later"
        )
    from transformers.initialization import no_init_weights

    transformers.AttentionInterface.register(_NAME, _attention)
    config, options = _configuration(borrowed)
    architecture = (config.architectures or [config.model_type])[0]
    if config.is_encoder_decoder:
        raise ConfigError(f"{architecture} has an encoder; only decoders run through transformers")
    with named(architecture), torch.device(scope.device), no_init_weights():
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config, dtype=scope.dtype, attn_implementation=_NAME, **options)
    model.tie_weights()
    _widen(model, scope.dtype)
    return model.requires_grad_(False).eval()


def _widen(model: Any, dtype: torch.dtype) -> None:
    """Some parts of some models stay in float32, whatever the rest is in."""
    kept = {*(model._keep_in_fp32_modules_strict or ())} if dtype != torch.float32 else set()
    if dtype == torch.float16:
        kept |= {*(model._keep_in_fp32_modules or ())}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(re.search(pattern.replace("*", ".*"), name) for pattern in kept):
            tensor.data = tensor.data.float()


def _as_float(block: dict[str, Any]) -> Any:
    """As transformers writes numbers that JSON has not."""
    return float(block["__float__"]) if [*block] == ["__float__"] else block


def _configuration(borrowed: Borrowed) -> tuple[Any, dict[str, Any]]:
    """A model's configuration, and what else its construction takes."""
    from transformers import CONFIG_MAPPING, AutoConfig

    values = json.loads(borrowed.config, object_hook=_as_float)
    if borrowed.remote:
        logger.warning("Running the Python code in %s (trust_remote_code)", borrowed.path)
        given = AutoConfig.from_pretrained(borrowed.path, trust_remote_code=True)
        config = type(given).from_dict(values)
        config._name_or_path = borrowed.path
        return config, {"trust_remote_code": True}
    values.pop("auto_map", None)
    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"{borrowed.path}: transformers has no model_type {kind!r}")
    with named(str(kind)):
        return CONFIG_MAPPING[kind].from_dict(values), {"trust_remote_code": False}


class _Uncopied(TorchDispatchMode):
    """What would be copied to lie in one piece stays where it is."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


def stored_parts(model: Any) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, as parts of the model's: what transformers would save."""
    from transformers.core_model_loading import revert_weight_conversion

    tied = model.all_tied_weights_keys
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    own = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    with named(type(model).__name__), _Uncopied():
        parts: dict[str, Tensor] = revert_weight_conversion(model, state)
        copied = [name for name, part in parts.items() if part.untyped_storage().data_ptr() not in own]
        if copied:
            raise ConfigError(f"its checkpoint holds {copied[0]} in an order that cannot be undone here")
    return parts


def place_attention(body: Any, facts: ArchFacts, scope: Scope, name: str) -> list[PagedAttention]:
    """Under every attention module of `body` its share of the cache."""
    census = _Census()
    ids = torch.zeros(1, 2, dtype=torch.int64, device=scope.device)
    with named(name):
        places = torch.arange(2, device=scope.device)[None]
        with _noting_masks(body, census.masks):
            body(input_ids=ids, position_ids=places, use_cache=False, quire_step=census)
        _narrow(census, body.config)
        _check(census, facts, body.config)
    rope = Rope(None, scope)  # transformers has turned queries and keys
    layers: list[PagedAttention] = []
    for at, (spec, planned) in enumerate(zip(census.specs.values(), cache_specs(facts), strict=True)):
        assert planned is not None
        layers.append(PlannedAttention(spec, planned, rope, scope / at))
    for module, layer, sinks in zip(census.specs, layers, census.sinks, strict=True):
        module.quire_attention = layer
        layer.sinks = None if sinks is None else nn.Parameter(sinks, requires_grad=False)
    if attention_layers(body.modules()) != layers:
        raise ConfigError(f"{name} cannot run here: its layers attend in another order than they stand in")
    return layers


_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")
"""What the files of models call the functions of transformers that make masks."""


@contextmanager
def _noting_masks(body: nn.Module, masks: set[str]) -> Iterator[None]:
    """Note which kinds of masks the model asks for while it runs."""
    module = sys.modules[type(body).__module__]
    real = {name: getattr(module, name) for name in _MASKS if hasattr(module, name)}

    def noting(name: str) -> Callable[..., Any]:
        def make(*args: Any, **options: Any) -> Any:
            masks.add(name)
            return real[name](*args, **options)

        return make

    try:
        for name in real:
            setattr(module, name, noting(name))
        yield
    finally:
        for name, make in real.items():
            setattr(module, name, make)


def _narrow(census: _Census, config: Any) -> None:
    """Some models say only by their mask that all of their layers look back through one window."""
    if _MASKS[1] not in census.masks or any(spec.window is not None for spec in census.specs.values()):
        return
    window = getattr(config.get_text_config(), "sliding_window", None)
    if len(census.masks) > 1 or not window:
        raise ConfigError("some of its layers look back through a window, but do not say so")
    census.specs = {module: replace(spec, window=window) for module, spec in census.specs.items()}


def _check(census: _Census, facts: ArchFacts, config: Any) -> None:
    """What the cache was planned for must be what the model does."""
    if census.twice or len(census.specs) != len(facts.layers):
        raise ConfigError(
            f"{len(census.specs)} attention modules took part{', some twice' if census.twice else ''}, "
            f"but it has {len(facts.layers)} layers, each of which must attend once"
        )
    planned = facts.heads, facts.kv_heads, facts.head_dim
    kinds = getattr(config.get_text_config(), "layer_types", None) or ["full_attention"] * len(facts.layers)
    for at, (spec, layer) in enumerate(zip(census.specs.values(), facts.layers, strict=True)):
        found = spec.heads, spec.kv_heads, spec.head_dim
        if found != planned:
            raise ConfigError(
                f"layer {at} has {found[0]} heads, {found[1]} of keys, of size {found[2]}; "
                f"config.json reads as {planned[0]}, {planned[1]} and {planned[2]} for all layers"
            )
        if spec.window is None and kinds[at] != "full_attention":
            raise ConfigError(f"layer {at} has {kinds[at]}, but does not say how far back it looks")
        if layer.window is not None and spec.window != layer.window:
            raise ConfigError(f"layer {at} looks {spec.window} tokens back, by config.json {layer.window}")


class PlannedAttention(PagedAttention):
    """A layer's share of the cache as config.json had it planned; the layer may look at less of it."""

    def __init__(self, spec: AttentionSpec, planned: CacheSpec, rope: Rope, scope: Scope) -> None:
        super().__init__(spec, rope, scope)
        self.planned = planned

    @property
    def keeps(self) -> CacheSpec:
        return self.planned


class TrialRun(NamedTuple):
    """Two short sequences, in two steps: one in two pieces, the other beside the second."""

    sequences: tuple[Tensor, Tensor]

    @staticmethod
    def of(vocab: int, device: torch.device) -> "TrialRun":
        ids = torch.arange(1, 9, device=device) * 7919 % vocab
        return TrialRun((ids[:5], ids[5:]))

    def expected(self, model: Any) -> Tensor:
        """All logits, by transformers alone."""
        model.set_attn_implementation("eager")
        with named(type(model).__name__):
            logits = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in self.sequences]
        model.set_attn_implementation(_NAME)
        return torch.cat(logits)

    def steps(self) -> list[Batch]:
        """The same tokens in the same order."""
        first, second = self.sequences
        return [_batch([(first[:2], 0)]), _batch([(first[2:], 2), (second, 0)])]


def _batch(chunks: list[tuple[Tensor, int]]) -> Batch:
    """A sequence per chunk, of these ids after so many others; it has the block behind its number."""
    device = chunks[0][0].device
    query_lens = np.array([len(ids) for ids, _ in chunks], np.int32)
    seq_lens = np.array([len(ids) + before for ids, before in chunks], np.int32)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    blocks = np.arange(1, len(chunks) + 1, dtype=np.int32)
    positions = np.concatenate([np.arange(before, before + len(ids)) for ids, before in chunks])
    slots = np.repeat(blocks.astype(np.int64), query_lens) * _BLOCK_SIZE + positions

    def there(values: Any) -> Tensor:
        return torch.from_numpy(values).to(device)

    return Batch(
        token_ids=torch.cat([ids for ids, _ in chunks]),
        positions=there(positions),
        slots=there(slots),
        query_starts=there(starts),
        seq_lens=there(seq_lens),
        rows=there(blocks - 1),
        block_tables=there(blocks[:, None]),
        logit_tokens=there(starts[1:].astype(np.int64) - 1),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )


def bind_blank(layers: list[PagedAttention], device: torch.device) -> None:
    """A cache for the trial: a block for each sequence behind the one that is never used."""
    for layer in layers:
        spec = layer.spec
        k_cache, v_cache = torch.zeros(
            2, 3, _BLOCK_SIZE, spec.kv_heads, spec.head_dim, dtype=spec.dtype, device=device
        )
        layer.bind(k_cache, v_cache)


def is_same(found: Tensor, expected: Tensor) -> bool:
    """But for rounding."""
    found, expected, tolerance = found.float(), expected.float(), _TOLERANCE[found.dtype]
    if found.shape != expected.shape:
        return False
    return not expected.isfinite().all() or bool((found - expected).norm() <= tolerance * expected.norm())
