"""Tests of KV cache groups with sliding windows: freed blocks, prefix hits and admission."""

import pytest
from symbolic import LAYOUTS, Engine, continuation


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % 97 for i in range(length)]


def num_cached(engine: Engine, id: str, tokens: list[int]) -> int:
    engine.add(id, tokens, count=1)
    return engine.step().admitted[id].num_cached


@pytest.mark.parametrize("depth", [1, 2])
def test_long_output_holds_only_its_window(depth: int) -> None:
    """Check 200 tokens in five blocks of 4, with a window of 6 tokens as the only group."""
    engine = Engine(layout="window", num_blocks=6, max_num_batched_tokens=8, depth=depth, lazy=depth > 1)
    engine.add("a", prompt(30), count=170)
    engine.run()
    assert engine.outputs["a"] == continuation(prompt(30), 170)
    assert engine.scheduler.num_preemptions == 0


def test_admission_reserves_the_window_and_not_the_whole_prompt() -> None:
    """Check a prompt of 15 blocks, of which a row holds 5 at most, and 3 while it decodes."""
    engine = Engine(layout="window", num_blocks=12, max_num_batched_tokens=8)
    for number in range(2):
        engine.add(str(number), prompt(60, number), count=20)
    engine.run()
    assert max(len(plan.rows) for plan in engine.plans) == 2
    assert engine.scheduler.num_preemptions == 0


def test_prefix_hit_holds_only_blocks_in_the_window() -> None:
    engine = Engine(layout="two windows", max_num_batched_tokens=64, num_blocks=100)
    assert num_cached(engine, "a", prompt(30)) == 0
    assert num_cached(engine, "b", prompt(30)) == 28
    (new,) = engine.plans[-1].admitted
    # The token at 28 attends to 6 tokens, back to 23, and to 13, back to 16.
    assert engine.kv.windows == (None, 6, 13)
    assert [[place for place, id in enumerate(ids) if id == 0] for ids in new.block_ids] == [
        [],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3],
    ]


@pytest.mark.parametrize(
    ("group", "gone", "left"),
    [(0, 6, 24), (0, 2, 8), (1, 6, 24), (1, 5, 20), (1, 4, 28), (2, 4, 16), (2, 3, 28)],
)
def test_prefix_hit_is_limited_to_blocks_cached_in_all_groups(group: int, gone: int, left: int) -> None:
    """Check that a shorter prefix is hit if one block is evicted, unless no window needs that block."""
    engine = Engine(layout="two windows", max_num_batched_tokens=64, num_blocks=100)
    request = engine.add("a", prompt(30), count=1)
    engine.run()
    block = engine.kv.pool.find(request.block_keys[gone] + engine.kv.marks[group])
    assert block is not None
    engine.kv.forget([block])
    assert num_cached(engine, "b", prompt(30)) == left


def test_prefix_hits_of_several_windows_converge() -> None:
    """Check evictions that shorten the hit of the narrow and of the wide window in turn."""
    engine = Engine(layout="two windows", max_num_batched_tokens=64, num_blocks=100)
    request = engine.add("a", prompt(30), count=1)
    engine.run()
    for group, gone in ((1, 6), (2, 5), (1, 4), (2, 2)):
        block = engine.kv.pool.find(request.block_keys[gone] + engine.kv.marks[group])
        assert block is not None
        engine.kv.forget([block])
    assert num_cached(engine, "b", prompt(30)) == 8


def test_blocks_that_leave_the_window_first_are_reused_first() -> None:
    engine = Engine(layout="window", num_blocks=20, max_num_batched_tokens=40)
    request = engine.add("a", prompt(33), count=20)
    engine.step()
    engine.step()
    findable = [engine.kv.pool.find(key) for key in request.block_keys]
    assert None not in findable, "freed blocks can still be hit"
    taken = engine.kv.pool.take(engine.kv.pool.num_free)
    order = [block.id for block in taken]
    slid = [block.id for block in findable[:7] if block is not None]  # the token at 33 attends back to 28
    assert order[-7:] == slid and all(engine.kv.pool.find(key) is None for key in request.block_keys[:7])


def test_resumed_request_hits_the_window_it_left() -> None:
    engine = Engine(layout="full and window", max_num_batched_tokens=64, num_blocks=100)
    engine.add("a", prompt(30), count=30)
    for _ in range(15):
        engine.step()
    engine.scheduler._preempt(int(engine.scheduler.running.order[0]))
    engine.step()
    (new,) = engine.plans[-1].admitted
    assert new.num_computed == 44 and len(new.token_ids) == 45
    engine.run()
    assert engine.outputs["a"] == continuation(prompt(30), 30)


def test_layouts_have_the_expected_groups() -> None:
    assert {name: len(layout.groups) for name, layout in LAYOUTS.items()} == {
        "full": 1,
        "window": 1,
        "full and window": 2,
        "more windows": 3,
        "two windows": 3,
        "latent": 1,
        "state": 1,
        "state and window": 1,
        "states alone": 1,
    }
