"""Warnings about a server that is reachable without an API key, and their remedies."""

import ipaddress
import ssl
from typing import NamedTuple

from quire.config.server_sections import HttpSection
from quire.server.settings import ServerSettings


class Exposure(NamedTuple):
    """A way to use the server without an API key, which the operator may not intend, and its remedy."""

    risk: str
    remedy: str


def exposures(settings: ServerSettings) -> list[Exposure]:
    """Return the ways to reach a server without an API key, for the log and for `quire doctor`. The list is
    empty if the server has keys or requires client certificates."""
    if settings.keys or settings.http.ssl_cert_reqs == ssl.CERT_REQUIRED:
        return []
    warnings = []
    if is_public(settings.http):
        address = settings.http.host or "every interface"
        warnings.append(
            Exposure(
                f"the server listens on {address} without an API key: any client that reaches it can use it",
                "give --api-key (or QUIRE_API_KEY), or listen on this machine only with --host 127.0.0.1",
            )
        )
    if "*" in settings.access.allowed_origins:
        warnings.append(
            Exposure(
                "--allowed-origins is * without an API key: every web page that is opened on a machine with "
                "access to the server can use it",
                "give --api-key (or QUIRE_API_KEY), or name the origins, or leave --allowed-origins out",
            )
        )
    return warnings


def is_public(http: HttpSection) -> bool:
    """Whether other machines may reach the server, judged by its address."""
    if http.uds:
        return False
    host = (http.host or "0.0.0.0").strip("[]").partition("%")[0]
    if host == "localhost" or host.endswith(".localhost"):
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True
