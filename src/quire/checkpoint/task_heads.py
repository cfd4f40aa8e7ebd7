"""Output layers of models with a separate layer for each pooling task: BGE-M3, ColBERT, SPLADE."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.checkpoint.reader import ConfigReader, read_json

COLBERT = ("HF_ColBERT", "ColBERTModernBertModel")
_BGE_M3 = "BgeM3EmbeddingModel"
_SPLADE = "BertSpladeSparseEmbeddingModel"
BESIDE = ("colbert_linear.pt", "sparse_linear.pt")
"""Files of BGE-M3 with the weights of its two output layers."""


@dataclass(frozen=True, slots=True)
class TaskHead:
    """The output layer of one pooling task."""

    task: str
    """The pooling task: embed | token_embed | token_classify"""
    size: int
    """Number of outputs, of a text or of each token."""
    kind: str = ""
    """Type of the layer: `linear`, or `masked_lm` with the output log(1 + relu(logits)); empty: no layer,
    since the output is the hidden state (after Dense layers of sentence-transformers, if there are any)."""
    name: str = ""
    """Name of the linear layer in the checkpoint; empty for other kinds."""
    bias: bool = False
    activation: str = "normalize"
    """Activation of the outputs: normalize | relu | identity"""
    reduce: str = ""
    """How the outputs of all tokens of a text are combined: `max` or `sum`; empty: the pooling type selects a
    hidden state."""
    skipped_ids: tuple[int, ...] = ()
    """Ids of special tokens that have no output."""
    file: str = ""
    """File of the layer's weights; empty: they are in the model's weight files."""


def read_task_heads(
    path: Path, keys: ConfigReader, architecture: str, modules: dict[str, Any]
) -> dict[str, Any]:
    """Return `task_heads` as a field of StoredPooling; empty for models with one output layer for all tasks.
    `modules` are the fields read from modules.json; those that only apply to task heads are removed."""
    reduce = modules.pop("reduce", "")
    if reduce or architecture == _SPLADE:
        head = TaskHead("embed", keys.size("vocab_size"), "masked_lm", "", True, "identity", reduce or "max")
        return {"task_heads": (head,)}
    if modules.pop("by_token", False):
        return {"task_heads": (TaskHead("token_embed", modules["dense"][-1].size_out),)}
    if architecture in COLBERT:
        return {"task_heads": (TaskHead("token_embed", _colbert_size(path, keys), "linear", "linear"),)}
    if architecture == _BGE_M3 or all((path / file).is_file() for file in BESIDE):
        return {"task_heads": _bge_m3(keys)}
    return {}


def _colbert_size(path: Path, keys: ConfigReader) -> int:
    """Return the size of ColBERT's vectors, from config.json or the file artifact.metadata."""
    for key in ("colbert_dim", "dim", "projection_dim"):
        if keys.get(key) is not None:
            return keys.size(key)
    file = path / "artifact.metadata"
    return ConfigReader(str(file), read_json(file) if file.is_file() else {}).size("dim", 128)


def _bge_m3(keys: ConfigReader) -> tuple[TaskHead, ...]:
    """Return the heads for the dense vector of a text, a vector of each token but the first, and a weight of
    each token."""
    hidden, (tokens, weights) = keys.size("hidden_size"), BESIDE
    first, last = keys.token_ids("bos_token_id") or (0,), keys.token_ids("eos_token_id") or (2,)
    size = keys.size("colbert_dim", hidden) if (keys.get("colbert_dim") or 0) > 0 else hidden
    vectors = TaskHead(
        "token_embed", size, "linear", "colbert_linear", bias=True, skipped_ids=first, file=tokens
    )
    sparse = TaskHead(
        "token_classify",
        1,
        "linear",
        "sparse_linear",
        bias=True,
        activation="relu",
        skipped_ids=(*first, *last),
        file=weights,
    )
    return TaskHead("embed", hidden), vectors, sparse
