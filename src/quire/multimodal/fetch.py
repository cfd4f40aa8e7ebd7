"""Fetching: what a url stands for, as bytes. Whatever is behind it has to be allowed, small and quick."""

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

_PORTS = {"http": 80, "https": 443}
_MAX_HOPS = 5
_FIRST_PAUSE_S = 0.1
"""Before a second try; the next ones wait twice as long each."""
_REDIRECTS = (301, 302, 303, 307, 308)
_AGAIN = (408, 429)
"""Statuses below 500 that may be other ones next time."""
_MAX_LOOKUPS = 256
"""Threads that ask for addresses: names that nobody answers for hold up no other work."""
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
"""Networks that lead to private addresses or nowhere, and that `is_global` of some Pythons calls public."""
_URL_SAFE = "/?&=%:@!$'()*+,;~[]|"
_SHOWN = 80
"""Characters of a url in errors."""


class Blob(NamedTuple):
    """An item as it was sent."""

    parts: tuple[bytes, ...]
    """Mostly one; of a video that comes as images, one a frame."""
    media_type: str = ""
    """As its sender calls it; empty: nobody said."""


class _Transient(Exception):
    """It did not work, and may the next time."""


@dataclass(frozen=True, slots=True)
class _Target:
    """Where one hop goes."""

    url: str
    parts: SplitResult
    host: str
    port: int

    @property
    def path(self) -> str:
        query = f"?{self.parts.query}" if self.parts.query else ""
        return quote((self.parts.path or "/") + query, safe=_URL_SAFE)


class Fetcher:
    """Fetches by http(s) what the public may see, or what is on the hosts that the operator names; data: urls
    are decoded, and file: urls are read below one directory."""

    def __init__(
        self,
        env: MediaEnv,
        threads: Executor,
        *,
        allowed_domains: Sequence[str] = (),
        allowed_path: str = "",
    ) -> None:
        """`threads` read what is near."""
        self._threads = threads
        self._domains = frozenset(_plain(domain) for domain in allowed_domains)
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
        """An Unreachable says why it cannot be had, a RequestError what is wrong with a data: url. What comes
        is held in `hold`; to wait for room takes none of its time."""
        scheme = url[: url.find(":")].lower()
        if (read := {"data": self._decode_url, "file": self._read_file}.get(scheme)) is not None:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, read, url)
            await hold.take(sum(map(len, found.parts)))
            return found
        if scheme not in _PORTS:
            raise Unreachable(f"{url!r:.{_SHOWN}} is no url that starts with http:, https:, data: or file:")
        seconds = self._seconds[modality]
        try:
            async with asyncio.timeout(seconds) as timer:
                return await self._try(url, partial(_take, hold, timer), hold)
        except TimeoutError:
            raise Unreachable(f"{_shown(url)} was not there in full after {seconds:g} s") from None

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
            raise RequestError(f"it is not base64: {error}") from None

    def _read_file(self, url: str) -> Blob:
        if self._root is None:
            raise Unreachable("Cannot load local files without `--allowed-local-media-path`.")
        parts = urlsplit(url)
        refused = Unreachable("the file must lie in the directory of `--allowed-local-media-path`")
        if parts.netloc not in ("", "localhost"):
            raise refused
        try:
            path = os.path.realpath(unquote(parts.path))
            if not path.startswith(self._root):
                raise refused
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(handle, "rb") as file:
                # A link may have been put in between since: what counts is what was opened.
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
            why = getattr(error, "strerror", None) or "its name is none"
            raise Unreachable(f"the file cannot be read: {why}") from None
        if len(data) > self._max_bytes:
            raise Unreachable(self._too_large("more"))
        return Blob((data,))

    def _too_large(self, size: str) -> str:
        return f"it has {size} bytes, and an item may have {self._max_bytes} (QUIRE_MEDIA_MAX_MB)"

    # ---- http(s)

    async def _try(self, url: str, take: Take, hold: BudgetHold) -> Blob:
        """As often as it may help."""
        for attempt in range(self._num_tries):
            try:
                return await self._follow(url, take)
            except _Transient as error:
                hold.give(hold.num_bytes)
                if attempt + 1 == self._num_tries:
                    raise Unreachable(f"{_shown(url)} cannot be fetched: {error}") from None
            await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
        raise AssertionError

    async def _follow(self, url: str, take: Take) -> Blob:
        """From hop to hop; each is looked at as if it were the first."""
        target = _target(url)
        for _ in range(self._num_hops + 1):
            answer = await self._get(target, take)
            if answer.status == 200:
                return Blob((answer.body,), answer.headers.get("content-type", "").partition(";")[0].strip())
            location = answer.headers.get("location") if answer.status in _REDIRECTS else None
            if not location:
                raise _failed(answer.status)
            next_target = _target(_joined(target.url, location))
            if target.parts.scheme == "https" and next_target.parts.scheme == "http":
                raise Unreachable(f"{_shown(url)} leads from https: to http:, which is not followed")
            target = next_target
        if not self._num_hops:
            raise Unreachable(f"{_shown(url)} is a redirect, and VLLM_MEDIA_URL_ALLOW_REDIRECTS is off")
        raise Unreachable(f"{_shown(url)} leads through more than {_MAX_HOPS} redirects")

    async def _get(self, target: _Target, take: Take) -> HttpAnswer:
        """From the first of its addresses that answers."""
        why = ""
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
                why = _reason(error)
        raise _Transient(why)

    async def _addresses(self, target: _Target) -> list[str]:
        """Of the host, each of which may be connected to: to these, and not to what its name may stand for a
        moment later."""
        named = target.host in self._domains
        if self._domains and not named:
            raise Unreachable(f"{target.host} is not one of the hosts of --allowed-media-domains")
        try:
            found = await self._lookups.find(target.host, target.port)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or "it is no name"
            raise _Transient(f"{target.host} has no address: {why}") from None
        if not named and not all(_is_public(address) for address in found):
            raise Unreachable(
                f"{target.host} is a private, local or otherwise special address: only "
                "--allowed-media-domains can allow it"
            )
        return found


