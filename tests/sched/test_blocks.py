"""Tests of the block pool: reference counts, eviction order and the prefix index."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.sched.blocks import BlockPool
from quire.sched.kv_manager import KVManager
from quire.sched.running import Running


def ids(blocks: list) -> list[int]:
    return [block.id for block in blocks]


def test_block_zero_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert ids(pool.take(4)) == [1, 2, 3, 4]
    with pytest.raises(AssertionError, match="0 free"):
        pool.take(1)


def test_freed_chain_is_reused_from_its_end() -> None:
    pool = BlockPool(4)
    chain = pool.take(3)
    for n, block in enumerate(chain):
        pool.remember(block, bytes([n]))
    pool.release(chain)
    assert ids(pool.take(3)) == [3, 2, 1]


def test_blocks_without_prefix_are_reused_before_cached_blocks() -> None:
    pool = BlockPool(4)
    known, unknown = pool.take(1), pool.take(1)
    pool.remember(known[0], b"k")
    pool.release(known)
    pool.release(unknown)
    assert ids(pool.take(3)) == [2, 3, 1]


def test_least_recently_freed_prefix_is_evicted_first() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.remember(block, key)
    for block in (blocks[1], blocks[2], blocks[0]):
        pool.release([block])
    pool.take(1)
    assert [pool.find(key) is None for key in (b"a", b"b", b"c")] == [False, True, False]


def test_double_free_is_detected() -> None:
    pool = BlockPool(3)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(blocks)


def test_sharing_a_free_block_removes_it_from_the_free_list() -> None:
    pool = BlockPool(3)
    block = pool.take(1)
    pool.remember(block[0], b"k")
    pool.release(block)
    pool.share(block)
    pool.share(block)
    assert pool.num_free == 1 and block[0].num_users == 2
    pool.release(block)
    assert pool.num_free == 1


def test_first_block_with_a_key_stays_in_the_index() -> None:
    pool = BlockPool(4)
    first, second = pool.take(2)
    pool.remember(first, b"k")
    pool.remember(second, b"k")
    pool.release([second])
    assert pool.find(b"k") is first
    pool.take(1)
    assert pool.find(b"k") is first


@given(
    st.integers(2, 12),
    st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 11)), max_size=60),
)
def test_random_operations_keep_the_index_consistent(
    num_blocks: int, operations: list[tuple[str, int]]
) -> None:
    """Check that evicted keys are not found, found keys match, and reference counts add up."""
    pool = BlockPool(num_blocks)
    held: list = []
    contents: dict[int, bytes] = {}
    count = 0
    for operation, n in operations:
        if operation == "take" and pool.num_free:
            (block,) = pool.take(1)
            contents.pop(block.id, None)
            assert block not in held
            count += 1
            contents[block.id] = str(count).encode()
            if n % 3:
                pool.remember(block, contents[block.id])
            held.append(block)
        elif operation == "share" and contents:
            key = contents[sorted(contents)[n % len(contents)]]
            actual = pool.find(key)
            if actual is not None:
                assert contents[actual.id] == key
                pool.share([actual])
                held.append(actual)
        elif operation == "release" and held:
            pool.release([held.pop(n % len(held))])
        assert pool.num_free == pool.num_usable - len({block.id for block in held})
        for block in pool.blocks[1:]:
            assert block.num_users == sum(other is block for other in held)
    for number in range(1, count + 1):
        actual = pool.find(str(number).encode())
        assert actual is None or contents[actual.id] == str(number).encode()


def test_filled_block_is_indexed_once() -> None:
    """Check that blocks filled in earlier steps are not indexed again."""
    kv, running = KVManager(num_blocks=20, block_size=4, max_rows=2, share_prefixes=True), Running(2, 40)
    request = Request(
        id="a", tokens=list(range(10)), params=SamplingParams(), prompt_len=10, limit=20, seed=0
    )
    row = np.array([running.admit(request, 0)])
    (table,) = kv.admit(int(row[0]), kv.lookup(request), 10)
    actual = []
    for num_filled in (4, 6, 8, 10):
        kv.index(running, row, np.array([num_filled], np.int32))
        actual.append(ids(kv.take_indexed()))
    assert actual == [table[:1], [], table[1:2], []]
