"""Block hashes: the names of KV cache blocks, made from all tokens up to the end of the block.

The hash of a block is SHA-256 over the hash of the block before it, its tokens as little-endian 32-bit
integers, and its extra keys: media items and prompt embeddings. The first block follows a root hash of the
LoRA adapter and the cache salt. So equal hashes mean equal contents in all engines with the same weights and
block size. docs/kv_events.md describes the hashes for clients in other languages."""

import hashlib
import struct
from collections.abc import Sequence

DIGEST_BYTES = 32
PLACE = struct.Struct("<iI")
"""Binary format of a media item in the hash input of a block: start of the block relative to the item, and
number of bytes of the item's key."""

ExtraKey = str | bytes | tuple[str, int]
"""An input of a block's hash besides its tokens: the name of the LoRA adapter or the cache salt (text), bytes
of the hash input, or a media item's key in hexadecimal and its start relative to the block."""


def root_hash(lora_digest: bytes | None = None, salt: str | None = None) -> bytes:
    """Return the parent hash of the first block: a hash of the LoRA adapter and the cache salt."""
    adapter = b"" if lora_digest is None else b"adapter:" + lora_digest
    salted = b"" if salt is None else b"salt:" + salt.encode()
    return hashlib.sha256(adapter + salted).digest()


def block_hash(parent: bytes, content: bytes) -> bytes:
    """Return the hash of a block; `parent` is the hash of the block before, `content` its own hash input."""
    return hashlib.sha256(parent + content).digest()


def block_content(tokens: Sequence[int], extra_keys: Sequence[ExtraKey] | None = None) -> bytes:
    """Return the hash input of a block, without texts among the extra keys: the root hash has these."""
    content = struct.pack(f"<{len(tokens)}i", *tokens)
    for key in extra_keys or ():
        if isinstance(key, bytes):
            content += key
        elif not isinstance(key, str):
            item = bytes.fromhex(key[0])
            content += PLACE.pack(-key[1], len(item)) + item
    return content


def block_hashes(
    tokens: Sequence[int],
    block_size: int,
    *,
    parent: bytes | None = None,
    extra_keys: Sequence[Sequence[ExtraKey] | None] | None = None,
) -> list[bytes]:
    """Return the hashes of the full blocks of a prompt, in order. `parent` is the hash of the block before
    these, or a `root_hash`; `extra_keys` has the extra keys of each block."""
    hashes, parent = list[bytes](), root_hash() if parent is None else parent
    for at in range(len(tokens) // block_size):
        content = tokens[at * block_size : (at + 1) * block_size]
        parent = block_hash(parent, block_content(content, extra_keys[at] if extra_keys else None))
        hashes.append(parent)
    return hashes


def short_hash(digest: bytes) -> int:
    """Return the last 64 bits of a hash, which stand for the hash in KV events."""
    return int.from_bytes(digest[DIGEST_BYTES - 8 : DIGEST_BYTES], "big")
