"""Tests of fetching media from correct servers and from hostile ones."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_inputs import data_url
from hostile import IMAGE, hostile_server
from ports import free_port

from quire.config.env import Env, MediaEnv
from quire.errors import ConfigError, RequestError, Unreachable
from quire.multimodal.byte_budget import BudgetShare, ByteBudget
from quire.multimodal.fetch import Fetcher, Lookups


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with hostile_server() as running:
        yield running


def fetch(
    url: str,
    *,
    domains: tuple[str, ...] = ("127.0.0.1",),
    path: str = "",
    modality: str = "image",
    **env: Any,
) -> bytes:
    limits = {"media_max_mb": 1.0, "media_fetch_max_retries": 0, "image_fetch_timeout": 60.0, **env}
    with ThreadPoolExecutor(2) as threads:
        fetcher = Fetcher(MediaEnv(**limits), threads, allowed_domains=domains, allowed_path=path)
        with ByteBudget(1 << 30).hold(BudgetShare(1 << 30)) as hold:
            return asyncio.run(fetcher.fetch(url, modality, hold)).parts[0]


@pytest.mark.parametrize("path", ["/image.png", "/near", "/chunked"])
def test_existing_files_are_fetched(server: Any, path: str) -> None:
    assert fetch(server.url + path) == IMAGE


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/missing", "answered with HTTP status 404"),
        ("/metadata", "169.254.169.254 is not one of the hosts of --allowed-media-domains"),
        ("/elsewhere", "127.0.0.3 is not one of the hosts"),
        ("/etc", "is not a url that can be fetched"),
        ("/nowhere", "answered with HTTP status 302"),
        ("/round", "more than 5 redirects"),
        ("/short", "closed before the response was complete"),
        ("/claims", "it has more bytes, and an item may have 1048576"),
        ("/endless", "it has more bytes, and an item may have 1048576"),
        ("/packed", "compressed, which was not requested"),
        ("/garbage", "not an HTTP response"),
    ],
)
def test_server_errors_are_reported(server: Any, path: str, words: str) -> None:
    with pytest.raises(Unreachable, match=words):
        fetch(server.url + path)


def test_slow_server_times_out(server: Any) -> None:
    with pytest.raises(Unreachable, match=r"was not fetched completely within 0\.3 s"):
        fetch(server.url + "/drips", video_fetch_timeout=0.3, modality="video")


def test_failed_fetch_is_retried(server: Any) -> None:
    assert fetch(server.url + "/flaky", media_fetch_max_retries=3) == IMAGE
    with pytest.raises(Unreachable, match="cannot be fetched: Connection refused"):
        fetch(f"http://127.0.0.1:{free_port()}/x", media_fetch_max_retries=1)


def test_redirects_can_be_disabled(server: Any) -> None:
    with pytest.raises(Unreachable, match="VLLM_MEDIA_URL_ALLOW_REDIRECTS is off"):
        fetch(server.url + "/near", media_url_allow_redirects=False)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "localhost", "2130706433", "0x7f.1", "0.0.0.0", "10.1.2.3", "192.168.0.1", "172.16.9.9",
        "169.254.169.254", "100.64.0.1", "224.0.0.1", "[::1]", "[fe80::1]", "[fd00::1]",
        "[64:ff9b::a9fe:a9fe]", "[::ffff:10.0.0.1]", "[2002:7f00:1::]",
    ],
)  # fmt: skip
def test_non_public_addresses_are_refused_unless_allowed(host: str) -> None:
    with pytest.raises(Unreachable, match="private, local or otherwise special|has no address"):
        fetch(f"http://{host}:1/x", domains=())


def test_name_is_resolved_once_and_all_its_addresses_are_checked(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that resolves to another address the next time (DNS rebinding) leads to no other address."""
    port, hosts = server.server_address[1], []

    def resolve(host: str, *_: Any, **__: Any) -> list[Any]:
        hosts.append(host)
        addresses = ["127.0.0.1"] if len(hosts) == 1 else ["127.0.0.99"]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert fetch(f"http://Images.Example.:{port}/image.png", domains=("images.example",)) == IMAGE
    assert hosts == ["images.example"]
    assert server.requests[-1] == ("/image.png", f"Images.Example.:{port}")

    def mixed(*_: Any, **__: Any) -> list[Any]:
        result = ("93.184.216.34", "10.0.0.1")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in result]

    monkeypatch.setattr(socket, "getaddrinfo", mixed)
    with pytest.raises(Unreachable, match="private, local or otherwise special"):
        fetch("http://images.example/x", domains=())


