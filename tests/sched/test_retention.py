"""Tests of retention: the order of eviction with hints, its limits and its end."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.data.cache_hints import CacheHints
from quire.sched.blocks import Block
from quire.sched.retention import MAX_NAME_SHARE, MAX_SHARE, RetainingPool


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def hints(name: str = "a", seconds: int = 300, scope: str = "") -> CacheHints:
    return CacheHints(seconds, name, scope)


def filled(pool: RetainingPool, count: int, name: str) -> list[Block]:
    """Take blocks and index them under keys that begin with `name`."""
    blocks = pool.take(count)
    for at, block in enumerate(blocks):
        pool.remember(block, f"{name}{at}".encode())
    return blocks


def cached(pool: RetainingPool, name: str) -> int:
    return sum(key.startswith(name.encode()) for key in pool.index)


def test_retained_blocks_are_evicted_after_later_ones() -> None:
    pool = RetainingPool(21)
    session, other = filled(pool, 4, "s"), filled(pool, 16, "o")
    pool.release(session, hints())
    pool.release(other)
    pool.release(pool.take(16))
    assert (cached(pool, "s"), cached(pool, "o")) == (4, 0)
    assert len(pool.take(20)) == 20, "retained blocks are free"
    assert not pool.index


def test_retained_blocks_are_evicted_from_the_end_of_a_chain() -> None:
    pool = RetainingPool(41)
    pool.release(filled(pool, 10, "s"), hints())
    pool.take(37)
    assert sorted(pool.index) == [b"s0", b"s1", b"s2"]


def test_blocks_of_an_ended_session_are_evicted_before_older_ones() -> None:
    clock = Clock()
    pool = RetainingPool(21, clock=clock)
    old, session = filled(pool, 10, "o"), filled(pool, 5, "s")
    pool.release(old)
    pool.release(session, hints(seconds=300))
    pool.take(5)
    clock.now += 301
    pool.take(3)
    assert sorted(pool.index)[-2:] == [b"s0", b"s1"], "the end of the chain goes first"
    assert cached(pool, "o") == 10


def test_one_session_retains_a_bounded_share() -> None:
    pool = RetainingPool(101)
    pool.release(filled(pool, 60, "s"), hints())
    assert pool.num_retained == int(100 * MAX_NAME_SHARE) == 25
    pool.release(filled(pool, 40, "o"))
    pool.release(pool.take(75))
    assert sorted(pool.index) == sorted(f"s{at}".encode() for at in range(25)), "the first of a prompt"


def test_the_least_recent_prompt_of_a_session_gives_way() -> None:
    pool = RetainingPool(101)
    pool.release(filled(pool, 20, "first"), hints())
    pool.release(filled(pool, 20, "second"), hints())
    assert pool.num_retained == 25
    pool.take(75)
    assert (cached(pool, "first"), cached(pool, "second")) == (5, 20)


def test_no_scope_takes_the_retention_of_another() -> None:
    pool = RetainingPool(101)
    pool.release(filled(pool, 10, "small"), hints(scope="key-1"))
    for number in range(8):
        pool.release(filled(pool, 10, f"large{number}-"), hints(f"session {number}", scope="key-2"))
    assert pool.num_retained == int(100 * MAX_SHARE)
    pool.release(pool.take(50))
    assert cached(pool, "small") == 10


def test_retention_survives_use_without_hints() -> None:
    clock = Clock()
    pool = RetainingPool(21, clock=clock)
    session = filled(pool, 4, "s")
    pool.release(session, hints(seconds=300))
    pool.share(session)
    assert pool.num_retained == 0
    pool.release(session)
    assert pool.num_retained == 4
    clock.now += 301
    pool.share(session)
    pool.release(session)
    assert pool.num_retained == 0, "its time is over"


def test_names_without_blocks_are_forgotten() -> None:
    """Catches memory that grows with the number of sessions while nothing has to be evicted."""
    pool = RetainingPool(101)
    blocks = filled(pool, 4, "s")
    for session in range(1000):
        pool.release(blocks, hints(str(session), 300 + session))
        pool.share(blocks)
    assert len(pool._retained) <= 1
    pool.release(blocks, hints("last", 5000))
    pool.take(97)
    assert cached(pool, "s") == 3 and pool.num_retained == 3


def test_longer_retention_wins() -> None:
    clock = Clock()
    pool = RetainingPool(21, clock=clock)
    session = filled(pool, 4, "s")
    pool.release(session, hints("long", 3600))
    pool.share(session)
    pool.release(session, hints("short", 300))
    clock.now += 301
    pool.release(filled(pool, 16, "o"))
    pool.take(16)
    assert cached(pool, "s") == 4


def test_reset_forgets_retained_blocks() -> None:
    pool = RetainingPool(21)
    pool.release(filled(pool, 4, "s"), hints())
    assert pool.reset()
    assert (pool.num_retained, pool.num_free, len(pool.index)) == (0, 20, 0)
    assert len(pool.take(20)) == 20


_OPERATIONS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 400)), max_size=60)


@settings(max_examples=60)
@given(_OPERATIONS)
def test_all_blocks_are_accounted_for(operations: list[tuple[int, int, int]]) -> None:
    clock = Clock()
    pool, held, serial = RetainingPool(33, clock=clock), [], 0
    names = [None, hints("a"), hints("b", 600, "k"), hints("c", 300, "k")]
    for kind, number, seconds in operations:
        clock.now += seconds / 10
        if kind == 0 and pool.num_free > number:
            serial += 1
            held.append(filled(pool, number + 1, f"{serial}."))
        elif kind == 1 and held:
            pool.release(held.pop(number % len(held)), names[seconds % 4])
        elif kind == 2 and pool.index:
            block = list(pool.index.values())[seconds % len(pool.index)]
            pool.share([block])
            held.append([block])
        elif kind == 3 and not held:
            assert pool.reset()
        in_use = {block for blocks in held for block in blocks}
        assert pool.num_free == 32 - len(in_use)
        assert pool.num_retained <= 16
        assert all(block.key == key for key, block in pool.index.items())
    for blocks in held:
        pool.release(blocks)
    assert len({block.id for block in pool.take(32)}) == 32
