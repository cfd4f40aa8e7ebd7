"""Tests of the language: retired words do not return, class names are unique, and fragments become fewer."""

import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from floors import FLOORS
from sources import FILES, ROOT, nodes_of, text_of
from words import findings

_RETIRED = """
    Beside Blanks Courier Crew Desk Draws EntryGate Fronts Given Kitchen Landed Landing Larder
    Pantry Picked Point Roster SpreadEngine Stowed Talker Trial Turns Undrawn confine confined
    courier crew desk in_passing kept_as kitchen larder leans pantry picked roster
"""
RETIRED = frozenset(_RETIRED.split())
"""Identifiers of the old vocabulary (docs/structure.md has the words that replaced them)."""
_RETIRED_WORD = re.compile(rf"\b({'|'.join(RETIRED)})\b")
_PUBLIC_CLASS = re.compile(r"^\s*class ([A-Za-z]\w*)[(:]", re.MULTILINE)
SHARED = frozenset({"Attention", "Layer", "MLP"})
"""Class names that every model file may use for its own parts."""

MAX_FRAGMENTS = 0
MAX_PERSONS = 0
MAX_VAGUE = 2
"""Limits that may only fall: lower them when a change removes some."""


@cache
def counts() -> Counter[str]:
    return Counter(kind for path in FILES for kind, _, _ in findings(path))


def test_retired_words_are_not_used() -> None:
    returned = []
    for path in FILES:
        if _RETIRED_WORD.search(text_of(path)):
            for node in nodes_of(path):
                names = [getattr(node, field, None) for field in ("id", "name", "arg", "attr", "asname")]
                returned += [f"{path}:{node.lineno}: {name}" for name in names if name in RETIRED]
        returned += [str(path)] if path.stem in RETIRED else []
    assert not returned, "\n".join(returned)


def test_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path in FILES:
        for name in _PUBLIC_CLASS.findall(text_of(path)):
            places[name].append(str(path.relative_to(ROOT)))
    twice = {name: where for name, where in places.items() if len(where) > 1 and name not in SHARED}
    assert len(places) > 500 and not twice, twice


def test_every_floor_exists() -> None:
    missing = [name for names in FLOORS for name in names if not any(ROOT.glob(f"{name}*"))]
    assert not missing


def test_fragments_do_not_increase() -> None:
    assert counts()["fragment"] <= MAX_FRAGMENTS, "a docstring is a complete sentence"


def test_persons_do_not_increase() -> None:
    assert counts()["person"] <= MAX_PERSONS, "who, nobody, somebody: data are things"


def test_vague_names_do_not_increase() -> None:
    assert counts()["vague"] <= MAX_VAGUE, "given, found, own, each: a name says what it holds"


def test_counter_finds_each_kind(tmp_path: Path) -> None:
    source = '''"""Module."""


def made(given: int) -> int:
    """Of a mask."""
    found = given  # nobody reads it
    return found


def whole() -> int:
    """Return the size."""
'''
    (tmp_path / "file.py").write_text(source)
    kinds = Counter(kind for kind, _, _ in findings(tmp_path / "file.py"))
    assert kinds == {"fragment": 1, "person": 1, "vague": 2}


VLLM_WORDS = {
    "docs/keys.md": ("speculative decoding",),
    "docs/lora.md": ("multi-LoRA", "speculative decoding"),
    "docs/metrics.md": ("speculative decoding",),
    "docs/migration.md": ("disaggregated prefill", "speculative decoding"),
    "docs/multimodal.md": ("vision encoder", "batch-level data parallelism", "speculative decoding"),
    "docs/operate.md": ("sleep mode",),
    "docs/performance.md": ("time to first token", "time per output token"),
    "docs/ranks.md": ("worker", "engine core"),
    "docs/scaling.md": ("data-parallel rank", "time to first token", "inter-token latency"),
    "docs/scheduling.md": ("PagedAttention", "continuous batching", "automatic prefix caching"),
    "docs/disaggregation.md": ("disaggregated prefill",),
    "docs/security.md": ("inter-token latency",),
    "docs/serving.md": ("data-parallel rank", "API servers"),
    "docs/speculation.md": ("speculative decoding",),
    "docs/structured.md": ("guided decoding",),
    "docs/timeline.md": ("speculative decoding",),
    "docs/tools.md": ("tool calling", "function calling"),
    "docs/tuning.md": ("inter-token latency", "speculative decoding", "vision encoder"),
    "README.md": ("continuous batching", "speculative decoding", "multi-LoRA"),
}
"""Words that a user of vLLM searches for, by page."""


def test_pages_have_the_words_of_vllm() -> None:
    missing = []
    for page, words in VLLM_WORDS.items():
        text = (Path(__file__).parents[2] / page).read_text().lower()
        missing += [(page, word) for word in words if word.lower() not in text]
    assert missing == []