def test_unresolvable_names_block_no_other_fetch(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    over, port = threading.Event(), server.server_address[1]

    def resolve(host: str, *_: Any, **__: Any) -> list[Any]:
        assert host == "quick.example" or over.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    async def go() -> None:
        limits = {"image_fetch_timeout": 0.2, "audio_fetch_timeout": 60.0}
        hosts = [f"{number}.example" for number in range(40)]
        with ThreadPoolExecutor(2) as threads, ByteBudget(1 << 30).hold(BudgetShare(1 << 30)) as hold:
            fetcher = Fetcher(MediaEnv(**limits), threads, allowed_domains=[*hosts, "quick.example"])
            urls = [f"http://{host}:{port}/image.png" for host in hosts]
            lost = await asyncio.gather(
                *(fetcher.fetch(url, "image", hold) for url in urls), return_exceptions=True
            )
            assert all(isinstance(item, Unreachable) and "within 0.2 s" in str(item) for item in lost)
            result = await fetcher.fetch(f"http://quick.example:{port}/image.png", "audio", hold)
            assert result.parts == (IMAGE,)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        asyncio.run(go())
    finally:
        over.set()


def test_concurrent_lookups_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    over, hosts = threading.Event(), []

    def resolve(host: str, port: int) -> list[str]:
        hosts.append(host)
        assert over.wait(60)
        return [host]

    monkeypatch.setattr("quire.multimodal.fetch._resolve", resolve)

    async def go() -> None:
        lookups = Lookups(2)
        same = [asyncio.create_task(lookups.find(host, 1)) for host in ("a", "b", "a")]
        await asyncio.sleep(0)
        with pytest.raises(OSError, match="2 host names are being looked up already"):
            await lookups.find("c", 1)
        over.set()
        assert await asyncio.gather(*same) == [["a"], ["b"], ["a"]] and sorted(hosts) == ["a", "b"]

    asyncio.run(go())


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://", "not a url that can be fetched"),
        ("http://a:b@127.0.0.1/x", "contains a user name"),
        ("http://127.0.0.1:99999/x", "not a url that can be fetched"),
        ("gopher://x", "does not start with"),
        ("", "does not start with"),
        ("http://[::1/x", "not a url that can be fetched"),
        ("http://other.example/x", "not one of the hosts of --allowed-media-domains"),
    ],
)
def test_invalid_urls_are_refused(url: str, words: str) -> None:
    with pytest.raises(Unreachable, match=words):
        fetch(url)


def test_files_are_read_only_below_the_allowed_directory(tmp_path: Path) -> None:
    root, secret = tmp_path / "media", tmp_path / "media-secret"
    root.mkdir()
    (root / "a b.png").write_bytes(IMAGE)
    (root / "big").write_bytes(bytes(3 << 19))
    secret.write_text("x")
    (root / "out").symlink_to(secret)
    (root / "up").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    assert fetch(f"file://{root}/a%20b.png", path=str(root)) == IMAGE
    for name, words in {
        f"{root}/out": "must be in the directory",
        f"{root}/up/media-secret": "must be in the directory",
        f"{root}/../media-secret": "must be in the directory",
        f"{secret}": "must be in the directory",
        f"{root}/none": "No such file",
        f"{root}/%00": "its name is invalid",
        f"{root}/pipe": "it is not a file",
        f"{root}/": "must be in the directory|Is a directory|not a file",
        f"{root}/big": "it has more bytes",
    }.items():
        with pytest.raises(Unreachable, match=words):
            fetch(f"file://{name}", path=str(root))
    with pytest.raises(Unreachable, match="Cannot load local files without"):
        fetch(f"file://{root}/a%20b.png")
    with pytest.raises(ConfigError, match="is not a directory"):
        fetch("", path=str(secret))


def test_data_urls_are_checked_and_limited() -> None:
    assert fetch(data_url(IMAGE)) == fetch(data_url(IMAGE, "image/png;name=x")) == IMAGE
    for url in ("data:,x", "data:image/png;base64", "data:image/png;base64,a b", "data:image/png;base64,AAA"):
        with pytest.raises(RequestError) as refused:
            fetch(url)
        assert refused.value.status == 400
    with pytest.raises(RequestError, match="an item may have 1048576"):
        fetch(data_url(bytes(1 << 21)))


def test_environment_variables_set_the_limits() -> None:
    env = Env.read({"VLLM_IMAGE_FETCH_TIMEOUT": "2.5", "QUIRE_MEDIA_LOADING_THREAD_COUNT": "2"})
    assert (env.media.image_fetch_timeout, env.media.media_loading_thread_count) == (2.5, 2)
    with pytest.raises(ConfigError, match="VLLM_MAX_IMAGE_PIXELS='0'"):
        Env.read({"VLLM_MAX_IMAGE_PIXELS": "0"})
