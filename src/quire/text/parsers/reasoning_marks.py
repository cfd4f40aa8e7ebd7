"""ReasoningMarks: the marks around reasoning that the server setting `reasoning_config` names."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.errors import ConfigError, check_keys
from quire.text.parsers import REASONING
from quire.text.parsers.reasoning import Reasoning, ReasoningMarkers

_KEYS = ("reasoning_parser", "reasoning_start_str", "reasoning_end_str")
_NAME = "marks of reasoning_config"
"""Name of the parser by these marks."""


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The setting `reasoning_config`."""

    parser: str = ""
    start: str = ""
    end: str = ""
    """Text by which a spent budget ends the reasoning. It ends with the end mark."""

    @staticmethod
    def of(settings: Mapping[str, Any]) -> "ReasoningMarks":
        """Read the setting; raise ConfigError if it is wrong."""
        check_keys("reasoning_config", settings, _KEYS)
        values = {key: settings.get(key) or "" for key in _KEYS}
        for key, value in values.items():
            if not isinstance(value, str):
                raise ConfigError(f"reasoning_config: {key}={value!r} must be a string")
        if bool(values["reasoning_start_str"]) != bool(values["reasoning_end_str"]):
            raise ConfigError(
                "reasoning_config: reasoning_start_str and reasoning_end_str go together: give both, or "
                "neither"
            )
        return ReasoningMarks(*values.values())

    def check(self, parser: str) -> None:
        """Raise ConfigError if the marks are not those of the reasoning parser with this name."""
        marks = REASONING[parser]("").reasoning_marks if parser and self.end else None
        if marks is not None and (marks[0].strip() != self.start.strip() or not self.end.endswith(marks[1])):
            raise ConfigError(
                f"reasoning_config: the reasoning parser {parser} expects {marks[0]!r} and a text that ends "
                f"with {marks[1]!r}, not {self.start!r} and {self.end!r}; use these, or leave them out"
            )

    def register(self) -> str | None:
        """Register a reasoning parser by the marks, and return its name; None without marks."""
        if not self.end:
            return None
        REASONING.register(_NAME, partial(Reasoning, ReasoningMarkers(self.start, self.end, opened=False)))
        return _NAME


NO_MARKS = ReasoningMarks()
