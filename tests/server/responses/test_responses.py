"""Tests of /v1/responses: complete, streamed, stored and background responses."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ask import ask, client_of, refused
from fake_engine import ANSWER, FakeEngine
from openai import APIError, AsyncOpenAI
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from quire.config.env import Env, StoreLimits
from quire.config.sections import ParallelSection
from quire.entrypoints.launch import launch
from quire.errors import ConfigError
from quire.frontend.output_stream import Outputs
from quire.server.app import Application
from quire.server.openai.api_call import ApiCall
from quire.server.openai.run_call import stream_call
from quire.server.openai.service import GenerationService
from quire.server.responses import routes
from quire.server.responses.encoder import ResponseEncoder
from quire.server.responses.items import ItemMessages
from quire.server.responses.store import ResponseStore, StoredResponse, StoredTurn, StoreFull
from quire.server.responses.translate import chat_of
from quire.server.settings import make_settings

PATH = "/v1/responses"
TIMEOUT_S = 60
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEMS: TypeAdapter[Any] = TypeAdapter(list[ResponseItem])
THOUGHTFUL = (
    '<think>Hm, żółw.</think>Let me see.<tool_call>{"name": "look", "arguments": {"at": "ż"}}</tool_call>'
    '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
)
LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
PARSERS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}


def respond(
    engine: FakeEngine | None = None, settings: dict[str, Any] | None = None, **body: Any
) -> httpx.Response:
    return ask("POST", PATH, engine=engine, settings=settings, json={"input": "hi", **body})


def read_events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, after checking their types, their numbers and the client's schema."""
    parsed_events = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        kind, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        EVENTS.validate_python(event)
        parsed_events.append(event)
    assert [event["sequence_number"] for event in parsed_events] == list(range(len(parsed_events)))
    return parsed_events


def stream(engine: FakeEngine | None = None, **body: Any) -> list[dict[str, Any]]:
    response = respond(engine, stream=True, **body)
    assert response.status_code == 200, response.text
    return read_events(response.text)


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def prompt_of(engine: FakeEngine) -> str:
    return engine.seen[-1][1].text or ""


# ---- output


