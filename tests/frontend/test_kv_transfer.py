"""Tests of the checks of `kv_transfer_params`."""

from pathlib import Path
from typing import Any

import pytest

from quire.config.kv_transfer import TransferSettings
from quire.data.params import SamplingParams
from quire.data.request import Request, with_transfer
from quire.errors import RequestError
from quire.frontend.kv_transfer import TransferCheck
from quire.system.kv_channel import KnownEngine, TransferMemory, open_memory

PREFIX = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r-1"}


def params_of(**transfer: Any) -> SamplingParams:
    return SamplingParams(extra_args={"kv_transfer_params": transfer})


def at(host: Any, port: Any) -> dict[str, Any]:
    return PREFIX | {"remote_host": host, "remote_port": port, "remote_num_tokens": 32}


def test_only_peers_and_known_engines_may_be_named(tmp_path: Path) -> None:
    check = TransferCheck(
        TransferSettings("kv_consumer", peers=(("10.0.0.1", 5600), ("node", None))), tmp_path
    )
    known = KnownEngine(tmp_path, "e", "localhost", 5601)
    for host, port in (("10.0.0.1", 5600), ("node", 1), ("node", 2), ("localhost", 5601)):
        check(params_of(**at(host, port)))
    others = [at("10.0.0.1", 22), at("169.254.169.254", 80), at("localhost", 5602)]
    others += [at("localhost", 5601) | {"remote_engine_id": name} for name in ("f", "../e", ".", "e/")]
    for transfer in others:
        with pytest.raises(RequestError, match="is not a peer of this server") as error:
            check(params_of(**transfer))
        assert error.value.param == "kv_transfer_params"
    (tmp_path / "kv_engines" / "dead").write_text("localhost 5602")
    later = KnownEngine(tmp_path, "later", "localhost", 5603)
    assert {path.name for path in (tmp_path / "kv_engines").iterdir()} == {"e", "later"}
    later.forget()
    known.forget()
    with pytest.raises(RequestError, match="is not a peer"):
        check(params_of(**at("localhost", 5601)))
    check(params_of(**PREFIX))  # it is computed here, with a warning
    check(params_of(max_offload_tokens=3))
    check(SamplingParams())


def test_the_role_must_fit(tmp_path: Path) -> None:
    producer, consumer = (
        TransferCheck(TransferSettings(f"kv_{role}"), tmp_path) for role in ("producer", "consumer")
    )
    producer(params_of(do_remote_decode=True))
    with pytest.raises(RequestError, match="do_remote_decode is for another server: .* kv_consumer"):
        consumer(params_of(do_remote_decode=True))
    with pytest.raises(RequestError, match="do_remote_prefill is for another server: .* kv_producer"):
        producer(params_of(**at("node", 1)))


@pytest.mark.parametrize(
    ("transfer", "words"),
    [
        ("text", "Expected `object`, got `str`"),
        ({"do_remote_prefill": "yes"}, "Expected `bool`, got `str` - at `$.do_remote_prefill`"),
        (at(["localhost"], 1), "at `$.remote_host`"),
        (at("h" * 600, 1), "at `$.remote_host`"),
        (at("localhost", "5600"), "at `$.remote_port`"),
        (at("localhost", 70000), "at `$.remote_port`"),
        (PREFIX | {"remote_num_tokens": -1}, "at `$.remote_num_tokens`"),
        (PREFIX | {"remote_block_ids": "1"}, "at `$.remote_block_ids`"),
        (PREFIX | {"do_remote_decode": True}, "exclude each other"),
    ],
)
def test_wrong_types_are_refused(transfer: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as error:
        TransferCheck(TransferSettings("kv_both"), tmp_path)(
            SamplingParams(extra_args={"kv_transfer_params": transfer})
        )
    assert words in str(error.value)


def test_the_first_sequence_keeps_the_prefix_and_all_load_it() -> None:
    def requests(**transfer: Any) -> list[Request]:
        params = params_of(**transfer)
        both = [
            Request(id=f"{k}_a", tokens=[1], params=params, prompt_len=1, limit=2, seed=0) for k in (0, 1)
        ]
        return with_transfer(both)

    assert [request.offers for request in requests(do_remote_decode=True)] == [True, False]
    prefixes = [request.remote for request in requests(**at("node", 5600), remote_block_ids=[[1], 2])]
    assert prefixes[0] == prefixes[1] and prefixes[0] is not None
    assert (prefixes[0].host, prefixes[0].port, prefixes[0].num_tokens) == ("node", 5600, 32)


def test_memory_of_another_process_is_opened_by_its_random_bytes_alone(tmp_path: Path) -> None:
    with TransferMemory(100) as memory:
        opened = open_memory(memory.target.path, memory.target.nonce)
        assert opened is not None
        opened[:3] = b"abc"
        assert bytes(memory.data[:3]) == b"abc" and len(opened) == 100
        assert open_memory(memory.target.path, bytes(32)) is None
        assert open_memory(memory.target.path, b"") is None
        file = tmp_path / "file"
        file.write_bytes(memory.target.nonce + bytes(100))
        assert open_memory(str(file), memory.target.nonce) is None, "only descriptors of processes are opened"
        assert open_memory("/proc/1/fd/../../../etc/passwd", memory.target.nonce) is None
        assert open_memory("/proc/self/fd/0", memory.target.nonce) is None
    assert open_memory(memory.target.path, memory.target.nonce) is None
