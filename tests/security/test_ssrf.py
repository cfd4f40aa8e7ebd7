"""Server-side request forgery by media URLs (CVE-2025-6242, CVE-2026-24779): no URL and no redirect leads to
an address that is not public, and none causes an internal error."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hostile import hostile_server

from quire.config.env import MediaEnv
from quire.errors import Unreachable
from quire.multimodal.byte_budget import BudgetShare, ByteBudget
from quire.multimodal.fetch import Fetcher, _is_public


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with hostile_server() as running:
        yield running


def fetch(url: str, domains: tuple[str, ...] = ()) -> bytes:
    with ThreadPoolExecutor(1) as threads:
        fetcher = Fetcher(MediaEnv(media_fetch_max_retries=0), threads, allowed_domains=domains)
        with ByteBudget(1 << 20).hold(BudgetShare(1 << 20)) as hold:
            return asyncio.run(fetcher.fetch(url, "image", hold)).parts[0]


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "169.254.169.254", "192.0.0.8", "192.88.99.1", "224.0.0.1",
        "255.255.255.255",
        "::1", "fe80::1%eth0", "fd00::1", "fec0::1", "feff::1", "3fff::1", "3fff:fff::1", "64:ff9b::7f00:1",
        "::ffff:127.0.0.1", "2002:7f00:1::", "2001:db8::1", "::127.0.0.1",
    ],
)  # fmt: skip
def test_special_addresses_are_not_public(address: str) -> None:
    assert not _is_public(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "192.0.1.1", "192.88.98.255", "2606:2800:220:1::1"])
def test_addresses_next_to_special_networks_are_public(address: str) -> None:
    assert _is_public(address)


@pytest.mark.parametrize("path", ["/unclosed", "/no-port", "/metadata", "/elsewhere", "/etc", "/nowhere"])
def test_invalid_redirect_is_a_client_error(server: Any, path: str) -> None:
    """A ValueError of the url parser would be an internal error with a stack trace in the log."""
    with pytest.raises(Unreachable):
        fetch(server.url + path, domains=("127.0.0.1",))
    assert server.requests[-1][0] == path
