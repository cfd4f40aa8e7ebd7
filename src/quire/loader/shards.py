"""Weight files and other files of a model directory."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from quire.checkpoint.reader import read_json
from quire.errors import ConfigError

STATE = "sharded_state.json"
"""Name of the file with the settings of a sharded state, beside the weight files."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")


def write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file that other users may read: safetensors restricts it to the owner."""
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(_mode_of_new_files())


def _mode_of_new_files() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def copy_around(path: Path, to: Path) -> None:
    """Copy all files of a model directory except weights; folders of extra modules are copied whole."""
    for file in sorted(path.iterdir()):
        is_weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and file.name[0] != ".":
            shutil.copyfile(file, to / file.name)
    for folder in (path / "additional_chat_templates", *path.glob("[0-9]*_*")):
        if folder.is_dir():
            shutil.copytree(folder, to / folder.name)


def find_shards(path: Path, stem: str, suffix: str) -> list[Path]:
    """Return the weight files: those in the index of `<stem><suffix>`, or the file of this name, or all files
    with this suffix."""
    index = path / f"{stem}{suffix}.index.json"
    if index.is_file():
        return _list_indexed(path, index)
    single = path / f"{stem}{suffix}"
    if single.is_file():
        return [single]
    # A consolidated file repeats the weights under other names; adapters are not models.
    others = [
        file
        for file in path.glob(f"*{suffix}")
        if not file.name.startswith(("consolidated", "adapter", "training"))
    ]
    if not others:
        raise ConfigError(
            f"no weights in {path}: looked for {index.name}, {single.name} and *{suffix}; "
            "download the whole model, or use load_format=dummy for random weights"
        )
    return sorted(others)


def _list_indexed(path: Path, index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"{index}: weight_map is missing or not an object of file names")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ConfigError(f"{index}: weight_map names {outside[0]!r}, which is not a file of this directory")
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise ConfigError(
            f"{path} lacks {len(missing)} of the {len(names)} weight files that {index.name} lists: "
            f"{', '.join(missing[:5])}; download the model again"
        )
    return [path / name for name in names]
