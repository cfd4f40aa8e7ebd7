"""Helpers that use the chat of the page as a reader does."""

from typing import Any


def ask(page: Any, text: str) -> None:
    page.fill("#question", text)
    page.press("#question", "Enter")


def answered(page: Any) -> Any:
    """Return the newest answer after it has ended."""
    page.wait_for_selector(".answer:last-child[aria-busy=false]")
    return page.locator(".answer").last
