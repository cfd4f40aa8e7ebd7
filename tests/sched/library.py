"""A LoRA adapter loader without files."""

import hashlib
from concurrent.futures import Future
from typing import Any

from quire.data.lora import AdapterFacts, LoRARequest


def lora(name: str, path: str = "", **fields: Any) -> LoRARequest:
    return LoRARequest(name, 1, path or f"/adapters/{name}", **fields)


def digest(content: str) -> bytes:
    return hashlib.sha256(content.encode()).digest()


class FakeLoader:
    """Loads adapters at_oncely, or when the test calls `bring`."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.at_once = at_once
        self.contents: dict[str, str] = {}
        """Adapter content by path; the default content is the path itself."""
        self.requested: list[tuple[LoRARequest, Future[AdapterFacts]]] = []
        self.most = 0
        self.host: dict[str, bytes] = {}

    def fetch(self, lora: LoRARequest) -> Future[AdapterFacts]:
        self.requested.append((lora, Future()))
        future = self.requested[-1][1]
        if self.at_once:
            self.complete_next()
        return future

    def complete_next(self, error: Exception | None = None) -> None:
        """Complete the oldest pending load, with an error if one is passed."""
        lora, future = next(entry for entry in self.requested if not entry[1].done())
        if error is not None:
            future.set_exception(error)
            return
        content_digest = digest(self.contents.get(lora.lora_path, lora.lora_path))
        assert lora.lora_name not in self.host, "read twice"
        self.host[lora.lora_name] = content_digest
        self.most = max(self.most, len(self.host))
        future.set_result(AdapterFacts(content_digest, 8, 100))

    def drop(self, name: str) -> None:
        self.host.pop(name, None)

    @property
    def open(self) -> list[LoRARequest]:
        return [lora for lora, future in self.requested if not future.done()]

    @property
    def names(self) -> list[str]:
        return [lora.lora_name for lora, _ in self.requested]
