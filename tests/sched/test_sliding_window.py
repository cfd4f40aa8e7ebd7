"""Groups of layers with windows: what they give back, what can be found, who is let in."""

import pytest
from symbolic import LAYOUTS, Engine, continuation


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % 97 for i in range(length)]


def num_cached(engine: Engine, id: str, tokens: list[int]) -> int:
    engine.add(id, tokens, count=1)
    return engine.step().admitted[id].num_cached


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_answer_takes_no_more_than_its_window(depth: int) -> None:
    """A window of 6 tokens in blocks of 4 and nothing else: 200 tokens in five blocks."""
    engine = Engine(layout="window", num_blocks=6, max_num_batched_tokens=8, depth=depth, lazy=depth > 1)
    engine.add("a", prompt(30), count=170)
    engine.run()
    assert engine.outputs["a"] == continuation(prompt(30), 170)
    assert engine.scheduler.num_preemptions == 0


def test_admission_counts_a_window_and_not_the_whole_prompt() -> None:
    """60 tokens are 15 blocks, of which a row holds 5 at most; 3 while it decodes."""
    engine = Engine(layout="window", num_blocks=12, max_num_batched_tokens=8)
    for number in range(2):
        engine.add(str(number), prompt(60, number), count=20)
    engine.run()
    assert max(len(plan.rows) for plan in engine.plans) == 2
    assert engine.scheduler.num_preemptions == 0


def test_a_hit_holds_what_is_seen_and_nothing_before() -> None:
    engine = Engine(layout="two windows", max_num_batched_tokens=64, num_blocks=100)
    assert num_cached(engine, "a", prompt(30)) == 0
    assert num_cached(engine, "b", prompt(30)) == 28
    (new,) = engine.plans[-1].admitted
    # The token at 28 sees 6 tokens back to 23, and 13 to 16.
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
def test_a_hit_is_what_all_groups_have(group: int, gone: int, left: int) -> None:
    """One block is forgotten: a shorter prefix remains, unless nobody would look at that block anyway."""
    engine = Engine(layout="two windows", max_num_batched_tokens=64, num_blocks=100)
    request = engine.add("a", prompt(30), count=1)
    engine.run()
    block = engine.kv.pool.find(request.block_keys[gone] + engine.kv.marks[group])
    assert block is not None
    engine.kv.forget([block])
    assert num_cached(engine, "b", prompt(30)) == left


def test_windows_that_are_cut_in_turn_agree_in_the_end() -> None:
    """The narrow one lacks a block that the wide one's shorter prefix needs, and the other way round."""
    engine = Engine(layout="two windows", max_num_batched_tokens=64, num_blocks=100)
    request = engine.add("a", prompt(30), count=1)
    engine.run()
    for group, gone in ((1, 6), (2, 5), (1, 4), (2, 2)):
        block = engine.kv.pool.find(request.block_keys[gone] + engine.kv.marks[group])
        assert block is not None
        engine.kv.forget([block])
    assert num_cached(engine, "b", prompt(30)) == 8


def test_what_fell_out_of_a_window_first_is_reused_first() -> None:
    engine = Engine(layout="window", num_blocks=20, max_num_batched_tokens=40)
    request = engine.add("a", prompt(33), count=20)
    engine.step()
    engine.step()
    findable = [engine.kv.pool.find(key) for key in request.block_keys]
    assert None not in findable, "what was given back can still be found"
    taken = engine.kv.pool.take(engine.kv.pool.num_free)
    order = [block.id for block in taken]
    slid = [block.id for block in findable[:7] if block is not None]  # the token at 33 sees 28
    assert order[-7:] == slid and all(engine.kv.pool.find(key) is None for key in request.block_keys[:7])


def test_a_request_that_comes_back_finds_the_window_it_left() -> None:
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


def test_layouts_are_those_that_are_meant() -> None:
    assert {name: len(layout.groups) for name, layout in LAYOUTS.items()} == {
        "full": 1,
        "window": 1,
        "full and window": 2,
        "more windows": 3,
        "two windows": 3,
        "latent": 1,
        "state": 1,
    }
