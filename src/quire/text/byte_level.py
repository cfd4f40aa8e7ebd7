"""The byte-level alphabet of BPE vocabularies: one printable character for each byte."""


def _alphabet() -> dict[str, int]:
    """Return the byte of each character of the alphabet; a printable byte is its own character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _alphabet()
_CHARS = {byte: char for char, byte in _BYTES.items()}


def to_byte_level(data: bytes) -> str:
    return data.decode("latin-1").translate(_CHARS)


def from_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:  # an added token, which is not in the byte-level alphabet
        return token.encode()
