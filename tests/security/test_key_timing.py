"""Timing of key comparison (CVE-2025-59425): `==` ends at the first wrong character, so that a key could be
guessed character by character. Quire compares SHA-256 digests in constant time, and all keys each time."""

import hmac

import pytest
from ask import status_of
from fake_engine import FakeEngine

from quire.server.app import Application
from quire.server.settings import make_settings

KEYS = ["sk-first-key", "sk-second-key", "sk-third-key"]


@pytest.fixture(scope="module")
def application() -> Application:
    return Application(FakeEngine(), make_settings({"api_key": KEYS}))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the lengths of the values that are compared in constant time during a request."""
    lengths: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        lengths.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    return lengths


@pytest.mark.parametrize(
    ("key", "status"),
    [(key, 200) for key in KEYS]
    + [(key, 401) for key in ("", "s", "sk-first-ke", "sk-first-kez", "sk-first-key2", "x" * 50_000)],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_every_key_costs_the_same_comparisons(
    application: Application, compared: list[tuple[int, int]], header: str, key: str, status: int
) -> None:
    value = f"Bearer {key}" if header == "authorization" else key
    assert status_of(application, "/v1/models", {header.encode(): value.encode()}) == status
    assert compared == [(32, 32)] * len(KEYS)


def test_keys_are_compared_for_other_auth_schemes(
    application: Application, compared: list[tuple[int, int]]
) -> None:
    for value in (b"Basic sk-first-key", b"sk-first-key", b""):
        compared.clear()
        assert status_of(application, "/v1/models", {b"authorization": value}) == 401
        assert len(compared) == len(KEYS)
