"""Adapter for models of transformers: construction, checkpoint names, paged attention, and a self-test."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, TransformersFacts
from quire.checkpoint.layout import CacheSpec, cache_specs
from quire.checkpoint.transformers_config import IMPL_OWN_CACHE
from quire.errors import ConfigError
from quire.layers.attention import PagedAttention, attention_layers
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.logs import get_logger

logger = get_logger(__name__)

_NAME = "quire"
"""Name of Quire's attention in transformers' AttentionInterface."""
_BLOCK_SIZE = 16
_TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.3, torch.float16: 0.3}
"""Largest accepted error of logits: norm of the difference relative to the norm of the expected logits."""


class AttentionCall(NamedTuple):
    """Arguments of an attention call of transformers."""

    q: Tensor
    """Queries, [1, heads, T, head_dim]; keys (`k`) and values (`v`) likewise."""
    k: Tensor
    v: Tensor
    spec: dict[str, Any]
    sinks: Tensor | None


class TransformersStep(NamedTuple):
    """The batch of a step, which transformers passes to every attention as a keyword argument."""

    batch: Batch

    def attend(self, module: Any, call: AttentionCall) -> Tensor:
        """Return the paged attention output, [1, T, heads, head_dim], of an attention module of the model."""
        qkv = torch.cat(call[:3], 1)[0].transpose(0, 1).flatten(1)
        out: Tensor = module.quire_attention.attend(qkv, self.batch)
        return out.view(1, len(out), *call.q.shape[1::2])


class _AttentionRecorder:
    """Replaces `TransformersStep` in one forward pass, to record attention modules and parameters."""

    def __init__(self) -> None:
        self.specs: dict[nn.Module, AttentionSpec] = {}
        self.sinks: list[Tensor | None] = []
        self.is_repeated = False
        self.masks: set[str] = set()
        """Names of the mask functions called during the pass."""

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        q, k, v, spec, sinks = call
        if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
            raise ConfigError(f"its keys {tuple(k.shape)} and values {tuple(v.shape)} differ in size")
        self.is_repeated |= module in self.specs
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
    quire_step: TransformersStep | _AttentionRecorder | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Pass an attention call of transformers' AttentionInterface to `quire_step`; return the output [1, T,
    heads, head_dim] and None. Raise a ConfigError for unsupported masks and biases."""
    if quire_step is None:
        raise ConfigError("it does not pass keyword arguments down to its attention")
    unsupported = [name for name in ("position_bias", "alibi") if rest.get(name) is not None]
    if unsupported or attention_mask is not None or rest.get("is_causal") is False:
        raise ConfigError(f"its attention needs {unsupported[0] if unsupported else 'a custom mask'}")
    spec = {"window": sliding_window, "scale": scaling, "softcap": softcap}
    return quire_step.attend(module, AttentionCall(query, key, value, spec, s_aux)), None


@contextmanager
def config_errors(name: str, remedy: str = "") -> Iterator[None]:
    """Convert any error of the `with` block, which runs transformers' code of the model `name`, to a
    ConfigError that names the model and the `remedy`."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        if isinstance(error, KeyError) and error.args == (_NAME,):
            reason = "it does not use AttentionInterface but its own table of attention classes"
        elif not isinstance(error, ConfigError):
            reason = f"its code raises {type(error).__name__}, {reason}"
        raise ConfigError(f"{name} cannot run through transformers: {reason}{remedy}") from error


def build(borrowed: TransformersFacts, scope: Scope) -> Any:
    """Build the model with uninitialized weights and with the buffers computed from its configuration. A
    model with a cache of its own uses transformers' attention, any other model Quire's attention."""
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        raise ConfigError(
            f"transformers {transformers.__version__} is too old for the transformers backend: install 5 or "
            "later"
        )
    from transformers.initialization import no_init_weights

    transformers.AttentionInterface.register(_NAME, _attention)
    config, options = _read_config(borrowed)
    architecture = (config.architectures or [config.model_type])[0]
    if config.is_encoder_decoder:
        raise ConfigError(
            f"{architecture} is an encoder-decoder model; the transformers backend supports decoders only"
        )
    with config_errors(architecture), torch.device(scope.device), no_init_weights():
        if not borrowed.own_cache:
            options["attn_implementation"] = _NAME
        model = _auto_class(config).from_config(config, dtype=scope.dtype, **options)
    model.tie_weights()
    _keep_float32(model, scope.dtype)
    return model.requires_grad_(False).eval()


def _auto_class(config: Any) -> Any:
    """Return the class that builds the model: a decoder, or a multimodal model whose text decoder is used."""
    import transformers

    multimodal: Any = getattr(
        transformers, "AutoModelForMultimodalLM", transformers.AutoModelForImageTextToText
    )
    decoder: Any = transformers.AutoModelForCausalLM
    is_decoder = type(config) in decoder._model_mapping or "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or {}
    )
    return decoder if is_decoder or type(config) not in multimodal._model_mapping else multimodal


def _keep_float32(model: Any, dtype: torch.dtype) -> None:
    """Convert to float32 the parameters and buffers that transformers keeps in float32 in a model of this
    dtype."""
    patterns = {*(model._keep_in_fp32_modules_strict or ())} if dtype != torch.float32 else set()
    if dtype == torch.float16:
        patterns |= {*(model._keep_in_fp32_modules or ())}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns):
            tensor.data = tensor.data.float()


def _parse_float(block: dict[str, Any]) -> Any:
    """Parse transformers' encoding of infinities and NaN, which JSON does not have."""
    return float(block["__float__"]) if [*block] == ["__float__"] else block


