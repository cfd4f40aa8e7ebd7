"""Nothing heavy is imported before it is needed. Measured against a bare interpreter, best of several."""

import subprocess
import sys
import time

import pytest


def best_of(arguments: list[str], runs: int = 7) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize(
    ("arguments", "limit_s"),
    [(["-c", "import quire"], 0.3), (["-m", "quire", "--help"], 0.5)],
    ids=["import quire", "quire --help"],
)
def test_start_is_quick(arguments: list[str], limit_s: float) -> None:
    assert best_of(arguments) - best_of(["-c", "pass"]) < limit_s
