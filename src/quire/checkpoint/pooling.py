"""Pooling: what becomes of a sequence's hidden states, as the checkpoint's files and the user say."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.reader import ConfigReader, read_json
from quire.checkpoint.sentence_transformers import DenseFacts, read_modules
from quire.errors import ConfigError, nearest

TYPES = ("LAST", "CLS", "MEAN")
"""Of a whole text."""
TOKEN_TYPES = ("ALL", "STEP")
"""Of its tokens."""
_NAMED_TYPES = {"cls": "CLS", "mean": "MEAN", "avg": "MEAN", "last": "LAST"}
"""What config.json calls them."""
_GGUF_TYPES = {1: "MEAN", 2: "CLS", 3: "LAST"}
_CLASSES = "ForSequenceClassification"
_TOKEN_CLASSES = "ForTokenClassification"
_BIDIRECTIONAL = "LlamaBidirectional"
_BOTH_WAYS = (_BIDIRECTIONAL, "EuroBert")
"""How those begin that attend in both directions and do not say so elsewhere."""
_REWARDS: dict[str, dict[str, Any]] = {
    "InternLM2ForRewardModel": {"head": "value", "labels": ("LABEL_0",), "is_raw": True},
    "Qwen2ForProcessRewardModel": {
        "head": "reward",
        "labels": ("LABEL_0", "LABEL_1"),
        "token_type": "STEP",
        "step_tag_id": 151651,
    },
    "Qwen2ForRewardModel": {"head": "reward", "labels": ("LABEL_0",), "is_raw": True},
}
"""Models that say how good each token is, or each step: what their configurations do not say."""
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
    "pooling_type": "pooling_type",
    "seq_pooling_type": "type",
    "tok_pooling_type": "token_type",
    **dict.fromkeys(("normalize", "softmax", "activation", "use_activation"), "use_activation"),
    **{name: name for name in ("dimensions", "step_tag_id", "returned_token_ids")},
}
"""What `pooler_config` may say, and what it means."""
_AS_STORED = ("is_matryoshka", "matryoshka_dimensions", "label_tokens", "two_way", "instructions")


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
    both_ways: str = ""
    """Of a decoder that was trained to look ahead, too: what says so."""
    instructions: tuple[tuple[str, str], ...] = ()
    """Texts to put in front of inputs, by what these are for."""
    projection: int = 0
    """Numbers of the product behind every state; 0: there is none."""
    dense: tuple[DenseFacts, ...] = ()
    """Products behind the pooled one, one after the other."""
    head: str = ""
    """Of a classifier of tokens: tokens | reward | value, a key of the table in `models/`."""
    is_raw: bool = False
    """Of a classifier: logits are given out as they are, unless a request says otherwise."""
    temperature: float = 1.0
    """Of a classifier: by which its logits are divided."""
    token_type: str = "ALL"
    step_tag_id: int | None = None

    @property
    def is_classifier(self) -> bool:
        return bool(self.head) or self.architecture.endswith(_CLASSES)


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """How an engine pools."""

    task: str
    """`embed` or `classify`, a text or each of its tokens."""
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
    dense: tuple[DenseFacts, ...] = ()
    head: str = ""
    """Of a classifier of tokens, which has no answer for a whole text: a key of the table in `models/`."""
    temperature: float = 1.0
    by_token: bool = False
    """Whether each token has an answer of its own, unless a request says otherwise."""
    token_type: str = "ALL"
    """What requests for tokens are given: ALL of them, or those that end a STEP."""
    step_tag_id: int | None = None
    """The token that does; None: all."""
    returned_token_ids: tuple[int, ...] = ()
    """Which of the numbers of a token are given out; empty: all."""
    label_ids: tuple[int, ...] = ()
    """A classifier that is made of the output head, by token ids."""
    both_ways: bool = False
    """Whether the tokens of a decoder see those behind them, too."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """What can be asked for; the first is what is done unless a request says otherwise."""
        both = (self.task, f"token_{self.task}")
        return both[1:] if self.head else both[::-1] if self.by_token else both

    @property
    def needs_all_states(self) -> str:
        """The type of pooling that would miss tokens which the prefix cache holds; empty: none would."""
        if self.token_type == "STEP":
            return self.token_type
        return "" if self.type == "LAST" or self.head else self.type


def read_pooling(path: Path, keys: ConfigReader, architecture: str) -> StoredPooling:
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
    stored: dict[str, Any] = {
        "labels": _labels(keys) if not tokens else ("yes",) if two_way else tuple(tokens),
        **_named_type(keys, architecture),
        **read_modules(path),
        **_REWARDS.get(architecture, {}),
    }
    if architecture.endswith(_TOKEN_CLASSES):
        stored["head"] = "tokens"
    return StoredPooling(
        architecture=architecture,
        activation=_activation(keys),
        is_matryoshka=keys.flag("is_matryoshka") or dimensions is not None,
        matryoshka_dimensions=tuple(dimensions or ()),
        label_tokens=tuple(tokens or ()),
        two_way=two_way,
        both_ways=_both_ways(keys, architecture),
        instructions=_instructions(path, keys),
        projection=keys.size("embedding_dim", 128) if architecture.endswith(RETRIEVAL) else 0,
        **stored,
    )


def _named_type(keys: ConfigReader, architecture: str) -> dict[str, Any]:
    """Of those whose config.json says how they pool."""
    if architecture.endswith(_CLASSES) and keys.get("classifier_pooling") is not None:
        key, known = "classifier_pooling", ["cls", "mean"]
    elif architecture.startswith(_BIDIRECTIONAL):
        key, known = "pooling", ["avg", "cls", "last"]
    else:
        return {}
    named = str(keys.get(key) or known[0])
    if named not in known:
        raise keys.wrong(key, f"one of {', '.join(known)}")
    found: dict[str, Any] = {"type": _NAMED_TYPES[named]}
    if architecture.startswith(_BIDIRECTIONAL) and architecture.endswith(_CLASSES):
        found["temperature"] = keys.number("temperature", 1.0)
    return found


def _both_ways(keys: ConfigReader, architecture: str) -> str:
    if keys.get("use_bidirectional_attention") in (True, "all"):
        return "use_bidirectional_attention"
    if keys.get("is_causal") is False:
        return "is_causal"
    return architecture if architecture.startswith(_BOTH_WAYS) else ""


def _instructions(path: Path, keys: ConfigReader) -> tuple[tuple[str, str], ...]:
    """Those of config.json, or what sentence-transformers calls prompts."""
    file = path / "config_sentence_transformers.json"
    found = keys.get("task_instructions") or (read_json(file).get("prompts") if file.is_file() else None)
    if not isinstance(found, dict):
        return ()
    return tuple((name, text) for name, text in found.items() if isinstance(text, str))


def read_gguf_pooling(arch: ConfigReader) -> StoredPooling:
    kind = arch.get("pooling_type")
    named = _GGUF_TYPES.get(kind) if isinstance(kind, int) else None
    return StoredPooling(is_embedder=named is not None, type=named)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _labels(keys: ConfigReader) -> tuple[str, ...]:
    """Two where nothing is said, as transformers has it."""
    names = keys.get("id2label") or {}
    if not isinstance(names, dict):
        raise keys.wrong("id2label", "an object of numbers to names")
    count = keys.size("num_labels", len(names) or 2)
    return tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))


def _activation(keys: ConfigReader) -> str | None:
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
    if not _pools(stored, is_encoder, runner, convert):
        return None
    asked = _asked(pooler or {})
    task, labels, label_ids = _classes(stored, convert, tuple(asked.get("returned_token_ids", ())))
    own = _embedder(stored, hidden) if task == "embed" else _classifier(stored, labels)
    facts = PoolingFacts(
        task=task,
        type=asked.get("type") or stored.type or ("CLS" if is_encoder else "LAST"),
        size=own.pop("size"),
        use_activation=asked.get("use_activation", own.pop("use_activation")) is not False,
        dimensions=asked.get("dimensions"),
        token_types=token_types,
        by_token="token_type" in asked,
        token_type=asked.get("token_type", own.pop("token_type", "ALL")),
        step_tag_id=asked.get("step_tag_id", stored.step_tag_id),
        returned_token_ids=() if label_ids else tuple(asked.get("returned_token_ids", ())),
        label_ids=label_ids,
        both_ways=bool(stored.both_ways) and not is_encoder,
        **{name: getattr(stored, name) for name in _AS_STORED},
        **own,
    )
    if facts.dimensions is not None and (wrong := dimensions_error(facts, facts.dimensions)):
        raise ConfigError(f"pooler_config: {wrong}")
    if any(each >= facts.size for each in facts.returned_token_ids):
        raise ConfigError(
            f"pooler_config: returned_token_ids={[*facts.returned_token_ids]} must be below {facts.size}, as"
            " many numbers a token has"
        )
    return facts


def _pools(stored: StoredPooling, is_encoder: bool, runner: str, convert: str) -> bool:
    generates = stored.architecture.endswith(GENERATIVE) and not stored.is_embedder
    converts = convert in ("embed", "classify")
    if runner == "generate" or (runner == "auto" and generates and not converts):
        if is_encoder or stored.is_classifier:
            raise ConfigError(f"{stored.architecture} does not generate: leave runner out, or set 'pooling'")
        if converts:
            raise ConfigError(
                f"convert={convert!r} makes a pooling model: leave runner out, or set 'pooling'"
            )
        return False
    if convert == "none" and stored.architecture.endswith(GENERATIVE):
        raise ConfigError(
            f"{stored.architecture} does not pool as it is: set convert to 'embed' or 'classify', or leave"
            " it out"
        )
    return True


def _classes(
    stored: StoredPooling, convert: str, returned: tuple[int, ...]
) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    """The task, the names of classes, and the tokens of the output head that they are: the head of a model
    that generates says how good a step was by the logits of some."""
    generates = stored.architecture.endswith(GENERATIVE) and not stored.label_tokens
    label_ids = returned if generates and convert != "embed" else ()
    if convert in ("embed", "classify"):
        task = convert
    else:
        task = "classify" if stored.is_classifier or stored.label_tokens or label_ids else "embed"
    return task, tuple(map(str, label_ids)) or stored.labels, label_ids


def _embedder(stored: StoredPooling, hidden: int) -> dict[str, Any]:
    dense = _chained(stored.dense, hidden)
    return {
        "size": dense[-1].size_out if dense else stored.projection or hidden,
        "use_activation": stored.normalize,
        "projection": stored.projection,
        "dense": dense,
    }


def _classifier(stored: StoredPooling, labels: tuple[str, ...]) -> dict[str, Any]:
    activation = stored.activation or "softmax"
    return {
        "size": len(labels),
        "use_activation": not stored.is_raw,
        "activation": "sigmoid" if len(labels) == 1 and activation == "softmax" else activation,
        "labels": labels,
        "head": stored.head,
        "temperature": stored.temperature,
        "token_type": stored.token_type,
    }


def _chained(dense: tuple[DenseFacts, ...], hidden: int) -> tuple[DenseFacts, ...]:
    """Each takes what the one before it gives."""
    given = hidden
    for each in dense:
        if each.size_in != given:
            raise ConfigError(
                f"{each.folder} takes {each.size_in} numbers, and there are {given} in front of it"
            )
        given = each.size_out
    return dense


def both_ways_error(stored: StoredPooling, facts: ArchFacts, max_len: int) -> str | None:
    """Why the tokens of a decoder cannot see those behind them."""
    windowed = any(layer.window is not None and layer.window < max_len for layer in facts.layers)
    said = facts.architecture == "Gemma3ForCausalLM" and stored.both_ways == "use_bidirectional_attention"
    reasons = {
        "and has layers that can only look back": any(layer.mixer != "attention" for layer in facts.layers),
        "and has scores that fall with the way back": bool(facts.alibi_slopes),
        "and takes in more than text": facts.media is not None,
        "and has windows, of which it is not said how far they reach ahead": windowed and not said,
    }
    found = next((reason for reason, is_so in reasons.items() if is_so), None)
    if found is None:
        return None
    return (
        f"this {stored.architecture} attends in both directions ({stored.both_ways}) {found}, which is not"
        " supported"
    )


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
    if (kind := asked.pop("pooling_type", None)) is not None:
        asked.setdefault("token_type" if str(kind).upper() in TOKEN_TYPES else "type", kind)
    for name, known in (("type", TYPES), ("token_type", TOKEN_TYPES)):
        if name in asked:
            asked[name] = str(asked[name]).upper()
            if asked[name] not in known:
                raise ConfigError(
                    f"pooler_config: pooling_type={asked[name]!r} is not supported; known: "
                    f"{', '.join(TYPES)}, and of tokens {', '.join(TOKEN_TYPES)}"
                )
    if asked.get("use_activation") not in (None, True, False):
        raise ConfigError(f"pooler_config: use_activation={asked['use_activation']!r} must be true or false")
    if not _is_id(asked.get("step_tag_id", 0)):
        raise ConfigError(f"pooler_config: step_tag_id={asked['step_tag_id']!r} must be a token id")
    if not all(map(_is_id, _listed(asked.get("returned_token_ids", ())))):
        raise ConfigError(
            f"pooler_config: returned_token_ids={asked['returned_token_ids']!r} must be a list of token ids"
        )
    steps = [name for name in ("step_tag_id", "returned_token_ids") if name in asked]
    if steps and asked.get("token_type", "STEP") != "STEP":
        raise ConfigError(f"pooler_config: {steps[0]} is for the pooling_type STEP")
    if steps:
        asked["token_type"] = "STEP"
    return asked


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (None,)


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
