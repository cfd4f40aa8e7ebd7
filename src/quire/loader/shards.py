"""Which weight files a model directory has."""

from pathlib import Path

from quire.config.keys import read_json
from quire.errors import ConfigError


def find_shards(path: Path, stem: str, suffix: str) -> list[Path]:
    """The files of `<stem><suffix>`: those that its index names, the one file, or all that end like it."""
    index = path / f"{stem}{suffix}.index.json"
    if index.is_file():
        return _indexed(path, index)
    single = path / f"{stem}{suffix}"
    if single.is_file():
        return [single]
    # The consolidated file repeats the weights under other names; an adapter is not a model.
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


def _indexed(path: Path, index: Path) -> list[Path]:
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
