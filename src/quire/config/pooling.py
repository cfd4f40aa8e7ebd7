"""Pooling: what becomes of a sequence's hidden states, as the checkpoint's files and the user say."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.keys import Keys, read_json
from quire.errors import ConfigError, nearest

TYPES = ("LAST", "CLS", "MEAN")
_STORED_TYPES = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_lasttoken": "LAST",
    "pooling_mode_mean_tokens": "MEAN",
    "cls": "CLS",
    "lasttoken": "LAST",
    "mean": "MEAN",
}
"""What 1_Pooling/config.json calls them: a switch each or, of late, one word."""
_GGUF_TYPES = {1: "MEAN", 2: "CLS", 3: "LAST"}
_CLASSES = "ForSequenceClassification"
RETRIEVAL = "ForRetrieval"
"""How those end that have a product behind every state."""
GENERATIVE = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ChatGLMModel", "GritLM")
"""How the architectures end that generate unless told otherwise."""
_BY_PROBLEM = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
ACTIVATIONS = ("identity", "sigmoid", "softmax")
_POOLER_KEYS = {
    **dict.fromkeys(("pooling_type", "seq_pooling_type"), "pooling_type"),
    **dict.fromkeys(("normalize", "softmax", "activation", "use_activation"), "use_activation"),
    "dimensions": "dimensions",
}
"""What `pooler_config` may say, and what it means."""


@dataclass(frozen=True, slots=True)
class StoredPooling:
    """What a checkpoint's files say about pooling."""

    architecture: str = "ForCausalLM"
    """As config.json names it."""
    is_embedder: bool = False
    """Whether sentence-transformers has saved it."""
    type: str | None = None
    normalize: bool | None = None
    max_len: int | None = None
    """The longest text that sentence-transformers reads."""
    labels: tuple[str, ...] = ()
    activation: str | None = None
    """Of a classifier: what makes scores of its logits."""
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    """Those it was trained for; empty: all."""
    label_tokens: tuple[str, ...] = ()
    """A classifier that is made of the output head: the tokens whose logits are its classes."""
    two_way: bool = False
    """Of these two, their softmax: one class."""
    both_ways: bool = False
    """A decoder that was trained to look ahead, too."""
    instructions: tuple[tuple[str, str], ...] = ()
    """Texts to put in front of inputs, by what these are for."""
    projection: int = 0
    """Numbers of the product behind every state; 0: there is none."""

    @property
    def is_classifier(self) -> bool:
        return self.architecture.endswith(_CLASSES)


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """How an engine pools."""

    task: str
    """`embed` or `classify`."""
    type: str
    """LAST, CLS or MEAN: the last token's state, the first's, or the mean of all."""
    size: int
    """Numbers of an embedding, or of classes."""
    use_activation: bool = True
    """What is done unless a request says otherwise: normalise, or make probabilities."""
    activation: str = "softmax"
    dimensions: int | None = None
    """How many numbers of an embedding are given out unless a request says otherwise."""
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    label_tokens: tuple[str, ...] = ()
    two_way: bool = False
    instructions: tuple[tuple[str, str], ...] = ()
    token_types: int = 0
    """Of how many texts in one prompt the model knows which token is whose; 0: it does not ask."""
    projection: int = 0

    @property
    def needs_all_states(self) -> bool:
        """Whether tokens that the prefix cache holds would be missed."""
        return self.type != "LAST"


