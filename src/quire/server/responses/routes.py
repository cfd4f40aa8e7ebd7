"""Routes of /v1/responses, including stored responses."""

import functools
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from starlette.responses import Response, StreamingResponse

from quire.data.params import INT64_MAX
from quire.errors import RequestError
from quire.server.http.errors import NotFound, json_response
from quire.server.http.in_flight import num_body_bytes
from quire.server.http.limits import account_of, keep_open
from quire.server.http.openapi_document import add_post, replies_of
from quire.server.openai.chat import prepare_chat
from quire.server.openai.chat_request import ChatRequest
from quire.server.openai.requests import ChatBody
from quire.server.openai.run_call import answer_call, stream_call
from quire.server.openai.service import GenerationService, releases_prefix
from quire.server.openai.work_size import off_loop
from quire.server.responses.bodies import DeletedReply, ItemsReply, ResponseBody, ResponseReply
from quire.server.responses.encoder import ResponseEncoder, fixed_fields
from quire.server.responses.items import Item, new_id, read_items
from quire.server.responses.store import NO_STORE, BackgroundRun, ResponseStore, StoredResponse, StoredTurn
from quire.server.responses.translate import chat_of, check_body

_CONTINUABLE = ("completed", "incomplete")
"""Statuses of responses that `previous_response_id` may name."""


