"""Blocks: users, order of reuse, and the index."""

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


def test_a_freed_chain_is_reused_from_its_end() -> None:
    pool = BlockPool(4)
    chain = pool.take(3)
    for n, block in enumerate(chain):
        pool.remember(block, bytes([n]))
    pool.release(chain)
    assert ids(pool.take(3)) == [3, 2, 1]


def test_blocks_without_a_prefix_are_reused_before_those_with_one() -> None:
    pool = BlockPool(4)
    known, unknown = pool.take(1), pool.take(1)
    pool.remember(known[0], b"k")
    pool.release(known)
    pool.release(unknown)
    assert ids(pool.take(3)) == [2, 3, 1]


def test_the_least_recently_freed_prefix_is_evicted_first() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.remember(block, key)
    for block in (blocks[1], blocks[2], blocks[0]):
        pool.release([block])
    pool.take(1)
    assert [pool.find(key) is None for key in (b"a", b"b", b"c")] == [False, True, False]


def test_freeing_twice_is_caught() -> None:
    pool = BlockPool(3)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(blocks)


def test_sharing_a_free_block_takes_it_off_the_free_list() -> None:
    pool = BlockPool(3)
    block = pool.take(1)
    pool.remember(block[0], b"k")
    pool.release(block)
    pool.share(block)
    pool.share(block)
    assert pool.num_free == 1 and block[0].num_users == 2
    pool.release(block)
    assert pool.num_free == 1


def test_the_first_block_with_a_content_is_the_one_that_is_found() -> None:
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
def test_any_sequence_of_operations_keeps_the_books(
    num_blocks: int, operations: list[tuple[str, int]]
) -> None:
    """An evicted key is never found, a found key is the one that was remembered, and users always add up."""
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
            found = pool.find(key)
            if found is not None:
                assert contents[found.id] == key
                pool.share([found])
                held.append(found)
        elif operation == "release" and held:
            pool.release([held.pop(n % len(held))])
        assert pool.num_free == pool.num_usable - len({block.id for block in held})
        for block in pool.blocks[1:]:
            assert block.num_users == sum(other is block for other in held)
    for number in range(1, count + 1):
        found = pool.find(str(number).encode())
        assert found is None or contents[found.id] == str(number).encode()


def test_a_filled_block_is_indexed_once() -> None:
    """Blocks looked at again in every step after the one that filled them."""
    kv, running = KVManager(num_blocks=20, block_size=4, max_rows=2, share_prefixes=True), Running(2, 40)
    request = Request(
        id="a", tokens=list(range(10)), params=SamplingParams(), prompt_len=10, limit=20, seed=0
    )
    row = np.array([running.admit(request, 0)])
    (table,) = kv.admit(int(row[0]), kv.lookup(request), 10)
    found = []
    for num_filled in (4, 6, 8, 10):
        kv.index(running, row, np.array([num_filled], np.int32))
        found.append(ids(kv.take_fresh()))
    assert found == [table[:1], [], table[1:2], []]
