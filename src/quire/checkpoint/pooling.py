"""Pooling settings: how hidden states become embeddings or scores, from the checkpoint and user settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.reader import ConfigReader, read_json
from quire.checkpoint.sentence_transformers import DenseFacts, read_modules
from quire.checkpoint.task_heads import TaskHead, read_task_heads
from quire.errors import ConfigError, nearest

TYPES = ("LAST", "CLS", "MEAN")
"""Pooling types over a whole sequence."""
TOKEN_TYPES = ("ALL", "STEP")
"""Pooling types with an output per token."""
_NAMED_TYPES = {"cls": "CLS", "mean": "MEAN", "avg": "MEAN", "last": "LAST"}
"""Pooling types by their names in config.json."""
_GGUF_TYPES = {1: "MEAN", 2: "CLS", 3: "LAST"}
_CLASSES = "ForSequenceClassification"
_TOKEN_CLASSES = "ForTokenClassification"
_BIDIRECTIONAL = "LlamaBidirectional"
_BIDIRECTIONAL_PREFIXES = (_BIDIRECTIONAL, "EuroBert")
"""Prefixes of architectures that attend in both directions, although config.json has no key for this."""
_DUAL_ENCODERS = ("CLIPModel", "SiglipModel")
"""Encoders whose embedding of a text is the output of its last token."""
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
"""Reward models: settings that their config.json does not contain."""
RETRIEVAL = "ForRetrieval"
"""Suffix of architectures that project every hidden state (late interaction)."""
GENERATIVE = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ChatGLMModel", "GritLM")
"""Suffixes of architectures that generate by default."""
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
"""Maps keys of `pooler_config` to fields of PoolingFacts."""
_AS_STORED = ("is_matryoshka", "matryoshka_dimensions", "label_tokens", "two_way", "instructions")


@dataclass(frozen=True, slots=True)
class StoredPooling:
    """Pooling settings of a checkpoint."""

    architecture: str = "ForCausalLM"
    """Architecture name in config.json."""
    is_embedder: bool = False
    """Whether the model was saved by sentence-transformers."""
    type: str | None = None
    normalize: bool | None = None
    max_len: int | None = None
    """Maximum sequence length in tokens that sentence-transformers sets; None: not set."""
    labels: tuple[str, ...] = ()
    activation: str | None = None
    """Classifiers: activation that turns logits into scores."""
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    """Embedding sizes that the model was trained for; empty: any."""
    label_tokens: tuple[str, ...] = ()
    """Tokens whose logits are the scores of the classes, if the classifier is part of the output head."""
    two_way: bool = False
    """Whether the only class is the second of two label tokens, and its score the softmax over both (Qwen3
    rerankers)."""
    bidirectional: str = ""
    """Reason why a decoder attends in both directions, such as a config key; empty: the decoder is causal."""
    instructions: tuple[tuple[str, str], ...] = ()
    """Prompts to prepend to inputs, by task name."""
    projection: int = 0
    """Output size of the projection of every hidden state (late interaction); 0: there is no projection."""
    dense: tuple[DenseFacts, ...] = ()
    """Dense layers after pooling, in order."""
    task_heads: tuple[TaskHead, ...] = ()
    """Output layer of each task, for models with several output layers; the first task is the default."""
    head: str = ""
    """Head of a token classifier: tokens | reward | value, keys of `_HEADS` in `models/pooling.py`; empty:
    the model is no token classifier."""
    is_raw: bool = False
    """Classifiers: whether logits are returned without activation unless a request sets it."""
    temperature: float = 1.0
    """Classifiers: divisor of the logits."""
    token_type: str = "ALL"
    step_tag_id: int | None = None

    @property
    def is_classifier(self) -> bool:
        return bool(self.head) or self.architecture.endswith(_CLASSES)


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """Pooling settings of an engine."""

    task: str
    """`embed` or `classify`; requests may also use the per-token form of the task, such as `token_embed`."""
    type: str
    """LAST, CLS or MEAN: hidden state of the last token, of the first, or the mean of all."""
    size: int
    """Size of an embedding, or number of classes."""
    use_activation: bool = True
    """Whether embeddings are normalized, or logits turned into probabilities, unless a request sets
    `use_activation`."""
    activation: str = "softmax"
    dimensions: int | None = None
    """Default size of returned embeddings; None: the full size."""
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    label_tokens: tuple[str, ...] = ()
    two_way: bool = False
    instructions: tuple[tuple[str, str], ...] = ()
    token_types: int = 0
    """Number of token types (segment ids) that the model expects in prompts; 0: none."""
    projection: int = 0
    dense: tuple[DenseFacts, ...] = ()
    task_heads: tuple[TaskHead, ...] = ()
    head: str = ""
    """Head of a token classifier, which has no output for a whole sequence: a key of `_HEADS` in
    `models/pooling.py`; empty: the model is no token classifier."""
    temperature: float = 1.0
    by_token: bool = False
    """Whether a request without a task gets outputs per token."""
    token_type: str = "ALL"
    """Tokens with outputs: `ALL` tokens, or those that end a reasoning step (`STEP`, for process rewards)."""
    step_tag_id: int | None = None
    """Id of the token that ends a reasoning step; None: each token has an output."""
    returned_token_ids: tuple[int, ...] = ()
    """Indices of the outputs that are returned per token; empty: all."""
    label_ids: tuple[int, ...] = ()
    """Token ids of the classes, if the classifier is part of the output head."""
    bidirectional: bool = False
    """Whether the tokens of a decoder attend in both directions."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return the tasks that requests may use; the first is the default."""
        if self.task_heads:
            named = [head.task for head in self.task_heads]
            return tuple(sorted(named, key=lambda task: "token" not in task) if self.by_token else named)
        both = (self.task, f"token_{self.task}")
        return both[1:] if self.head else both[::-1] if self.by_token else both

    @property
    def is_late_interaction(self) -> bool:
        """Whether texts are scored by the vectors of their tokens (MaxSim)."""
        return bool(self.projection) or self.tasks == ("token_embed",)

    def head_of(self, task: str | None) -> TaskHead | None:
        """Return the output layer of a task; None if all tasks have the same output layer."""
        return next((head for head in self.task_heads if head.task == task), None)

    @property
    def needs_all_states(self) -> str:
        """Return the name of the pooling type if it needs the hidden states of all tokens, so that prefix
        caching is not possible; otherwise an empty string."""
        if self.token_type == "STEP":
            return self.token_type
        return "" if self.type == "LAST" or self.head else self.type