async def _take(hold: BudgetHold, timer: asyncio.Timeout, num_bytes: int) -> None:
    """The clock stands still meanwhile."""
    loop, end = asyncio.get_running_loop(), timer.when()
    assert end is not None
    left = end - loop.time()
    timer.reschedule(None)
    await hold.take(num_bytes)
    timer.reschedule(loop.time() + left)


class Lookups:
    """Asks for the addresses of hosts, each in a thread of its own, which nobody has to wait for: the system
    may take minutes to say that there is no answer."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._asked: dict[tuple[str, int], Future[list[str]]] = {}

    async def find(self, host: str, port: int) -> list[str]:
        """An OSError if there is none, or too many are asked for."""
        with self._lock:
            found = self._asked.get((host, port))
            if found is None:
                if len(self._asked) >= self._most:
                    raise OSError(errno.EAGAIN, f"{self._most} names are looked up already")
                found = self._asked[host, port] = Future()
                threading.Thread(target=self._ask, args=(host, port, found), daemon=True).start()
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def tell(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop of one that gave up may be over
                loop.call_soon_threadsafe(done.set)

        found.add_done_callback(tell)
        await done.wait()
        return found.result()

    def _ask(self, host: str, port: int, found: Future[list[str]]) -> None:
        try:
            addresses = _resolve(host, port)
        except (OSError, UnicodeError) as error:
            found.set_exception(error)
        else:
            found.set_result(addresses)
        finally:
            with self._lock:
                del self._asked[host, port]


def _reason(error: OSError) -> str:
    """asyncio's own texts repeat the address; those of the system say what happened."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__


def _failed(status: int) -> Exception:
    text = f"HTTP status {status}"
    if status >= 500 or status in _AGAIN:
        return _Transient(text)
    return Unreachable(f"the server that has it answered with {text}")


def _target(url: str) -> _Target:
    try:
        parts = urlsplit(url)
        host, port = _plain(parts.hostname or ""), parts.port
    except ValueError:
        host = ""
    if not host or parts.scheme not in _PORTS:
        raise Unreachable(f"{_shown(url)} is no url that can be fetched")
    if "@" in parts.netloc:
        raise Unreachable(
            f"{_shown(url.replace(parts.netloc, host, 1))} has a user's name in it; leave it out"
        )
    if not parts.netloc.isascii():
        parts = parts._replace(netloc=host if port is None else f"{host}:{port}")
    return _Target(url, parts, host, port or _PORTS[parts.scheme])


def _joined(url: str, location: str) -> str:
    """The url that a redirect leads to."""
    try:
        return urljoin(url, location)
    except ValueError:
        raise Unreachable(f"{_shown(url)} leads to {_shown(location)!r}, which is no url") from None


def _plain(host: str) -> str:
    """A host's name as it is compared: ASCII, lower case, without a dot behind it."""
    host = host.strip().lower().rstrip(".")
    if host.isascii():
        return host
    try:
        return host.encode("idna").decode()
    except UnicodeError:
        return ""


def _resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return _is_public(str(address.ipv4_mapped))
        if address.sixtofour is not None or address.teredo is not None:
            return False  # tunnels to IPv4 addresses, whichever
    if any(address in network for network in _NOT_PUBLIC):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


def _directory(path: str) -> str:
    """With links followed, and a separator behind it."""
    found = os.path.realpath(os.path.expanduser(path))
    if not os.path.isdir(found):
        raise ConfigError(f"allowed_local_media_path {path!r} is not a directory")
    return os.path.join(found, "")


def _shown(url: str) -> str:
    """A url in an error: what is behind its question mark may be a secret."""
    return url.partition("?")[0][:_SHOWN]
