"""Tests of the chat page in a real browser, against a server with scripted answers."""

from collections.abc import Callable
from typing import Any

import pytest
from browse import answered, ask

Open = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("rare_events")


def wait_for(page: Any, expression: str) -> None:
    page.wait_for_function(expression)


def test_answer_is_streamed_into_the_page(serve: Open, open_page: Open) -> None:
    """Catches a broken stream reader, lost history, requests to elsewhere, and any console message."""
    site = serve()
    page = open_page(site)
    ask(page, "Why is the sky blue?")
    answer = answered(page)
    assert answer.locator(".prose").inner_text() == "The sky is blue."
    stats = answer.locator(".stats").inner_text().replace("\u00a0", " ")
    assert stats.startswith("3 tokens · ") and "tok/s" in stats and "TTFT" in stats
    assert page.inner_text("#context") == "context: 23 of 8,192 tokens"
    ask(page, "And at night?")
    answered(page)
    roles = [message["role"] for message in site.bodies[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert site.bodies[1]["messages"][1]["content"] == "The sky is blue."
    assert all(url.startswith(site.url) for url in page.requests)
    assert page.problems == []


def test_sampling_controls_and_keyboard_shortcuts(serve: Open, open_page: Open) -> None:
    """Catches controls that are not sent, empty ones that are, and a Shift+Enter that sends."""
    site = serve()
    page = open_page(site)
    page.click("#controls summary")
    for name, value in {
        "temperature": "0.7",
        "top_p": "0.95",
        "top_k": "40",
        "max_tokens": "64",
        "seed": "7",
    }.items():
        page.fill(f"[name={name}]", value)
    page.fill("[name=system]", "Be brief.")
    page.fill("#question", "one")
    page.press("#question", "Shift+Enter")
    page.keyboard.type("two")
    page.press("#question", "Enter")
    answered(page)
    page.click("#defaults")
    ask(page, "three")
    answered(page)
    first, second = site.bodies
    assert first == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one\ntwo"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 40,
        "max_tokens": 64,
        "seed": 7,
    }
    assert second.keys() == {"messages", "stream", "stream_options"}


def test_invalid_control_value_is_not_sent(serve: Open, open_page: Open) -> None:
    """Catches a question that is lost to a refused request, or swallowed by a closed panel."""
    site = serve()
    page = open_page(site)
    page.click("#controls summary")
    page.fill("[name=top_p]", "1.5")
    page.click("#controls summary")
    ask(page, "hello")
    assert page.locator("#controls").get_attribute("open") is not None
    assert page.input_value("#question") == "hello"
    page.fill("[name=top_p]", "0.5")
    page.press("#question", "Enter")
    answered(page)
    assert [body["top_p"] for body in site.bodies] == [0.5]


def test_stop_aborts_the_request_on_the_server(serve: Open, open_page: Open, until: Open) -> None:
    """Catches a stop that only hides the text while the engine continues."""
    site = serve()
    page = open_page(site)
    for num_stopped, way in enumerate(("button", "key", "new chat"), 1):
        ask(page, "endless")
        wait_for(page, "() => document.querySelector('.prose')?.textContent.length > 30")
        if way == "key":
            page.keyboard.press("Escape")
        else:
            page.click({"button": "#stop", "new chat": "#new"}[way])
        page.wait_for_selector("#send")
        until(lambda num=num_stopped: site.num_aborted == num)
        if way == "new chat":
            assert page.locator(".answer, .question").count() == 0
        else:
            assert answered(page).locator(".stats").inner_text().endswith("stopped"), way
        ask(page, "again")
        assert answered(page).locator(".prose").inner_text() == "The sky is blue.", way
        assert len(site.bodies[-1]["messages"]) == (1 if way == "new chat" else 3), way
        page.click("#new")


def test_retry_sends_the_same_request(serve: Open, open_page: Open) -> None:
    """Catches a retry that sends the old answer along, or leaves it on the page."""
    site = serve()
    page = open_page(site)
    ask(page, "hello")
    answered(page).locator("[data-retry]").click()
    page.wait_for_function("() => document.querySelector('.answer[aria-busy=false]')")
    assert site.bodies[0] == site.bodies[1]
    assert page.locator(".answer").count() == 1


def test_server_errors_are_shown(serve: Open, open_page: Open) -> None:
    """Catches a server error that leaves the page waiting forever or shows no message."""
    page = open_page(serve())
    for question, problem in {
        "refuse": "max_tokens is too large.",
        "overload": "The server answered with status 503.",
        "fail": "The engine stopped.",
        "cut": "The connection ended before the answer did.",
    }.items():
        ask(page, question)
        assert answered(page).locator(".note").inner_text() == problem, question
        assert page.locator("#send").is_visible(), question
        page.click("#new")


def test_markdown_is_rendered(serve: Open, open_page: Open) -> None:
    """Catches code blocks, lists and emphasis that do not survive being streamed in pieces."""
    page = open_page(serve())
    ask(page, "How is a linked list reversed?")
    prose = answered(page).locator(".prose")
    assert prose.locator("> *").evaluate_all("nodes => nodes.map(node => node.tagName)") == [
        "P",
        "DIV",
        "P",
        "OL",
    ]
    assert prose.locator("pre code").inner_text().startswith("def reverse(head: Node | None)")
    assert prose.locator("strong").inner_text() == "one node at a time"
    assert prose.locator("> ol > li").count() == 3
    assert prose.locator("ol ul li").count() == 2
    assert "```" not in prose.inner_text() and "**" not in prose.inner_text()


def test_copy_buttons_copy_the_source_text(serve: Open, open_page: Open) -> None:
    """Catches a copy of the rendered text instead of the source text."""
    page = open_page(serve(), permissions=["clipboard-read", "clipboard-write"])
    ask(page, "How is a linked list reversed?")
    answered(page).locator("[data-copy=code]").click()
    assert page.evaluate("navigator.clipboard.readText()").endswith("\n    return before")
    page.click("[data-copy=answer]")
    assert "```python\ndef reverse" in page.evaluate("navigator.clipboard.readText()")


def test_model_output_is_never_parsed_as_html(serve: Open, open_page: Open) -> None:
    """Catches script injection through the answer."""
    page = open_page(serve())
    ask(page, "inject")
    prose = answered(page).locator(".prose")
    assert prose.locator("img, script, b, a").count() == 0
    assert '<img src=x onerror="window.hit=1"> <script>' in prose.inner_text()
    assert prose.locator("strong").inner_text() == "<b>bold</b>"
    assert page.evaluate("window.hit") is None
    assert page.problems == []


def test_streaming_text_does_not_move_the_layout(serve: Open, open_page: Open) -> None:
    """Catches layout jumps: a composer that moves, or a scroll position that is lost."""
    page = open_page(serve())
    place = "() => document.getElementById('composer').getBoundingClientRect().top"
    top = page.evaluate(place)
    ask(page, "endless")
    wait_for(page, "() => log.scrollTop > 40")
    assert page.evaluate(place) == top
    page.evaluate("log.scrollTop = 0")
    length = page.evaluate("document.querySelector('.prose').textContent.length")
    wait_for(page, f"() => document.querySelector('.prose').textContent.length > {length} + 200")
    assert page.evaluate("log.scrollTop") == 0
    page.keyboard.press("Escape")