def _read_config(borrowed: TransformersFacts) -> tuple[Any, dict[str, Any]]:
    """Return a model's configuration and further options of its construction."""
    from transformers import CONFIG_MAPPING, AutoConfig

    values = json.loads(borrowed.config, object_hook=_parse_float)
    if borrowed.remote:
        logger.warning("Running the Python code in %s (trust_remote_code)", borrowed.path)
        loaded = AutoConfig.from_pretrained(borrowed.path, trust_remote_code=True)
        config = type(loaded).from_dict(values)
        config._name_or_path = borrowed.path
        return config, {"trust_remote_code": True}
    values.pop("auto_map", None)
    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"{borrowed.path}: transformers has no model_type {kind!r}")
    with config_errors(str(kind)):
        return CONFIG_MAPPING[kind].from_dict(values), {"trust_remote_code": False}


class _NoClone(TorchDispatchMode):
    """Dispatch mode in which clone() returns an alias, so that views keep their storage."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


def stored_parts(model: Any) -> tuple[dict[str, Tensor], bool]:
    """Return the tensors that transformers would save, by name, as views of the model's tensors; and whether
    the views are complete. Tensors whose stored layout is not a view are left out."""
    from transformers.core_model_loading import revert_weight_conversion

    tied = model.all_tied_weights_keys
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    storages = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    with config_errors(type(model).__name__):
        try:
            with _NoClone():
                parts: dict[str, Tensor] = revert_weight_conversion(model, state)
        except RuntimeError:  # a conversion needs a copy
            parts = revert_weight_conversion(model, state)
    views = {name: part for name, part in parts.items() if part.untyped_storage().data_ptr() in storages}
    return views, len(views) == len(parts)


def load_by_transformers(model: Any, folder: str) -> None:
    """Fill a model with the weights of a checkpoint as transformers converts them."""
    if not [*Path(folder).glob("*.safetensors"), *Path(folder).glob("pytorch_model*.bin")]:
        return  # random weights
    with config_errors(type(model).__name__):
        loaded = type(model).from_pretrained(folder, config=model.config, dtype=model.dtype)
        state = loaded.state_dict()
        for name, tensor in model.state_dict().items():
            tensor.copy_(state[name])


def place_attention(body: Any, facts: ArchFacts, scope: Scope, name: str) -> list[PagedAttention]:
    """Attach a paged attention layer to every attention module of `body`, and return these layers in order.
    Raise a ConfigError if the model's attention is not supported."""
    recorder = _AttentionRecorder()
    ids = torch.zeros(1, 2, dtype=torch.int64, device=scope.device)
    with config_errors(name, f"; model_impl={IMPL_OWN_CACHE!r}, which is slower, may run it"):
        positions = torch.arange(2, device=scope.device)[None]
        with _record_masks(body, recorder.masks):
            body(input_ids=ids, position_ids=positions, use_cache=False, quire_step=recorder)
        _set_window(recorder, body.config)
        _check(recorder, facts, body.config)
    rope = Rope(None, scope)  # transformers has already rotated queries and keys
    layers: list[PagedAttention] = []
    for i, (spec, planned) in enumerate(zip(recorder.specs.values(), cache_specs(facts), strict=True)):
        assert planned is not None
        layers.append(PlannedAttention(spec, planned, rope, scope / i))
    for module, layer, sinks in zip(recorder.specs, layers, recorder.sinks, strict=True):
        module.quire_attention = layer
        layer.sinks = None if sinks is None else nn.Parameter(sinks, requires_grad=False)
    if attention_layers(body.modules()) != layers:
        raise ConfigError(f"{name} is not supported: its layers attend in another order than their modules")
    return layers


_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")
"""Names of transformers' mask functions in model files."""


@contextmanager
def _record_masks(body: nn.Module, masks: set[str]) -> Iterator[None]:
    """Add the names of the mask functions that the model calls in the `with` block to `masks`."""
    module = sys.modules[type(body).__module__]
    real = {name: getattr(module, name) for name in _MASKS if hasattr(module, name)}

    def recorded(name: str) -> Callable[..., Any]:
        def make(*args: Any, **options: Any) -> Any:
            masks.add(name)
            return real[name](*args, **options)

        return make

    try:
        for name in real:
            setattr(module, name, recorded(name))
        yield
    finally:
        for name, make in real.items():
            setattr(module, name, make)


def _set_window(recorder: _AttentionRecorder, config: Any) -> None:
    """Set the sliding window in the recorded attention if the model applies one only by its mask, in all
    layers."""
    specs = recorder.specs
    if _MASKS[1] not in recorder.masks or any(spec.window is not None for spec in specs.values()):
        return
    window = getattr(config.get_text_config(), "sliding_window", None)
    if len(recorder.masks) > 1 or not window:
        raise ConfigError("some of its layers use a sliding window, but do not pass it to the attention")
    recorder.specs = {module: replace(spec, window=window) for module, spec in specs.items()}


