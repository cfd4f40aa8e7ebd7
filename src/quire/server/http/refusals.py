"""Limits and log of connections and requests that are refused before they reach the application."""

import asyncio
import ipaddress
import resource
from dataclasses import dataclass, field

from quire.config.server_sections import HttpSection
from quire.logs import get_logger

logger = get_logger(__name__)

LOG_INTERVAL_S = 60.0
_MAX_DEFAULT = 65_536
"""Largest default of max_connections, however many files a process may open."""
_MIN_OTHER_FILES = 64
"""File descriptors reserved for other uses: engine sockets, adapters, media downloads."""


def default_max_connections(num_files: int) -> int:
    """Return the maximum connections for a limit of open files: at most seven eighths of the limit, since
    other file descriptors are needed, too."""
    if num_files == resource.RLIM_INFINITY:
        return _MAX_DEFAULT
    return max(min(num_files - max(num_files // 8, _MIN_OTHER_FILES), _MAX_DEFAULT), 1)


@dataclass
class RefusalLog:
    """Log of refused clients: the first refusal of a cause is logged at once, later refusals as one line per
    cause and interval."""

    interval_s: float = LOG_INTERVAL_S
    _counts: dict[str, int] = field(default_factory=dict)
    """Refusals since the last log line, by cause; a cause is removed after an interval without refusals."""

    def count(self, cause: str, client: str) -> None:
        """Count one refusal. `cause` must be one of few texts and must not quote client input."""
        if cause in self._counts:
            self._counts[cause] += 1
            return
        self._counts[cause] = 0
        logger.warning("Refused a client (%s): %s", client, cause)
        asyncio.get_running_loop().call_later(self.interval_s, self._report, cause)

    def _report(self, cause: str) -> None:
        count = self._counts.pop(cause)
        if count:
            self._counts[cause] = 0
            logger.warning("Refused %d more connections within %g s: %s", count, self.interval_s, cause)
            asyncio.get_running_loop().call_later(self.interval_s, self._report, cause)


class OpenConnections:
    """Counters of the open connections of this process, in total and by client network, with limits."""

    def __init__(self, *, max_total: int, max_per_address: int) -> None:
        self._max_total = max_total
        self._max_per_address = max_per_address
        self._num_open = 0
        self._by_network: dict[str, int] = {}

    @classmethod
    def limited_by(cls, http: HttpSection) -> "OpenConnections":
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        total = http.max_connections or default_max_connections(num_files)
        return cls(
            max_total=total, max_per_address=http.max_connections_per_address or max(total * 3 // 4, 1)
        )

    def problem(self, network: str) -> str:
        """Return an error message if a limit forbids one more connection of `network`, else an empty text."""
        if self._num_open >= self._max_total:
            return (
                f"{self._max_total} connections are open, the limit of --max-connections; try again later, "
                "or raise it together with the limit of open files (ulimit -n)"
            )
        if network and self._by_network.get(network, 0) >= self._max_per_address:
            return (
                f"{self._max_per_address} connections of one address are open, the limit of "
                "--max-connections-per-address; close some, or raise it"
            )
        return ""

    def add(self, network: str) -> None:
        self._num_open += 1
        self._by_network[network] = self._by_network.get(network, 0) + 1

    def remove(self, network: str) -> None:
        self._num_open -= 1
        self._by_network[network] -= 1
        if not self._by_network[network]:
            del self._by_network[network]


def network_of(host: str) -> str:
    """Return the network that a connection is counted for: an IPv4 address, or the /64 network of an IPv6
    address. It is empty for a Unix socket, where clients have no address."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))
