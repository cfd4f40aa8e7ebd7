"""Fetching of urls of allowed hosts and paths, limited in size and time."""

import asyncio
import base64
import binascii
import contextlib
import errno
import ipaddress
import os
import socket
import ssl
import stat
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from quire.config.env import MediaEnv
from quire.errors import ConfigError, RequestError, Unreachable
from quire.multimodal.byte_budget import BudgetHold
from quire.multimodal.http import HttpAnswer, Take, get
from quire.remote.http import reason_of

_PORTS = {"http": 80, "https": 443}
_MAX_HOPS = 5
_FIRST_PAUSE_S = 0.1
"""Seconds before the first retry; the pause doubles with every further retry."""
_REDIRECTS = (301, 302, 303, 307, 308)
_AGAIN = (408, 429)
"""HTTP statuses below 500 after which a request is repeated. It is also repeated after all statuses from 500
on."""
_MAX_LOOKUPS = 256
"""Maximum number of concurrent DNS lookups; slow lookups do not block other work."""
_NOT_PUBLIC = tuple(
    ipaddress.ip_network(network)
    for network in (
        "192.0.0.0/24",  # protocol assignments (RFC 6890)
        "192.88.99.0/24",  # relays of 6to4 (RFC 7526)
        "64:ff9b::/96",  # NAT64
        "3fff::/20",  # documentation (RFC 9637)
        "fec0::/10",  # site-local (RFC 3879)
    )
)
"""IP networks that are not public, although `is_global` of some Python versions reports them as public."""
_URL_SAFE = "/?&=%:@!$'()*+,;~[]|"
_MAX_SHOWN = 80
"""Maximum number of characters of a url in an error message."""


class Blob(NamedTuple):
    """The encoded bytes of an image, video or audio."""

    parts: tuple[bytes, ...]
    """The bytes of a file, or of one file for each frame of a video that was sent as images."""
    media_type: str = ""
    """Media type that the sender declared; empty if none."""


class _Transient(Exception):
    """A failure after which a retry may succeed."""


@dataclass(frozen=True, slots=True)
class _Target:
    """Destination of one HTTP request: the url of a media item, or a url to which it redirects."""

    url: str
    parts: SplitResult
    host: str
    port: int

    @property
    def path(self) -> str:
        query = f"?{self.parts.query}" if self.parts.query else ""
        return quote((self.parts.path or "/") + query, safe=_URL_SAFE)


