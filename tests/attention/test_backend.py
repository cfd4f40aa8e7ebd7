"""Tests of the choice of an attention backend: the first that fits, the named one, or an error."""

from dataclasses import replace

import pytest
import torch

from quire.attention import backend
from quire.attention.backend import AttentionSpec, choose
from quire.attention.torch_sdpa import TorchSDPA
from quire.config.machine import Machine
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.registry import LazyTable

MACHINE = Machine(device="cpu", name="a CPU", num_devices=1, total_bytes=1, free_bytes=1, num_cores=1)
SPEC = AttentionSpec(4, 2, 16, torch.float32)


class Picky(TorchSDPA):
    name = "PICKY"

    def fits(self, spec: AttentionSpec, machine: Machine) -> str | None:
        return None if machine.device == "cuda" else f"needs CUDA, this is {machine.device}"


@pytest.fixture
def with_picky(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"PICKY": f"{__name__}:Picky", "TORCH_SDPA": backend.BACKENDS.entries["TORCH_SDPA"]}
    monkeypatch.setattr(backend, "BACKENDS", LazyTable("attention backend", entries))


@pytest.mark.usefixtures("with_picky")
def test_first_backend_that_fits_is_chosen() -> None:
    assert choose(None, SPEC, MACHINE).name == "TORCH_SDPA"


@pytest.mark.usefixtures("with_picky")
def test_named_backend_that_does_not_fit_is_an_error() -> None:
    """Check that there is no silent fallback to another backend."""
    with pytest.raises(ConfigError, match="PICKY: needs CUDA, this is cpu"):
        choose("PICKY", SPEC, MACHINE)


def test_unknown_name_lists_the_known_names() -> None:
    with pytest.raises(ConfigError, match="unknown attention backend 'FLASH'; known: .*TORCH_SDPA"):
        choose("flash", SPEC, MACHINE)


def test_native_backend_comes_first_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check also that it is skipped if it is not compiled, on other devices, and for unsupported shapes."""
    monkeypatch.setattr(native, "library", lambda: object())
    assert choose(None, SPEC, MACHINE).name == "CPU_ATTN"
    for spec, machine in [
        (SPEC, replace(MACHINE, device="cuda")),
        (replace(SPEC, head_dim=20), MACHINE),
        (replace(SPEC, dtype=torch.float16), MACHINE),
    ]:
        assert choose(None, spec, machine).name == "TORCH_SDPA"
    monkeypatch.setattr(native, "library", lambda: None)
    assert choose(None, SPEC, MACHINE).name == "TORCH_SDPA"
    with pytest.raises(ConfigError, match="CPU_ATTN: the native kernels are not available; omit it"):
        choose("cpu_attn", SPEC, MACHINE)


def test_every_backend_of_the_table_can_be_constructed() -> None:
    """Check that each name leads to the class with this name."""
    assert [backend.BACKENDS[name]().name for name in backend.BACKENDS] == list(backend.BACKENDS)


def test_own_kernels_come_first_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = replace(MACHINE, device="cuda", capability=(9, 0))
    monkeypatch.setattr("quire.attention.triton_attn.find_spec", lambda name: object())
    assert choose(None, SPEC, gpu).name == "TRITON_ATTN"
    monkeypatch.setattr("quire.attention.triton_attn.find_spec", lambda name: None)
    assert choose(None, SPEC, gpu).name == "TORCH_SDPA"


def test_names_are_case_insensitive() -> None:
    assert choose("torch_sdpa", SPEC, MACHINE).name == "TORCH_SDPA"


def test_error_lists_every_reason_if_no_backend_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "BACKENDS", LazyTable("attention backend", {"PICKY": f"{__name__}:Picky"}))
    with pytest.raises(ConfigError, match="no attention backend fits .*PICKY: needs CUDA"):
        choose(None, SPEC, MACHINE)
