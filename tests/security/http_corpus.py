"""Raw HTTP messages and their expected answers, for a server with an API key."""

import json
from dataclasses import dataclass

from raw_http import KEY

AUTH = f"Host: x\r\nAuthorization: Bearer {KEY}\r\n".encode()
JSON = b"Content-Type: application/json\r\n"
BODY = json.dumps({"prompt": "ab", "max_tokens": 2}).encode()
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = b"GET /v1/models HTTP/1.1\r\n" + AUTH + b"\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: anything\r\n"


@dataclass(frozen=True)
class Case:
    """A message in pieces, which are sent one by one, with the expected statuses."""

    name: str
    pieces: tuple[bytes, ...]
    statuses: tuple[int, ...]
    is_closed: bool
    """Whether the server closes the connection afterwards; otherwise it must answer another request."""


def get(headers: bytes = AUTH, *, path: bytes = b"/v1/models", version: bytes = b"HTTP/1.1") -> bytes:
    return b"GET %b %b\r\n%b\r\n" % (path, version, headers)


def post(headers: bytes, body: bytes, *, version: bytes = b"HTTP/1.1") -> bytes:
    return b"POST /v1/completions %b\r\n%b%b%b\r\n%b" % (version, AUTH, JSON, headers, body)


def with_length(text: bytes, body: bytes = BODY) -> bytes:
    return post(b"Content-Length: " + text + b"\r\n", body)


def with_encoding(value: bytes, body: bytes = CHUNKS) -> bytes:
    return post(b"Transfer-Encoding: " + value + b"\r\n", body)


def chunks(body: bytes) -> bytes:
    return post(CHUNKED, body)