def read_pooling(path: Path, keys: ConfigReader, architecture: str) -> StoredPooling:
    """Read the pooling settings of a model directory: config.json and the files of sentence-transformers."""
    dimensions, tokens = keys.integers("matryoshka_dimensions"), keys.names("classifier_from_token")
    two_way = keys.flag("is_original_qwen3_reranker") or keys.get("method") == "from_2_way_softmax"
    if two_way and len(tokens) != 2:
        raise keys.wrong("classifier_from_token", "the tokens for no and yes, such as ['no', 'yes']")
    modules = read_modules(path)
    task_heads = read_task_heads(path, keys, architecture, modules)
    stored: dict[str, Any] = {
        "labels": _read_labels(keys) if not tokens else ("yes",) if two_way else tuple(tokens),
        **_read_type(keys, architecture),
        **modules,
        **task_heads,
        **_REWARDS.get(architecture, {}),
    }
    if architecture.endswith(_TOKEN_CLASSES):
        stored["head"] = "tokens"
    return StoredPooling(
        architecture=architecture,
        activation=_read_activation(keys),
        is_matryoshka=keys.flag("is_matryoshka") or keys.get("matryoshka_dimensions") is not None,
        matryoshka_dimensions=tuple(dimensions),
        label_tokens=tuple(tokens),
        two_way=two_way,
        bidirectional=_bidirectional_reason(keys, architecture),
        instructions=_read_instructions(path, keys),
        projection=keys.size("embedding_dim", 128) if architecture.endswith(RETRIEVAL) else 0,
        **stored,
    )


def _read_type(keys: ConfigReader, architecture: str) -> dict[str, Any]:
    """Return fields of StoredPooling that depend on the architecture: the pooling type, and a classifier's
    temperature."""
    if architecture.endswith(_CLASSES) and keys.get("classifier_pooling") is not None:
        key, known = "classifier_pooling", ["cls", "mean"]
    elif architecture in _DUAL_ENCODERS:
        return {"type": "LAST"}
    elif architecture.startswith(_BIDIRECTIONAL):
        key, known = "pooling", ["avg", "cls", "last"]
    else:
        return {}
    named = str(keys.get(key) or known[0])
    if named not in known:
        raise keys.wrong(key, f"one of {', '.join(known)}")
    settings: dict[str, Any] = {"type": _NAMED_TYPES[named]}
    if architecture.startswith(_BIDIRECTIONAL) and architecture.endswith(_CLASSES):
        settings["temperature"] = keys.number("temperature", 1.0)
    return settings