def test_complete_response_matches_the_openai_client() -> None:
    reply = respond(instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=5).json()
    response = Response.model_validate(reply, strict=False)
    assert response.output_text == ANSWER[:5] and response.id.startswith("resp_")
    assert (response.status, reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert respond(max_tokens=5).json()["max_output_tokens"] == 5, "the name in chat completions"
    prompt = len("system:Be brief.\nuser:hi\nassistant:")
    assert response.usage is not None and response.usage.total_tokens == prompt + 5
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.metadata == {"a": "b"} and response.store is False  # type: ignore[attr-defined]
    assert respond().json()["status"] == "completed"


def test_stream_equals_the_complete_response() -> None:
    events = stream()
    assert kinds(events)[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds(events)[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == ANSWER == events[-4]["text"]
    unstreamed, last = respond().json(), events[-1]["response"]
    for part in (unstreamed, last):
        for name in ("id", "created_at", "completed_at"):
            part.pop(name)
        part["output"][0].pop("id")
    assert unstreamed == last


def test_reasoning_text_and_tool_calls_are_separate_items() -> None:
    unstreamed = respond(FakeEngine(THOUGHTFUL), PARSERS, tools=[LOOK]).json()
    Response.model_validate(unstreamed, strict=False)
    assert [item["type"] for item in unstreamed["output"]] == ["reasoning", "message", *["function_call"] * 2]
    thought, message, first, second = unstreamed["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, żółw."}] and not thought["summary"]
    assert message["content"][0]["text"] == "Let me see."
    assert (first["name"], json.loads(first["arguments"]), second["arguments"]) == ("look", {"at": "ż"}, "{}")
    assert first["call_id"] != second["call_id"] and first["status"] == "completed"
    assert unstreamed["usage"]["output_tokens_details"]["reasoning_tokens"] == len("Hm, żółw.".encode())

    events = stream(FakeEngine(THOUGHTFUL), settings=PARSERS, tools=[LOOK])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    for item, like in zip(done, unstreamed["output"], strict=True):
        assert {**item, "id": 0, "call_id": 0} == {**like, "id": 0, "call_id": 0}
        deltas = [event["delta"] for event in events if "delta" in event and event["item_id"] == item["id"]]
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(deltas) == text


@pytest.mark.parametrize("streams", [False, True])
def test_logprobs_cover_the_message_only(streams: bool) -> None:
    fields: dict[str, Any] = {
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "tools": [LOOK],
        "settings": PARSERS,
    }
    engine = FakeEngine("<think>Hm.</think>So.<tool_call>{}")
    last = stream(engine, **fields)[-1]["response"] if streams else respond(engine, **fields).json()
    Response.model_validate(last, strict=False)
    message = next(item for item in last["output"] if item["type"] == "message")
    logprobs = message["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in logprobs).startswith("So.")
    assert [len(entry["top_logprobs"]) for entry in logprobs] == [2] * len(logprobs)


def test_streamed_logprobs_come_with_their_text() -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "max_output_tokens": 3}
    deltas = [event for event in stream(**fields) if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in event["logprobs"]] for event in deltas] == [["H"], ["e"], ["l"]]


def test_failed_stream_ends_with_a_failed_response() -> None:
    events = stream(FakeEngine(fail_after=2))
    assert kinds(events)[-2:] == ["output_item.done", "failed"]
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert kinds(stream(FakeEngine(fail_after=0))) == ["created", "in_progress", "failed"]
    assert respond(FakeEngine(fail_after=2)).status_code == 500


# ---- input


def test_input_items_become_messages() -> None:
    engine = FakeEngine()
    engine.facts.chat_template = (
        "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.reasoning }}|{{ m.name }}"
        "{% for c in m.tool_calls %}|{{ c.function.name }}{{ c.function.arguments.a }}{% endfor %}]"
        "{% endfor %}"
    )
    call = {"type": "function_call", "name": "f", "arguments": '{"a": 1}'}
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "D"}]},
        {"role": "user", "content": "U"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "R"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        call | {"call_id": "1"},
        call | {"call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "O"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "P"}]},
    ]
    assert respond(engine, input=items, instructions="I").status_code == 200
    assert prompt_of(engine) == ("[system|I\n\nD||][user|U||][assistant|A|R||f1|f1][tool|O||f][tool|P||f]")


class Unread(list[Any]):
    """List that must not be iterated."""

    def __iter__(self) -> Any:
        raise AssertionError


def test_items_are_joined_once() -> None:
    conversation = ItemMessages("I")
    conversation._messages = Unread(conversation._messages)
    system = {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "s"}]}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    conversation.add([system, system, thought])
    texts = [conversation._messages[0]["content"], conversation._messages[1]["reasoning"]]
    conversation.add([thought, system])
    assert texts == [["I", "s", "s"], ["t", "t"]]
    assert texts[1] is conversation._messages[1]["reasoning"]
    conversation._messages = list(conversation._messages[:])
    assert conversation.messages() == [
        {"role": "system", "content": "I\n\ns\n\ns"},
        {"role": "assistant", "reasoning": "t\nt"},
        {"role": "system", "content": "s"},
    ]


def test_long_bodies_are_translated_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop = []

    def record_thread(*args: Any, **kwargs: Any) -> Any:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return chat_of(*args, **kwargs)

    monkeypatch.setattr(routes, "chat_of", record_thread)
    for length in (1, 20_000):
        assert respond(FakeEngine(max_model_len=30_000), input="x" * length).status_code == 200
    assert on_loop == [True, False]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": []}, "empty"),
        ({"input": [{"role": "bishop", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": {"a": 1}}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "not a multimodal model",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 7}]}]}, "content[0].text"),
        ({"input": [{"type": "computer_call"}]}, "computer_call"),
        ({"input": [{"type": ["message"]}]}, "not supported"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]}, "JSON"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [{"type": "function", "name": 7}]}, "tools[0].name"),
        ({"tools": [LOOK, LOOK | {"parameters": "x"}]}, "tools[1].function.parameters"),
        ({"tools": [LOOK], "tool_choice": {"type": "mcp"}}, "mcp"),
        ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "tools": [1]}}, "allowed_tools"),
        (
            {
                "tools": [LOOK],
                "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]},
            },
            "'x'",
        ),
        ({"tool_choice": "required"}, "tools"),
        ({"text": {"format": {"type": "xml"}}}, "xml"),
        ({"text": {"format": {"type": "json_schema"}}}, "schema"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "both"),
        ({"n": 2}, "`n`"),
        ({"response_format": {"type": "json_object"}}, "text.format"),
        ({"conversation": "c"}, "conversation"),
        ({"max_output_tokens": 0}, "max_tokens"),
        ({"temperature": 99}, "temperature"),
        ({"include": ["nothing"]}, "include"),
        ({"background": True}, "VLLM_ENABLE_RESPONSES_API_STORE"),
        ({"previous_response_id": "resp_1"}, "VLLM_ENABLE_RESPONSES_API_STORE"),
    ],
)
def test_unsupported_fields_are_400(body: dict[str, Any], words: str) -> None:
    assert words in refused(respond(**body))["message"]