def _check(recorder: _AttentionRecorder, facts: ArchFacts, config: Any) -> None:
    """Raise ConfigError if the recorded attention differs from the planned cache."""
    if recorder.is_repeated or len(recorder.specs) != len(facts.layers):
        repeated = ", some twice" if recorder.is_repeated else ""
        raise ConfigError(
            f"{len(recorder.specs)} attention modules were called{repeated}, but it has "
            f"{len(facts.layers)} layers, each of which must attend once"
        )
    planned = facts.heads, facts.kv_heads, facts.head_dim
    kinds = getattr(config.get_text_config(), "layer_types", None) or ["full_attention"] * len(facts.layers)
    for i, (spec, layer) in enumerate(zip(recorder.specs.values(), facts.layers, strict=True)):
        actual = spec.heads, spec.kv_heads, spec.head_dim
        if actual != planned:
            raise ConfigError(
                f"layer {i} has {actual[0]} heads, {actual[1]} KV heads and head size {actual[2]}; "
                f"by config.json all layers have {planned[0]}, {planned[1]} and {planned[2]}"
            )
        if spec.window is None and kinds[i] != "full_attention":
            raise ConfigError(f"layer {i} has {kinds[i]}, but does not pass a window to its attention")
        if layer.window is not None and spec.window != layer.window:
            raise ConfigError(
                f"layer {i} has a window of {spec.window} tokens, by config.json {layer.window}"
            )


class PlannedAttention(PagedAttention):
    """Paged attention with the cache planned from config.json; the layer may use a smaller window."""

    def __init__(self, spec: AttentionSpec, planned: CacheSpec, rope: Rope, scope: Scope) -> None:
        super().__init__(spec, rope, scope)
        self.planned = planned

    @property
    def cache_spec(self) -> CacheSpec:
        return self.planned


class SelfTest(NamedTuple):
    """Input of the self-test: two short sequences in two steps. The first is prefilled in two chunks; the
    second joins in the second step."""

    sequences: tuple[Tensor, Tensor]

    @staticmethod
    def of(vocab: int, device: torch.device) -> "SelfTest":
        ids = torch.arange(1, 9, device=device) * 7919 % vocab
        return SelfTest((ids[:5], ids[5:]))

    def expected(self, model: Any) -> Tensor:
        """Return the logits of all tokens [T, vocab], computed by transformers without the paged cache."""
        has_paged_attention = model.config._attn_implementation == _NAME
        if has_paged_attention:
            model.set_attn_implementation("eager")
        with config_errors(type(model).__name__):
            logits = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in self.sequences]
        if has_paged_attention:
            model.set_attn_implementation(_NAME)
        return torch.cat(logits)

    def steps(self) -> list[Batch]:
        """Return the two batches; their tokens are in the order of `expected`."""
        first, second = self.sequences
        return [_batch([(first[:2], 0)]), _batch([(first[2:], 2), (second, 0)])]


def _batch(chunks: list[tuple[Tensor, int]]) -> Batch:
    """Build a batch of one sequence per chunk (token ids, number of earlier tokens). Sequence i has block
    i + 1."""
    device = chunks[0][0].device
    query_lens = np.array([len(ids) for ids, _ in chunks], np.int32)
    seq_lens = np.array([len(ids) + before for ids, before in chunks], np.int32)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    blocks = np.arange(1, len(chunks) + 1, dtype=np.int32)
    positions = np.concatenate([np.arange(before, before + len(ids)) for ids, before in chunks])
    slots = np.repeat(blocks.astype(np.int64), query_lens) * _BLOCK_SIZE + positions

    def to_device(values: Any) -> Tensor:
        return torch.from_numpy(values).to(device)

    return Batch(
        token_ids=torch.cat([ids for ids, _ in chunks]),
        positions=to_device(positions),
        slots=to_device(slots),
        query_starts=to_device(starts),
        seq_lens=to_device(seq_lens),
        rows=to_device(blocks - 1),
        block_tables=to_device(blocks[:, None]),
        logit_tokens=to_device(starts[1:].astype(np.int64) - 1),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )


def bind_blank(layers: list[PagedAttention], device: torch.device) -> None:
    """Bind a zeroed cache for the self-test: block 0, which is never used, and one block per sequence."""
    for layer in layers:
        spec = layer.spec
        k_cache, v_cache = torch.zeros(
            2, 3, _BLOCK_SIZE, spec.kv_heads, spec.head_dim, dtype=spec.dtype, device=device
        )
        layer.bind(k_cache, v_cache)


def is_same(logits: Tensor, expected: Tensor) -> bool:
    """Return whether logits are equal up to rounding errors."""
    logits, expected, tolerance = logits.float(), expected.float(), _TOLERANCE[logits.dtype]
    if logits.shape != expected.shape:
        return False
    return not expected.isfinite().all() or bool((logits - expected).norm() <= tolerance * expected.norm())
