"""Tests of the batch-invariant mode over HTTP."""

import pytest
from invariance_cases import check_http
from serve_process import Start

from quire.kernels.cpu import native


@pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
def test_completions_alone_and_in_one_call(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a seed or a logprob of a list of prompts that differs from that of a single prompt."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    server = start("--max-num-batched-tokens", "64", "--max-num-seqs", "32")
    server.until_healthy()
    check_http(server, "tiny", 12)
    server.end_cleanly()
