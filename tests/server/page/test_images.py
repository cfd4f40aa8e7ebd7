"""Tests of images in the chat page in a real browser: added, shown, sent and refused."""

import base64
import io
from collections.abc import Callable
from typing import Any

import pytest
from browse import answered, ask
from PIL import Image

from quire.server import page as page_module

Open = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("rare_events")
VISION_MODEL = {"modalities": ["image", "video"]}
DISPATCH_FILE = """([kind, name, type, text]) => {
    const data = new DataTransfer();
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    data.items.add(new File([bytes], name, { type }));
    const event = kind === "paste"
        ? new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })
        : new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
    document.getElementById("question").dispatchEvent(event);
    return event.defaultPrevented;
}"""
"""Script that dispatches a synthetic event with a file: a browser lets no script fill the clipboard or drag
files in."""


def png(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (24, 16), colour).save(file, "PNG")
    return file.getvalue()


def drop_or_paste(page: Any, kind: str, name: str, content: bytes, type: str = "image/png") -> None:
    text = base64.b64encode(content).decode()
    assert page.evaluate(DISPATCH_FILE, [kind, name, type, text]), "the browser opens the file instead"


def image_part(content: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def test_images_are_added_by_button_drop_and_paste(serve: Open, open_page: Open) -> None:
    """Catches an input method that adds no image, a removed image that is sent, and one that is sent
    twice."""
    site = serve()
    site.engine.changes = VISION_MODEL
    page = open_page(site)
    red, green, blue = png("red"), png("green"), png("blue")
    with page.expect_file_chooser() as chooser:
        page.click("#add-images")
    chooser.value.set_files([{"name": "red.png", "mimeType": "image/png", "buffer": red}])
    page.wait_for_selector("#images img[alt='red.png']")
    drop_or_paste(page, "drop", "green.png", green)
    page.wait_for_selector("#images img[alt='green.png']")
    drop_or_paste(page, "paste", "blue.png", blue)
    page.wait_for_selector("#images img[alt='blue.png']")
    page.click("[aria-label='Remove green.png']")
    ask(page, "What is this?")
    answered(page)
    assert page.locator("#images img").count() == 0
    shown = page.locator(".question img")
    assert shown.evaluate_all("nodes => nodes.map((node) => node.naturalWidth)") == [24, 24]
    drop_or_paste(page, "paste", "green.png", green)
    page.wait_for_selector("#images img")
    ask(page, "")
    answered(page)
    contents = [message["content"] for message in site.bodies[-1]["messages"]]
    text = {"type": "text", "text": "What is this?"}
    assert contents == [
        [image_part(red), image_part(blue), text],
        "The sky is blue.",
        [image_part(green)],
    ]
    assert page.problems == []


def test_images_that_cannot_be_sent_are_reported(
    serve: Open, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches images offered to a text-only model, a file that is no image, and a refused image that stays
    in the history."""
    monkeypatch.setattr(page_module, "TICK_S", 0.5)  # the model changes below
    site = serve()
    site.engine.changes = VISION_MODEL
    page = open_page(site)
    page.wait_for_selector("#add-images")
    drop_or_paste(page, "drop", "notes.pdf", b"%PDF", "application/pdf")
    page.wait_for_selector("text=notes.pdf cannot be read as an image.")
    drop_or_paste(page, "paste", "red.png", png("red"))
    page.wait_for_selector("#images img")
    assert page.locator("#image-note").is_hidden()
    ask(page, "refuse")
    assert answered(page).locator(".note").inner_text() == "max_tokens is too large."
    ask(page, "And without?")
    page.wait_for_selector(".answer:nth-child(4)[aria-busy=false]")
    assert site.bodies[-1]["messages"] == [{"role": "user", "content": "And without?"}]
    site.engine.changes = {"modalities": []}
    page.wait_for_selector("#add-images", state="hidden")
    drop_or_paste(page, "drop", "red.png", png("red"))
    page.wait_for_selector("text=This model takes no images.")
    assert page.locator("#images img").count() == 0