def _bidirectional_reason(keys: ConfigReader, architecture: str) -> str:
    if keys.get("use_bidirectional_attention") in (True, "all"):
        return "use_bidirectional_attention"
    if keys.get("is_causal") is False:
        return "is_causal"
    return architecture if architecture.startswith(_BIDIRECTIONAL_PREFIXES) else ""


def _read_instructions(path: Path, keys: ConfigReader) -> tuple[tuple[str, str], ...]:
    """Return the instructions in config.json, or the prompts of sentence-transformers."""
    file = path / "config_sentence_transformers.json"
    instructions = keys.get("task_instructions") or (
        read_json(file).get("prompts") if file.is_file() else None
    )
    if not isinstance(instructions, dict):
        return ()
    return tuple((name, text) for name, text in instructions.items() if isinstance(text, str))


def read_gguf_pooling(arch: ConfigReader) -> StoredPooling:
    kind = arch.get("pooling_type")
    named = _GGUF_TYPES.get(kind) if isinstance(kind, int) else None
    return StoredPooling(is_embedder=named is not None, type=named)


def _read_labels(keys: ConfigReader) -> tuple[str, ...]:
    """Return the class names. If config.json has no labels, there are two classes, as in transformers."""
    names = keys.get("id2label") or {}
    if not isinstance(names, dict):
        raise keys.wrong("id2label", "an object of numbers to names")
    count = keys.size("num_labels", len(names) or 2)
    return tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))


def _read_activation(keys: ConfigReader) -> str | None:
    """Return the activation that config.json names for a classifier or cross-encoder."""
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


