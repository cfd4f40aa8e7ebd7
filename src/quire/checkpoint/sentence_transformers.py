"""Reading the files of sentence-transformers: the modules after the model, and their settings."""

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
"""Pooling types by their names in 1_Pooling/config.json: names of flags or, in newer files, values of
`pooling_mode`."""
_SPLADE = "SpladePooling"
_IGNORED = ("Transformer", "MLMTransformer", "Dropout")
"""Modules without settings to read: the model itself, and dropout, which only training uses."""
DENSE_ACTIVATIONS = ("gelu", "identity", "relu", "sigmoid", "silu", "tanh")


@dataclass(frozen=True, slots=True)
class DenseFacts:
    """A linear layer after pooling, and its activation."""

    folder: str
    """Folder in the model's directory."""
    size_in: int
    size_out: int
    bias: bool = True
    activation: str = "tanh"
    """One of DENSE_ACTIVATIONS."""


def read_modules(path: Path) -> dict[str, Any]:
    """Read modules.json, and the folders that it lists, as fields of StoredPooling; empty if the file does
    not exist."""
    file = path / "modules.json"
    if not file.is_file():
        return {}
    modules = _list_modules(file)
    kinds = [kind for kind, _ in modules]
    for kind in kinds:
        if kind not in (*_IGNORED, "Pooling", "Dense", "Normalize", _SPLADE):
            raise ConfigError(f"{file}: the module {kind!r} is not supported yet")
    if _SPLADE in kinds:
        return _read_splade(path, modules)
    if "Dense" in kinds and "Pooling" in kinds:
        after_pooling = kinds[kinds.index("Pooling") :]
        between = (
            after_pooling[: after_pooling.index("Normalize")]
            if "Normalize" in after_pooling
            else after_pooling
        )
        if between.count("Dense") != kinds.count("Dense"):
            raise ConfigError(f"{file}: Dense is only supported between Pooling and Normalize")
    fields: dict[str, Any] = {
        "is_embedder": True,
        "normalize": "Normalize" in kinds,
        "dense": tuple(_read_dense(path, folder) for kind, folder in modules if kind == "Dense"),
    }
    if fields["dense"] and "Pooling" not in kinds:  # ColBERT models of PyLate
        fields |= {"by_token": True, "normalize": True}
    for folder in (folder for kind, folder in modules if kind == "Pooling"):
        fields["type"] = _read_pooling_type(path / folder / "config.json")
    return fields | _read_max_len(path)


def _read_max_len(path: Path) -> dict[str, int]:
    fields = {}
    for config_file in sorted(path.glob("sentence_*_config.json")):
        if read_json(config_file).get("max_seq_length") is not None:
            fields["max_len"] = ConfigReader(str(config_file), read_json(config_file)).size("max_seq_length")
    return fields


def _read_splade(path: Path, modules: list[tuple[str, str]]) -> dict[str, Any]:
    """Read a sparse encoder: the logits of a masked language model, reduced over the tokens."""
    if [kind for kind, _ in modules] != ["MLMTransformer", _SPLADE]:
        raise ConfigError(
            f"{path / 'modules.json'}: {_SPLADE} is only supported as the last of two modules, after one"
            " MLMTransformer"
        )
    file = path / modules[-1][1] / "config.json"
    keys = ConfigReader(str(file), read_json(file))
    known = {"pooling_strategy": ("max", "sum"), "activation_function": ("relu",)}
    for key, values in known.items():
        if (keys.get(key) or values[0]) not in values:
            raise keys.wrong(key, " or ".join(values))
    reduce = str(keys.get("pooling_strategy") or "max")
    return {"is_embedder": True, "reduce": reduce} | _read_max_len(path)


def _list_modules(file: Path) -> list[tuple[str, str]]:
    """Return the class name and the folder of each module, in order."""
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
        return [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in modules]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{file} is not a list of modules: {error!r}") from error


def _read_pooling_type(file: Path) -> str:
    values = read_json(file)
    named = [str(values.get("pooling_mode"))] if values.get("pooling_mode") else []
    named += [name for name, on in values.items() if name.startswith("pooling_mode_") and on is True]
    if len(named) != 1 or named[0] not in _TYPES:
        known = ", ".join(_TYPES)
        raise ConfigError(f"{file} has the pooling {' and '.join(named) or 'none'}; expected one of {known}")
    return _TYPES[named[0]]


def _read_dense(path: Path, folder: str) -> DenseFacts:
    inside = PurePosixPath(folder)
    if not folder or inside.is_absolute() or ".." in inside.parts:
        raise ConfigError(f"{path / 'modules.json'}: {folder!r} is not a folder of this directory")
    file = path / folder / "config.json"
    keys = ConfigReader(str(file), read_json(file))
    named = str(keys.get("activation_function") or "Tanh")  # default of sentence-transformers
    activation = named.rpartition(".")[2].lower()
    if activation not in DENSE_ACTIVATIONS:
        raise keys.wrong("activation_function", f"one of {', '.join(DENSE_ACTIVATIONS)}")
    if keys.flag("use_residual"):
        raise keys.wrong("use_residual", "false")
    for key in ("module_input_name", "module_output_name"):
        if keys.get(key) not in (None, "sentence_embedding"):
            raise keys.wrong(key, "sentence_embedding")
    sizes = keys.size("in_features"), keys.size("out_features")
    return DenseFacts(folder, *sizes, bias=keys.flag("bias", True), activation=activation)
