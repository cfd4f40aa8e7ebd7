"""Tests that third-party parts are named in NOTICE, with their licence, and in the bill of materials."""

import importlib.util
import re
import tomllib
from email.message import Message
from pathlib import Path
from typing import Any

from quire.checkpoint.hub import DEFAULT_MODEL

ROOT = Path(__file__).parents[2]
NOTICE = (ROOT / "NOTICE").read_text()
NAMED = re.findall(r"^- (\S+): .+\. Licence: (\S+)\.$", NOTICE, re.MULTILINE)
OWN = {
    "src/quire/kernels/csrc": {".c", ".h"},
    "src/quire/server/page": {".js", ".css", ".html", ".svg"},
    "src/quire": {".typed"},
}
"""Folders of the package with non-Python files that are Quire's own."""
_FOREIGN = re.compile(r"copyright|@license|\(c\) \d{4}|all rights reserved", re.IGNORECASE)


def bundled() -> list[Path]:
    result = (path for path in (ROOT / "src/quire").rglob("*") if path.is_file())
    return [path for path in result if path.suffix != ".pyc" and "__pycache__" not in path.parts]


def test_every_bundled_file_is_ours_or_in_the_notice() -> None:
    """Catches a script, a font or a table that was added without a notice."""
    named = {name for name, _ in NAMED}
    for path in bundled():
        name = str(path.relative_to(ROOT))
        if path.suffix == ".py" or name in named:
            continue
        assert path.suffix in OWN.get(str(path.parent.relative_to(ROOT)), set()), f"NOTICE has no {name}"


def test_no_file_has_a_foreign_header() -> None:
    for path in bundled():
        assert not _FOREIGN.search(path.read_text(encoding="utf-8")), path


def test_named_files_exist_and_state_their_licence() -> None:
    for name, licence in NAMED:
        path = ROOT / name
        if name == DEFAULT_MODEL.file:
            continue
        head = path.read_text(encoding="utf-8")[:400] if path.suffix != ".json" else ""
        beside = path.with_name("LICENSE")
        assert f"SPDX-License-Identifier: {licence}" in head or beside.is_file(), name
    assert DEFAULT_MODEL.file in NOTICE


def test_wheel_and_sbom_list_the_notices() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0" and project["license-files"] == ["LICENSE", "NOTICE"]
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
    listed = {item["name"]: item["licenses"][0]["license"]["id"] for item in _sbom().noticed()}
    assert listed == dict(NAMED) and len(NAMED) == NOTICE.count("\n- ")


def test_every_dependency_has_a_licence() -> None:
    """Check also packages that name their licence only by classifiers."""
    sbom = _sbom()
    about = Message()
    about["Classifier"] = "License :: OSI Approved :: MIT License"
    assert sbom.licence_of(about) == "MIT License"
    result = sbom.needed("quire", {})
    result.pop("quire", None)
    assert [name for name, item in result.items() if not sbom.licence_of(item.metadata)] == []


def _sbom() -> Any:
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "deploy/sbom.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
