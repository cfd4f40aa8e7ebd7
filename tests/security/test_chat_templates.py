"""Chat templates as programs (CVE-2025-61620, CVE-2025-62426): a template in a request could loop forever,
and chat_template_kwargs could replace the template or make the server tokenize on its event loop. Quire
accepts a template from a request only with --trust-request-chat-template, renders in an immutable sandbox
with a time limit, and refuses variables with the names of the renderer's arguments."""

import asyncio
import threading
from typing import Any

import pytest
from ask import CHAT, MESSAGES, ask, chat, client_of, refused
from fake_engine import FakeEngine

from quire.frontend.chat import chat_prompt
from quire.frontend.inputs import Prompt
from quire.server.app import Application
from quire.server.settings import make_settings

TRUSTED = {"trust_request_chat_template": True}


@pytest.mark.parametrize("path", [CHAT, "/tokenize", f"{CHAT}/render"])
def test_request_templates_are_refused_by_default(path: str) -> None:
    engine = FakeEngine()
    body = {"messages": MESSAGES, "chat_template": "{{ 'x' * 10 ** 9 }}"}
    error = refused(ask("POST", path, engine=engine, json=body))
    assert "--trust-request-chat-template" in error["message"] and not engine.seen


@pytest.mark.parametrize("path", [CHAT, "/tokenize", f"{CHAT}/render"])
@pytest.mark.parametrize(
    "kwargs", [{"chat_template": "{{ 1 }}"}, {"tokenize": True}, {"messages": []}, {"self": 1}], ids=str
)
def test_template_kwargs_cannot_replace_arguments(path: str, kwargs: dict[str, Any]) -> None:
    engine = FakeEngine()
    body = {"messages": MESSAGES, "chat_template_kwargs": kwargs}
    error = refused(ask("POST", path, engine=engine, json=body))
    assert (
        f"chat_template_kwargs may not contain {next(iter(kwargs))}" in error["message"] and not engine.seen
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% set _ = messages.append(1) %}changed",
        "{% set _ = messages[0].update({'role': 'x'}) %}changed",
        "{% for i in range(10**6) %}{% endfor %}looped",
    ],
)
def test_hostile_templates_are_refused(template: str) -> None:
    """The templates access Python internals, change the request, or loop over a large range()."""
    engine = FakeEngine(max_model_len=10**6)
    refused(chat(engine, TRUSTED, chat_template=template))
    assert not engine.seen


async def test_template_timeout_is_400_and_blocks_no_other_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, others_answered = threading.Event(), threading.Event()

    def rendering(*args: Any, **kwargs: Any) -> Prompt:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert others_answered.wait(60)
        return chat_prompt(*args, **kwargs)

    monkeypatch.setattr("quire.server.openai.prompts.chat_prompt", rendering)
    engine = FakeEngine()
    application = Application(engine, make_settings(TRUSTED))
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    async with client_of(application.asgi) as client:
        body = {"messages": MESSAGES, "chat_template": loops}
        slow = asyncio.create_task(client.post(CHAT, json=body, timeout=60))
        async with asyncio.timeout(60):
            while not begun.is_set():
                await asyncio.sleep(0.01)
        assert (await client.post(CHAT, json={"messages": MESSAGES})).status_code == 200
        others_answered.set()
        error = refused(await slow)
        assert "rendering the chat template took longer than 1 s" in error["message"]
        assert len(engine.seen) == 1
