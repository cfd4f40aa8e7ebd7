"""/v1/responses, and the responses that are kept."""

import functools
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from starlette.responses import Response, StreamingResponse

from quire.data.params import INT64_MAX
from quire.errors import RequestError
from quire.server.http.document import BODY, CODES, replies_of
from quire.server.http.errors import NotFound, json_response
from quire.server.http.limits import account_of, stay
from quire.server.openai.chat_request import Talk, begin_talk
from quire.server.openai.prompts import off_loop
from quire.server.openai.service import GenerationService
from quire.server.responses.bodies import ResponseBody
from quire.server.responses.encoder import ResponseEncoder, frame_of
from quire.server.responses.items import Item, new_id, read_items
from quire.server.responses.replies import DeletedReply, ItemsReply, ResponseReply
from quire.server.responses.run import BackgroundRun
from quire.server.responses.store import NO_STORE, Store, StoredResponse, StoredTurn
from quire.server.responses.translate import chat_of, check_body

_CONTINUED = ("completed", "incomplete")
"""Endings that a conversation can go on behind."""


class Responses:
    """Makes responses, and has those that are kept."""

    def __init__(self, api: GenerationService) -> None:
        self.api = api
        limits = api.settings.responses
        self.store = None if limits is None else Store(limits)

    async def create(self, body: ResponseBody, request: Request) -> Response:
        check_body(body)
        keeps = self.store is not None and body.store is not False
        if body.background and not keeps:
            raise RequestError("`background` needs `store`; " + NO_STORE, param="background")
        owner = _owner(request)
        before = self._before(body.previous_response_id, owner)
        find = functools.partial(self._item, owner=owner)
        asked = (*before, StoredTurn(read_items(body.input, find), owner))
        id = new_id("resp")
        # Tokens are told apart by what they say only as they come.
        by_token = body.wants_logprobs or bool(body.background)
        items = [item for turn in asked for item in turn.items]
        made = functools.partial(
            chat_of, body, items, stream=bool(body.stream) or by_token, request_id=id.removeprefix("resp_")
        )
        chat = await off_loop(sum(turn.num_bytes for turn in asked), made)
        talk = await begin_talk(self.api, chat, request, "resp")
        stored = StoredResponse(frame_of(body, talk, id, stored=keeps), asked)
        keep = functools.partial(self._keep, stored) if keeps else _forget
        encoder = ResponseEncoder(self.api, talk, stored.response, keep)
        if body.background:
            return await self._in_background(stored, encoder, talk, request, stream=bool(body.stream))
        if by_token and not body.stream:
            work = _whole(self.api, talk, encoder)
            return json_response(await self.api.answering.until_gone(request.receive, work))
        return await self.api.answer(talk.job, encoder, request, stream=bool(body.stream))

    async def _in_background(
        self, stored: StoredResponse, encoder: ResponseEncoder, talk: Talk, request: Request, *, stream: bool
    ) -> Response:
        store = self.store
        assert store is not None
        store.check_room()
        outputs = await self.api.streamed(talk.job)
        leave = stay(request.scope)

        def on_end() -> None:
            try:
                store.put(stored)
            finally:
                leave()

        stored.run = BackgroundRun(outputs, encoder, keeps_events=stream, on_end=on_end)
        try:
            store.check_room()  # others may have come meanwhile
            store.put(stored)
        except BaseException:
            leave()
            await outputs.aclose()
            raise
        stored.run.start(self.api.answering)
        return _followed(stored.run, -1) if stream else json_response(stored.shown())

    def show(self, id: str, request: Request, *, stream: bool, starting_after: int | None) -> Response:
        stored = self._stored(id, request)
        if not stream:
            return json_response(stored.shown())
        if stored.run is None or not stored.run.keeps_events:
            raise RequestError(
                "only a response that was asked for with background=true and stream=true can be streamed "
                "again",
                param="stream",
            )
        return _followed(stored.run, -1 if starting_after is None else starting_after)

    async def cancel(self, id: str, request: Request) -> Response:
        stored = self._stored(id, request)
        if stored.run is None:
            raise RequestError("Cannot cancel a synchronous response.", param="response_id")
        await stored.run.cancel()
        return json_response(stored.shown())

    async def delete(self, id: str, request: Request) -> Response:
        stored = self._stored(id, request)
        if stored.run is not None:
            await stored.run.cancel()
        assert self.store is not None
        self.store.drop(id)
        return json_response({"id": id, "object": "response", "deleted": True})

    def input_items(
        self, id: str, request: Request, *, limit: int, order: str, after: str | None
    ) -> Response:
        items = [item for turn in self._stored(id, request).asked for item in turn.items]
        if order == "desc":
            items.reverse()
        if after is not None:
            places = [place for place, item in enumerate(items) if item["id"] == after]
            if not places:
                raise NotFound(f"this response has no input item {after!r:.80}", param="after")
            items = items[places[0] + 1 :]
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

    def _item(self, id: str, *, owner: int) -> Item | None:
        return None if self.store is None else self.store.item(id, owner)

    def _before(self, id: str | None, owner: int) -> tuple[StoredTurn, ...]:
        """What was said up to the end of a response."""
        if id is None:
            return ()
        if self.store is None:
            raise RequestError(NO_STORE, param="previous_response_id")
        stored = self.store.get(id, owner, param="previous_response_id")
        status = stored.shown()["status"]
        if status not in _CONTINUED:
            raise RequestError(
                f"the response {id!r:.80} is {status}: only one that is {' or '.join(_CONTINUED)} can be "
                "gone on with",
                param="previous_response_id",
            )
        return stored.turns

    def _keep(self, stored: StoredResponse, response: dict[str, Any]) -> None:
        assert self.store is not None
        stored.response, stored.said = response, StoredTurn(response["output"], stored.owner)
        if stored.run is None:
            self.store.put(stored)


