"""Events come out whole, however the network cuts them."""

from hypothesis import given
from hypothesis import strategies as st

from quire.remote.sse import EventSplitter

STREAM = (
    b'data: {"a": 1}\n\n: still here\n\ndata: two\ndata: lines\n\n'
    b"event: x\r\ndata:tight\r\n\r\ndata: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b"two\nlines", b"tight", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    """An event lost, doubled or torn at the border of two pieces."""
    feed, found = EventSplitter().feed, []
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in zip(edges, edges[1:], strict=False):
        found += feed(STREAM[start:end])
    assert found == EVENTS


def test_an_event_of_several_lines_does_not_take_the_short_way() -> None:
    """`data: a` with a second line must not come out as one raw string."""
    assert EventSplitter().feed(b"data: a\nid: 3\n\n") == [b"a"]
    assert EventSplitter().feed(b"data: a\n\ndata: b\n\n") == [b"a", b"b"]


def test_every_pair_of_cuts() -> None:
    """A piece that only looks like one whole event, as `data: a` with the first letter of the next line."""
    for first in range(len(STREAM)):
        for second in range(first, len(STREAM)):
            feed = EventSplitter().feed
            assert feed(STREAM[:first]) + feed(STREAM[first:second]) + feed(STREAM[second:]) == EVENTS


def test_an_unfinished_event_waits() -> None:
    feed = EventSplitter().feed
    assert feed(b"data: a\n") == [] and feed(b"\n") == [b"a"]
