"""The draft model of speculative decoding, and the checks that it fits its target model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.checkpoint.facts import ArchFacts, HeadFacts
from quire.checkpoint.families import Family
from quire.checkpoint.families.dense import llama
from quire.checkpoint.layout import cache_specs, has_ssm_state
from quire.checkpoint.model import Checkpoint, read_checkpoint
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.tensor_parallel import shard_facts
from quire.errors import ConfigError

_MTP_ARCHITECTURES = (
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Step3p5ForCausalLM",
)
"""Architectures with checkpoints that include multi-token prediction (MTP) layers."""


_UNNORMED_TARGET_STATES = ("Step3p5ForCausalLM",)
"""Architectures whose MTP layers read the target's hidden states before its final norm; those of all others
read them after it."""
METHODS = ("draft_model", "eagle", "eagle3", "mtp")
"""Speculation methods that run a draft model in the worker."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft model, which runs on the device of the target model."""

    method: str
    """Speculation method, one of METHODS."""
    checkpoint: Checkpoint
    """Checkpoint of the draft; for `mtp` the target's checkpoint, but its `facts` describe the MTP layer."""
    num_tokens: int
    """Largest number of draft tokens per step."""

    @property
    def facts(self) -> ArchFacts:
        return self.checkpoint.facts

    def of_one(self, num_devices: int) -> ArchFacts:
        """Return the architecture facts of the part of the draft model that one of `num_devices`
        tensor-parallel ranks has."""
        return shard_facts(self.facts, num_devices)


def read_draft(method: str, target: Checkpoint, num_tokens: int, path: Path | None = None) -> Draft:
    """Read the draft model at `path`; for `mtp` it is part of the target's checkpoint."""
    if method == "mtp":
        return Draft(method, replace(target, facts=_mtp_facts(target.facts, target.path)), num_tokens)
    if path is None:
        raise ConfigError(f"speculation by {method!r} needs a model: name one in speculative_config")
    if method == "draft_model":
        draft = Draft(method, read_checkpoint(path), num_tokens)
        _check_draft_model(draft.facts)
        return draft
    read = _READERS[method]
    family = Family(method, lambda keys: read(_flatten_layer_config(keys), target.facts))
    return Draft(method, read_checkpoint(path, family=family), num_tokens)


