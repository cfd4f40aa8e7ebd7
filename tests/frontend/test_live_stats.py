"""Tests of the slowest recent requests."""

from quire.data.outputs import RequestOutput, RequestStateStats
from quire.frontend.live_stats import RECENT, SLOWEST, LiveView


def test_slowest_come_first_and_old_ones_expire() -> None:
    view = LiveView()

    def end(id: int, seconds: float) -> None:
        stats = RequestStateStats(num_generation_tokens=3, latency=seconds, queued_ts=1.0, scheduled_ts=1.5)
        view.ended(RequestOutput(str(id), None, [1, 2], None, [], True, stats, num_cached_tokens=1))

    end(-1, 1e6)
    for id in range(RECENT):
        end(id, (id * 7 % RECENT) + 1.0)
    view.ended(RequestOutput("without times", None, [1], None, [], True))
    slowest = view._recent(0, 0)["slowest"]
    assert [item["total_ms"] for item in slowest] == [1e3 * (RECENT - i) for i in range(SLOWEST)]
    first = slowest[0]
    assert (first["prompt_tokens"], first["completion_tokens"], first["cached_tokens"]) == (2, 3, 1)
    assert first["queue_ms"] == 500 and int(first["id"]) * 7 % RECENT == RECENT - 1
