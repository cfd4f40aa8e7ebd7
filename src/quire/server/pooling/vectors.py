"""Encoding of vectors as JSON numbers, base64 or raw bytes."""

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.responses import Response

from quire.data.pooling import Floats
from quire.server.http.errors import json_response
from quire.server.openai.prompts import off_loop
from quire.server.openai.service import ApiCall, GenerationService
from quire.server.pooling.bodies import VectorOptions
from quire.server.pooling.jobs import Pooled, listing

_ORDERS = {"native": "=", "little": "<", "big": ">"}


def packed(values: Floats, dtype: str, endianness: str) -> bytes:
    """Return the values as bytes in row-major order."""
    order = _ORDERS[endianness]
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        to_even = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        return ((bits + to_even) >> np.uint32(16)).astype(f"{order}u2").tobytes()
    return values.astype(f"{order}{'f2' if dtype == 'float16' else 'f4'}").tobytes()


async def answer_vectors(
    api: GenerationService,
    body: VectorOptions,
    job: ApiCall,
    outputs: Sequence[Pooled],
    *,
    kind: str,
    field: str,
) -> Response:
    """Return the vectors as objects of type `kind` that hold the values in `field`."""
    make = _bytes if body.encoding_format in ("bytes", "bytes_only") else _json
    size = sum(output.outputs.data.size for output in outputs)
    return await off_loop(size, lambda: make(api, body, job, outputs, kind, field))


def _json(
    api: GenerationService,
    body: VectorOptions,
    job: ApiCall,
    outputs: Sequence[Pooled],
    kind: str,
    field: str,
) -> Response:
    def encode(values: Floats) -> list[Any] | str:
        if body.encoding_format == "float":
            return list(values.tolist())
        return base64.b64encode(packed(values, body.embed_dtype, body.endianness)).decode()

    data = [
        {"index": index, "object": kind, field: encode(output.outputs.data)}
        for index, output in enumerate(outputs)
    ]
    return json_response(listing(api, job, data, outputs))


def _bytes(
    api: GenerationService, body: VectorOptions, job: ApiCall, outputs: Sequence[Pooled], kind: str, _: str
) -> Response:
    parts, data, start = [], [], 0
    for index, output in enumerate(outputs):
        parts.append(packed(output.outputs.data, body.embed_dtype, body.endianness))
        end = start + len(parts[-1])
        data.append(
            {
                "index": index,
                "object": kind,
                "embed_dtype": body.embed_dtype,
                "endianness": body.endianness,
                "start": start,
                "end": end,
                "shape": list(output.outputs.data.shape),
            }
        )
        start = end
    headers = {}
    if body.encoding_format == "bytes":
        headers["metadata"] = json.dumps(listing(api, job, data, outputs))
    return Response(b"".join(parts), headers=headers, media_type="application/octet-stream")
