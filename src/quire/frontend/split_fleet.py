"""SplitFleet: two fleets as one, of which the first computes prompts and the second computes answers."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from quire.data.kv_transfer import FIELD, RemotePrefix, remote_prefix, transfer_params
from quire.data.params import RequestOutputKind, SamplingParams
from quire.data.request import Request
from quire.data.wire import Add, Ready, StepDone, decode_from_core, decode_to_core, encode
from quire.frontend.cached_prefixes import PrefixChanges
from quire.frontend.fleet_link import Fleet, ReplicaLost, last_line
from quire.frontend.fleet_routes import FleetRoutes, Route
from quire.logs import get_logger

log = get_logger(__name__)

_ONE_TOKEN = SamplingParams(
    max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)
"""Sampling parameters of the request that computes a prompt; its token is not used."""
_MAX_UNCACHED, _MAX_UNCACHED_SHARE = 512, 1 / 16
"""Most tokens, and largest share of a prompt, that the second fleet computes after a cached prefix. Known
lengths of cached prefixes are exact up to a 16th of the prompt."""


class SplitFleet:
    """A fleet that computes prompts (`prefill`) and one that loads their prefixes and computes the answers
    (`decode`). If a prompt cannot be computed by the first fleet, the second one computes it."""

    def __init__(self, prefill: Fleet, decode: Fleet, routes: FleetRoutes) -> None:
        """`routes` chooses the replicas of `prefill`."""
        self._prefill, self._decode, self._routes = prefill, decode, routes

    async def ready(self) -> Ready:
        await self._prefill.ready()
        return await self._decode.ready()

    async def ping(self) -> None:
        await self._decode.ping()

    async def stream(self, route: Route, data: bytes) -> AsyncGenerator[str | Sequence[bytes]]:
        add = decode_to_core(data)
        assert isinstance(add, Add)
        (request,) = add.requests[:1]
        if self._is_movable(request) and not _is_cached(route, request):
            prefix = await self._compute_prompt(request)
            if prefix is not None:
                for request in add.requests:
                    request.remote = prefix
                data = encode(add)
        async with aclosing(self._decode.stream(route, data)) as stream:
            async for item in stream:
                yield item

    def _is_movable(self, request: Request) -> bool:
        """Whether the prefix of a request can move: it has a full block and no media, and the answer needs
        nothing else that is computed with the prompt. A request that continues after the loss of its replica
        computes its prefix again."""
        computes_prompt = request.pooling is not None or request.params.prompt_logprobs is not None
        is_long = request.prompt_len > self._routes.block_size
        return is_long and not (computes_prompt or request.has_run or request.media is not None)

    async def _compute_prompt(self, request: Request) -> RemotePrefix | None:
        """Let a replica compute the prompt of a request; return the prefix that it keeps, or None."""
        prompt = msgspec.structs.replace(
            request, params=_ONE_TOKEN, limit=request.prompt_len + 1, eos_id=-1, offers=True
        )
        route = self._routes.route_of([request])
        replica = ""
        try:
            async with aclosing(self._prefill.stream(route, encode(Add([prompt])))) as stream:
                async for item in stream:
                    if isinstance(item, str):
                        replica = item
                        continue
                    for message in map(decode_from_core, item):
                        if isinstance(message, StepDone) and request.id in message.output.finished:
                            finish = message.output.finished[request.id]
                            transfer = transfer_params({FIELD: finish.kv_transfer})
                            return None if transfer is None else remote_prefix(transfer)
        except Exception as error:  # the second fleet computes the prompt
            if isinstance(error, ReplicaLost):
                self._routes.lose(replica)
            log.warning(
                "The prompt of request %s is computed with its answer: %s", request.id, last_line(error)
            )
        finally:
            self._routes.end(request.id)
        return None

    async def cached_prefixes(self, route: Route, number: int) -> PrefixChanges | None:
        return await self._decode.cached_prefixes(route, number)

    async def abort(self, route: Route, sequence_ids: list[str]) -> None:
        await self._decode.abort(route, sequence_ids)

    async def call_all(self, method: str, args: dict[str, Any], timeout_s: float | None) -> list[Any]:
        fleets = (self._decode, self._prefill)
        answers = await asyncio.gather(*(fleet.call_all(method, args, timeout_s) for fleet in fleets))
        return [answer for of_fleet in answers for answer in of_fleet]


def _is_cached(route: Route, request: Request) -> bool:
    """Whether the replica that will compute the answer has nearly all of the prompt in its prefix cache."""
    num_cached = 0 if route.routes is None else route.routes.num_cached(route)
    limit = max(_MAX_UNCACHED, request.prompt_len * _MAX_UNCACHED_SHARE)
    return num_cached > 0 and request.prompt_len - num_cached <= limit
