"""Tests of the KV cache layout: layers that share blocks, and the blocks of a request."""

import pytest

from quire.checkpoint.facts import ArchFacts, LayerFacts, RopeFacts
from quire.checkpoint.layout import CacheSpec, cache_specs, has_ssm_state, layout

FULL, LATENT = CacheSpec("full", elements=8), CacheSpec("latent", planes=1, elements=16)
STATE = CacheSpec("state", bytes_per_row=100)


def window(size: int, elements: int = 8) -> CacheSpec:
    return CacheSpec("window", elements=elements, window=size)


def test_full_attention_layers_are_one_group() -> None:
    made = layout([FULL] * 5, 100)
    assert made.windows == (None,) and made.groups[0].layers == (0, 1, 2, 3, 4)
    assert made.slabs == (16,) * 5 and made.block_bytes(4, 2) == 5 * 16 * 4 * 2


def test_sliding_window_layers_form_groups_of_equal_size() -> None:
    """Gemma-3 4B: 34 layers, each sixth of them full. A block has a page in five slabs, and only in the last
    group one is unused."""
    made = layout([FULL if layer % 6 == 5 else window(1024) for layer in range(34)], 1 << 17)
    assert made.windows == (None, *(1024,) * 6)
    assert [len(group.layers) for group in made.groups] == [5] * 6 + [4] and len(made.slabs) == 5
    assert made.groups[0].layers == (5, 11, 17, 23, 29)
    assert sorted(layer for group in made.groups for layer in group.layers) == list(range(34))
    assert made.places[5] == (0, 0) and made.places[33] == (6, 3)


@pytest.mark.parametrize(
    ("specs", "sizes"),
    [
        ([FULL] * 4 + [window(9)] * 5, [4, 4, 1]),
        ([FULL] * 5 + [window(9)] * 6, [5, 6]),
        ([window(9)] * 2 + [window(5)] * 2 + [FULL] * 2, [2, 2, 2]),
    ],
    ids=["a quarter more is too many", "a fifth more is not", "two windows"],
)
def test_number_of_layers_per_group(specs: list[CacheSpec], sizes: list[int]) -> None:
    made = layout(specs, 100)
    assert [len(group.layers) for group in made.groups] == sizes and len(made.slabs) == max(sizes)


@pytest.mark.parametrize("odd", [LATENT, window(9, elements=4)], ids=["one plane", "fewer heads"])
def test_layers_with_different_pages_share_no_memory(odd: CacheSpec) -> None:
    made = layout([FULL, odd, FULL], 100)
    assert made.windows == (None,) and made.slabs == (16, 16, odd.planes * odd.elements)
    assert made.places == {0: (0, 0), 2: (0, 1), 1: (0, 2)}


@pytest.mark.parametrize("draft", [CacheSpec("full", elements=2), LATENT, window(5, elements=2)])
def test_draft_with_other_pages_is_in_the_full_group(draft: CacheSpec) -> None:
    """The target's windows stay windows; the draft's pages are unused in their blocks."""
    made = layout([FULL, window(6)] * 4 + [draft] * 2, 1000)
    assert made.windows == (None, 6) and made.groups[0].layers == (0, 2, 4, 6, 8, 9)
    assert made.slabs == (16,) * 4 + (draft.planes * draft.elements,) * 2
    assert [made.places[layer] for layer in (7, 8, 9)] == [(1, 3), (0, 4), (0, 5)]
    last = made.of({7, 8, 9})
    assert last.windows == made.windows and last.places == {8: (0, 0), 9: (0, 1), 7: (1, 2)}


