"""FieldRule: the values that a field of the configuration accepts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldRule:
    """The values that a field accepts beyond its type, and its form on the command line."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    human: bool = False
    """Whether `4k` and `4K` are read as 4000 and 4096."""
    auto: bool = False
    """Whether `auto` and -1 are accepted in addition to a number."""
    short: str = ""
    repeats: bool = False
    """Whether the flag may be given several times, with all values combined."""
    derived: bool = False
    """Whether only `resolve()` sets the field; it has no flag."""

    def allows(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = [
            ("at least", self.at_least),
            ("above", self.above),
            ("at most", self.at_most),
            ("below", self.below),
        ]
        return " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