def test_unknown_models_and_responses_are_404() -> None:
    assert refused(respond(model="gpt-5"), 404)["param"] == "model"
    assert refused(respond(input=[{"id": "msg_1"}]), 404)["param"] == "input"
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        refused(ask(method, f"{PATH}/resp_1{path}"), 404)


def test_sampling_fields_reach_the_engine() -> None:
    engine = FakeEngine()
    respond(
        engine,
        temperature=0.3,
        top_k=7,
        seed=11,
        max_output_tokens=2,
        chat_template_kwargs={"mood": "calm"},
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}},
        tools=[],
        tool_choice="auto",
        guided_regex=None,
        unknown={"is": "fine"},
    )
    _, _, params, _ = engine.seen[0]
    assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.3, 7, 11, 2)
    assert "mood:calm" in prompt_of(engine)
    assert params.structured_outputs is not None and params.structured_outputs.json == '{"type": "object"}'
    long = "x" * 600
    assert respond(input=long).status_code == 400
    assert respond(input=long, truncation="auto", max_output_tokens=2).status_code == 200


def test_allowed_tools_restrict_the_tool_choice() -> None:
    tools = [LOOK, LOOK | {"name": "listen"}]
    engine = FakeEngine('[{"name": "listen", "parameters": {}}]')
    some = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "listen"}]}
    (call,) = respond(engine, tools=tools, tool_choice=some).json()["output"]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "listen", "{}")
    assert "tools:1" in prompt_of(engine)
    engine = FakeEngine('{"at": 1}')
    reply = respond(engine, tools=tools, tool_choice={"type": "function", "name": "look"}).json()
    Response.model_validate(reply, strict=False)
    assert [(item["name"], item["arguments"]) for item in reply["output"]] == [("look", '{"at": 1}')]
    assert "tools:2" in prompt_of(engine)
    assert "auto" in refused(respond(tools=tools))["message"]  # the server has no parser


# ---- the OpenAI client


@asynccontextmanager
async def clients(
    engine: FakeEngine,
    limits: StoreLimits | None = None,
    settings: dict[str, Any] | None = None,
) -> AsyncIterator[tuple[AsyncOpenAI, httpx.AsyncClient]]:
    application = Application(engine, replace(make_settings(settings or {}), responses=limits))
    async with client_of(application.asgi) as raw:
        yield (
            AsyncOpenAI(
                api_key="-", base_url="http://test/v1", http_client=raw, max_retries=0, timeout=TIMEOUT_S
            ),
            raw,
        )


class Place(BaseModel):
    """Schema of a parsed answer."""

    city: str


async def test_openai_client_parses_structured_output() -> None:
    async with clients(FakeEngine('{"city": "Łódź"}')) as (client, _):
        parsed = await client.responses.parse(model="fake", input="x", text_format=Place)
        assert parsed.output_parsed == Place(city="Łódź")
        async with client.responses.stream(model="fake", input="x", text_format=Place) as events:
            deltas = [event.delta async for event in events if event.type == "response.output_text.delta"]
            final = await events.get_final_response()
        assert final.output_parsed == Place(city="Łódź") and "".join(deltas) == final.output_text


async def test_openai_client_assembles_streamed_tool_calls() -> None:
    async with clients(FakeEngine(THOUGHTFUL), settings=PARSERS) as (client, _):
        async with client.responses.stream(model="fake", input="x", tools=[LOOK]) as events:
            final = await events.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "message", *["function_call"] * 2]


# ---- the store


