"""Tests of the token shared by the processes of a deployment: its source, and socket authentication."""

import stat
import threading
from pathlib import Path

import pytest
import zmq

from quire.config.env import Env
from quire.errors import ConfigError
from quire.system.cluster_token import FILE_NAME, cluster_token, is_same, new_token
from quire.system.socket_security import Handshakes, secure


def env_of(folder: Path, **variables: str) -> Env:
    return Env.read({"QUIRE_CACHE_ROOT": str(folder), **variables})


@pytest.mark.parametrize("name", ["QUIRE_CLUSTER_TOKEN", "VLLM_CLUSTER_TOKEN"])
@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1"])
def test_environment_variable_comes_first(tmp_path: Path, name: str, host: str) -> None:
    env = env_of(tmp_path, **{name: "secret"})
    assert cluster_token(env, host) == "secret" and not (tmp_path / FILE_NAME).exists()
    assert "secret" not in repr(env)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "[::1]", "localhost"])
def test_commands_of_one_user_on_one_machine_share_a_file(tmp_path: Path, host: str) -> None:
    env = env_of(tmp_path / "new")
    token = cluster_token(env, host)
    assert len(token) >= 32 and cluster_token(env, host) == token
    file = tmp_path / "new" / FILE_NAME
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and file.read_text() == token
    assert [path.name for path in file.parent.iterdir()] == [FILE_NAME]


def test_concurrent_creation_gives_one_token(tmp_path: Path) -> None:
    env, start, tokens = env_of(tmp_path), threading.Barrier(16), []

    def make() -> None:
        start.wait()
        tokens.append(cluster_token(env, "127.0.0.1"))

    threads = [threading.Thread(target=make) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tokens) == 16 and len({*tokens}) == 1


def test_readable_linked_or_empty_token_file_is_rejected(tmp_path: Path) -> None:
    file, env = tmp_path / FILE_NAME, env_of(tmp_path)
    file.write_text("known to all")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by other users: run `chmod 600`"):
        cluster_token(env, "127.0.0.1")
    file.unlink()
    (tmp_path / "other").write_text("planted")
    file.symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="cannot be kept"):
        cluster_token(env, "127.0.0.1")
    file.unlink()
    file.touch(0o600)
    with pytest.raises(ConfigError, match="is empty: remove it"):
        cluster_token(env, "127.0.0.1")


def test_unwritable_directory_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="set QUIRE_CLUSTER_TOKEN to the same secret"):
        cluster_token(env_of(tmp_path / "file"), "127.0.0.1")


def test_multi_node_without_a_token_starts_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert cluster_token(env_of(tmp_path), "10.77.0.1") == ""
    assert "QUIRE_CLUSTER_TOKEN is not set: any host that reaches the ports" in caplog.text


def test_tokens_are_compared_completely() -> None:
    token = new_token()
    assert is_same(token, token) and is_same("é", "é")
    assert not is_same(token, token[:-1]) and not is_same(token, "") and not is_same("", token)


@pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")
@pytest.mark.parametrize(
    ("listening", "connecting", "passes"),
    [("a", "a", True), ("", "", True), ("a", "b", False), ("a", "", False), ("", "a", False)],
)
def test_sockets_accept_only_the_same_token(listening: str, connecting: str, passes: bool) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as server, context.socket(zmq.PUSH) as client:
        for sock, token in ((server, listening), (client, connecting)):
            sock.setsockopt(zmq.LINGER, 0)
            secure(sock, token, listens=sock is server)
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(b"prompt")
        assert bool(server.poll(30_000 if passes else 300)) is passes


def test_token_is_refused_where_nothing_could_be_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    with zmq.Context() as context, context.socket(zmq.PULL) as server:
        secure(server, "", listens=True)
        with pytest.raises(ConfigError, match="has no CURVE"):
            secure(server, "a", listens=True)


def test_repeated_failed_handshakes_are_a_rejection() -> None:
    handshakes = Handshakes()
    for event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,) * 2 + (zmq.EVENT_HANDSHAKE_SUCCEEDED,):
        handshakes.note(event)
    assert not handshakes.is_refused and handshakes.num_failed == 0, "the peer ended in the middle of one"
    for _ in range(3):
        handshakes.note(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    assert handshakes.is_refused
    other = Handshakes()
    other.note(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    assert other.is_refused, "ZMQ does not try again"


def test_connection_state_follows_its_last_event() -> None:
    """Check that a failed handshake before a successful one is not taken for a lost peer."""
    handshakes = Handshakes()
    failed = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_DISCONNECTED)
    for event in (*failed, zmq.EVENT_HANDSHAKE_SUCCEEDED):
        handshakes.note(event)
    assert handshakes.is_connected
    handshakes.note(zmq.EVENT_DISCONNECTED)
    assert not handshakes.is_connected
