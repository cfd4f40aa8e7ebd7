"""Tests of the reasons of prefix cache misses."""

from typing import Any

import pytest
from symbolic import Engine, continuation

from quire.data.cache_hints import CacheHints
from quire.data.cache_scope import CACHE_SCOPE, scoped_salt, split_salt
from quire.data.multimodal import Media, MediaItem
from quire.data.params import SamplingParams
from quire.data.prefix_miss import MISS_REASONS, PrefixMiss
from quire.sched.miss_reasons import RecentEntries


def numbers(count: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + 31 * at * at + 17 * at) % 97 for at in range(count)]


def miss_of(engine: Engine, prompt: list[int], **fields: Any) -> PrefixMiss | None:
    """Answer a request and return why a part of its prompt was not cached."""
    id = str(len(engine.seen))
    engine.add(id, prompt, **fields)
    engine.run()
    (miss,) = [step.admitted[id].miss for step in engine.steps if id in step.admitted]
    counted = [reason for step in engine.steps for reason in step.stats.misses]
    assert miss is None or counted[-1] == miss.reason
    return miss


def test_new_prompt_was_never_seen() -> None:
    engine = Engine()
    assert miss_of(engine, numbers(20)) == PrefixMiss("never_seen")
    assert miss_of(engine, numbers(20)) is None, "all blocks before the last token are cached"


def test_next_turn_adds_text_that_was_never_seen() -> None:
    engine, first = Engine(), numbers(20)
    miss_of(engine, first)
    answer = continuation(first, 4)
    assert miss_of(engine, [*first, *answer, *numbers(9, 2)]) == PrefixMiss("never_seen", 20)


@pytest.mark.parametrize(("salt", "expected"), [(None, 8), ("tenant", 10)])
def test_change_inside_a_prompt(salt: str | None, expected: int) -> None:
    """Check that tokens of unknown clients are not revealed one by one: only whole blocks are compared."""
    engine, first = Engine(), numbers(20)
    miss_of(engine, first, cache_salt=salt)
    changed = [*first[:10], (first[10] + 1) % 97, *first[11:]]
    assert miss_of(engine, changed, cache_salt=salt) == PrefixMiss("differs", expected)


def test_change_in_the_first_block_is_reported_with_a_salt() -> None:
    engine, first = Engine(), numbers(20)
    miss_of(engine, first)
    changed = [*first[:3], (first[3] + 1) % 97, *first[4:]]
    assert miss_of(engine, changed) == PrefixMiss("never_seen")
    miss_of(engine, first, cache_salt="s")
    assert miss_of(engine, changed, cache_salt="s") == PrefixMiss("differs", 3)


def test_change_in_an_answer_is_noticed() -> None:
    """Check a template that changes an earlier answer, for example removes its reasoning."""
    engine, first = Engine(), numbers(17)
    miss_of(engine, first, count=12)
    answer = continuation(first, 12)
    prompt = [*first, *answer[:4], *answer[6:], *numbers(8, 3)]
    assert miss_of(engine, prompt, cache_salt=None) == PrefixMiss("differs", 20)