async def test_conversation_continues_from_a_stored_response() -> None:
    engine = FakeEngine("Yes.")
    async with clients(engine, StoreLimits()) as (client, raw):
        first = await client.responses.create(model="fake", input="one?", instructions="Be kind.")
        assert (await client.responses.retrieve(first.id)).output_text == "Yes."
        second = await client.responses.create(model="fake", input="two?", previous_response_id=first.id)
        assert prompt_of(engine) == "user:one?\nassistant:Yes.\nuser:two?\nassistant:"
        events = [
            event async for event in await client.responses.create(model="fake", input="s", stream=True)
        ]
        third = events[-1].response.id  # type: ignore[union-attr]
        assert (await client.responses.retrieve(third)).output_text == "Yes."

        await client.responses.delete(first.id)
        assert (await raw.get(f"{PATH}/{first.id}")).status_code == 404
        listed = await client.responses.input_items.list(second.id, order="asc", limit=2)
        texts = [item.content[0].text for item in listed.data]  # type: ignore[union-attr]
        assert texts == ["one?", "Yes."] and listed.has_more
        rest = (await raw.get(f"{PATH}/{second.id}/input_items?order=asc&after={listed.data[-1].id}")).json()
        assert [item["content"][0]["text"] for item in rest["data"]] == ["two?"] and not rest["has_more"]
        ITEMS.validate_python(rest["data"])

        again = {"type": "item_reference", "id": second.output[0].id}
        await client.responses.create(model="fake", input=[again, {"role": "user", "content": "and?"}])  # type: ignore[list-item,misc]
        assert prompt_of(engine) == "assistant:Yes.\nuser:and?\nassistant:"
        kept = await client.responses.create(model="fake", input="x", store=False)
        assert (await raw.get(f"{PATH}/{kept.id}")).status_code == 404
        assert (await raw.post(f"{PATH}/{second.id}/cancel")).status_code == 400
        assert (await raw.get(f"{PATH}/{second.id}?stream=true")).status_code == 400


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not await condition():
            await asyncio.sleep(0.01)


async def test_background_response_completes_without_a_client() -> None:
    engine = FakeEngine("Yes.", step_s=0.01)
    async with clients(engine, StoreLimits()) as (client, raw):
        queued = await client.responses.create(model="fake", input="x", background=True)
        assert queued.status == "queued" and not queued.output
        refused(await raw.post(PATH, json={"input": "x", "previous_response_id": queued.id}))

        async def is_done() -> bool:
            return (await client.responses.retrieve(queued.id)).status == "completed"

        await until(is_done)
        done = await client.responses.retrieve(queued.id)
        assert done.output_text == "Yes." and done.usage is not None and engine.num_in_flight == 0
        assert (await client.responses.cancel(queued.id)).status == "completed"
        await raw.post(PATH, json={"input": "y", "previous_response_id": queued.id})
        assert prompt_of(engine) == "user:x\nassistant:Yes.\nuser:y\nassistant:"


async def test_background_stream_can_be_resumed_from_any_event() -> None:
    async with clients(FakeEngine("Yes."), StoreLimits()) as (_, raw):
        first = read_events(
            (await raw.post(PATH, json={"input": "x", "background": True, "stream": True})).text
        )
        id = first[-1]["response"]["id"]
        again = await raw.get(f"{PATH}/{id}?stream=true")
        assert read_events(again.text) == first and kinds(first)[-1] == "completed"
        rest = (await raw.get(f"{PATH}/{id}?stream=true&starting_after=4")).text
        assert rest.count("event: ") == len(first) - 5 and '"sequence_number":5' in rest
        assert not (await raw.get(f"{PATH}/{id}?stream=true&starting_after=999")).text
        refused(await raw.get(f"{PATH}/{id}?stream=true&starting_after=x"))


@pytest.mark.parametrize("verb", ["cancel", "delete"])
async def test_background_response_can_be_cancelled_or_deleted(verb: str) -> None:
    engine = FakeEngine("x" * 400, step_s=0.05)
    async with clients(engine, StoreLimits()) as (client, raw):
        queued = await client.responses.create(model="fake", input="x", background=True)
        if verb == "cancel":
            assert (await client.responses.cancel(queued.id)).status == "cancelled"  # before the first token

            later = await client.responses.create(model="fake", input="x", background=True)

            async def has_begun() -> bool:
                return bool((await client.responses.retrieve(later.id)).output_text)

            await until(has_begun)
            ended = await client.responses.cancel(later.id)
            assert ended.status == "cancelled" and set(ended.output_text) == {"x"}
        else:
            await client.responses.delete(queued.id)
            assert (await raw.get(f"{PATH}/{queued.id}")).status_code == 404
        assert engine.num_in_flight == 0


async def test_failed_background_response_has_an_error() -> None:
    async with clients(FakeEngine(fail_after=2), StoreLimits()) as (client, raw):
        queued = await client.responses.create(model="fake", input="x", background=True)

        async def has_ended() -> bool:
            return (await client.responses.retrieve(queued.id)).status == "failed"

        await until(has_ended)
        error = (await client.responses.retrieve(queued.id)).error
        assert error is not None and "the engine failed" in error.message
        with pytest.raises(APIError):
            await client.responses.create(model="fake", input="x", previous_response_id=queued.id)


