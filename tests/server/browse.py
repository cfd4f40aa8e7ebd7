"""What a reader does with the chat of the page."""

from typing import Any


def ask(page: Any, text: str) -> None:
    page.fill("#question", text)
    page.press("#question", "Enter")


def answered(page: Any) -> Any:
    """The newest answer, when it has ended."""
    page.wait_for_selector(".answer:last-child[aria-busy=false]")
    return page.locator(".answer").last
