"""`LoRARequest`: the LoRA adapter of a request."""

from typing import Any

import msgspec

from quire.errors import RequestError


class LoRARequest(msgspec.Struct, kw_only=False, omit_defaults=True, eq=False):
    """A LoRA adapter by name, number and path. Requests with equal adapter names are equal."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False
    """Whether to reload an adapter of this name, because its files changed."""
    is_3d_lora_weight: bool = False
    within: tuple[str, ...] = ()
    """Directories that must contain the adapter's files whenever they are opened; empty: any."""

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise RequestError(
                f"lora_int_id must be at least 1, not {self.lora_int_id}", param="lora_request"
            )
        if not self.lora_path:
            raise RequestError("lora_path must not be empty", param="lora_request")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


class AdapterFacts(msgspec.Struct, frozen=True):
    """Facts of a loaded LoRA adapter."""

    digest: bytes
    """Digest of the adapter's contents, which is a part of prefix cache keys."""
    rank: int
    num_bytes: int
    """Bytes in host memory, for one device."""
    num_extra_vocab: int = 0
    """Number of tokens that the adapter adds to the model's vocabulary."""
