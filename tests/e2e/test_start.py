"""Tests of the addresses and clients of a server, and of failed starts: one clear line, exit code 1, no
hang."""

import os
import re
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from serve_process import PATIENCE_S, ServeProcess, Start, eventually, greedy
from tiny_text import TextModel


def only_line(server: ServeProcess, within_s: float = PATIENCE_S) -> str:
    """Return the one error line of a server that could not start."""
    assert server.exit_code(within_s) == 1, server.text()
    lines = [line for line in server.text().splitlines() if "error" in line.lower()]
    assert len(lines) == 1 and lines[0].startswith("quire serve: error: "), server.text()
    assert "Traceback" not in server.text(), server.text()
    return lines[0]


def test_port_in_use_is_named(start: Start) -> None:
    """Catches a start that loads a model before it reports the port, or waits for the port to become free."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = only_line(start("--port", port))
    assert f"127.0.0.1:{port}" in line and "in use" in line


def test_missing_model_is_named(start: Start, tmp_path: Path) -> None:
    missing = str(tmp_path / "no" / "model")
    assert missing in only_line(start(model=missing))


def test_corrupt_weights_end_the_start(start: Start, tiny: TextModel, tmp_path: Path) -> None:
    """Catches an engine that is restarted again and again although it can never run."""
    broken = tmp_path / "broken"
    shutil.copytree(tiny.path, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    server = start(model=str(broken))
    assert "model.safetensors" in only_line(server)
    assert "starting it again" not in server.text()


def test_missing_certificate_is_named(start: Start, tmp_path: Path) -> None:
    """Catches an API process that is restarted again and again although it can never serve."""
    missing = str(tmp_path / "no.pem")
    server = start("--ssl-certfile", missing, "--ssl-keyfile", missing)
    assert missing in only_line(server)
    assert "starting it again" not in server.text()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ImportError('no such library')", "ImportError: no such library"),
        ("import os; os._exit(3)", r"API server \d could not start \(exit code 3\)"),
    ],
)
def test_failing_api_process_ends_the_server(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    """Catches a process that reports itself up before it serves, and is then restarted forever."""
    (tmp_path / "uvicorn.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    server = start("--api-server-count", "2", fresh=True)
    assert server.exit_code() == 1, server.text()
    errors = [line for line in server.text().splitlines() if line.startswith("quire serve: error: ")]
    assert len(errors) == 1 and re.search(words, errors[0]), server.text()
    assert "starting it again" not in server.text()


def test_port_0_binds_and_logs_a_free_port(start: Start) -> None:
    server = start("--port", "0")
    eventually("the log has the address", lambda: "Starting Quire server on" in server.text())
    address = server.text().partition("Starting Quire server on ")[2].split()[0]
    assert not address.endswith(":0")
    assert httpx.get(f"{address}/version", timeout=30).status_code == 200


def test_unix_socket(start: Start, tmp_path: Path) -> None:
    """Catches a socket file that is not made, or is left behind."""
    path = tmp_path / "sock"
    server = start("--uds", str(path))
    eventually("the socket exists", path.exists)
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://quire", timeout=PATIENCE_S) as client:
        eventually("the server is up", lambda: client.get("/health").status_code == 200)
        reply = client.post("/v1/completions", json=greedy(max_tokens=3))
        assert reply.json()["usage"]["completion_tokens"] == 3
    server.end_cleanly()
    assert not path.exists()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not installed")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        + ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        + ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True,
        capture_output=True,
    )
    return key, cert


def test_https_and_api_keys_on_every_route(start: Start, certificate: tuple[Path, Path]) -> None:
    """Catches a route that answers without the key, and plain HTTP on a TLS port."""
    key, cert = certificate
    server = start("--ssl-keyfile", str(key), "--ssl-certfile", str(cert), "--api-key", "sesame", "other")
    address = server.url.replace("http:", "https:")
    eventually("the server listens", lambda: "Started server process" in server.text())
    with httpx.Client(base_url=address, verify=ssl.create_default_context(cafile=cert), timeout=60) as client:
        eventually("the server is up", lambda: client.get("/health").status_code == 200)
        eventually("the line of vLLM", lambda: server.text().count("Application startup complete.") == 1)
        assert re.search(r"Ready, \d+\.\d s after the server was started", server.text())
        routes = client.get("/openapi.json", headers={"Authorization": "Bearer other"}).json()["paths"]
        open_to_all = {"/health", "/ping", "/metrics"}
        assert open_to_all < set(routes) and "/v1/chat/completions" in routes
        for path, methods in routes.items():
            for method in methods:
                status = client.request(method, path.replace("{name}", "tiny"), json={}).status_code
                assert (status == 401) == (path not in open_to_all), (method, path, status)
        for path in ("/openapi.json", "/docs", "/v1/nowhere"):
            assert client.get(path).status_code == 401
        wrong = {"Authorization": "Bearer sesam"}
        assert client.post("/v1/completions", json=greedy(), headers=wrong).status_code == 401
        right = {"Authorization": "Bearer sesame"}
        assert client.post("/v1/completions", json=greedy(max_tokens=2), headers=right).status_code == 200
    with pytest.raises(httpx.TransportError):
        server.client.get("/health")
    server.end_cleanly()