class Responses:
    """Creates responses and serves the stored ones."""

    def __init__(self, api: GenerationService) -> None:
        self.api = api
        limits = api.settings.responses
        self.store = None if limits is None else ResponseStore(limits)

    @releases_prefix
    async def create_response(self, body: ResponseBody, request: Request) -> Response:
        """Answer a conversation of items, whole or as a stream of events."""
        check_body(body)
        is_stored = self.store is not None and body.store is not False
        if body.background and not is_stored:
            raise RequestError("`background` needs `store`; " + NO_STORE, param="background")
        owner = _owner(request)
        previous_turns = self._previous_turns(body.previous_response_id, owner)
        id = new_id("resp")
        # Logprobs are attributed to output items only while the tokens are streamed.
        token_by_token = body.wants_logprobs or bool(body.background)

        def find(item_id: str) -> Item | None:
            return None if self.store is None else self.store.item(item_id, owner)

        def read() -> tuple[tuple[StoredTurn, ...], ChatBody]:
            turns = (*previous_turns, StoredTurn(read_items(body.input, find), owner))
            items = [item for turn in turns for item in turn.items]
            streams = bool(body.stream) or token_by_token
            return turns, chat_of(body, items, stream=streams, request_id=id.removeprefix("resp_"))

        if self.store is not None:
            self.store.expire()
        num_bytes = num_body_bytes(request) + sum(turn.num_bytes for turn in previous_turns)
        turns, chat_body = await off_loop(num_bytes, read)
        chat = await prepare_chat(self.api, chat_body, request, "resp")
        stored = StoredResponse(fixed_fields(body, chat, id, stored=is_stored), turns)
        on_end = functools.partial(self._store_ended, stored) if is_stored else lambda _: None
        encoder = ResponseEncoder(self.api, chat, stored.response, on_end)
        if body.background:
            return await self._in_background(stored, encoder, chat, request, stream=bool(body.stream))
        if token_by_token and not body.stream:
            work = _generate_whole(self.api, chat, encoder)
            return json_response(await self.api.running_requests.until_disconnect(request.receive, work))
        return await answer_call(self.api, chat.call, encoder, request, stream=bool(body.stream))

    async def _in_background(
        self,
        stored: StoredResponse,
        encoder: ResponseEncoder,
        chat: ChatRequest,
        request: Request,
        *,
        stream: bool,
    ) -> Response:
        store = self.store
        assert store is not None
        store.check_room()
        outputs = await stream_call(self.api, chat.call)
        release = keep_open(request.scope)

        def on_end() -> None:
            try:
                store.put(stored)
            finally:
                release()

        stored.run = BackgroundRun(outputs, encoder, keeps_events=stream, on_end=on_end)
        try:
            store.check_room()  # other requests may have been stored in the meantime
            store.put(stored)
        except BaseException:
            release()
            await outputs.aclose()
            raise
        stored.run.start(self.api.running_requests)
        return _event_stream(stored.run, -1) if stream else json_response(stored.as_dict())

    async def show_response(
        self,
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=-1, le=INT64_MAX)] = None,
    ) -> Response:
        """Return a stored response, or stream the events of a background response after `starting_after`."""
        stored = self._stored(response_id, request)
        if not stream:
            return json_response(stored.as_dict())
        if stored.run is None or not stored.run.keeps_events:
            raise RequestError(
                "only a response that was created with background=true and stream=true can be streamed again",
                param="stream",
            )
        return _event_stream(stored.run, -1 if starting_after is None else starting_after)

    async def cancel_response(self, response_id: str, request: Request) -> Response:
        """Cancel a response that runs in the background."""
        stored = self._stored(response_id, request)
        if stored.run is None:
            raise RequestError("Cannot cancel a synchronous response.", param="response_id")
        await stored.run.cancel()
        return json_response(stored.as_dict())

    async def delete_response(self, response_id: str, request: Request) -> Response:
        """Delete a stored response. A response that runs in the background is cancelled first."""
        stored = self._stored(response_id, request)
        if stored.run is not None:
            await stored.run.cancel()
        assert self.store is not None
        self.store.drop(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def list_input_items(
        self,
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """List the input items of a response, including those of previous responses."""
        items = [item for turn in self._stored(response_id, request).input_turns for item in turn.items]
        if order == "desc":
            items.reverse()
        if after is not None:
            indices = [index for index, item in enumerate(items) if item["id"] == after]
            if not indices:
                raise NotFound(f"this response has no input item {after!r:.80}", param="after")
            items = items[indices[0] + 1 :]
        shown = items[:limit]
        return json_response(
            {
                "object": "list",
                "data": shown,
                "first_id": shown[0]["id"] if shown else None,
                "last_id": shown[-1]["id"] if shown else None,
                "has_more": len(items) > limit,
            }
        )

    def _stored(self, id: str, request: Request) -> StoredResponse:
        if self.store is None:
            raise NotFound(f"Response with id {id!r:.80} not found: {NO_STORE}", param="response_id")
        return self.store.get(id, _owner(request))

    def _previous_turns(self, id: str | None, owner: int) -> tuple[StoredTurn, ...]:
        """Return the turns of the conversation up to the end of response `id`."""
        if id is None:
            return ()
        if self.store is None:
            raise RequestError(NO_STORE, param="previous_response_id")
        stored = self.store.get(id, owner, param="previous_response_id")
        status = stored.as_dict()["status"]
        if status not in _CONTINUABLE:
            raise RequestError(
                f"the response {id!r:.80} is {status}: only one that is {' or '.join(_CONTINUABLE)} can be "
                "continued",
                param="previous_response_id",
            )
        return stored.turns

    def _store_ended(self, stored: StoredResponse, response: dict[str, Any]) -> None:
        assert self.store is not None
        stored.response, stored.output_turn = response, StoredTurn(response["output"], stored.owner)
        if stored.run is None:
            self.store.put(stored)


def _owner(request: Request) -> int:
    """Return the tenant of a request. Each named key has its own responses; all other clients share tenant
    0."""
    account = account_of(request.scope)
    return 0 if account is None else account.tenant


async def _generate_whole(
    api: GenerationService, chat: ChatRequest, encoder: ResponseEncoder
) -> dict[str, Any]:
    """Generate a response with a streamed engine call, whose outputs the encoder collects, and return the
    whole response."""
    outputs = await stream_call(api, chat.call)
    try:
        async for output in outputs:
            encoder.add_output(output)
    finally:
        await outputs.aclose()
    return encoder.final_response()


def _event_stream(run: BackgroundRun, after: int) -> Response:
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(run.follow(after), headers=headers, media_type="text/event-stream")


def add_response_routes(app: FastAPI, responses: Responses) -> None:
    path, error_codes = "/v1/responses/{response_id}", (400, 404)
    show = replies_of(ResponseReply, *error_codes, stream=True)
    add_post(app, responses, "/v1/responses", Responses.create_response, ResponseReply, stream=True)
    app.get(path, **show)(responses.show_response)
    app.delete(path, **replies_of(DeletedReply, *error_codes))(responses.delete_response)
    app.post(f"{path}/cancel", **replies_of(ResponseReply, *error_codes, 413))(responses.cancel_response)
    app.get(f"{path}/input_items", **replies_of(ItemsReply, *error_codes))(responses.list_input_items)