LENGTH = b"Content-Length: %d\r\n" % len(BODY)
REFUSED: dict[str, bytes] = {
    # Two framings, or one that can be parsed in two ways.
    "content-length, then chunked": post(LENGTH + CHUNKED, CHUNKS),
    "chunked, then content-length": post(CHUNKED + LENGTH, CHUNKS),
    "two content-lengths that differ": post(LENGTH + b"Content-Length: 3\r\n", BODY),
    "two content-lengths that are equal": post(LENGTH + LENGTH, BODY),
    "content-length with a sign": with_length(b"+5"),
    "content-length as a list": with_length(b"5, 5"),
    "content-length in hexadecimal": with_length(b"0x10"),
    "content-length in hexadecimal letters": with_length(b"1a"),
    "negative content-length": with_length(b"-5"),
    "content-length of 65 bits": with_length(b"18446744073709551616"),
    "content-length of 40 digits": with_length(b"9" * 40),
    "empty content-length": with_length(b""),
    "content-length with a space inside": with_length(b"2 3"),
    "content-length with a decimal point": with_length(b"5.0"),
    "content-length with an underscore": with_length(b"2_3"),
    "transfer-encoding xchunked": with_encoding(b"xchunked"),
    "transfer-encoding chunked, identity": with_encoding(b"chunked, identity"),
    "transfer-encoding identity, chunked": with_encoding(b"identity, chunked"),
    "transfer-encoding gzip, chunked": with_encoding(b"gzip, chunked"),
    "transfer-encoding chunked twice in one header": with_encoding(b"chunked, chunked"),
    "transfer-encoding chunked twice": post(CHUNKED + CHUNKED, CHUNKS),
    "transfer-encoding with a vertical tab": with_encoding(b"\x0bchunked"),
    "transfer-encoding in quotes": with_encoding(b'"chunked"'),
    "transfer-encoding with a parameter": with_encoding(b"chunked;q=1"),
    "transfer-encoding identity": with_encoding(b"identity"),
    "empty transfer-encoding": with_encoding(b""),
    "chunked in HTTP/1.0": post(CHUNKED, CHUNKS, version=b"HTTP/1.0"),
    # Malformed lines.
    "space before the colon": get(b"Authorization : Bearer x\r\n"),
    "space before the colon of the framing": post(b"Content-Length : 5\r\n", b"hello"),
    "tab before the colon of the framing": post(b"Transfer-Encoding\t: chunked\r\n", CHUNKS),
    "folded header": get(b"X-A: b\r\n c\r\n" + AUTH),
    "folded framing": post(b"Transfer-Encoding:\r\n chunked\r\n", CHUNKS),
    "line feeds without carriage returns": get().replace(b"\r\n", b"\n"),
    "line feed without carriage return in a header": get(b"X-A: b\n" + AUTH),
    "carriage return without line feed": get(b"X-A: b\rX-B: c\r\n" + AUTH),
    "carriage return in x-request-id": get(b"X-Request-Id: a\rb\r\n" + AUTH),
    "NUL in a header": get(b"X-A: b\0c\r\n" + AUTH),
    "NUL in the name of a header": get(b"X-\0A: b\r\n" + AUTH),
    "NUL in the path": get(path=b"/v1/\0models"),
    "bytes above 127 in the path": get(path="/v1/mödels".encode()),
    "header without a name": get(b": b\r\n" + AUTH),
    "header without a colon": get(b"X-A\r\n" + AUTH),
    "space in front of the first header": get(b" X-A: b\r\n" + AUTH),
    "space in the name of a header": get(b"X A: b\r\n" + AUTH),
    "brackets in the name of a header": get(b"X(A): b\r\n" + AUTH),
    # Request lines.
    "lower-case method": get().replace(b"GET", b"get"),
    "unknown method": get().replace(b"GET", b"GOT"),
    "preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/9.9": get(version=b"HTTP/9.9"),
    "HTTP/0.9": b"GET /v1/models\r\n" + get(),
    "version with a third number": get(version=b"HTTP/1.1.1"),
    "version in lower case": get(version=b"http/1.1"),
    "space in the path": get(path=b"/v1/models /health"),
    "authority for a path": b"CONNECT x:443 HTTP/1.1\r\n" + AUTH + b"\r\n",
    "hello of TLS": bytes.fromhex("16030100a5010000a10303") + b"\0" * 32,
    # Chunks.
    "carriage return and line feed in a chunk extension": chunks(b'5;a="\r\n"\r\nhello\r\n0\r\n\r\n'),
    "line feed in a chunk extension": chunks(b"5;a\nb\r\nhello\r\n0\r\n\r\n"),
    "chunk without its line end": chunks(b"5\r\nhello0\r\n\r\n"),
    "chunk longer than its size": chunks(b"3\r\nhello\r\n0\r\n\r\n"),
    "chunk size of 65 bits": chunks(b"1" + b"0" * 16 + b"\r\nhello\r\n0\r\n\r\n"),
    "chunk size with a sign": chunks(b"+5\r\nhello\r\n0\r\n\r\n"),
    "negative chunk size": chunks(b"-5\r\nhello\r\n0\r\n\r\n"),
    "chunk size with 0x": chunks(b"0x5\r\nhello\r\n0\r\n\r\n"),
    "chunk size with a space behind it": chunks(b"5 \r\nhello\r\n0\r\n\r\n"),
    "empty chunk size": chunks(b"\r\nhello\r\n0\r\n\r\n"),
    "content-length in a trailer": chunks(CHUNKS[:-2] + LENGTH + b"\r\n"),
    "chunks with line feeds only": chunks(b"5\nhello\n0\n\n"),
    # Headers that two parsers could resolve differently.
    "two authorizations, the second valid": get(b"Authorization: Bearer x\r\n" + AUTH),
    "two authorizations, the first valid": get(AUTH + b"Authorization: Bearer x\r\n"),
    "two authorizations in other cases": get(AUTH + b"AUTHORIZATION: Bearer x\r\n"),
    "two keys": get(b"Host: x\r\nX-Api-Key: a\r\nx-api-key: b\r\n"),
    "two hosts": get(AUTH + b"Host: y\r\n"),
    "two content types": post(b"Content-Type: text/plain\r\n" + LENGTH, BODY),
    # Upgrades with a body.
    "upgrade with a content-length": post(UPGRADE + LENGTH, BODY),
    "upgrade with chunks": post(UPGRADE + CHUNKED, CHUNKS),
    "h2c with a body": post(
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n" + LENGTH, BODY
    ),
    "CONNECT with a body": b"CONNECT /v1/models HTTP/1.1\r\n" + AUTH + b"Content-Length: 5\r\n\r\nhello",
}
"""Messages that are answered with one 400 and a closed connection."""