def _owner(request: Request) -> int:
    """Whose responses it may see: keys with names have their own, all others share."""
    account = account_of(request.scope)
    return 0 if account is None else account.tenant


def _forget(response: dict[str, Any]) -> None:
    """Nobody will ask for it again."""


async def _whole(api: GenerationService, talk: Talk, encoder: ResponseEncoder) -> dict[str, Any]:
    """A response that is not streamed, of outputs that are."""
    outputs = await api.streamed(talk.job)
    try:
        async for output in outputs:
            encoder.hear(output)
    finally:
        await outputs.aclose()
    return encoder.ended()


def _followed(run: BackgroundRun, after: int) -> Response:
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(run.follow(after), headers=headers, media_type="text/event-stream")


def add_response_routes(app: FastAPI, responses: Responses) -> None:
    kept = (400, 404)
    reply = functools.partial(replies_of, ResponseReply)

    @app.post("/v1/responses", **reply(*CODES, stream=True), **BODY)
    async def create_response(body: ResponseBody, request: Request) -> Response:
        """Answer a conversation of items, whole or as a stream of events."""
        return await responses.create(body, request)

    @app.get("/v1/responses/{response_id}", **reply(*kept, stream=True))
    async def show_response(
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=-1, le=INT64_MAX)] = None,
    ) -> Response:
        """A response that is kept; of one in the background its events, from a number on."""
        return responses.show(response_id, request, stream=stream, starting_after=starting_after)

    @app.delete("/v1/responses/{response_id}", **replies_of(DeletedReply, *kept))
    async def delete_response(response_id: str, request: Request) -> Response:
        """Forget a response; one that runs in the background ends."""
        return await responses.delete(response_id, request)

    @app.post("/v1/responses/{response_id}/cancel", **reply(*kept, 413))
    async def cancel_response(response_id: str, request: Request) -> Response:
        """End a response in the background."""
        return await responses.cancel(response_id, request)

    @app.get("/v1/responses/{response_id}/input_items", **replies_of(ItemsReply, *kept))
    async def list_input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """The items that a response answers, those of earlier responses too."""
        return responses.input_items(response_id, request, limit=limit, order=order, after=after)
