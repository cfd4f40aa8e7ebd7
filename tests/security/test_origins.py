"""Web pages that use a server through their visitor's browser (CORS, CSRF), and open servers without a
warning: a server without a key refuses other origins, and logs its exposure."""

import asyncio
import socket
from typing import Any

import httpx
import pytest
from ask import CHAT, MESSAGES, ask, refused
from fake_engine import FakeEngine

from quire.config.env import Env
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
AUTHORIZED = {"authorization": "Bearer secret"}
ALLOWED = "access-control-allow-origin"


def talk(headers: dict[str, str], **settings: Any) -> httpx.Response:
    return ask("POST", CHAT, settings=settings, headers=headers, json={"messages": MESSAGES})


def test_cross_origin_requests_without_a_key_are_refused() -> None:
    refusal = ask("OPTIONS", CHAT, headers=PREFLIGHT)
    assert refusal.status_code == 400 and ALLOWED not in refusal.headers
    assert ALLOWED not in ask("GET", "/v1/models", headers=PAGE).headers
    for site in ("cross-site", "same-site"):
        engine = FakeEngine()
        reply = ask("POST", "/ping", engine=engine, headers={**PAGE, "sec-fetch-site": site})
        message = refused(reply, 403)["message"]
        assert "https://evil.example" in message and "--allowed-origins" in message and not engine.seen


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
    assert make_settings({}, env=Env.read({"HOME": "/", "QUIRE_API_KEY": "x"})).access.allowed_origins == [
        "*"
    ]


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
def test_private_server_has_no_warning(settings: dict[str, Any]) -> None:
    assert not exposures(make_settings(settings))


def test_all_origins_without_a_key_are_warned_about() -> None:
    ((what, remedy),) = exposures(make_settings({"host": "::1", "allowed_origins": ["*"]}))
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
