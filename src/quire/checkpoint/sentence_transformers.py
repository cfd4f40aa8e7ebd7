"""What sentence-transformers writes beside a model: the modules behind it, and what each of them is."""

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from quire.checkpoint.reader import ConfigReader, read_json
from quire.errors import ConfigError

_TYPES = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_lasttoken": "LAST",
    "pooling_mode_mean_tokens": "MEAN",
    "cls": "CLS",
    "lasttoken": "LAST",
    "mean": "MEAN",
}
"""What 1_Pooling/config.json calls them: a switch each or, of late, one word."""
_IDLE = ("Transformer", "Dropout")
"""Modules of which nothing is to be read: the model itself, and what only training knows."""
DENSE_ACTIVATIONS = ("gelu", "identity", "relu", "sigmoid", "silu", "tanh")


@dataclass(frozen=True, slots=True)
class DenseFacts:
    """A product behind the pooled state, and an activation."""

    folder: str
    """Where it lies in the model's directory."""
    size_in: int
    size_out: int
    bias: bool = True
    activation: str = "tanh"
    """One of DENSE_ACTIVATIONS."""


def read_modules(path: Path) -> dict[str, Any]:
    """modules.json and the folders that it names, as fields of StoredPooling; of a model without, nothing."""
    file = path / "modules.json"
    if not file.is_file():
        return {}
    modules = _modules(file)
    kinds = [kind for kind, _ in modules]
    for kind in kinds:
        if kind not in (*_IDLE, "Pooling", "Dense", "Normalize"):
            raise ConfigError(f"{file}: the module {kind!r} is not supported yet")
    if "Dense" in kinds:
        behind = kinds[kinds.index("Pooling") :] if "Pooling" in kinds else []
        between = behind[: behind.index("Normalize")] if "Normalize" in behind else behind
        if between.count("Dense") != kinds.count("Dense"):
            raise ConfigError(f"{file}: Dense is only supported behind Pooling and in front of Normalize")
    found: dict[str, Any] = {
        "is_embedder": True,
        "normalize": "Normalize" in kinds,
        "dense": tuple(_dense(path, folder) for kind, folder in modules if kind == "Dense"),
    }
    for folder in (folder for kind, folder in modules if kind == "Pooling"):
        found["type"] = _type(path / folder / "config.json")
    for each in sorted(path.glob("sentence_*_config.json")):
        if read_json(each).get("max_seq_length") is not None:
            found["max_len"] = ConfigReader(str(each), read_json(each)).size("max_seq_length")
    return found


def _modules(file: Path) -> list[tuple[str, str]]:
    """The class and the folder of each, in their order."""
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
        return [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in modules]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file} is not a list of modules: {error!r}") from error


def _type(file: Path) -> str:
    values = read_json(file)
    named = [str(values.get("pooling_mode"))] if values.get("pooling_mode") else []
    named += [name for name, on in values.items() if name.startswith("pooling_mode_") and on is True]
    if len(named) != 1 or named[0] not in _TYPES:
        known = ", ".join(_TYPES)
        raise ConfigError(f"{file} asks for {' and '.join(named) or 'nothing'}; known, one of: {known}")
    return _TYPES[named[0]]


def _dense(path: Path, folder: str) -> DenseFacts:
    inside = PurePosixPath(folder)
    if not folder or inside.is_absolute() or ".." in inside.parts:
        raise ConfigError(f"{path / 'modules.json'}: {folder!r} is not a folder of this directory")
    file = path / folder / "config.json"
    keys = ConfigReader(str(file), read_json(file))
    named = str(keys.get("activation_function") or "Tanh")  # what a Dense has that is not told otherwise
    activation = named.rpartition(".")[2].lower()
    if activation not in DENSE_ACTIVATIONS:
        raise keys.wrong("activation_function", f"one of {', '.join(DENSE_ACTIVATIONS)}")
    for key in ("module_input_name", "module_output_name"):
        if keys.get(key) not in (None, "sentence_embedding"):
            raise keys.wrong(key, "sentence_embedding")
    sizes = keys.size("in_features"), keys.size("out_features")
    return DenseFacts(folder, *sizes, bias=keys.flag("bias", True), activation=activation)
