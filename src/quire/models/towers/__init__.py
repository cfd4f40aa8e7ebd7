"""Towers: the vision and audio encoders of multimodal models, one per family. Their output vectors replace
the embeddings of placeholder tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts, MediaFacts
from quire.checkpoint.multimodal import MEDIA_CODE
from quire.layers.scope import Scope
from quire.logs import get_logger, warn_once
from quire.registry import LazyTable

log = get_logger(__name__)


class Tower(nn.Module):
    """The vision and audio encoders of a model; built as `TOWERS[family](facts, scope)`."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        assert facts.media is not None
        self.facts: Any = facts.media.tower
        self.device = scope.device

    @staticmethod
    def heads(facts: Any) -> tuple[int, ...]:
        """Return the number of attention heads of each encoder; () if the tower does not support tensor
        parallelism."""
        return (getattr(facts, "vit", facts).heads,)

    @classmethod
    def can_shard(cls, media: MediaFacts, count: int) -> bool:
        """Return whether the tower's layers can be sharded over `count` devices."""
        heads = cls.heads(media.tower)
        return bool(heads) and all(number % count == 0 for number in heads)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encode all items in one batch; return the vectors of each item, [num_vectors, hidden * (1 +
        deepstack levels)]. An item maps the array names of the family's processor to tensors on the
        device."""
        raise NotImplementedError

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        """Return the arrays by name of a blank item of about `num_vectors` vectors, for memory profiling."""
        raise NotImplementedError

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        """Estimate the relative compute cost of an item, without unit, from the shapes of its arrays by name,
        to balance items over devices."""
        raise NotImplementedError


@runtime_checkable
class GraphableTower(Protocol):
    """A tower that a CUDA graph can capture: its computation depends only on the shapes of the items."""

    def lay_out(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Any:
        """Return all inputs of `compute` that depend only on the shapes of the items, as tensors on the
        device."""

    def compute(self, modality: str, items: Sequence[Mapping[str, Tensor]], layout: Any) -> list[Tensor]:
        """Return the vectors of each item, computed with this `layout` and without host copies and
        synchronization."""


TOWERS = LazyTable(
    "tower", {family: f"quire.models.towers.{code.tower}" for family, code in MEDIA_CODE.items()}
)
"""Tower classes by the family of the multimodal model (`MediaFacts.family`)."""


def is_tensor_parallel(media: MediaFacts, mode: str, count: int) -> bool:
    """Return whether the tower is tensor-parallel over `count` devices; never if `mode` (mm_encoder_tp_mode)
    is "data". Otherwise each device has a full copy and encodes some of the items."""
    can_shard = getattr(TOWERS[media.family], "can_shard", None)
    if count == 1 or mode == "data":
        return False
    if can_shard is None or not can_shard(media, count):
        warn_once(
            log,
            f"The encoder of {media.family} cannot be divided over {count} devices: each device runs a full "
            "copy, as with mm_encoder_tp_mode=data",
        )
        return False
    return True