async def test_background_responses_are_limited_by_the_store() -> None:
    async with clients(FakeEngine("x" * 400, step_s=0.05), StoreLimits(max_count=1)) as (client, raw):
        running = await client.responses.create(model="fake", input="x", background=True)
        reply = await raw.post(PATH, json={"input": "x", "background": True})
        assert refused(reply, 429)["type"] == "RateLimitError" and reply.headers["retry-after"] == "1"
        await client.responses.delete(running.id)
        running = await client.responses.create(model="fake", input="x", background=True)
        await client.responses.delete(running.id)


async def test_concurrent_background_requests_respect_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both requests find a free slot before either takes it."""
    engine = FakeEngine("x" * 400, step_s=0.05)
    async with clients(engine, StoreLimits(max_count=1)) as (_, raw):
        both = asyncio.Barrier(2)

        async def together(api: GenerationService, call: ApiCall) -> Outputs:
            await both.wait()
            return await stream_call(api, call)

        monkeypatch.setattr("quire.server.responses.routes.stream_call", together)
        async with asyncio.timeout(TIMEOUT_S):
            requests = [raw.post(PATH, json={"input": "x", "background": True}) for _ in range(2)]
            replies = sorted(await asyncio.gather(*requests), key=lambda reply: reply.status_code)
        assert [reply.status_code for reply in replies] == [200, 429]
        await raw.delete(f"{PATH}/{replies[0].json()['id']}")
        assert engine.num_in_flight == 0


async def test_running_background_responses_count_toward_the_store() -> None:
    store = ResponseStore(StoreLimits(max_bytes=5_000))
    shared = StoredTurn([{"id": "u", "text": "x" * 2_000}])
    run: Any = SimpleNamespace(has_ended=False, num_bytes=0)
    for id in "ab":
        response = stored(id, shared)
        response.run = run
        store.put(response)
    store.check_room()
    run.num_bytes = 1_500
    with pytest.raises(StoreFull, match="5000 bytes"):
        store.check_room()
    run.has_ended = True
    store.check_room()
    async with clients(FakeEngine("x" * 400, step_s=0.05), StoreLimits(max_bytes=1000)) as (client, raw):
        running = await client.responses.create(model="fake", input="x" * 400, background=True)
        refused(await raw.post(PATH, json={"input": "x", "background": True}), 429)
        await client.responses.delete(running.id)
        await client.responses.create(model="fake", input="x", background=True)


@pytest.mark.parametrize(
    ("broken", "last"),
    [
        ([(ResponseStore, "put", 0)], None),
        ([(ResponseStore, "put", 1)], "completed"),
        ([(ResponseEncoder, "last_events", 0)], "failed"),
        ([(ResponseEncoder, "last_events", 0), (ResponseEncoder, "failure_events", 0)], "output_item.done"),
    ],
)
async def test_any_background_failure_ends_the_response(
    broken: list[tuple[type, str, int]], last: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams that follow it end, and the slot of the key is freed."""
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "a", "key": "sk-a", "max_concurrency": 1}]}))
    for owner, name, nth in broken:
        break_once(monkeypatch, owner, name, nth)
    engine, headers = FakeEngine("Yes."), {"authorization": "Bearer sk-a"}
    async with clients(engine, StoreLimits(), {"api_key": [str(file)]}) as (_, raw):
        body = {"input": "x", "background": True, "stream": True}
        async with asyncio.timeout(TIMEOUT_S):
            reply = await raw.post(PATH, headers=headers, json=body)
        if last is None:
            refused(reply, 500)
        else:
            events = read_events(reply.text)
            assert kinds(events)[-1] == last
            id = events[0]["response"]["id"]
            shown = (await raw.get(f"{PATH}/{id}", headers=headers)).json()
            assert shown["output"][0]["content"][0]["text"] == "Yes."
            assert last == "output_item.done" or shown["status"] == last
        assert (await raw.post(PATH, headers=headers, json={"input": "x"})).status_code == 200
        assert engine.num_in_flight == 0


def break_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, nth: int) -> None:
    """Make the call with this number fail."""
    works, num_calls = getattr(owner, name), count()

    def breaking(*args: Any, **kwargs: Any) -> Any:
        if next(num_calls) == nth:
            raise ValueError("broken")
        return works(*args, **kwargs)

    monkeypatch.setattr(owner, name, breaking)