class Fetcher:
    """Fetches http(s) urls of public addresses or of the allowed domains, decodes data: urls, and reads file:
    urls below one directory."""

    def __init__(
        self, env: MediaEnv, threads: Executor, *, allowed_domains: Sequence[str] = (), allowed_path: str = ""
    ) -> None:
        """Build a fetcher that decodes data: urls and reads files in `threads`. Without `allowed_domains`, it
        fetches from all public hosts; without `allowed_path`, it reads no files."""
        self._threads = threads
        self._domains = frozenset(_normalize_host(domain) for domain in allowed_domains)
        self._root = _directory(allowed_path) if allowed_path else None
        self._max_bytes = int(env.media_max_mb * 2**20)
        self._num_tries = max(env.media_fetch_max_retries, 0) + 1
        self._num_hops = _MAX_HOPS if env.media_url_allow_redirects else 0
        self._seconds = {
            "image": env.image_fetch_timeout,
            "video": env.video_fetch_timeout,
            "audio": env.audio_fetch_timeout,
        }
        self._lookups = Lookups(_MAX_LOOKUPS)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    async def fetch(self, url: str, modality: str, hold: BudgetHold) -> Blob:
        """Fetch a url, and return its bytes, which are reserved through `hold`. Waiting for free bytes does
        not count towards the timeout. Raise Unreachable if fetching fails, and a RequestError if a data: url
        is invalid."""
        scheme = url[: url.find(":")].lower()
        if (read := {"data": self._decode_url, "file": self._read_file}.get(scheme)) is not None:
            blob = await asyncio.get_running_loop().run_in_executor(self._threads, read, url)
            await hold.take(sum(map(len, blob.parts)))
            return blob
        if scheme not in _PORTS:
            raise Unreachable(f"{url!r:.{_MAX_SHOWN}} does not start with http:, https:, data: or file:")
        seconds = self._seconds[modality]
        try:
            async with asyncio.timeout(seconds) as timer:
                return await self._fetch_with_retries(url, partial(_take, hold, timer), hold)
        except TimeoutError:
            raise Unreachable(f"{_shown_url(url)} was not fetched completely within {seconds:g} s") from None

    # ---- data: and file:

    def _decode_url(self, url: str) -> Blob:
        head, comma, data = url.partition(",")
        media_type, _, encoding = head[len("data:") :].rpartition(";")
        if not comma or encoding.strip().lower() != "base64":
            raise RequestError("a data: url must look like data:image/png;base64,...")
        media_type = media_type.partition(";")[0].strip().lower()
        texts = data.split(",") if media_type == "video/jpeg" else [data]
        return Blob(tuple(self.decode_base64(text) for text in texts), media_type)

    def decode_base64(self, text: str) -> bytes:
        if len(text) // 4 * 3 > self._max_bytes + 3:
            raise RequestError(self._too_large(f"about {len(text) // 4 * 3}"))
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise RequestError(f"invalid base64: {error}") from None

    def _read_file(self, url: str) -> Blob:
        if self._root is None:
            raise Unreachable("Cannot load local files without `--allowed-local-media-path`.")
        parts = urlsplit(url)
        refused = Unreachable("the file must be in the directory of `--allowed-local-media-path`")
        if parts.netloc not in ("", "localhost"):
            raise refused
        try:
            path = os.path.realpath(unquote(parts.path))
            if not path.startswith(self._root):
                raise refused
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(handle, "rb") as file:
                # A symbolic link may have been created since: check the file that was opened.
                if os.path.exists("/proc/self/fd") and not os.path.realpath(
                    f"/proc/self/fd/{handle}"
                ).startswith(self._root):
                    raise refused
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise Unreachable("it is not a file")
                data = file.read(self._max_bytes + 1)
        except (OSError, ValueError) as error:
            if isinstance(error, Unreachable):
                raise
            reason = getattr(error, "strerror", None) or "its name is invalid"
            raise Unreachable(f"the file cannot be read: {reason}") from None
        if len(data) > self._max_bytes:
            raise Unreachable(self._too_large("more"))
        return Blob((data,))

    def _too_large(self, size: str) -> str:
        return f"it has {size} bytes, and an item may have {self._max_bytes} (QUIRE_MEDIA_MAX_MB)"

    # ---- http(s)

    async def _fetch_with_retries(self, url: str, take: Take, hold: BudgetHold) -> Blob:
        for attempt in range(self._num_tries):
            try:
                return await self._follow(url, take)
            except _Transient as error:
                hold.release(hold.num_bytes)
                if attempt + 1 == self._num_tries:
                    raise Unreachable(f"{_shown_url(url)} cannot be fetched: {error}") from None
            await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
        raise AssertionError

    async def _follow(self, url: str, take: Take) -> Blob:
        """Return the bytes at a url, following redirects. The url of each redirect is checked like the first
        url."""
        target = _target(url)
        for _ in range(self._num_hops + 1):
            answer = await self._get(target, take)
            if answer.status == 200:
                return Blob((answer.body,), answer.headers.get("content-type", "").partition(";")[0].strip())
            location = answer.headers.get("location") if answer.status in _REDIRECTS else None
            if not location:
                raise _status_error(answer.status)
            next_target = _target(_redirect_url(target.url, location))
            if target.parts.scheme == "https" and next_target.parts.scheme == "http":
                raise Unreachable(f"{_shown_url(url)} redirects from https: to http:, which is not followed")
            target = next_target
        if not self._num_hops:
            raise Unreachable(f"{_shown_url(url)} is a redirect, and VLLM_MEDIA_URL_ALLOW_REDIRECTS is off")
        raise Unreachable(f"{_shown_url(url)} has more than {_MAX_HOPS} redirects")

    async def _get(self, target: _Target, take: Take) -> HttpAnswer:
        """Send a GET request to the first address of the host that answers, and return the response."""
        reason = ""
        for address in await self._addresses(target):
            try:
                return await get(
                    address,
                    target.port,
                    host=target.host,
                    netloc=target.parts.netloc,
                    path=target.path,
                    tls=self._tls if target.parts.scheme == "https" else None,
                    max_bytes=self._max_bytes,
                    take=take,
                )
            except ssl.SSLCertVerificationError as error:
                raise Unreachable(f"{target.host} has no valid certificate: {error.verify_message}") from None
            except OverflowError:
                raise Unreachable(self._too_large("more")) from None
            except OSError as error:
                reason = reason_of(error)
        raise _Transient(reason)

    async def _addresses(self, target: _Target) -> list[str]:
        """Return the IP addresses of the host; raise Unreachable if one of them is not allowed. The
        connection uses these addresses, so that a second DNS answer cannot change the target."""
        is_allowed = target.host in self._domains
        if self._domains and not is_allowed:
            raise Unreachable(f"{target.host} is not one of the hosts of --allowed-media-domains")
        try:
            addresses = await self._lookups.find(target.host, target.port)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not a valid name"
            raise _Transient(f"{target.host} has no address: {reason}") from None
        if not is_allowed and not all(_is_public(address) for address in addresses):
            raise Unreachable(
                f"{target.host} is a private, local or otherwise special address: only "
                "--allowed-media-domains can allow it"
            )
        return addresses


