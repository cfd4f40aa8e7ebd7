"""Web pages that use a server through their visitor's browser (CORS, CSRF), and open servers without a
warning: without a key, pages cannot operate the server, and it logs its exposure."""

import asyncio
import socket
from typing import Any

import httpx
import pytest
from ask import CHAT, MESSAGES, ask, refused
from fake_engine import FakeEngine

from quire.server import main
from quire.server.http.exposure import exposures
from quire.server.settings import make_settings

PAGE = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
PREFLIGHT = {
    **PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "content-type",
}
SAME_ORIGIN = {"origin": "http://test", "sec-fetch-site": "same-origin"}
KEY = {"api_key": ["secret"]}
DEVELOPER = {"HOME": "/", "VLLM_SERVER_DEV_MODE": "1"}
AUTHORIZED = {"authorization": "Bearer secret"}
ALLOWED = "access-control-allow-origin"


def talk(headers: dict[str, str], **settings: Any) -> httpx.Response:
    return ask("POST", CHAT, settings=settings, headers=headers, json={"messages": MESSAGES})


def test_any_origin_may_use_the_model_by_default() -> None:
    """As in vLLM."""
    allowed = ask("OPTIONS", CHAT, headers=PREFLIGHT)
    assert allowed.status_code == 200 and allowed.headers[ALLOWED] == "*"
    assert ask("GET", "/v1/models", headers=PAGE).headers[ALLOWED] == "*"
    assert talk(PAGE).headers[ALLOWED] == "*"


def test_cross_origin_requests_are_refused_if_no_origin_is_allowed() -> None:
    settings: dict[str, Any] = {"allowed_origins": []}
    refusal = ask("OPTIONS", CHAT, settings=settings, headers=PREFLIGHT)
    assert refusal.status_code == 400 and ALLOWED not in refusal.headers
    assert ALLOWED not in ask("GET", "/v1/models", settings=settings, headers=PAGE).headers
    for site in ("cross-site", "same-site"):
        engine = FakeEngine()
        headers = {**PAGE, "sec-fetch-site": site}
        reply = ask("POST", "/ping", engine=engine, settings=settings, headers=headers)
        message = refused(reply, 403)["message"]
        assert "https://evil.example" in message and "--allowed-origins" in message and not engine.seen


def test_pages_cannot_operate_a_server_without_a_key_unless_they_are_named() -> None:
    """Catches a page that puts the engine of its visitor's machine to sleep."""

    def pause(headers: dict[str, str], **settings: Any) -> int:
        return ask("POST", "/pause", settings=settings, headers=headers, env=DEVELOPER).status_code

    assert pause(PAGE) == pause(PAGE, allowed_origins=["*"]) == 403
    assert pause(PAGE, allowed_origins=["https://evil.example"]) == 200
    assert pause(SAME_ORIGIN) == pause({}) == pause({**PAGE, **AUTHORIZED}, **KEY) == 200
    reply = ask("POST", CHAT, headers=PAGE, env=DEVELOPER, json={"messages": MESSAGES})
    assert reply.status_code == 200, "the model itself may be used"


def test_same_origin_and_non_browser_clients_are_allowed() -> None:
    """Behind a proxy, the server does not know its own origin."""
    for headers in ({}, SAME_ORIGIN, {"origin": "https://quire.example", "sec-fetch-site": "same-origin"}):
        assert talk(headers).status_code == 200
    assert (
        talk({"origin": "http://old.browser"}).status_code == 200
    )  # the browser does not show it the answer


def test_any_origin_may_use_an_api_key() -> None:
    allowed = ask("OPTIONS", CHAT, settings=KEY, headers=PREFLIGHT)
    assert allowed.status_code == 200 and allowed.headers[ALLOWED] == "*"
    assert talk({**PAGE, **AUTHORIZED}, **KEY).headers[ALLOWED] == "*"
    assert talk(PAGE, **KEY).status_code == 401


def test_allowed_origins_are_honoured() -> None:
    settings = {"allowed_origins": ["https://evil.example"]}
    assert talk(PAGE, **settings).headers[ALLOWED] == "https://evil.example"
    assert talk({**PAGE, "origin": "https://other.example"}, **settings).status_code == 403
    assert talk(PAGE, allowed_origins=["*"]).headers[ALLOWED] == "*"
    assert talk({**PAGE, **AUTHORIZED}, **KEY, allowed_origins=[]).status_code == 403


# ---- warnings at startup


@pytest.mark.parametrize("host", [None, "0.0.0.0", "::", "10.0.0.7", "gpu-box.example"])
def test_public_address_without_a_key_is_warned_about(host: str | None) -> None:
    ((what, remedy),) = exposures(make_settings({"host": host}))
    assert (host or "every interface") in what and "without an API key" in what
    assert "--api-key" in remedy and "--host 127.0.0.1" in remedy
    assert not exposures(make_settings({"host": host, **KEY}))


@pytest.mark.parametrize(
    "settings",
    [{"host": "127.0.0.1"}, {"host": "localhost"}, {"host": "::1"}, {"host": "127.9.9.9"}, {"uds": "/tmp/s"},
     {"host": "0.0.0.0", "ssl_cert_reqs": 2}],
)  # fmt: skip
def test_private_server_without_other_origins_has_no_warning(settings: dict[str, Any]) -> None:
    assert not exposures(make_settings({"allowed_origins": [], **settings}))


def test_all_origins_without_a_key_are_warned_about() -> None:
    ((what, remedy),) = exposures(make_settings({"host": "::1"}))
    assert "every web page" in what and "--allowed-origins" in remedy
    assert not exposures(make_settings({"host": "::1", "allowed_origins": ["https://a.example"]}))


def test_warning_is_logged_once_by_the_announcing_process(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start_and_stop(announce: bool) -> None:
        stop = asyncio.Event()
        settings = make_settings({"port": 0, "shutdown_timeout": 0})
        monkeypatch.setattr(main, "bind", lambda http: loopback_socket())
        await main.serve(
            settings, FakeEngine(), stop=stop, announce=announce, on_serving=lambda _: stop.set()
        )

    for announce, count in ((True, 1), (False, 0)):
        caplog.clear()
        with caplog.at_level("WARNING"):
            asyncio.run(start_and_stop(announce))
        assert sum("without an API key" in record.getMessage() for record in caplog.records) == count


def loopback_socket() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener
