"""Many sequences by one request (CVE-2024-8939, CVE-2026-34756): best_of and n had no upper bound, so that
one small body blocked the server or filled its memory. Quire bounds n (--max-n) and the sequences of one
call (VLLM_MAX_N_SEQUENCES), and ignores best_of."""

from typing import Any

import pytest
from ask import CHAT, EMBEDDER, MESSAGES, ask, chat, complete, refused
from fake_engine import FakeEngine

LARGE = 10**9


@pytest.mark.parametrize("n", [129, LARGE])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "ab"}),
        (f"{CHAT}/batch", {"messages": [MESSAGES]}),
        ("/inference/v1/generate", {"token_ids": [1, 2]}),
    ],
)
def test_n_is_bounded(path: str, body: dict[str, Any], n: int) -> None:
    engine = FakeEngine()
    fields = {"n": n, "temperature": 1.0}
    body = body | ({"sampling_params": fields} if path.startswith("/inference") else fields)
    error = refused(ask("POST", path, engine=engine, json=body))
    assert error["param"] == "n" and not engine.seen


def test_best_of_is_ignored() -> None:
    engine = FakeEngine()
    for send in (chat, complete):
        reply = send(engine, best_of=LARGE, max_tokens=1)
        assert reply.status_code == 200 and len(reply.json()["choices"]) == 1
    assert [params.n for _, _, params, _ in engine.seen] == [1, 1]


def test_too_many_sequences_are_refused_before_any_is_built() -> None:
    """1,024 prompts with n = 128 would block all other requests and fill the memory."""
    engine = FakeEngine()
    error = refused(complete(engine, prompt=["a"] * 1024, n=128, temperature=1.0))
    assert error["param"] == "n" and "131072 sequences" in error["message"]
    assert "at most 16384" in error["message"] and engine.seen == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"{CHAT}/batch", {"messages": [MESSAGES] * 17_000}),
        ("/v1/completions", {"prompt": ["a"] * 1025}),
        ("/v1/embeddings", {"input": ["a"] * 17_000}),
    ],
)
def test_number_of_prompts_is_bounded(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine(pooling=EMBEDDER if path == "/v1/embeddings" else None)
    refused(ask("POST", path, engine=engine, json=body))
    assert not engine.seen and not engine.pooled