def read_pooling(path: Path, keys: Keys, architecture: str) -> StoredPooling:
    """Out of a model directory: config.json, and what sentence-transformers writes beside it."""
    dimensions = keys.get("matryoshka_dimensions")
    if dimensions is not None and not _is_list_of(dimensions, int):
        raise keys.wrong("matryoshka_dimensions", "a list of integers")
    tokens = keys.get("classifier_from_token")
    if tokens is not None and not _is_list_of(tokens, str):
        raise keys.wrong("classifier_from_token", "a list of tokens")
    two_way = keys.flag("is_original_qwen3_reranker") or keys.get("method") == "from_2_way_softmax"
    if two_way and len(tokens or ()) != 2:
        raise keys.wrong("classifier_from_token", "the tokens for no and yes, such as ['no', 'yes']")
    stored: dict[str, Any] = {}
    if architecture.endswith(_CLASSES) and keys.get("classifier_pooling") is not None:
        stored["type"] = _STORED_TYPES.get(str(keys.get("classifier_pooling")))
        if stored["type"] is None:
            raise keys.wrong("classifier_pooling", "cls or mean")
    if (path / "modules.json").is_file():
        stored |= _read_modules(path)
    return StoredPooling(
        architecture=architecture,
        labels=_labels(keys) if not tokens else ("yes",) if two_way else tuple(tokens),
        activation=_activation(keys),
        is_matryoshka=keys.flag("is_matryoshka") or dimensions is not None,
        matryoshka_dimensions=tuple(dimensions or ()),
        label_tokens=tuple(tokens or ()),
        two_way=two_way,
        both_ways=keys.get("is_causal") is False or keys.get("use_bidirectional_attention") in (True, "all"),
        instructions=_instructions(path, keys),
        projection=keys.size("embedding_dim", 128) if architecture.endswith(RETRIEVAL) else 0,
        **stored,
    )


def _instructions(path: Path, keys: Keys) -> tuple[tuple[str, str], ...]:
    """Those of config.json, or what sentence-transformers calls prompts."""
    file = path / "config_sentence_transformers.json"
    found = keys.get("task_instructions") or (read_json(file).get("prompts") if file.is_file() else None)
    if not isinstance(found, dict):
        return ()
    return tuple((name, text) for name, text in found.items() if isinstance(text, str))


def read_gguf_pooling(arch: Keys) -> StoredPooling:
    kind = arch.get("pooling_type")
    named = _GGUF_TYPES.get(kind) if isinstance(kind, int) else None
    return StoredPooling(is_embedder=named is not None, type=named)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _labels(keys: Keys) -> tuple[str, ...]:
    """Two where nothing is said, as transformers has it."""
    names = keys.get("id2label") or {}
    if not isinstance(names, dict):
        raise keys.wrong("id2label", "an object of numbers to names")
    count = keys.size("num_labels", len(names) or 2)
    return tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))


def _activation(keys: Keys) -> str | None:
    """The function that config.json names for a classifier or a cross-encoder."""
    if (problem := keys.get("problem_type")) is not None:
        if str(problem) not in _BY_PROBLEM:
            raise keys.wrong("problem_type", f"one of {', '.join(_BY_PROBLEM)}")
        return _BY_PROBLEM[str(problem)]
    named = keys.get("sbert_ce_default_activation_function")
    if isinstance(inner := keys.get("sentence_transformers"), dict):
        named = inner.get("activation_fn", named)
    if named is None:
        return None
    function = str(named).rpartition(".")[2].lower()
    if function not in ACTIVATIONS:
        raise ConfigError(f"{keys.source}: the activation {named!r} is not supported")
    return function


def _read_modules(path: Path) -> dict[str, Any]:
    """modules.json and the folders that it names."""
    try:
        modules = json.loads((path / "modules.json").read_text(encoding="utf-8"))
        kinds = {str(each["type"]).rpartition(".")[2]: str(each["path"]) for each in modules}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path / 'modules.json'} is not a list of modules: {error!r}") from error
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if unknown:
        raise ConfigError(f"{path / 'modules.json'}: the module {unknown[0]!r} is not supported yet")
    found: dict[str, Any] = {"is_embedder": True, "normalize": "Normalize" in kinds}
    if (folder := kinds.get("Pooling")) is not None:
        found["type"] = _stored_type(path / folder / "config.json")
    for file in sorted(path.glob("sentence_*_config.json")):
        if read_json(file).get("max_seq_length") is not None:
            found["max_len"] = Keys(str(file), read_json(file)).size("max_seq_length")
    return found


def _stored_type(file: Path) -> str:
    values = read_json(file)
    named = [str(values.get("pooling_mode"))] if values.get("pooling_mode") else []
    named += [name for name, on in values.items() if name.startswith("pooling_mode_") and on is True]
    if len(named) != 1 or named[0] not in _STORED_TYPES:
        known = ", ".join(_STORED_TYPES)
        raise ConfigError(f"{file} asks for {' and '.join(named) or 'nothing'}; known, one of: {known}")
    return _STORED_TYPES[named[0]]


