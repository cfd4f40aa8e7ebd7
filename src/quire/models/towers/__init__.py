"""Towers: images, videos and sounds become vectors that stand among those of tokens. One line a family."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from quire.checkpoint.facts import MediaFacts
from quire.logs import get_logger, warn_once
from quire.registry import LazyTable

log = get_logger(__name__)


class Tower(Protocol):
    """All that a model has to see or to hear with; made as `TOWERS[family](facts, scope)`.

    One whose layers the devices of `scope.group` share has a static method `divides(media, count)`: whether
    so many can.
    """

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """The vectors of each item, [num_vectors, hidden * (1 + levels)], of all in one batch: `items` are
        their arrays, on the device, by the names that the family's processor gave them."""

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        """An item of about so many vectors, for measuring what it takes."""

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        """What an item takes, by the shapes of its arrays: items are spread over devices by it."""


@runtime_checkable
class Repeats(Protocol):
    """A tower that does the same to all items of the same shapes: what depends on these alone is made once,
    and the rest can be played again."""

    def lay_out(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Any:
        """All that depends on shapes, on the device; the numbers of the items are not read."""

    def compute(self, modality: str, items: Sequence[Mapping[str, Tensor]], layout: Any) -> list[Tensor]:
        """As `encode` does. Nothing comes from the host, and nobody waits for the device."""


TOWERS = LazyTable(
    "tower",
    {
        "aya_vision": "quire.models.towers.aya:Aya",
        "cohere2_vision": "quire.models.towers.aya:Aya",
        "dots_ocr": "quire.models.towers.dots:DotsOCR",
        "gemma3": "quire.models.towers.gemma:Gemma3",
        "gemma3n": "quire.models.towers.gemma3n:Gemma3nTower",
        "idefics3": "quire.models.towers.idefics:Idefics3",
        "internvl": "quire.models.towers.intern:InternVL",
        "kimi_vl": "quire.models.towers.kimi:KimiVL",
        "llama4": "quire.models.towers.llama4:Llama4Tower",
        "lighton_ocr": "quire.models.towers.pixtral:Pixtral",
        "llava": "quire.models.towers.llava:Llava",
        "glm4v": "quire.models.towers.glm4v:Glm4v",
        "qwen2_5_omni": "quire.models.towers.omni:Omni",
        "qwen2_5_vl": "quire.models.towers.qwen2_5_vl:Qwen2_5VL",
        "qwen2_vl": "quire.models.towers.qwen2_vl:Qwen2VL",
        "audio_flamingo3": "quire.models.towers.qwen_audio:QwenAudio",
        "qwen2_audio": "quire.models.towers.qwen_audio:QwenAudio",
        "qwen3_omni": "quire.models.towers.qwen3_omni:Qwen3Omni",
        "qwen3_vl": "quire.models.towers.qwen3_vl:Qwen3VL",
        "llava_next": "quire.models.towers.anyres:Anyres",
        "llava_onevision": "quire.models.towers.anyres:Anyres",
        "minicpm_v": "quire.models.towers.minicpm:MiniCPMV",
        "paddleocr_vl": "quire.models.towers.paddle:PaddleOCRVL",
        "ovis2": "quire.models.towers.ovis:Ovis2",
        "paligemma": "quire.models.towers.paligemma:PaliGemma",
        "pixtral": "quire.models.towers.pixtral:Pixtral",
        "step_vl": "quire.models.towers.step3:StepVL",
        "voxtral": "quire.models.towers.qwen_audio:QwenAudio",
        "whisper": "quire.models.towers.whisper:WhisperTower",
    },
)


def is_divided(media: MediaFacts, mode: str, count: int) -> bool:
    """Whether so many devices share each layer of a tower, by mm_encoder_tp_mode and as far as it can be;
    else each has all of them, and encodes some of the items."""
    divides = getattr(TOWERS[media.family], "divides", None)
    if count == 1 or mode == "data":
        return False
    if divides is None or not divides(media, count):
        warn_once(
            log,
            f"towers of {media.family} cannot be divided over {count} devices: each has a whole one, as with"
            " mm_encoder_tp_mode=data",
        )
        return False
    return True
