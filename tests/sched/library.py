"""A reader of adapters without files."""

import hashlib
from concurrent.futures import Future
from typing import Any

from quire.data.lora import AdapterFacts, LoRARequest


def lora(name: str, path: str = "", **fields: Any) -> LoRARequest:
    return LoRARequest(name, 1, path or f"/adapters/{name}", **fields)


def digest(content: str) -> bytes:
    return hashlib.sha256(content.encode()).digest()


class Library:
    """A reader whose books come when the test says so, or at once."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.at_once = at_once
        self.contents: dict[str, str] = {}
        """By path, where that is not the path itself."""
        self.asked: list[tuple[LoRARequest, Future[AdapterFacts]]] = []
        self.most = 0
        self.host: dict[str, bytes] = {}

    def fetch(self, lora: LoRARequest) -> Future[AdapterFacts]:
        self.asked.append((lora, Future()))
        future = self.asked[-1][1]
        if self.at_once:
            self.bring()
        return future

    def bring(self, error: Exception | None = None) -> None:
        """The first that was asked for and has not come."""
        asked, future = next(each for each in self.asked if not each[1].done())
        if error is not None:
            future.set_exception(error)
            return
        found = digest(self.contents.get(asked.lora_path, asked.lora_path))
        assert asked.lora_name not in self.host, "read twice"
        self.host[asked.lora_name] = found
        self.most = max(self.most, len(self.host))
        future.set_result(AdapterFacts(found, 8, 100))

    def drop(self, name: str) -> None:
        self.host.pop(name, None)

    @property
    def open(self) -> list[LoRARequest]:
        return [asked for asked, future in self.asked if not future.done()]

    @property
    def names(self) -> list[str]:
        return [asked.lora_name for asked, _ in self.asked]