async def _take(hold: BudgetHold, timer: asyncio.Timeout, num_bytes: int) -> None:
    """Reserve bytes through `hold`, and suspend the timeout of the request until they are free."""
    loop, end = asyncio.get_running_loop(), timer.when()
    assert end is not None
    left = end - loop.time()
    timer.reschedule(None)
    await hold.take(num_bytes)
    timer.reschedule(loop.time() + left)


class Lookups:
    """Resolves host names, each in a daemon thread, since the system may take minutes to report a failure."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, int], Future[list[str]]] = {}

    async def find(self, host: str, port: int) -> list[str]:
        """Return the IP addresses of a host, without blocking the event loop. Raise an OSError if it has
        none, or if the maximum number of lookups already runs."""
        with self._lock:
            lookup = self._pending.get((host, port))
            if lookup is None:
                if len(self._pending) >= self._most:
                    raise OSError(errno.EAGAIN, f"{self._most} host names are being looked up already")
                lookup = self._pending[host, port] = Future()
                threading.Thread(target=self._look_up, args=(host, port, lookup), daemon=True).start()
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def notify(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop of a cancelled request may be closed
                loop.call_soon_threadsafe(done.set)

        lookup.add_done_callback(notify)
        await done.wait()
        return lookup.result()

    def _look_up(self, host: str, port: int, lookup: Future[list[str]]) -> None:
        try:
            addresses = _resolve(host, port)
        except (OSError, UnicodeError) as error:
            lookup.set_exception(error)
        else:
            lookup.set_result(addresses)
        finally:
            with self._lock:
                del self._pending[host, port]


def _status_error(status: int) -> Exception:
    text = f"HTTP status {status}"
    if status >= 500 or status in _AGAIN:
        return _Transient(text)
    return Unreachable(f"its server answered with {text}")


def _target(url: str) -> _Target:
    try:
        parts = urlsplit(url)
        host, port = _normalize_host(parts.hostname or ""), parts.port
    except ValueError:
        host = ""
    if not host or parts.scheme not in _PORTS:
        raise Unreachable(f"{_shown_url(url)} is not a url that can be fetched")
    if "@" in parts.netloc:
        raise Unreachable(f"{_shown_url(url.replace(parts.netloc, host, 1))} contains a user name; remove it")
    if not parts.netloc.isascii():
        parts = parts._replace(netloc=host if port is None else f"{host}:{port}")
    return _Target(url, parts, host, port or _PORTS[parts.scheme])


def _redirect_url(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        message = f"{_shown_url(url)} redirects to {_shown_url(location)!r}, which is not a url"
        raise Unreachable(message) from None


def _normalize_host(host: str) -> str:
    """Normalize a host name: ASCII, lower case, without a trailing dot."""
    host = host.strip().lower().rstrip(".")
    if host.isascii():
        return host
    try:
        return host.encode("idna").decode()
    except UnicodeError:
        return ""


def _resolve(host: str, port: int) -> list[str]:
    records = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(record[4][0]) for record in records))


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return _is_public(str(address.ipv4_mapped))
        if address.sixtofour is not None or address.teredo is not None:
            return False  # tunnels to any IPv4 address
    if any(address in network for network in _NOT_PUBLIC):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


def _directory(path: str) -> str:
    """Return the real path of a directory with a trailing separator."""
    real_path = os.path.realpath(os.path.expanduser(path))
    if not os.path.isdir(real_path):
        raise ConfigError(f"allowed_local_media_path {path!r} is not a directory")
    return os.path.join(real_path, "")


def _shown_url(url: str) -> str:
    """Return a url for an error message, without its query, which may contain a secret."""
    return url.partition("?")[0][:_MAX_SHOWN]
