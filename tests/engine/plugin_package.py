"""Packages with plugins, installed into a folder without pip: files, and the metadata of a distribution."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"
_BLOCK = re.compile(r"^```(?:python|toml)\n# ([\w/]+\.\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def install(
    folder: Path, package: str, groups: Mapping[str, Mapping[str, str]], files: Mapping[str, str]
) -> None:
    """Install a package with these entry points, by group and name, and these Python files."""
    for name, code in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code, encoding="utf-8")
    metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [
        line
        for group, entries in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


def install_example(folder: Path) -> None:
    """Install the package that docs/plugins.md prints."""
    files = dict(_BLOCK.findall(PAGE.read_text(encoding="utf-8")))
    project = tomllib.loads(files.pop("pyproject.toml"))["project"]
    install(folder, project["name"], project["entry-points"], files)
