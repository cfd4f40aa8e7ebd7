"""Tests of prompt embeddings: torch.save files are read as torch does, and all else is rejected."""

import base64
import io
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from saved import saved, sent
from torch import Tensor

from quire.data.params import SamplingParams
from quire.data.prompt_embeds import PromptEmbeds
from quire.data.request import Request
from quire.data.wire import Add, decode_to_core, encode
from quire.errors import RequestError
from quire.frontend.inputs import InputProcessor
from quire.frontend.prompt_embeds import PromptEmbedsReader

HIDDEN = 6
WHOLE = torch.randn(8, 2 * HIDDEN, generator=torch.Generator().manual_seed(0))
TENSORS: dict[str, Tensor] = {
    "plain": WHOLE[:, :HIDDEN].contiguous(),
    "part of a storage": WHOLE[2:5, HIDDEN:],
    "transposed": WHOLE[:HIDDEN, :7].T,
    "of a batch of one": WHOLE[None, :4, :HIDDEN],
    "expanded": WHOLE[:1, :HIDDEN].expand(5, HIDDEN),
    "trained": torch.nn.Parameter(WHOLE[:3, :HIDDEN].clone()),
    "half": WHOLE[:4, :HIDDEN].half(),
    "brain": WHOLE[:4, :HIDDEN].bfloat16(),
}


def read(value: Any, dtype: str = "bfloat16") -> PromptEmbeds:
    return PromptEmbedsReader(HIDDEN, dtype).read(value, lambda count: None)


def back(embeds: PromptEmbeds) -> Tensor:
    dtype: torch.dtype = getattr(torch, embeds.dtype)
    return torch.frombuffer(embeds.rows(0, len(embeds)), dtype=dtype).view(-1, embeds.hidden)


@pytest.mark.parametrize("way", ["saved", "of protocol 4", "live"])
@pytest.mark.parametrize("kind", TENSORS)
def test_tensor_round_trip(kind: str, way: str) -> None:
    tensor = TENSORS[kind]
    options = {"pickle_protocol": 4} if way == "of protocol 4" else {}
    actual = read(tensor if way == "live" else sent(tensor, **options))
    expected = tensor.detach().reshape(-1, HIDDEN)
    assert back(actual).dtype == tensor.dtype and torch.equal(back(actual), expected)
    assert len(actual) == len(expected)


def test_numpy_arrays_are_accepted() -> None:
    array = TENSORS["plain"].numpy()
    assert torch.equal(back(read(array[::2])), TENSORS["plain"][::2])


class Trap:
    """A hostile pickle that calls a function."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, ("raise SystemExit('the pickle ran')",)


def zipped(pkl: bytes, how: int = zipfile.ZIP_STORED, **entries: bytes) -> str:
    """Return a torch file with this pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as archive:
        archive.writestr("a/data.pkl", pkl)
        archive.writestr("a/data/0", bytes(4 * HIDDEN * 3))
        for name, data in entries.items():
            archive.writestr(f"a/{name}", data)
    return base64.b64encode(file.getvalue()).decode()


def pickled(tensor: Tensor = TENSORS["plain"]) -> bytes:
    with zipfile.ZipFile(io.BytesIO(saved(tensor))) as archive:
        return archive.read("archive/data.pkl")


def crowd() -> str:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for number in range(100):
            archive.writestr(f"a/data/{number}", b"")
    return base64.b64encode(file.getvalue()).decode()


def spoiled(value: float) -> Tensor:
    tensor = TENSORS["plain"].clone()
    tensor[1, 2] = value
    return tensor