def settle(
    stored: StoredPooling,
    *,
    is_encoder: bool,
    hidden: int,
    token_types: int = 0,
    runner: str = "auto",
    convert: str = "auto",
    pooler: Mapping[str, Any] | None = None,
) -> PoolingFacts | None:
    """What the user and the checkpoint say together; None for an engine that generates."""
    generates = stored.architecture.endswith(GENERATIVE) and not stored.is_embedder
    converts = convert in ("embed", "classify")
    if runner == "generate" or (runner == "auto" and generates and not converts):
        if is_encoder or stored.is_classifier:
            raise ConfigError(f"{stored.architecture} does not generate: leave runner out, or set 'pooling'")
        if converts:
            raise ConfigError(
                f"convert={convert!r} makes a pooling model: leave runner out, or set 'pooling'"
            )
        return None
    if convert == "none" and stored.architecture.endswith(GENERATIVE):
        raise ConfigError(
            f"{stored.architecture} does not pool as it is: set convert to 'embed' or 'classify', or leave"
            " it out"
        )
    if stored.both_ways and not is_encoder:
        raise ConfigError(
            f"config.json says that this {stored.architecture} attends in both directions, which is not"
            " supported yet for decoders"
        )
    task = convert if converts else "classify" if stored.is_classifier or stored.label_tokens else "embed"
    asked = _asked(pooler or {})
    size = stored.projection or hidden if task == "embed" else len(stored.labels)
    activation = stored.activation or "softmax"
    facts = PoolingFacts(
        task=task,
        type=asked.get("pooling_type") or stored.type or ("CLS" if is_encoder else "LAST"),
        size=size,
        use_activation=asked.get("use_activation", stored.normalize if task == "embed" else None)
        is not False,
        activation="sigmoid" if size == 1 and activation == "softmax" else activation,
        dimensions=asked.get("dimensions"),
        labels=stored.labels if task == "classify" else (),
        token_types=token_types,
        projection=stored.projection if task == "embed" else 0,
        **{
            name: getattr(stored, name)
            for name in ("is_matryoshka", "matryoshka_dimensions", "label_tokens", "two_way", "instructions")
        },
    )
    if facts.dimensions is not None and (wrong := dimensions_error(facts, facts.dimensions)):
        raise ConfigError(f"pooler_config: {wrong}")
    return facts


def _asked(pooler: Mapping[str, Any]) -> dict[str, Any]:
    """`pooler_config`, checked, under one name for each thing."""
    asked: dict[str, Any] = {}
    for name, value in pooler.items():
        if value is None:
            continue
        if name not in _POOLER_KEYS:
            near = nearest(name, list(_POOLER_KEYS))
            raise ConfigError(
                f"pooler_config: {name!r} is not supported; known: {', '.join(_POOLER_KEYS)}{near}"
            )
        asked[_POOLER_KEYS[name]] = value
    kind = asked.get("pooling_type")
    if kind is not None:
        asked["pooling_type"] = kind = str(kind).upper()
        if kind not in TYPES:
            raise ConfigError(
                f"pooler_config: pooling_type={kind!r} is not supported; known: {', '.join(TYPES)}"
            )
    if asked.get("use_activation") not in (None, True, False):
        raise ConfigError(f"pooler_config: use_activation={asked['use_activation']!r} must be true or false")
    return asked


def dimensions_error(facts: PoolingFacts, wanted: int) -> str | None:
    """Why embeddings of so many numbers cannot be had."""
    if not facts.is_matryoshka:
        return (
            "this model does not support matryoshka representation, changing output dimensions will lead to"
            " poor results; if it was trained for them set hf_overrides={'is_matryoshka': true}"
        )
    if not isinstance(wanted, int) or not 1 <= wanted <= facts.size:
        return f"dimensions={wanted!r} must be from 1 to {facts.size}"
    known = facts.matryoshka_dimensions
    if known and wanted not in known:
        return f"this model only supports {list(known)} matryoshka dimensions, got {wanted}"
    return None