def check_draft_settings(draft: Draft, requested: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Raise if a setting of speculative_config (`requested`) differs from that of the target model or, for
    `quantization`, of the draft checkpoint."""
    quant = draft.checkpoint.quant
    expected = {"quantization": None if quant is None else quant.method, **target}
    for name, value in requested.items():
        if value not in (None, "auto", expected[name]):
            raise ConfigError(
                f"speculative_config.{name}={value!r} is not supported with {expected[name]!r} "
                f"{'in the draft itself' if name == 'quantization' else 'for the target'}; leave it out"
            )


def check_vocabulary(
    draft: Draft,
    target: ArchFacts,
    target_vocab: Mapping[str, int] | None,
    draft_vocab: Mapping[str, int] | None,
) -> None:
    """Raise a ConfigError if a separate draft model has another vocabulary than the target. If both
    tokenizers are available (as {token: id}), their tokens are compared, and the number of unused ids may
    differ."""
    if draft.method != "draft_model":
        return
    if target_vocab is None or draft_vocab is None:
        if draft.facts.vocab != target.vocab:
            raise ConfigError(
                f"the draft model has a vocabulary of {draft.facts.vocab} tokens and the target of "
                f"{target.vocab}: they need the same tokenizer"
            )
        return
    names = {token_id: token for token, token_id in target_vocab.items()}
    for token, token_id in draft_vocab.items():
        if target_vocab.get(token) != token_id:
            difference = f"is {names[token_id]!r}" if token_id in names else "does not exist"
            raise ConfigError(
                f"the draft model needs the target's tokenizer: token {token_id} is {token!r} in the draft's "
                f"tokenizer and {difference} in the target's"
            )


def _check_draft_model(draft: ArchFacts) -> None:
    """Raise a ConfigError if this model cannot be a draft model, which computes positions again after draft
    tokens were rejected: one with recurrent states cannot, for instance."""
    cannot = {
        "attends in both directions": draft.encoder is not None,
        "is run by transformers": draft.borrowed is not None,
        "has SSM states, and a draft computes tokens twice": has_ssm_state(cache_specs(draft)),
    }
    for reason in (reason for reason, applies in cannot.items() if applies):
        raise ConfigError(f"the draft model is a {draft.architecture}, which {reason}: it cannot draft")


def _flatten_layer_config(keys: ConfigReader) -> ConfigReader:
    """Merge the keys of `transformer_layer_config` into the top level, if the config has such an object."""
    layer = keys.get("transformer_layer_config")
    if not isinstance(layer, dict):
        return keys
    top_level = {key: value for key, value in keys.values.items() if value is not None}
    return ConfigReader(
        keys.source, {"norm_before_residual": True, "num_hidden_layers": 1, **layer, **top_level}
    )


def _eagle(keys: ConfigReader, target: ArchFacts) -> ArchFacts:
    """Read an EAGLE draft: decoder layers that read the target's last hidden states and the next tokens."""
    facts = llama(keys)
    _check_vocab(keys, facts, target)
    if facts.hidden != target.hidden:
        raise keys.wrong("hidden_size", f"{target.hidden}, the target's")
    head = HeadFacts(target.hidden)
    return replace(facts, architecture="EagleLlamaForCausalLM", drafts=head, unused=r"^lm_head\.")


def _eagle3(keys: ConfigReader, target: ArchFacts) -> ArchFacts:
    """Read an EAGLE-3 draft: one layer that reads hidden states of an early, a middle and a late target
    layer."""
    if keys.size("num_hidden_layers", 1) != 1:
        raise keys.wrong("num_hidden_layers", "1 (no other is supported)")
    facts, eagle_config = llama(keys.but(num_hidden_layers=1)), keys.get("eagle_config")
    eagle_config = eagle_config if isinstance(eagle_config, dict) else {}
    _check_vocab(keys, facts, target)
    count = len(target.layers)
    aux_layers: Any = keys.get("eagle_aux_hidden_state_layer_ids") or eagle_config.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    aux_layers = aux_layers or [2, count // 2, count - 3]
    if not isinstance(aux_layers, list) or not all(
        isinstance(at, int) and 0 <= at < count for at in aux_layers
    ):
        raise keys.wrong("eagle_aux_hidden_state_layer_ids", f"numbers of the target's {count} layers")
    if eagle_config.get("use_aux_hidden_state") is False:
        raise keys.wrong("eagle_config", "use_aux_hidden_state: true (nothing else is supported)")
    if keys.size("target_hidden_size", target.hidden) != target.hidden:
        raise keys.wrong("target_hidden_size", f"{target.hidden}, the target's")
    head = HeadFacts(
        target.hidden,
        aux_layers=tuple(aux_layers),
        vocab=keys.size("draft_vocab_size", facts.vocab),
        keeps_normed=keys.flag("norm_before_residual"),
    )
    return replace(facts, architecture="Eagle3LlamaForCausalLM", drafts=head, unused="^t2d$")


def _check_vocab(keys: ConfigReader, facts: ArchFacts, target: ArchFacts) -> None:
    if facts.vocab != target.vocab:
        raise keys.wrong("vocab_size", f"{target.vocab}, the target's")


_READERS: dict[str, Callable[[ConfigReader, ArchFacts], ArchFacts]] = {"eagle": _eagle, "eagle3": _eagle3}


def _mtp_facts(target: ArchFacts, path: Path) -> ArchFacts:
    """Return the facts of a draft that consists of the target's MTP layer."""
    if target.architecture not in _MTP_ARCHITECTURES:
        raise ConfigError(
            f"{path}: a {target.architecture} has no layers for multi-token prediction; "
            f"architectures that have them: {', '.join(_MTP_ARCHITECTURES)}"
        )
    layer, count = target.predicting, len(target.layers)
    if layer is None:
        layer = next(layer for layer in reversed(target.layers) if layer.mixer in ("attention", "latent"))
    aux_layers = (count,) if target.architecture in _UNNORMED_TARGET_STATES else ()
    head = HeadFacts(target.hidden, aux_layers=aux_layers, layers_of=target.architecture, first=count)
    return replace(target, architecture="MTP", layers=(layer,), drafts=head, state=None)
