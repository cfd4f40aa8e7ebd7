"""Tests of the GPU benchmark's trace evaluation; the rest of it needs a GPU."""

import json
from pathlib import Path

import pytest

from quire.bench.gpu import idle_share


def test_idle_time_is_of_the_third_quarter(tmp_path: Path) -> None:
    """Check eight kernels of 8 us: gaps before and after the third quarter do not count."""
    starts = [0, 100, 200, 300, 1000, 1010, 2000, 3000]
    events = [{"cat": "kernel", "ts": start, "dur": 8} for start in starts]
    events += [{"cat": "cpu_op", "ts": 0, "dur": 9000}, {"name": "no span"}]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert idle_share(str(path)) == pytest.approx(2 / 18)


def test_overlapping_kernels_are_counted_once(tmp_path: Path) -> None:
    spans = [(0, 1), (1, 1), (10, 10), (15, 10), (50, 1), (60, 1)]
    events = [{"cat": "kernel", "ts": start, "dur": took} for start, took in [(0, 1), (1, 1), *spans]]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert idle_share(str(path)) == 0.0
