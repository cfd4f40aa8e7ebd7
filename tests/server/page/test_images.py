"""Images in the chat, in a real browser: how they are taken, shown, sent and refused."""

import base64
import io
from collections.abc import Callable
from typing import Any

from browse import answered, ask
from PIL import Image

Open = Callable[..., Any]
SEES = {"modalities": ["image", "video"]}
GIVE = """([kind, name, type, text]) => {
    const data = new DataTransfer();
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    data.items.add(new File([bytes], name, { type }));
    const event = kind === "paste"
        ? new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })
        : new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
    document.getElementById("question").dispatchEvent(event);
    return event.defaultPrevented;
}"""
"""A browser lets no script fill the clipboard with files, or drag them in from outside."""


def png(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (24, 16), colour).save(file, "PNG")
    return file.getvalue()


def give(page: Any, kind: str, name: str, content: bytes, type: str = "image/png") -> None:
    text = base64.b64encode(content).decode()
    assert page.evaluate(GIVE, [kind, name, type, text]), "left to the browser, which goes to the file"


def image_part(content: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def test_images_come_by_button_drop_and_paste(serve: Open, open_page: Open) -> None:
    """Catches a way that takes none, a removed image that is sent, and one not shown or sent twice."""
    site = serve()
    site.engine.changes = SEES
    page = open_page(site)
    red, green, blue = png("red"), png("green"), png("blue")
    with page.expect_file_chooser() as chooser:
        page.click("#add-images")
    chooser.value.set_files([{"name": "red.png", "mimeType": "image/png", "buffer": red}])
    page.wait_for_selector("#images img[alt='red.png']")
    give(page, "drop", "green.png", green)
    page.wait_for_selector("#images img[alt='green.png']")
    give(page, "paste", "blue.png", blue)
    page.wait_for_selector("#images img[alt='blue.png']")
    page.click("[aria-label='Remove green.png']")
    ask(page, "What is this?")
    answered(page)
    assert page.locator("#images img").count() == 0
    shown = page.locator(".question img")
    assert shown.evaluate_all("nodes => nodes.map((node) => node.naturalWidth)") == [24, 24]
    give(page, "paste", "green.png", green)
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


def test_images_that_cannot_be_sent_are_told(serve: Open, open_page: Open) -> None:
    """Catches images offered to a model that does not see, a file that is none, and a conversation that one
    refused image has spoiled."""
    site = serve()
    site.engine.changes = SEES
    page = open_page(site)
    page.wait_for_selector("#add-images")
    give(page, "drop", "notes.pdf", b"%PDF", "application/pdf")
    page.wait_for_selector("text=notes.pdf cannot be read as an image.")
    give(page, "paste", "red.png", png("red"))
    page.wait_for_selector("#images img")
    assert page.locator("#image-note").is_hidden()
    ask(page, "refuse")
    assert answered(page).locator(".note").inner_text() == "max_tokens is too large."
    ask(page, "And without?")
    page.wait_for_selector(".answer:nth-child(4)[aria-busy=false]")
    assert site.bodies[-1]["messages"] == [{"role": "user", "content": "And without?"}]
    site.engine.changes = {"modalities": []}
    page.wait_for_selector("#add-images", state="hidden")
    give(page, "drop", "red.png", png("red"))
    page.wait_for_selector("text=This model takes no images.")
    assert page.locator("#images img").count() == 0
