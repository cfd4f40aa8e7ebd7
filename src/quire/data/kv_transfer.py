"""Prefixes of requests that move between engines: one engine computes the prompt, another the answer.

The fields of `kv_transfer_params` are those of vLLM, so that its proxies work unchanged."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.errors import RequestError

FIELD = "kv_transfer_params"
"""Name of the field in request bodies, and its key in `extra_args` of the sampling parameters."""
MAX_KEYS = 1024
"""Maximum number of KV cache entries that one `ReadEntries` message requests."""
NONCE_BYTES = 32
DATA_START = 64
"""Byte offset of the KV cache entries in the memory of a transfer, which begins with a nonce."""
_MAX_TEXT = 512

Text = Annotated[str, Meta(max_length=_MAX_TEXT)]
Port = Annotated[int, Meta(ge=1, le=65535)]


class TransferParams(msgspec.Struct, omit_defaults=True):
    """The `kv_transfer_params` of a request. Further keys have no effect. Entries are named by the hash of
    their contents, so that `remote_block_ids` is not used."""

    do_remote_prefill: bool = False
    """Load the prefix from the engine that has computed the prompt."""
    do_remote_decode: bool = False
    """Keep the prefix for the engine that computes the answer."""
    remote_engine_id: Text | None = None
    remote_request_id: Text | None = None
    remote_host: Text | None = None
    remote_port: Port | None = None
    remote_num_tokens: Annotated[int, Meta(ge=0)] | None = None
    remote_block_ids: list[list[int] | int] | None = None


class RemotePrefix(msgspec.Struct, frozen=True):
    """A prefix that another engine keeps for one request."""

    host: str
    port: int
    request_id: str
    num_tokens: int | None = None
    """Number of tokens of the prefix; None if it is not known."""


def transfer_params(extra_args: Mapping[str, Any] | None) -> TransferParams | None:
    """Return the `kv_transfer_params` in the `extra_args` of a request, or None. Raise if a field has the
    wrong type, or if the fields contradict each other."""
    value = (extra_args or {}).get(FIELD)
    if value is None:
        return None
    try:
        params = msgspec.convert(value, TransferParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"{FIELD}: {error}", param=FIELD) from None
    if params.do_remote_prefill and params.do_remote_decode:
        raise RequestError(
            f"{FIELD}: do_remote_prefill and do_remote_decode exclude each other: send the first to the"
            " engine that decodes, the second to the one that computes the prompt",
            param=FIELD,
        )
    return params


def missing_fields(params: TransferParams) -> list[str]:
    """Return the names of unset fields without which the prefix of another engine cannot be found."""
    needed = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
    return [name for name in needed if getattr(params, name) is None]


def remote_prefix(params: TransferParams) -> RemotePrefix | None:
    """Return the prefix that a request loads from another engine, if any."""
    if not params.do_remote_prefill or missing_fields(params):
        return None
    assert params.remote_host is not None and params.remote_port is not None
    assert params.remote_request_id is not None
    return RemotePrefix(
        params.remote_host, params.remote_port, params.remote_request_id, params.remote_num_tokens
    )


# ---- messages between engines


class TargetMemory(msgspec.Struct, frozen=True):
    """Memory of the engine that reads entries, to which the other engine writes them, if both are on one
    machine."""

    nonce: bytes
    """Random bytes at the start of the memory, since its path or handle may exist on several machines."""
    path: str = ""
    """Path of shared memory."""
    handle: bytes = b""
    """CUDA IPC handle of GPU memory, in place of a path."""


class ReadEntries(msgspec.Struct):
    """Message to the engine that keeps a prefix: read some of its KV blocks, or some of its SSM state
    checkpoints."""

    token: str
    layout: str
    """Digest of the settings that both engines must have in common."""
    request_id: str
    keys: Annotated[list[bytes], Meta(max_length=MAX_KEYS)] = []
    target: TargetMemory | None = None
    """Memory to write the entries to; None, or if it cannot be opened: the entries are part of the answer."""
    ends: bool = False
    """Whether this is the last message of a rank about the prefix, which is released after the last rank."""
    rank: Annotated[int, Meta(ge=0)] = 0
    """Rank of the engine that reads; it gets the entries of the same rank of the other engine."""


class EntriesRead(msgspec.Struct, omit_defaults=True):
    """Answer to `ReadEntries`. The entries follow in a second frame, or are in the memory of the message."""

    places: list[int] = []
    """Indices of the requested keys that have an entry in the answer, in order."""
    in_memory: bool = False
    problem: str = ""
    layout: dict[str, str] = {}
    """The settings of the answering engine that both engines must have in common; empty if they are equal."""
