"""Tests of the event splitter: events are complete for any split of the stream."""

from hypothesis import given
from hypothesis import strategies as st

from quire.remote.sse import EventSplitter

STREAM = (
    b'data: {"a": 1}\n\n: still here\n\ndata: two\ndata: lines\n\n'
    b"event: x\r\ndata:tight\r\n\r\ndata: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b"two\nlines", b"tight", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_split_gives_the_same_events(cuts: list[int]) -> None:
    """Catches an event lost, doubled or torn at the border of two pieces."""
    feed, result = EventSplitter().feed, []
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in zip(edges, edges[1:], strict=False):
        result += feed(STREAM[start:end])
    assert result == EVENTS


def test_multiline_event_skips_the_fast_path() -> None:
    """Check that `data: a` with a second line is not returned as one raw string."""
    assert EventSplitter().feed(b"data: a\nid: 3\n\n") == [b"a"]
    assert EventSplitter().feed(b"data: a\n\ndata: b\n\n") == [b"a", b"b"]


def test_every_pair_of_splits() -> None:
    """Catches a piece that looks like one whole event, as `data: a` with the first letter of the next
    line."""
    for first in range(len(STREAM)):
        for second in range(first, len(STREAM)):
            feed = EventSplitter().feed
            assert feed(STREAM[:first]) + feed(STREAM[first:second]) + feed(STREAM[second:]) == EVENTS


def test_unfinished_event_waits() -> None:
    feed = EventSplitter().feed
    assert feed(b"data: a\n") == [] and feed(b"\n") == [b"a"]