async def test_api_keys_see_only_their_own_responses(tmp_path: Path) -> None:
    keys = [{"name": "a", "key": "sk-a", "max_concurrency": 1}, {"name": "b", "key": "sk-b"}]
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": keys}))
    owner, others = ({"authorization": f"Bearer sk-{name}"} for name in "ab")
    async with clients(FakeEngine("x" * 400, step_s=0.05), StoreLimits(), {"api_key": [str(file)]}) as (
        _,
        raw,
    ):

        async def post(path: str, headers: dict[str, str], **body: Any) -> httpx.Response:
            return await raw.post(PATH + path, headers=headers, json={"input": "x", **body})

        id = (await post("", owner, background=True)).json()["id"]
        assert (await raw.get(f"{PATH}/{id}", headers=others)).status_code == 404
        assert (await post(f"/{id}/cancel", others)).status_code == 404
        assert (await post("", others, previous_response_id=id)).status_code == 404
        assert (await post("", owner, max_output_tokens=1)).status_code == 429
        assert (await post(f"/{id}/cancel", owner)).json()["status"] == "cancelled"
        reply = (await post("", owner, max_output_tokens=1)).json()
        item = [{"id": reply["output"][0]["id"]}]
        assert (await post("", owner, input=item, max_output_tokens=1)).status_code == 200
        assert (await post("", others, input=item, max_output_tokens=1)).status_code == 404


def stored(id: str, *turns: StoredTurn, text: str = "") -> StoredResponse:
    return StoredResponse(
        {"id": id}, turns or (StoredTurn([]),), StoredTurn([{"id": f"msg_{id}", "text": text}])
    )


def test_store_evicts_old_and_oversized_responses() -> None:
    clock = [0.0]
    store = ResponseStore(StoreLimits(max_count=2, max_bytes=10_000, ttl_s=10), now=lambda: clock[0])
    for id in ("a", "b", "c"):
        store.put(stored(id))
        clock[0] += 1
    assert len(store) == 2 and store.item("msg_a") is None and store.item("msg_b") is not None
    store.put(stored("d", text="x" * 9_950))
    assert len(store) == 1 and store.get("d")
    clock[0] += 20
    store.expire()
    assert store.item("msg_d") is None and (len(store), store.num_bytes) == (0, 0)


def test_shared_turns_are_counted_once() -> None:
    store = ResponseStore(StoreLimits())
    shared = StoredTurn([{"id": "u", "text": "x" * 1000}])
    store.put(stored("a", shared))
    alone = store.num_bytes
    store.put(stored("b", shared))
    assert alone > 1000 and store.num_bytes < alone + 200
    store.drop("a")
    assert store.item("u") is not None and store.num_bytes > 1000
    store.drop("b")
    assert store.item("u") is None and store.num_bytes == 0


def test_item_stays_while_any_turn_refers_to_it() -> None:
    """Another turn holds the item by reference, or was sent one with the same id."""
    store = ResponseStore(StoreLimits())
    first = {"id": "u", "text": "1"}
    for id, item in (("a", first), ("b", first), ("c", {"id": "u", "text": "2"})):
        store.put(stored(id, StoredTurn([item, item])))
    texts = []
    for id in "abc":
        texts.append((store.item("u") or {})["text"])
        store.drop(id)
    assert texts == ["1", "1", "2"] and store.item("u") is None and store.num_bytes == 0


def test_environment_variable_enables_the_store() -> None:
    names = {"VLLM_ENABLE_RESPONSES_API_STORE": "1", "QUIRE_RESPONSES_STORE_TTL_S": "5"}
    limits = make_settings({}, env=Env.read(names)).responses
    assert limits is not None and (limits.ttl_s, limits.max_count) == (5.0, 4096)
    assert make_settings({}, env=Env.read({})).responses is None


def test_store_needs_one_api_process() -> None:
    """Only one of several processes would have the response."""
    settings = replace(make_settings({"api_server_count": 2}), responses=StoreLimits())
    config: Any = SimpleNamespace(parallel=ParallelSection(device="cpu", cpu_threads=1))
    with pytest.raises(ConfigError, match="--api-server-count 1"):
        launch(config, settings)


def test_chosen_token_ids_are_all_in_the_logprobs() -> None:
    """`logprob_token_ids` asks for logprobs of these ids, not for the best `top_logprobs`."""
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "logprob_token_ids": [5, 6, 7]}
    (message,) = respond(**fields).json()["output"]
    for entry in message["content"][0]["logprobs"]:
        assert len(entry["top_logprobs"]) >= 3