def test_evicted_block(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, first = Engine(num_blocks=17), numbers(20)
    miss_of(engine, first)
    monkeypatch.setattr(engine.kv.reasons, "_clock", lambda: 100.0)
    miss_of(engine, numbers(56, 2))
    monkeypatch.setattr(engine.kv.reasons, "_clock", lambda: 112.5)
    miss = miss_of(engine, first)
    assert miss is not None
    assert (miss.reason, miss.evicted_s, miss.tier) == ("evicted", 12.5, "device")


def test_retained_prefix_is_not_evicted() -> None:
    engine, first = Engine(num_blocks=41), numbers(20)
    miss_of(engine, first, hints=CacheHints(300, "session"))
    miss_of(engine, numbers(120, 2))
    miss_of(engine, numbers(120, 3))
    assert miss_of(engine, first) is None


def test_block_after_the_reset_was_never_seen() -> None:
    engine = Engine()
    miss_of(engine, numbers(20))
    assert engine.kv.reset()
    assert miss_of(engine, numbers(20)) == PrefixMiss("never_seen")


def test_other_salt_is_told_only_of_prompts_that_are_not_secret() -> None:
    engine, prompt = Engine(), numbers(20)
    miss_of(engine, prompt, cache_salt="secret")
    assert miss_of(engine, prompt, cache_salt="guess") == PrefixMiss("never_seen")
    assert miss_of(engine, prompt) == PrefixMiss("never_seen")
    assert miss_of(engine, prompt, cache_salt="third") == PrefixMiss("other_salt"), "it is cached without one"


def test_other_salt_of_the_same_key() -> None:
    engine, prompt, salts = Engine(), numbers(20), []
    for scope, salt in (("key-1", "a"), ("key-2", "a"), ("key-1", "b")):
        token = CACHE_SCOPE.set(scope)
        salts.append(scoped_salt(salt))
        CACHE_SCOPE.reset(token)
    reasons = [miss_of(engine, prompt, cache_salt=salt) for salt in salts]
    assert reasons == [PrefixMiss("never_seen"), PrefixMiss("never_seen"), PrefixMiss("other_salt")]


@pytest.mark.parametrize("scope", ["", "key 1", "\0"])
@pytest.mark.parametrize("salt", [None, "", "+a", "-", "\0\0b", "7 c"])
def test_scope_and_salt_are_split_as_they_were_joined(scope: str, salt: str | None) -> None:
    token = CACHE_SCOPE.set(scope)
    joined = scoped_salt(salt)
    CACHE_SCOPE.reset(token)
    assert split_salt(joined) == (scope, salt)


def test_other_media() -> None:
    engine, prompt = Engine(), numbers(20)

    def media(key: bytes, length: int = 6) -> Media:
        return Media([MediaItem(modality="image", key=key * 32, offset=6, length=length)])

    kv, reasons = engine.kv, []
    for number, item in enumerate((media(b"a"), media(b"b"), media(b"b"))):
        request = engine.add(str(number), prompt)
        request.media = item
        reasons.append(kv.explain(request, kv.lookup(request)))
        request.media = None  # the symbolic worker has no encoder
        engine.run()
    assert reasons == [PrefixMiss("never_seen"), PrefixMiss("other_media", 4), None]


@pytest.mark.parametrize(
    ("engine", "fields", "expected"),
    [
        ({}, {"prompt": numbers(4)}, PrefixMiss("too_short")),
        ({"share": False}, {}, PrefixMiss("off", why="enable_prefix_caching is off")),
        ({}, {"params": SamplingParams(max_tokens=4, skip_reading_prefix_cache=True)}, PrefixMiss("skipped")),
    ],
)
def test_prefix_that_cannot_be_cached(
    engine: dict[str, Any], fields: dict[str, Any], expected: PrefixMiss
) -> None:
    assert miss_of(Engine(**engine), **({"prompt": numbers(20)} | fields)) == expected


def test_states_without_a_checkpoint() -> None:
    engine = Engine(layout="state", unit=8, interval=0, num_slots=4, num_blocks=300)
    prompt = numbers(40)
    miss_of(engine, prompt)
    shorter = [*prompt[:30], *numbers(10, 5)]
    assert miss_of(engine, shorter) == PrefixMiss("no_checkpoint", 0)
    assert miss_of(engine, prompt) is None, "its checkpoint is at the last multiple of 8"
    for seed in range(10, 14):
        miss_of(engine, numbers(40, seed))
    miss = miss_of(engine, prompt)
    assert miss is not None and miss.reason == "evicted"


def test_every_reason_is_documented() -> None:
    assert all(text and not text.endswith(".") for text in MISS_REASONS.values())


def test_recent_entries_are_bounded() -> None:
    entries: RecentEntries[int, int] = RecentEntries(100)
    for number in range(1000):
        entries.update({number: number})
        assert len(entries) <= 201
        assert all(entries.get(key) == key for key in range(max(number - 99, 0), number + 1))
    entries.update({number: -number for number in range(50)})
    assert entries.get(49) == -49


def test_memory_of_the_history_is_bounded() -> None:
    engine = Engine(num_blocks=64, max_num_batched_tokens=64)
    reasons = engine.kv.reasons
    reasons._continuations, reasons._evicted = RecentEntries(40), RecentEntries(40)
    for seed in range(60):
        miss_of(engine, numbers(40, seed), count=2)
    assert len(reasons._continuations) <= 100 and len(reasons._evicted) <= 82


def test_created_tokens_are_those_of_full_blocks_after_the_hit() -> None:
    engine, prompt = Engine(), numbers(22)
    for id in "ab":
        engine.add(id, prompt)
        engine.run()
    created = {id: run.num_created for step in engine.steps for id, run in step.admitted.items()}
    assert created == {"a": 20, "b": 0}