CASES: list[Case] = [
    *(Case(name, (message,), (400,), True) for name, message in REFUSED.items()),
    # The body of an upgrade that arrives later was parsed as another request.
    Case(
        "upgrade with a body that is a request",
        (post(UPGRADE + b"Content-Length: %d\r\n" % len(SMUGGLED), b""), SMUGGLED),
        (400,),
        True,
    ),
    Case("rest behind a short content-length", (post(LENGTH, BODY + b"x"),), (200,), True),
    Case("request behind a short content-length", (with_length(b"2", b"{}" + SMUGGLED),), (400, 200), False),
    Case("invalid request behind a valid one", (get() + b"x / y\r\n\r\n",), (200,), True),
    # Valid messages, after which the connection stays in sync.
    Case("get", (get(),), (200,), False),
    Case("get, byte by byte", tuple(get()[i : i + 1] for i in range(len(get()))), (200,), False),
    Case("empty lines in front", (b"\r\n\r\n" + get(),), (200,), False),
    Case("post", (post(LENGTH, BODY),), (200,), False),
    Case("post in two pieces", (post(LENGTH, b""), BODY), (200,), False),
    Case("post, byte by byte", tuple(bytes((byte,)) for byte in post(LENGTH, BODY)), (200,), False),
    Case("chunked", (post(CHUNKED, CHUNKS),), (200,), False),
    Case("chunked, byte by byte", tuple(bytes((byte,)) for byte in post(CHUNKED, CHUNKS)), (200,), False),
    Case("chunked in capitals", (with_encoding(b"Chunked"),), (200,), False),
    Case("chunk with an extension", (chunks(CHUNKS.replace(b"\r\n", b";a=b\r\n", 1)),), (200,), False),
    Case("two at once", (get() + get(),), (200, 200), False),
    Case("get behind post", (post(LENGTH, BODY) + get(),), (200, 200), False),
    Case("post behind get, its body later", (get() + post(LENGTH, BODY[:3]), BODY[3:]), (200, 200), False),
    Case("seventeen at once", (get() * 17,), (200,) * 17, False),
    Case("forty at once", (get() * 40,), (200,) * 17, True),
    Case("get with a body", (get(AUTH + LENGTH) + BODY,), (200,), False),
    Case("get with chunks", (get(AUTH + CHUNKED) + CHUNKS,), (200,), False),
    Case("HTTP/1.0", (get(version=b"HTTP/1.0"),), (200,), True),
    Case("connection: close", (get(AUTH + b"Connection: close\r\n"),), (200,), True),
    Case(
        "connection: close, and another request",
        (get(AUTH + b"Connection: close\r\n") + get(),),
        (200,),
        True,
    ),
    Case("expect: 100-continue", (post(LENGTH + b"Expect: 100-continue\r\n", b""), BODY), (100, 200), False),
    Case(
        "plain body under content-encoding",
        (post(LENGTH + b"Content-Encoding: gzip\r\n", BODY),),
        (200,),
        False,
    ),
    Case("h2c", (get(AUTH + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"),), (200,), False),
    Case("websocket", (get(AUTH + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"),), (200,), False),
    Case("upgrade, and another request", (get(AUTH + UPGRADE) + get(),), (200, 200), False),
    Case("upgrade with an empty body", (post(UPGRADE + b"Content-Length: 0\r\n", b""),), (400,), False),
    Case("upgrade that connection does not name", (post(b"Upgrade: h2c\r\n" + LENGTH, BODY),), (200,), False),
    Case("equal headers that are lists", (get(AUTH + b"Accept: a\r\nAccept: b\r\n"),), (200,), False),
    # Trailers are not headers.
    Case("trailer", (post(CHUNKED, CHUNKS[:-2] + b"X-A: b\r\n\r\n"),), (200,), False),
    Case(
        "authorization in a trailer",
        (post(CHUNKED, CHUNKS[:-2] + b"Authorization: Bearer x\r\n\r\n"),),
        (200,),
        False,
    ),
    Case(
        "authorization in a trailer only",
        (
            post(CHUNKED, CHUNKS[:-2]).replace(KEY.encode(), b"x"),
            b"Authorization: Bearer " + KEY.encode() + b"\r\n\r\n",
        ),
        (401,),
        False,
    ),
    # Unsupported methods and targets.
    Case("wrong key", (get(b"Host: x\r\nAuthorization: Bearer x\r\n"),), (401,), False),
    Case(
        "wrong key, expect: 100-continue",
        (post(LENGTH + b"Expect: 100-continue\r\n", b"").replace(KEY.encode(), b"x"), BODY),
        (401,),
        False,
    ),
    Case("absolute path of another host", (get(b"Host: x\r\n", path=b"http://y/v1/models"),), (401,), False),
    Case("double slash", (get(b"Host: x\r\n", path=b"//health"),), (401,), False),
    Case("dots behind an open path", (get(b"Host: x\r\n", path=b"/health/../v1/models"),), (401,), False),
    Case("two spaces before the version", (get(version=b" HTTP/1.1"),), (200,), False),
    Case("asterisk for a path", (get(path=b"*"),), (404,), False),
    Case("TRACE", (get().replace(b"GET", b"TRACE"),), (405,), False),
    Case("CONNECT to a path", (get().replace(b"GET", b"CONNECT"),), (405,), False),
]
