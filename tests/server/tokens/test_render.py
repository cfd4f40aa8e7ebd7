"""Tests of the render, derender, generate, batch and invocation routes."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ask import CHAT, COMPLETIONS, EMBEDDER, MESSAGES, ask, chat, client_of, complete, events, refused
from fake_engine import ANSWER, FakeEngine
from test_tools import HERMES, THOUGHT, TOOLS, TWO

from quire.config.cli import FlagParser
from quire.entrypoints import serve
from quire.server.app import Application
from quire.server.openai import batch, streams
from quire.server.openai.chat_encoder import ChatEncoder
from quire.server.settings import make_settings

GENERATE = "/inference/v1/generate"
SETTINGS = HERMES | {"reasoning_parser": "qwen3"}


def post(path: str, engine: FakeEngine | None = None, settings: Any = None, **body: Any) -> Any:
    response = ask("POST", path, engine=engine, settings=settings, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_rendered_chat_equals_the_engine_request() -> None:
    body = {"messages": MESSAGES, "temperature": 0.5, "stop": "x", "max_tokens": 7, "cache_salt": "s"}
    rendered = post(f"{CHAT}/render", **body)
    engine = FakeEngine()
    chat(engine, **body)
    _, prompt, params, _ = engine.seen[0]
    assert (rendered["token_ids"], rendered["prompt"]) == (prompt.token_ids, "user:hi\nassistant:")
    sampling = rendered["sampling_params"]
    assert (sampling["temperature"], sampling["stop"], sampling["max_tokens"]) == (0.5, ["x"], 7)
    again = FakeEngine()
    post(GENERATE, again, **rendered)
    assert again.seen[0][1].token_ids == prompt.token_ids and again.seen[0][1].cache_salt == "s"
    assert again.seen[0][2] == params


def test_token_offsets_are_returned_on_request() -> None:
    talk = [{"role": "user", "content": "h\u00e9"}]
    rendered = post(f"{CHAT}/render", messages=talk, return_token_offsets=True)
    text, places = rendered["prompt"], rendered["token_offsets"]
    assert len(places) == len(rendered["token_ids"]) == len(text.encode())
    assert [text[start:end] for start, end in places][:7] == [*"user:h", "\u00e9"]
    texts = post(f"{COMPLETIONS}/render", prompt=["ab", "c"], return_token_offsets=True)
    assert [entry["token_offsets"] for entry in texts] == [[[0, 1], [1, 2]], [[0, 1]]]
    (ids,) = post(f"{COMPLETIONS}/render", prompt=[64, 65], return_token_offsets=True)
    assert ids["token_offsets"] is None
    cut = post(f"{COMPLETIONS}/render", prompt="abc", return_token_offsets=True, truncate_prompt_tokens=1)
    assert [entry["token_offsets"] for entry in cut] == [None]
    assert post(f"{COMPLETIONS}/render", prompt="ab")[0]["token_offsets"] is None
    assert complete(return_token_offsets=True).status_code == 200


def test_every_prompt_is_rendered() -> None:
    rendered = post(f"{COMPLETIONS}/render", prompt=["ab", "c"])
    assert [prompt["prompt"] for prompt in rendered] == ["ab", "c"]
    assert len({prompt["request_id"] for prompt in rendered}) == 2
    assert refused(ask("POST", f"{COMPLETIONS}/render", json={"prompt": "a", "use_beam_search": True}))[
        "param"
    ]


@pytest.mark.parametrize("schema", [None, {"type": "object"}])
def test_render_generate_derender_equals_chat(schema: Any) -> None:
    answer = THOUGHT + (TWO if schema is None else "{}")
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 400}
    if schema is None:
        body["tools"] = TOOLS
    else:
        body["structured_outputs"] = {"json": schema}
    rendered = post(f"{CHAT}/render", settings=SETTINGS, **body)
    tokens = post(GENERATE, FakeEngine(answer), **rendered)
    derendered = post(
        f"{CHAT}/derender",
        settings=SETTINGS,
        generate_response=tokens,
        chat_request=body,
        prompt_tokens=len(rendered["token_ids"]),
    )
    direct = chat(FakeEngine(answer), SETTINGS, **body).json()
    for reply in (derendered, direct):
        for call in reply["choices"][0]["message"].get("tool_calls", ()):
            del call["id"]
    assert derendered["choices"] == direct["choices"] and derendered["usage"] == direct["usage"]


def test_stream_fields_are_ignored_by_derender() -> None:
    reply = {"choices": [{"index": 0, "token_ids": [39, 72]}]}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    derendered = post(
        f"{CHAT}/derender", generate_response=reply, chat_request={"messages": MESSAGES, **options}
    )
    assert derendered["choices"][0]["message"]["content"] == "Hi"
    derendered = post(
        f"{COMPLETIONS}/derender", generate_responses=[reply], completion_request={"prompt": "a", **options}
    )
    assert derendered["choices"][0]["text"] == "Hi"


def test_long_answers_are_derendered_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    encode = ChatEncoder.response_body

    def record_thread(*args: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(*args)

    monkeypatch.setattr(ChatEncoder, "response_body", record_thread)
    for num_tokens in (20_000, 1):
        reply = {"choices": [{"index": 0, "token_ids": [39] * num_tokens}]}
        derendered = post(f"{CHAT}/derender", FakeEngine(max_model_len=20_000), generate_response=reply)
        assert derendered["choices"][0]["message"]["content"] == "H" * num_tokens
    assert threads == [False, True]


def test_render_generate_derender_equals_completion() -> None:
    body = {"prompt": ["ab", "c"], "stop": ["wor"], "echo": True, "max_tokens": 30}
    rendered = post(f"{COMPLETIONS}/render", **body)
    tokens = [post(GENERATE, **request) for request in rendered]
    fields = {"generate_responses": tokens, "prompt_tokens": [2, 1]}
    derendered = post(f"{COMPLETIONS}/derender", completion_request=body, **fields)
    direct = post(COMPLETIONS, **body)
    assert derendered["choices"] == direct["choices"] and derendered["usage"] == direct["usage"]
    plain = post(f"{COMPLETIONS}/derender", **fields)
    assert [choice["text"] for choice in plain["choices"]] == ["Hello, wor", "Hello, wor"]


def test_invalid_derender_requests_are_refused() -> None:
    reply = {"choices": [{"index": 0, "token_ids": [1]}]}
    for path, body in (
        (CHAT, {"generate_response": {"choices": [{"index": 0, "token_ids": [999]}]}}),
        (CHAT, {"generate_response": {"choices": [{"index": 1, "token_ids": [1]}]}}),
        (CHAT, {"generate_response": reply, "stream": True}),
        (CHAT, {"generate_response": {"choices": reply["choices"] * 2}}),
        (CHAT, {"generate_response": {"choices": [{"index": 0, "token_ids": [1] * 513}]}}),
        (COMPLETIONS, {"generate_responses": [{"choices": [{"index": 0, "token_ids": [1] * 513}]}]}),
        (COMPLETIONS, {"generate_responses": [reply], "prompt_tokens": [1, 2]}),
        (COMPLETIONS, {"generate_responses": [reply], "completion_request": {"prompt": ["a", "b"]}}),
    ):
        refused(ask("POST", f"{path}/derender", json=body))


def test_generate_takes_and_returns_token_ids() -> None:
    engine = FakeEngine()
    body = {"token_ids": [65, 66], "sampling_params": {"n": 2, "logprobs": 1, "max_tokens": 3}}
    reply = post(GENERATE, engine, **body)
    text = engine.tokenizer.encode(ANSWER, add_special_tokens=False)[:3]
    assert [choice["token_ids"] for choice in reply["choices"]] == [text, text]
    assert reply["choices"][0]["finish_reason"] == "length" and reply["usage"]["completion_tokens"] == 6
    assert [entry["token"] for entry in reply["choices"][1]["logprobs"]["content"]] == ["H", "e", "l"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(ask("POST", GENERATE, json=body | options))
    streamed: dict[int, list[int]] = {0: [], 1: []}
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        streamed[choice["index"]] += choice["token_ids"]
    assert streamed == {0: text, 1: text} and last["usage"]["completion_tokens"] == 6


def test_invalid_generate_requests_are_refused() -> None:
    for body in (
        {"token_ids": [], "sampling_params": {}},
        {"token_ids": [999], "sampling_params": {}},
        {"token_ids": [1], "sampling_params": {"temperature": "hot"}},
        {"token_ids": [1], "sampling_params": {"max_tokens": 0}},
        {"token_ids": [1], "sampling_params": {"stop": list("abcde")}},
        {"token_ids": [1], "sampling_params": {"max_tokens": 10**6}},
        {"token_ids": [1], "sampling_params": {"reasoning": {"start": 1}}},
        {"token_ids": [1], "sampling_params": {"thinking_token_budget": 3}},
        {"token_ids": [1], "sampling_params": {}, "features": {"mm_hashes": {}}},
        {"token_ids": [1], "sampling_params": {}, "stream_options": {"include_usage": True}},
    ):
        refused(ask("POST", GENERATE, json=body))


def test_batch_of_chats() -> None:
    engine = FakeEngine()
    other = [{"role": "user", "content": "bye"}]
    body = {"messages": [MESSAGES, other], "max_tokens": 5, "repetition_detection": {}}
    reply = post(f"{CHAT}/batch", engine, **body)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert {prompt.text for _, prompt, _, _ in engine.seen} == {
        "user:hi\nassistant:", "user:bye\nassistant:"
    }  # fmt: skip
    assert reply["usage"]["prompt_tokens"] == len("user:hi\nassistant:user:bye\nassistant:")
    for extra in ({"n": 2}, {"stream": True}, {"tools": TOOLS}, {"messages": MESSAGES}):
        refused(ask("POST", f"{CHAT}/batch", json=body | extra))
    post(f"{CHAT}/batch", **body, cls=1, _fields_set=[], self=2)  # internal names in the body are ignored


async def test_batch_of_chats_yields_to_other_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    num_turns, seen = 0, list[int]()
    begin, encode = batch.prepare_chat, batch.ChatEncoder.response_body

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def prepare(*args: Any) -> Any:
        seen.append(num_turns)
        return await begin(*args)

    def encode_whole(*args: Any) -> Any:
        seen.append(num_turns)
        return encode(*args)

    monkeypatch.setattr(streams, "MAX_BLOCKING_S", 0.0)
    monkeypatch.setattr(batch, "prepare_chat", prepare)
    monkeypatch.setattr(batch.ChatEncoder, "response_body", encode_whole)
    others = asyncio.create_task(count_turns())
    await asyncio.sleep(0)
    async with client_of(Application(FakeEngine(), make_settings({})).asgi) as client:
        answered = await client.post(f"{CHAT}/batch", json={"messages": [MESSAGES] * 3})
    others.cancel()
    assert answered.status_code == 200
    assert len(seen) == len(set(seen)) == 6


def test_invocations_are_routed_by_their_body() -> None:
    assert post("/invocations", messages=MESSAGES)["object"] == "chat.completion"
    assert post("/invocations", prompt="a")["object"] == "text_completion"
    embedder = FakeEngine(pooling=EMBEDDER)
    assert post("/invocations", embedder, input="a")["data"][0]["object"] == "embedding"
    assert post("/invocations", embedder, text_1="a", text_2="b")["data"][0]["object"] == "score"
    assert "results" in post("/invocations", embedder, query="a", documents=["b"])
    refused(ask("POST", "/invocations", json={"x": 1}))


@pytest.mark.parametrize("body", [
    {},
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "none"},
    {"chat_template_kwargs": {"mood": "x"}, "documents": [{"text": "d"}], "add_special_tokens": True},
    {"messages": [*MESSAGES, {"role": "assistant", "content": "so"}], "add_generation_prompt": False,
     "continue_final_message": True},
])  # fmt: skip
def test_chat_uses_the_tokens_that_tokenize_counts(body: dict[str, Any]) -> None:
    settings = SETTINGS | {"exclude_tools_when_tool_choice_none": True}
    fields = {"messages": MESSAGES, **body}
    counted = post("/tokenize", settings=settings, **fields)
    used = post(CHAT, settings=settings, max_tokens=4, **fields)["usage"]["prompt_tokens"]
    assert counted["count"] == used == len(counted["tokens"])
    assert complete(prompt=counted["tokens"]).json()["usage"]["prompt_tokens"] == used


def test_tokens_only_serves_no_text_route() -> None:
    only = {"tokens_only": True}
    body = {"token_ids": [64, 65], "sampling_params": {"max_tokens": 3}}
    assert post(GENERATE, settings=only, **body)["choices"][0]["token_ids"]
    assert ask("GET", "/v1/models", settings=only).status_code == 200
    assert ask("GET", "/health", settings=only).status_code == 200
    assert ask("POST", "/abort_requests", settings=only, json={"request_ids": []}).status_code == 200
    assert ask("POST", "/abort_requests", json={"request_ids": []}).status_code == 404
    for path in (CHAT, COMPLETIONS, "/v1/messages", "/v1/responses", "/tokenize", "/v1/embeddings"):
        assert ask("POST", path, settings=only, json={"messages": MESSAGES}).status_code == 404, path


def test_tokens_only_skips_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    configured: dict[str, Any] = {}
    config = SimpleNamespace(
        model=SimpleNamespace(served_model_name=("m",)), scheduler=SimpleNamespace(has_targets=False)
    )

    def configure(options: dict[str, Any], usage: str) -> SimpleNamespace:
        configured.update(options)
        return config

    monkeypatch.setattr("quire.entrypoints.models_config.configure", configure)
    monkeypatch.setattr("quire.entrypoints.launch.launch", lambda config, settings, early: 0)
    parser = FlagParser(prog="quire serve")
    serve.add_flags(parser)
    for flags, expected in (([], None), (["--tokens-only"], True)):
        configured.clear()
        assert serve.run(parser.parse_args(["m", "--port", "0", *flags])) == 0
        assert configured.get("skip_tokenizer_init") is expected
