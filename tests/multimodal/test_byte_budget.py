"""Tests of the byte budget of media: waiting for free bytes, and the limit of a request."""

import asyncio
from typing import Any

import pytest
from fake_inputs import data_url, file_of, image_part, inputs, media, picture
from hostile import IMAGE, hostile_server

from quire.errors import RequestError
from quire.frontend.chat import chat_prompt
from quire.multimodal.byte_budget import BudgetShare, ByteBudget
from quire.multimodal.inputs import MediaInput, MediaLink


def test_requests_wait_for_room_and_the_oldest_never_waits() -> None:
    room, order = ByteBudget(10), list[str]()

    async def one(name: str, *wants: int) -> None:
        with room.hold(BudgetShare(100)) as hold:
            for want in wants:
                await hold.take(want)
                order.append(name)
                await asyncio.sleep(0)

    async def go() -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(one("a", 6, 6, 6), one("b", 4, 4), one("c", 1))

    asyncio.run(go())
    assert order[:4] == ["a", "b", "a", "a"] and sorted(order[4:]) == ["b", "c"] and room._left == 10


def test_cancelled_requests_release_their_room() -> None:
    room = ByteBudget(10)

    async def hold_bytes(count: int) -> None:
        with room.hold(BudgetShare(100)) as hold:
            await hold.take(count)
            await asyncio.sleep(60)

    async def go() -> None:
        tasks = [asyncio.create_task(hold_bytes(count)) for count in (9, 5, 5)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(go())
    assert room._left == 10 and not room._holds
    asyncio.run(room.take(next(_hold(room)), 10))


def _hold(room: ByteBudget) -> Any:
    with room.hold(BudgetShare(100)) as hold:
        yield hold


def test_all_items_of_a_request_count_together() -> None:
    file = file_of(picture(60, 60))
    url, reader = data_url(file), media({"image": 9}, env={"media_max_mb": 1.5 * len(file) / 2**20})
    parts = [image_part(url), image_part(url)]
    assert chat_prompt(inputs(reader), _message(*parts[:1])).media is not None
    with pytest.raises(RequestError, match=r"content\[\d\]: the media of the request have at least"):
        chat_prompt(inputs(reader), _message(*parts))


def _message(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_many_requests_wait_for_room_and_all_are_served() -> None:
    """Each request may use the whole budget. None fails, though they wait longer than the timeout of an
    item."""
    env = {"media_max_mb": len(IMAGE) * 1.5 / 2**20, "image_fetch_timeout": 60.0}
    reader = media(env=env, allowed_media_domains=("127.0.0.1",), mm_processor_cache_gb=0)

    async def go(url: str) -> None:
        items = [MediaInput("image", MediaLink(f"{url}/image.png"), "here") for _ in range(20)]
        async with asyncio.timeout(60):
            results = await asyncio.gather(*(reader.prepare([item]) for item in items))
        assert len(results) == 20

    with hostile_server() as server:
        asyncio.run(go(server.url))
    assert reader._media_processor is not None
    assert not reader._media_processor._fetching._holds
