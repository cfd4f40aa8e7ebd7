"""`python -m quire.bench.probe`: one start of an engine, timed from inside. `bench startup` runs it."""

import json
import sys
import time

import psutil

from quire.data.params import SamplingParams
from quire.entrypoints.llm import LLM


def main() -> None:
    """Engine arguments come in as JSON; one line of JSON goes out. Clocks are the machine's monotonic one,
    so that the parent can set them against the moment it started this process."""
    imported = time.monotonic()
    llm = LLM(**json.loads(sys.argv[1]))
    ready = time.monotonic()
    llm.generate([[1]], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    first_token = time.monotonic()
    rss = psutil.Process().memory_info().rss
    print(
        json.dumps(
            {"imported_at": imported, "ready_at": ready, "first_token_at": first_token, "rss_bytes": rss}
        )
    )


if __name__ == "__main__":
    main()
