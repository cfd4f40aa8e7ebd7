"""Draft: the model that proposes tokens beside the target, and whether the two fit together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.checkpoint.facts import ArchFacts, HeadFacts
from quire.checkpoint.families import Family
from quire.checkpoint.families.dense import llama
from quire.checkpoint.layout import cache_specs, has_states
from quire.checkpoint.model import Checkpoint, read_checkpoint
from quire.checkpoint.reader import ConfigReader
from quire.checkpoint.tensor_parallel import of_one
from quire.errors import ConfigError

_PREDICTS = (
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
"""Whose checkpoints have layers that predict more than one token."""


_BEFORE_THE_NORM = ("Step3p5ForCausalLM",)
"""Of those: whose layers take the target's states before its last norm, not behind it."""
METHODS = ("draft_model", "eagle", "eagle3", "mtp")
"""Drafts that the worker makes."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The model that makes drafts on the device of the target."""

    method: str
    """One of METHODS."""
    checkpoint: Checkpoint
    """Its own; for `mtp` the target's, with the facts of the layers that draft."""
    num_tokens: int
    """How many it proposes at most, each time."""

    @property
    def facts(self) -> ArchFacts:
        return self.checkpoint.facts

    def of_one(self, num_devices: int) -> ArchFacts:
        """What each device has of it."""
        return of_one(self.facts, num_devices)


def read_draft(method: str, target: Checkpoint, num_tokens: int, path: Path | None = None) -> Draft:
    """The draft at `path` for this target; for `mtp` it lies in the target's own checkpoint."""
    if method == "mtp":
        return Draft(method, replace(target, facts=_predicting(target.facts, target.path)), num_tokens)
    if path is None:
        raise ConfigError(f"speculation by {method!r} needs a model: name one in speculative_config")
    if method == "draft_model":
        draft = Draft(method, read_checkpoint(path), num_tokens)
        _check_whole(draft.facts)
        return draft
    read = _HEADS[method]
    family = Family(method, lambda keys: read(_flat(keys), target.facts))
    return Draft(method, read_checkpoint(path, family=family), num_tokens)


def check_target(facts: ArchFacts) -> None:
    """Refuse a model that no draft can be verified with."""
    if has_states(cache_specs(facts)):
        raise ConfigError(
            f"{facts.architecture} has layers whose state cannot go back to before a draft that was not "
            "accepted: it has to run without speculation"
        )


def check_alike(draft: Draft, asked: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Refuse what was `asked` of the draft, by key of speculative_config, and cannot differ from the
    `target`'s, or from what its own checkpoint says."""
    quant = draft.checkpoint.quant
    own = {"quantization": None if quant is None else quant.method, **target}
    for name, value in asked.items():
        if value not in (None, "auto", own[name]):
            raise ConfigError(
                f"speculative_config.{name}={value!r} is not supported with {own[name]!r} "
                f"{'in the draft itself' if name == 'quantization' else 'for the target'}; leave it out"
            )


def check_tokens(
    draft: Draft, target: ArchFacts, ours: Mapping[str, int] | None, theirs: Mapping[str, int] | None
) -> None:
    """Refuse a model whose tokens are not the target's. Where both tokenizers are known, `ours` being the
    target's, they may leave different numbers of ids unused."""
    if draft.method != "draft_model":
        return
    if ours is None or theirs is None:
        if draft.facts.vocab != target.vocab:
            raise ConfigError(
                f"the draft model knows {draft.facts.vocab} tokens and the target {target.vocab}: they need "
                "the same tokenizer"
            )
        return
    names = {token_id: token for token, token_id in ours.items()}
    for token, token_id in theirs.items():
        if ours.get(token) != token_id:
            own = f"is {names[token_id]!r}" if token_id in names else "does not exist"
            raise ConfigError(
                f"the draft model needs the target's tokenizer: token {token_id} is {token!r} in its own, "
                f"and {own} in the target's"
            )


def _check_whole(draft: ArchFacts) -> None:
    """Whether a model can draft: it is given tokens again that it has seen."""
    cannot = {
        "reads in both directions": draft.encoder is not None,
        "is run by transformers": draft.borrowed is not None,
        "has layers whose state cannot go back": has_states(cache_specs(draft)),
    }
    for why in (why for why, is_so in cannot.items() if is_so):
        raise ConfigError(f"the draft model is a {draft.architecture}, which {why}: it cannot draft")


def _flat(keys: ConfigReader) -> ConfigReader:
    """Where the layer is described by an object of its own, with what that says."""
    layer = keys.get("transformer_layer_config")
    if not isinstance(layer, dict):
        return keys
    known = {key: value for key, value in keys.values.items() if value is not None}
    return ConfigReader(keys.source, {"norm_before_residual": True, "num_hidden_layers": 1, **layer, **known})


def _eagle(keys: ConfigReader, target: ArchFacts) -> ArchFacts:
    """EAGLE: a layer or more on the target's last states and the tokens behind them."""
    facts = llama(keys)
    _check_sizes(keys, facts, target)
    if facts.hidden != target.hidden:
        raise keys.wrong("hidden_size", f"{target.hidden}, the target's")
    head = HeadFacts(target.hidden)
    return replace(facts, architecture="EagleLlamaForCausalLM", drafts=head, unused=r"^lm_head\.")


def _eagle3(keys: ConfigReader, target: ArchFacts) -> ArchFacts:
    """EAGLE-3: one layer on states from the beginning, the middle and the end of the target."""
    if keys.size("num_hidden_layers", 1) != 1:
        raise keys.wrong("num_hidden_layers", "1 (no other is supported)")
    facts, own = llama(keys.but(num_hidden_layers=1)), keys.get("eagle_config")
    own = own if isinstance(own, dict) else {}
    _check_sizes(keys, facts, target)
    count = len(target.layers)
    aux_layers: Any = keys.get("eagle_aux_hidden_state_layer_ids") or own.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    aux_layers = aux_layers or [2, count // 2, count - 3]
    if not isinstance(aux_layers, list) or not all(
        isinstance(at, int) and 0 <= at < count for at in aux_layers
    ):
        raise keys.wrong("eagle_aux_hidden_state_layer_ids", f"numbers of the target's {count} layers")
    if own.get("use_aux_hidden_state") is False:
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


def _check_sizes(keys: ConfigReader, facts: ArchFacts, target: ArchFacts) -> None:
    if facts.vocab != target.vocab:
        raise keys.wrong("vocab_size", f"{target.vocab}, the target's")


_HEADS: dict[str, Callable[[ConfigReader, ArchFacts], ArchFacts]] = {"eagle": _eagle, "eagle3": _eagle3}


def _predicting(target: ArchFacts, path: Path) -> ArchFacts:
    """The layer that predicts the next token but one: like the target's last that attends."""
    if target.architecture not in _PREDICTS:
        raise ConfigError(
            f"{path}: a {target.architecture} has no layers for multi-token prediction; "
            f"those that have: {', '.join(_PREDICTS)}"
        )
    layer, count = target.predicting, len(target.layers)
    if layer is None:
        layer = next(layer for layer in reversed(target.layers) if layer.mixer in ("attention", "latent"))
    aux_layers = (count,) if target.architecture in _BEFORE_THE_NORM else ()
    head = HeadFacts(target.hidden, aux_layers=aux_layers, layers_of=target.architecture, first=count)
    return replace(target, architecture="MTP", layers=(layer,), drafts=head, state=None)
