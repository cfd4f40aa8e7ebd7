"""Tests of the live view, the API key dialog and the layout of the page in a real browser."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browse import answered, ask

import quire.server.page as page_module
from quire.errors import EngineDead

PHONE = {"width": 390, "height": 844}

Open = Callable[..., Any]


def test_live_numbers_are_updated(serve: Open, open_page: Open) -> None:
    """Catches a live view that is drawn once, or fields without a source."""
    site = serve()
    site.engine.changes = {"itl_ms": {"p50": 8.1, "p90": 11.6, "p99": float("nan")}}
    page = open_page(site)
    running = "[data-field=running]"
    page.wait_for_selector("[data-state=healthy]")
    seen = page.inner_text(running)
    page.wait_for_function(f"() => document.querySelector('{running}').textContent !== '{seen}'")
    texts = dict(
        page.eval_on_selector_all("[data-field]", "n => n.map(e => [e.dataset.field, e.textContent])")
    )
    assert texts["model"] == "example-model-1B-instruct"
    assert (texts["waiting"], texts["kv_usage"], texts["prefix_hit_rate"]) == ("3", "43.8 %", "62.8 %")
    assert (texts["ttft_ms.p50"], texts["ttft_ms.p99"], texts["itl_ms.p99"]) == ("41.3 ms", "263 ms", "–")
    assert [name for name, text in texts.items() if text == "–"] == ["itl_ms.p99"]
    assert page.inner_text("#blocks-text") == "4,144 of 9,472 blocks of 16 tokens in use"


def test_slowest_requests_have_bars(serve: Open, open_page: Open) -> None:
    """Catches bars without a width, which a content policy could cause."""
    slow = {"id": "chatcmpl-<b>1</b>", "total_ms": 2000.0, "queue_ms": 1000.0, "prefill_ms": 500.0}
    slow |= {"decode_ms": 400.0, "preempted_ms": 120.0, "num_preemptions": 2, "cached_tokens": 16}
    slow |= {"step_share_ms": 0.0, "prompt_tokens": 1200, "completion_tokens": 30}
    slow |= {"cache_miss": {"reason": "evicted", "from_token": 16, "evicted_s": 3.0, "tier": "device"}}
    site = serve()
    page = open_page(site)
    page.wait_for_selector("[data-state=healthy]")
    assert page.is_hidden("#slowest")
    site.engine.changes = {"slowest": [slow]}
    page.wait_for_selector("#slowest li")
    assert page.inner_text("#slowest .row") == "chatcmpl-<b>1</b>\n2,000 ms"
    words = page.inner_text("#slowest .fine")
    assert (
        "1,200 (16 cached) + 30 tokens · not cached from token 16: evicted 3,000 ms ago from device" in words
    )
    assert "preempted 2 times, 120 ms" in words
    whole = page.locator("#slowest .times").bounding_box()["width"]
    widths = [item.bounding_box()["width"] for item in page.locator("#slowest .times i").all()]
    assert [round(width / whole, 2) for width in widths] == [0.5, 0.25, 0.2]


def test_block_map_has_one_colour_per_state(serve: Open, open_page: Open) -> None:
    """Catches a map that stays empty or mixes up the states."""
    page = open_page(serve())
    page.wait_for_selector("[data-state=healthy]")
    counts = page.evaluate(
        """() => {
            const canvas = document.getElementById("blocks");
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const counts = {};
            for (let i = 0; i < data.length; i += 4) {
                const name = data.slice(i, i + 3).join();
                if (data[i + 3] === 255) counts[name] = (counts[name] ?? 0) + 1;
            }
            return counts;
        }"""
    )
    cells = serve().engine.cells
    colours = ["234,231,224", "179,201,222", "43,91,140", "207,123,52"]
    assert counts == {colour: 16 * cells.count(state) for state, colour in enumerate(colours)}


def test_engine_failure_and_lost_connection_are_shown_and_recover(serve: Open, open_page: Open) -> None:
    """Catches a page that shows stale numbers as live, or never reconnects."""
    site = serve()
    page = open_page(site)
    page.wait_for_selector("[data-state=healthy]")
    site.engine.error = EngineDead("the core has died")
    page.wait_for_selector("[data-state=sick]")
    assert page.inner_text("#status") == "the core has died"
    site.engine.error = None
    page.wait_for_selector("[data-state=healthy]")
    site.stop()
    page.wait_for_selector("[data-state=lost]")
    serve(port=site.port)
    page.wait_for_selector("[data-state=healthy]")


def test_api_key_is_requested_stored_and_sent(serve: Open, open_page: Open) -> None:
    """Catches a page that cannot be used with an API key, or does not store it."""
    site = serve(key="s3cret")
    page = open_page(site)
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("[data-state=locked]")
    page.click("#unlock")
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    page.wait_for_selector("#key-refused")
    page.fill("#key", "s3cret")
    page.press("#key", "Enter")
    page.wait_for_selector("[data-state=healthy]")
    ask(page, "hello")
    assert answered(page).locator(".prose").inner_text() == "The sky is blue."
    page.reload()
    page.wait_for_selector("[data-state=healthy]")
    assert page.locator("dialog[open]").count() == 0


def test_phone_layout_does_not_scroll_sideways(serve: Open, open_page: Open, until: Open) -> None:
    """Catches a layout wider than the screen, in the chat and in the engine view."""
    site = serve()
    page = open_page(site, viewport=PHONE, is_mobile=True, device_scale_factor=2)
    widths = "nodes => nodes.map(node => node.scrollWidth)"
    ask(page, "How is a linked list reversed?")
    answered(page)
    page.click("#controls summary")
    assert page.locator(".engine").is_hidden()
    assert max(page.eval_on_selector_all("html, body, main, .log, .engine", widths)) <= PHONE["width"]
    page.click("#show-engine")
    assert page.locator(".engine").is_visible()
    shown = site.engine.num_snapshots
    until(lambda: site.engine.num_snapshots >= shown + 3)
    assert max(page.eval_on_selector_all("html, body, main, .log, .engine", widths)) <= PHONE["width"]


def test_screenshots(serve: Open, open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a dark scheme that is not dark. QUIRE_PICTURES=docs stores the screenshots there."""
    kept = os.environ.get("QUIRE_PICTURES")
    if kept:  # record a minute of numbers in a few seconds, to fill the charts
        monkeypatch.setattr(page_module, "TICK_S", 0.02)
    looks: dict[str, dict[str, Any]] = {
        "page": {"color_scheme": "light"},
        "page-dark": {"color_scheme": "dark"},
        "page-phone": {"color_scheme": "light", "viewport": PHONE, "is_mobile": True},
    }
    paper = {}
    for name, settings in looks.items():
        page = open_page(serve(), **settings)
        ask(page, "How is a linked list reversed?")
        answered(page)
        if kept:
            page.wait_for_timeout(6000)
            page.screenshot(path=Path(kept) / f"{name}.png")
        paper[name] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {
        "page": "rgb(250, 249, 246)",
        "page-dark": "rgb(21, 21, 19)",
        "page-phone": "rgb(250, 249, 246)",
    }
