"""What is not Quire's own is named in NOTICE, with its licence, and in the bill of materials."""

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
"""Where files of the package beside Python are Quire's own."""
_FOREIGN = re.compile(r"copyright|@license|\(c\) \d{4}|all rights reserved", re.IGNORECASE)


def bundled() -> list[Path]:
    found = (path for path in (ROOT / "src/quire").rglob("*") if path.is_file())
    return [path for path in found if path.suffix != ".pyc" and "__pycache__" not in path.parts]


def test_every_bundled_file_is_ours_or_named() -> None:
    """A script, a font or a table that was put in without a word."""
    named = {name for name, _ in NAMED}
    for path in bundled():
        name = str(path.relative_to(ROOT))
        if path.suffix == ".py" or name in named:
            continue
        assert path.suffix in OWN.get(str(path.parent.relative_to(ROOT)), set()), f"NOTICE has no {name}"


def test_no_file_has_a_foreign_header() -> None:
    for path in bundled():
        assert not _FOREIGN.search(path.read_text(encoding="utf-8")), path


def test_what_is_named_is_there_and_says_its_licence() -> None:
    for name, licence in NAMED:
        path = ROOT / name
        if name == DEFAULT_MODEL.file:
            continue
        head = path.read_text(encoding="utf-8")[:400] if path.suffix != ".json" else ""
        beside = path.with_name("LICENSE")
        assert f"SPDX-License-Identifier: {licence}" in head or beside.is_file(), name
    assert DEFAULT_MODEL.file in NOTICE


def test_wheel_and_bill_have_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0" and project["license-files"] == ["LICENSE", "NOTICE"]
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
    listed = {each["name"]: each["licenses"][0]["license"]["id"] for each in _sbom().noticed()}
    assert listed == dict(NAMED) and len(NAMED) == NOTICE.count("\n- ")


def test_every_part_of_an_environment_has_a_licence() -> None:
    """Some packages name it by classifiers alone."""
    sbom = _sbom()
    about = Message()
    about["Classifier"] = "License :: OSI Approved :: MIT License"
    assert sbom.licence_of(about) == "MIT License"
    found = sbom.needed("quire", {})
    found.pop("quire", None)
    assert [name for name, each in found.items() if not sbom.licence_of(each.metadata)] == []


def _sbom() -> Any:
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "deploy/sbom.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