def test_half_size_pages_are_placed_side_by_side() -> None:
    """Gemma 4 31B: 60 layers, each sixth with full attention and half the bytes per token. A block has the
    size of those ten layers for its tokens."""
    specs = [CacheSpec("full", elements=2048) if i % 6 == 5 else window(1024, 4096) for i in range(60)]
    made = layout(specs, 1 << 17)
    assert made.windows == (None, *(1024,) * 10) and made.slabs == (2 * 4096,) * 5
    assert [len(group.layers) for group in made.groups] == [10] + [5] * 10
    full = [(made.places[layer], made.parts[layer]) for layer in range(5, 60, 6)]
    assert full == [((0, at // 2), (at % 2, 2)) for at in range(10)]
    assert {made.parts[layer] for layer in range(60) if layer % 6 != 5} == {(0, 1)}
    assert made.keeping(1).slabs == made.slabs and made.keeping(1).windows[1] == 1025
    last = made.of(range(54, 60))
    assert last.slabs == made.slabs[:5] and last.parts[59] == (0, 2)


def test_pages_that_do_not_divide_each_other_share_no_memory() -> None:
    specs = [CacheSpec("full", elements=6), *[window(9, elements=4)] * 5] * 2
    assert layout(specs, 1 << 17).largest == 0


def test_draft_with_the_same_pages_adds_layers() -> None:
    made = layout([FULL, window(6)] * 4 + [FULL], 1000)
    assert [len(group.layers) for group in made.groups] == [4, 1, 4] and len(made.slabs) == 4
    assert layout([FULL] * 8 + [FULL], 1000).groups[0].layers == tuple(range(9))


def test_full_attention_draft_disables_windows() -> None:
    """Its blocks have room for all layers anyway, unless it has the same pages or a part of them."""
    assert layout([window(6)] * 4 + [CacheSpec("full", elements=3)], 1000).windows == (None,)
    assert layout([window(6)] * 4 + [CacheSpec("full", elements=2)], 1000).windows == (None, 6, 6, 6, 6)
    assert layout([window(6)] * 4 + [FULL], 1000).windows == (None, 6, 6, 6, 6)


def test_windows_are_disabled_if_a_draft_makes_them_cost_more() -> None:
    """Each of nine window groups would have room for the draft."""
    specs = [FULL, *[window(600)] * 9, *[LATENT] * 2]
    assert layout(specs, 1000).windows == (None,) and len(layout(specs, 100_000).windows) == 10


def test_window_of_the_full_length_is_ignored() -> None:
    assert layout([FULL, window(64)], 64).windows == (None,)
    assert layout([FULL, window(64)], 65).windows == (None, 64)


def test_rows_have_a_state_for_each_draft() -> None:
    """A checkpoint is one state; a stage has the states of its layers."""
    plain, drafting = (layout([STATE, FULL, STATE], 100, count) for count in (1, 4))
    assert plain.row_bytes(4) == plain.state_bytes == drafting.state_bytes
    assert drafting.row_bytes(4) == 4 * plain.row_bytes(4) == 2 * drafting.of({0, 1}).row_bytes(4)
    assert drafting.keeping(1).states_per_row == 4


def test_states_have_no_pages() -> None:
    specs = [STATE, FULL, None, STATE]
    made = layout(specs, 100)
    assert made.places == {1: (0, 0)} and made.row_bytes(4) == 200
    assert has_ssm_state(specs) and not has_ssm_state([FULL, None])
    assert layout([STATE], 100).slabs == ()


@pytest.mark.parametrize(("tokens", "chunk", "blocks"), [(3, 8, 1), (400, 1, 3), (400, 8, 5), (10, 8, 3)])
def test_request_takes_only_the_blocks_of_its_window(tokens: int, chunk: int, blocks: int) -> None:
    """With blocks of 4, the worst case over all starts of a window of 7 and a chunk."""
    made = layout([window(7)], 1000)
    assert made.blocks_of(tokens, block_size=4, max_chunk=chunk) == blocks
    seen = [range(max(at - 6, 0), min(at + chunk, tokens)) for at in range(0, tokens, 1)]
    assert blocks == max(span[-1] // 4 - span[0] // 4 + 1 for span in seen)


def test_cache_specs_follow_the_facts() -> None:
    layers = tuple(LayerFacts(RopeFacts(), window) for window in (None, 32))
    facts = ArchFacts("Qwen3ForCausalLM", 320, 64, 128, 4, 2, 16, 1e-5, layers)
    assert cache_specs(facts) == (CacheSpec("full", elements=32), window(32, elements=32))


def test_pipeline_stage_has_all_groups_and_its_own_layers() -> None:
    """Block tables and blocks of a group are the same in every stage."""
    whole = layout([window(6), FULL, window(6), FULL, STATE], 100)
    first, second = whole.of(range(3)), whole.of(range(3, 5))
    assert first.windows == second.windows == whole.windows == (None, 6)
    assert first.places == {1: (0, 0), 0: (1, 0), 2: (1, 1)} and len(first.slabs) == 2
    assert second.places == {3: (0, 0)} and len(second.slabs) == 1
    assert (first.row_bytes(4), second.row_bytes(4)) == (0, whole.row_bytes(4))
    assert whole.of(range(4, 5)).slabs == ()
    assert whole.of(range(5)) == whole