def resolve_pooling(
    stored: StoredPooling,
    *,
    is_encoder: bool,
    hidden: int,
    token_types: int = 0,
    runner: str = "auto",
    convert: str = "auto",
    pooler: Mapping[str, Any] | None = None,
) -> PoolingFacts | None:
    """Return the pooling settings of the engine, merged from the user's and the checkpoint's; None for an
    engine that generates text."""
    if not _pools(stored, is_encoder, runner, convert):
        return None
    requested = _check_pooler_config(pooler or {})
    task, labels, label_ids = _choose_classes(stored, convert, tuple(requested.get("returned_token_ids", ())))
    defaults = _embedding_fields(stored, hidden) if task == "embed" else _classifier_fields(stored, labels)
    facts = PoolingFacts(
        task=task,
        type=requested.get("type") or stored.type or ("CLS" if is_encoder else "LAST"),
        size=defaults.pop("size"),
        use_activation=requested.get("use_activation", defaults.pop("use_activation")) is not False,
        dimensions=requested.get("dimensions"),
        token_types=token_types,
        by_token="token_type" in requested,
        token_type=requested.get("token_type", defaults.pop("token_type", "ALL")),
        step_tag_id=requested.get("step_tag_id", stored.step_tag_id),
        returned_token_ids=() if label_ids else tuple(requested.get("returned_token_ids", ())),
        label_ids=label_ids,
        bidirectional=bool(stored.bidirectional) and not is_encoder,
        **{name: getattr(stored, name) for name in _AS_STORED},
        **defaults,
    )
    if facts.dimensions is not None and (wrong := dimensions_error(facts, facts.dimensions)):
        raise ConfigError(f"pooler_config: {wrong}")
    if any(token_id >= facts.size for token_id in facts.returned_token_ids):
        raise ConfigError(
            f"pooler_config: returned_token_ids={[*facts.returned_token_ids]} must be below {facts.size},"
            " the number of outputs per token"
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


def _choose_classes(
    stored: StoredPooling, convert: str, returned: tuple[int, ...]
) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    """Return the task (embed or classify), the class names, and the token ids whose logits score the classes.
    These are `returned` (returned_token_ids) for a generative model, otherwise empty."""
    generates = stored.architecture.endswith(GENERATIVE) and not stored.label_tokens
    label_ids = returned if generates and convert != "embed" else ()
    if convert in ("embed", "classify"):
        task = convert
    else:
        task = "classify" if stored.is_classifier or stored.label_tokens or label_ids else "embed"
    return task, tuple(map(str, label_ids)) or stored.labels, label_ids


def _embedding_fields(stored: StoredPooling, hidden: int) -> dict[str, Any]:
    dense = _check_dense_sizes(stored.dense, hidden)
    size = dense[-1].size_out if dense else stored.projection or hidden
    return {
        "size": stored.task_heads[0].size if stored.task_heads else size,
        "task_heads": stored.task_heads,
        "use_activation": stored.normalize,
        "projection": stored.projection,
        "dense": dense,
    }


def _classifier_fields(stored: StoredPooling, labels: tuple[str, ...]) -> dict[str, Any]:
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


def _check_dense_sizes(dense: tuple[DenseFacts, ...], hidden: int) -> tuple[DenseFacts, ...]:
    """Raise if the sizes of consecutive Dense layers do not match."""
    size = hidden
    for layer in dense:
        if layer.size_in != size:
            raise ConfigError(
                f"{layer.folder} expects inputs of size {layer.size_in}, but the layer before it has {size}"
            )
        size = layer.size_out
    return dense


def bidirectional_error(stored: StoredPooling, facts: ArchFacts, max_len: int) -> str | None:
    """Return the error message if this decoder cannot attend in both directions, otherwise None."""
    windowed = any(layer.window is not None and layer.window < max_len for layer in facts.layers)
    is_gemma = (
        facts.architecture == "Gemma3ForCausalLM" and stored.bidirectional == "use_bidirectional_attention"
    )
    reasons = {
        "has causal layers without attention": any(layer.mixer != "attention" for layer in facts.layers),
        "has ALiBi slopes": bool(facts.alibi_slopes),
        "is multimodal": facts.media is not None,
        "has sliding windows without a defined extent to the right": windowed and not is_gemma,
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if reason is None:
        return None
    return (
        f"this {stored.architecture} attends in both directions ({stored.bidirectional}) and {reason}, which"
        " is not supported"
    )


def _check_pooler_config(pooler: Mapping[str, Any]) -> dict[str, Any]:
    """Validate `pooler_config` and map its keys to setting names."""
    requested: dict[str, Any] = {}
    for name, value in pooler.items():
        if value is None:
            continue
        if name not in _POOLER_KEYS:
            near = nearest(name, list(_POOLER_KEYS))
            raise ConfigError(
                f"pooler_config: {name!r} is not supported; known: {', '.join(_POOLER_KEYS)}{near}"
            )
        requested[_POOLER_KEYS[name]] = value
    if (kind := requested.pop("pooling_type", None)) is not None:
        requested.setdefault("token_type" if str(kind).upper() in TOKEN_TYPES else "type", kind)
    for name, known in (("type", TYPES), ("token_type", TOKEN_TYPES)):
        if name in requested:
            requested[name] = str(requested[name]).upper()
            if requested[name] not in known:
                raise ConfigError(
                    f"pooler_config: pooling_type={requested[name]!r} is not supported; known: "
                    f"{', '.join(TYPES)}, and per token {', '.join(TOKEN_TYPES)}"
                )
    if requested.get("use_activation") not in (None, True, False):
        raise ConfigError(
            f"pooler_config: use_activation={requested['use_activation']!r} must be true or false"
        )
    if not _is_id(requested.get("step_tag_id", 0)):
        raise ConfigError(f"pooler_config: step_tag_id={requested['step_tag_id']!r} must be a token id")
    if not all(map(_is_id, _as_list(requested.get("returned_token_ids", ())))):
        raise ConfigError(
            f"pooler_config: returned_token_ids={requested['returned_token_ids']!r} must be a list of token"
            " ids"
        )
    steps = [name for name in ("step_tag_id", "returned_token_ids") if name in requested]
    if steps and requested.get("token_type", "STEP") != "STEP":
        raise ConfigError(f"pooler_config: {steps[0]} is for the pooling_type STEP")
    if steps:
        requested["token_type"] = "STEP"
    return requested


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (None,)


def dimensions_error(facts: PoolingFacts, wanted: int) -> str | None:
    """Return the error message if embeddings of the size `wanted` are not available, otherwise None."""
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
