"""docs/python.md has an entry for every name that `quire` exports."""

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


def classes(name: str) -> type | None:
    target = getattr(quire, name)
    return target if isinstance(target, type) else None
