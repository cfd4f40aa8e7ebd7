"""Tests that docs/python.md has an entry for every name that `quire` exports."""

import inspect
import re
from pathlib import Path

import quire
from quire import _EXPORTS

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_every_exported_name_is_on_the_page() -> None:
    entries = re.findall(r"^::: (\S+)", PAGE.read_text(), re.MULTILINE)
    exported = {
        f"{target.__module__}.{target.__qualname__}" for name in _EXPORTS if (target := classes(name))
    }
    aliases = {"quire.frontend.inputs.PromptType"}
    assert set(entries) == exported | aliases


def test_the_overview_names_methods_and_fields_that_exist() -> None:
    overview = PAGE.read_text().partition("## Overview")[2].partition("\n## ")[0]
    kind, num_names = None, 0
    for line in overview.splitlines():
        if header := re.match(r"\| (?:method|field) of `(\w+)`", line):
            kind = getattr(quire, header[1])
        elif kind is not None and line.startswith("| `"):
            for name, arguments in re.findall(r"`(\w+)(?:\((.*?)\))?`", line.split("|")[1]):
                num_names += 1
                parameters = inspect.signature(getattr(kind, name)).parameters if arguments else {}
                assert hasattr(kind, name) and {*filter(None, arguments.split(", "))} <= {*parameters}
    assert num_names > 30


def classes(name: str) -> type | None:
    target = getattr(quire, name)
    return target if isinstance(target, type) else None
