"""Tests of the trace spans of requests, as a collector receives them."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from serve_process import Start, eventually

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Run a collector and yield its address with the list of received spans."""
    messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    came: list[Any] = []

    class Takes(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            sent = messages.ExportTraceServiceRequest.FromString(body)
            came.extend(
                span for group in sent.resource_spans for scope in group.scope_spans for span in scope.spans
            )
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Takes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", came
    server.shutdown()
    server.server_close()


def test_request_is_a_span_with_its_events(start: Start, collector: tuple[str, list[Any]]) -> None:
    endpoint, came = collector
    server = start("--otlp-traces-endpoint", endpoint)
    server.until_healthy()
    body = {"model": "tiny", "prompt": "A page is", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    reply = server.client.post("/v1/completions", json=body, headers={"traceparent": CALLER})
    assert reply.status_code == 200
    eventually("all spans are exported", lambda: len(came) >= 4)
    spans = {span.name: span for span in came}
    assert {*spans} == {"llm_request", "queue", "prefill", "decode"}
    whole = spans["llm_request"]
    _, trace, caller, _ = CALLER.split("-")
    assert whole.trace_id.hex() == trace and whole.parent_span_id.hex() == caller
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent_span_id == whole.span_id
        assert whole.start_time_unix_nano <= spans[name].start_time_unix_nano + 5_000_000
    attributes = {attribute.key: attribute.value for attribute in whole.attributes}
    assert attributes["gen_ai.usage.completion_tokens"].int_value == 5
    assert attributes["gen_ai.request.max_tokens"].int_value == 5
