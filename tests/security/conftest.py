"""Server fixtures of this folder."""

from collections.abc import Iterator

import pytest
from raw_http import RawServer, raw_server


@pytest.fixture(scope="module")
def http_server() -> Iterator[RawServer]:
    """Serve with default limits and without an access log."""
    with raw_server(disable_uvicorn_access_log=True) as server:
        yield server
