"""Parameters of one request that could take the time or the memory of all others are bounded.

Guards against CVE-2024-8939 and CVE-2026-34756 (large values of n, best_of and the like).
"""

import asyncio
from typing import Any

import numpy as np
import pytest
from ask import CHAT, COMPLETIONS, MESSAGES, ask, chat, complete, refused
from fake_engine import VOCAB, FakeEngine

from quire.data.params import MAX_SALT_CHARS, MAX_STOP_TOKEN_IDS, SamplingParams
from quire.data.request import Request
from quire.errors import RequestError
from quire.sched.running import Running
from quire.sched.step_tokens import why_stopped
from quire.server.openai import sampling_params as params_module
from quire.server.openai import streams
from quire.server.openai.sampling_params import sampling_params
from quire.server.openai.streams import Pauses
from quire.server.responses.items import MAX_REFERENCES, read_items


class Ids(list[int]):
    """Token ids that must not be searched linearly."""

    def __contains__(self, id: object) -> bool:
        raise AssertionError("the list was searched")


def test_stop_ids_are_looked_up_in_a_set() -> None:
    params = SamplingParams(max_tokens=None)
    params.stop_token_ids = Ids(range(100, 100 + MAX_STOP_TOKEN_IDS))
    request = Request(id="a", tokens=[1], params=params, prompt_len=1, limit=99, seed=0)
    running = Running(1, 99)
    assert running.watched[running.admit(request, 0)]
    assert why_stopped(request, np.array([1, 100], np.int32)) == ("stop", 100)
    assert why_stopped(request, np.array([1, 99], np.int32)) is None


def test_request_without_stop_ids_is_not_watched() -> None:
    request = Request(id="a", tokens=[1], params=SamplingParams(), prompt_len=1, limit=99, seed=0)
    running = Running(1, 99)
    assert not running.watched[running.admit(request, 0)]


@pytest.mark.parametrize("ids", [[VOCAB], [5, 10**9], [-1], list(range(MAX_STOP_TOKEN_IDS + 1))], ids=len)
def test_invalid_or_too_many_stop_ids_are_400(ids: list[int]) -> None:
    engine = FakeEngine()
    assert "stop_token_ids" in refused(chat(engine, stop_token_ids=ids))["param"]
    assert engine.seen == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES}),
        (COMPLETIONS, {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3, "model": "fake"}),
    ],
)
def test_long_cache_salt_is_400(path: str, body: dict[str, Any]) -> None:
    response = ask("POST", path, json=body | {"cache_salt": "x" * (MAX_SALT_CHARS + 1)})
    assert response.status_code == 400 and str(MAX_SALT_CHARS) in response.text
    assert ask("POST", path, json=body | {"cache_salt": "x" * MAX_SALT_CHARS}).status_code == 200


def test_long_cache_salt_of_a_prompt_is_refused_with_the_remedy() -> None:
    prompt = {"prompt": "a", "cache_salt": "x" * 1000}
    with pytest.raises(RequestError, match=f"at most {MAX_SALT_CHARS} characters, got 1000; send its hash"):
        FakeEngine().inputs.parse(prompt)


def test_references_to_one_stored_item_are_bounded() -> None:
    """A reference takes a few bytes, but the stored item may take megabytes."""
    item = {"id": "msg_1", "type": "message", "role": "user", "content": []}
    num_found = 0

    def find(id: str) -> dict[str, Any] | None:
        nonlocal num_found
        num_found += 1
        return item | {"id": id}

    def references(count: int) -> list[dict[str, Any]]:
        return [{"type": "item_reference", "id": "msg_1"}] * count + [{"id": "msg_2"}]

    assert len(read_items(references(MAX_REFERENCES), find)) == MAX_REFERENCES + 1
    num_found = 0
    with pytest.raises(
        RequestError, match=f"at most {MAX_REFERENCES} times in one input; remove the repeats"
    ):
        read_items(references(100_000), find)
    assert num_found <= MAX_REFERENCES


def test_params_are_built_once_for_all_prompts_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """If params were built once per prompt, 100,000 allowed ids would be checked and copied 1,024 times on
    the event loop."""
    made: list[SamplingParams] = []

    def build(*args: Any, **options: Any) -> SamplingParams:
        made.append(sampling_params(*args, **options))
        return made[-1]

    monkeypatch.setattr(params_module, "sampling_params", build)
    engine = FakeEngine()
    assert complete(engine, prompt=["a"] * 200, max_tokens=1, allowed_token_ids=[65]).status_code == 200
    assert len(engine.seen) == 200 and len(made) == 1


class Turns:
    """A clock that advances by the given work, and counts the iterations of the event loop."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    async def work(self, pauses: Pauses, seconds: float, done: list[int]) -> None:
        await pauses.if_due()
        self.now += seconds
        done.append(1)


@pytest.mark.parametrize(("seconds", "most"), [(streams.MAX_BLOCKING_S, 1), (streams.MAX_BLOCKING_S / 4, 5)])
async def test_pauses_are_timed_and_shared_by_the_tasks_of_a_call(seconds: float, most: int) -> None:
    """However many tasks of a call are ready, together they take about one piece of work per iteration of the
    event loop."""
    turns, done = Turns(), list[int]()
    pauses = Pauses(turns.clock)
    tasks = [asyncio.create_task(turns.work(pauses, seconds, done)) for _ in range(40)]
    before, by_turn = 0, list[int]()
    while len(done) < 40:
        await asyncio.sleep(0)
        by_turn.append(len(done) - before)
        before = len(done)
    await asyncio.gather(*tasks)
    assert max(by_turn) <= most, by_turn
