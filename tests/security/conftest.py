"""Servers that tests of this folder share."""

from collections.abc import Iterator

import pytest
from raw_http import RawServer, raw_server


@pytest.fixture(scope="module")
def http_server() -> Iterator[RawServer]:
    """Serve with the limits of a server without flags, and without a log line for each request."""
    with raw_server(disable_uvicorn_access_log=True) as server:
        yield server