WHOLE_FILE = saved(TENSORS["plain"])
WRONG: dict[str, tuple[Any, str]] = {
    "no base64": ("not base64!", "is not base64"),
    "no ascii": ("é", "is not base64"),
    "nothing": ("", "torch.save"),
    "no zip": (base64.b64encode(b"abc").decode(), "not a zip file"),
    "half a file": (base64.b64encode(WHOLE_FILE[: len(WHOLE_FILE) // 2]).decode(), "torch.save"),
    "an old file": (sent(TENSORS["plain"], _use_new_zipfile_serialization=False), "torch.save"),
    "a trap": (zipped(pickle.dumps(Trap(), 2)), "would call"),
    "a trap inside": (sent([TENSORS["plain"], Trap()]), "torch.save"),
    "a dict": (sent({"a": TENSORS["plain"]}), "torch.save"),
    "a number": (sent(3), "not contain a tensor"),
    "a storage too short": (zipped(pickled()), "its storage has 18 elements"),
    "no storage": (zipped(pickled().replace(b"\x01\x00\x00\x000", b"\x01\x00\x00\x009")), "torch.save"),
    "a pickle cut off": (zipped(pickled()[:60]), "torch.save"),
    "an empty pickle": (zipped(b"."), "torch.save"),
    "a huge memo": (zipped(b"\x80\x02Nr\xff\xff\xff\xff."), "torch.save"),
    "a long pickle": (zipped(b"\x80\x02" + b"]" * 20_000 + b"."), "more than a tensor"),
    "compressed": (zipped(pickled(), zipfile.ZIP_DEFLATED), "compressed"),
    "big-endian": (zipped(pickled(), byteorder=b"big"), "big-endian"),
    "many entries": (crowd(), "more than 64 entries"),
    "integers": (sent(torch.ones(3, HIDDEN, dtype=torch.int64)), "must be of float32"),
    "live integers": (torch.ones(3, HIDDEN, dtype=torch.int64), "must be of float32"),
    "doubles": (sent(torch.ones(3, HIDDEN, dtype=torch.float64)), "must be of float32"),
    "sparse": (sent(torch.eye(HIDDEN).to_sparse()), "torch.save"),
    "a vector": (sent(torch.ones(HIDDEN)), "has the shape [6]"),
    "a batch of two": (sent(torch.ones(2, 3, HIDDEN)), "has the shape [2, 3, 6]"),
    "another hidden size": (sent(torch.ones(3, HIDDEN + 1)), "of 7 numbers, and the hidden size is 6"),
    "not a number": (sent(spoiled(float("nan"))), "not finite"),
    "infinite": (sent(spoiled(float("-inf")).bfloat16()), "not finite"),
    "a list": ([[0.0] * HIDDEN], "must be a tensor, got list"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_other_contents_are_rejected(kind: str) -> None:
    value, words = WRONG[kind]
    with pytest.raises(RequestError) as refused:
        read(value)
    assert words in str(refused.value) and refused.value.param == "prompt_embeds"


def test_truncated_and_modified_files_are_read_or_rejected() -> None:
    """Check that no error of the standard library escapes."""
    draw = np.random.default_rng(1)
    for at in range(len(WHOLE_FILE)):
        changed = bytearray(WHOLE_FILE)
        changed[at] ^= int(draw.integers(1, 256))
        for data in (bytes(changed), WHOLE_FILE[:at]):
            try:
                read(base64.b64encode(data).decode())
            except RequestError as refused:
                assert refused.param == "prompt_embeds"


def test_values_outside_the_models_dtype_are_rejected() -> None:
    assert len(read(spoiled(7e4))) == 8
    with pytest.raises(RequestError, match="beyond 65504, the largest of float16"):
        read(spoiled(7e4), "float16")


def test_length_is_checked_before_the_values() -> None:
    """Check a tensor of stride 0, which would fill the memory."""
    endless = torch.zeros(1).expand(1 << 38, HIDDEN)
    inputs = processor()
    with pytest.raises(RequestError, match="contains 274877906944 input tokens"):
        inputs.parse({"prompt_embeds": sent(endless)})
    with pytest.raises(RequestError, match="cannot be empty"):
        inputs.parse({"prompt_embeds": sent(torch.zeros(0, HIDDEN))})


def processor() -> InputProcessor:
    return InputProcessor(
        tokenizer=None,
        vocab=50,
        max_model_len=32,
        eos_ids=(),
        max_logprobs=5,
        seed=0,
        embeds=PromptEmbedsReader(HIDDEN, "float32"),
    )


def requests(**params: Any) -> list[Request]:
    prompt = processor().parse({"prompt_embeds": TENSORS["plain"], "cache_salt": "s"})
    return processor().requests("a", prompt, SamplingParams(**params))


def test_requests_carry_their_embeddings_to_the_core() -> None:
    message = decode_to_core(encode(Add.of(requests(n=3))))
    assert isinstance(message, Add)
    for request in message.all():
        assert request.tokens == [0] * 8 and request.prompt_len == 8 and request.embeds is not None
        assert torch.equal(back(request.embeds), TENSORS["plain"])
    with pytest.raises(RequestError, match="prompt_logprobs is not compatible with prompt embeds"):
        requests(prompt_logprobs=1)
    with pytest.raises(RequestError, match="prompt_token_ids together with prompt_embeds"):
        processor().parse({"prompt_embeds": TENSORS["plain"], "prompt_token_ids": [1]})


def test_keys_differ_by_embeddings_and_dtype() -> None:
    plain, half = read(TENSORS["plain"]), read(TENSORS["plain"].half())
    same_bits = read(TENSORS["plain"].half().view(torch.bfloat16).nan_to_num(0))
    second = read(TENSORS["plain"].clone())
    assert plain.keys == second.keys and len({*plain.routing_ids()}) == len(plain)
    keys = {item.keys_of(3, 4) for item in (plain, half, same_bits)} | {plain.keys_of(4, 5)}
    assert len(keys) == 4
