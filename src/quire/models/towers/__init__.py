"""Towers: encoders of images, videos and audio to vectors in place of placeholder tokens, one per family."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts, MediaFacts
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
        """Return the head counts of its encoders, or () if it does not support tensor parallelism."""
        return (facts.heads,)

    @classmethod
    def divides(cls, media: MediaFacts, count: int) -> bool:
        """Return whether `count` devices can share its layers."""
        heads = cls.heads(media.tower)
        return bool(heads) and all(number % count == 0 for number in heads)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encode all items in one batch; return [num_vectors, hidden * (1 + levels)] each. `items` holds
        their arrays on the device, by the names of the family's processor."""
        raise NotImplementedError

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        """Return a blank item of about `num_vectors` vectors, for memory profiling."""
        raise NotImplementedError

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        """Estimate the cost of an item from the shapes of its arrays, to balance items over devices."""
        raise NotImplementedError


@runtime_checkable
class GraphableTower(Protocol):
    """A tower that a CUDA graph can capture: its computation depends only on the shapes of the items."""

    def lay_out(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Any:
        """Return all inputs that depend on shapes only, on the device."""

    def compute(self, modality: str, items: Sequence[Mapping[str, Tensor]], layout: Any) -> list[Tensor]:
        """Encode the items with this layout, without host copies and synchronization."""


TOWERS = LazyTable(
    "tower",
    {
        "aya_vision": "quire.models.towers.clip:Aya",
        "clip": "quire.models.towers.clip:ClipEmbedding",
        "cohere2_vision": "quire.models.towers.clip:Aya",
        "dots_ocr": "quire.models.towers.ocr:DotsOCR",
        "gemma3": "quire.models.towers.clip:Gemma3",
        "gemma4": "quire.models.towers.gemma4:Gemma4Tower",
        "gemma3n": "quire.models.towers.gemma3n:Gemma3nTower",
        "idefics3": "quire.models.towers.clip:Idefics3",
        "internvl": "quire.models.towers.intern:InternVL",
        "kimi_vl": "quire.models.towers.kimi:KimiVL",
        "lfm2_vl": "quire.models.towers.lfm2:Lfm2VL",
        "llama4": "quire.models.towers.llama4:Llama4Tower",
        "lighton_ocr": "quire.models.towers.pixtral:Pixtral",
        "llava": "quire.models.towers.clip:Llava",
        "glm4v": "quire.models.towers.glm4v:Glm4v",
        "qwen2_5_omni": "quire.models.towers.omni:Omni",
        "qwen2_5_vl": "quire.models.towers.qwen_vl:Qwen2_5VL",
        "qwen2_vl": "quire.models.towers.qwen_vl:Qwen2VL",
        "audio_flamingo3": "quire.models.towers.whisper:QwenAudio",
        "qwen2_audio": "quire.models.towers.whisper:QwenAudio",
        "qwen3_asr": "quire.models.towers.qwen3_omni:Qwen3ASR",
        "qwen3_omni": "quire.models.towers.qwen3_omni:Qwen3Omni",
        "qwen3_vl": "quire.models.towers.qwen_vl:Qwen3VL",
        "llava_next": "quire.models.towers.clip:Anyres",
        "llava_onevision": "quire.models.towers.clip:Anyres",
        "minicpm_v": "quire.models.towers.minicpm:MiniCPMV",
        "paddleocr_vl": "quire.models.towers.ocr:PaddleOCRVL",
        "ovis2": "quire.models.towers.ovis:Ovis2",
        "paligemma": "quire.models.towers.clip:PaliGemma",
        "pixtral": "quire.models.towers.pixtral:Pixtral",
        "siglip": "quire.models.towers.clip:SiglipEmbedding",
        "step3": "quire.models.towers.step3:Step3",
        "step_vl": "quire.models.towers.step3:StepVL",
        "voxtral": "quire.models.towers.whisper:QwenAudio",
        "whisper": "quire.models.towers.whisper:WhisperTower",
    },
)


def is_divided(media: MediaFacts, mode: str, count: int) -> bool:
    """Return whether the tower is tensor-parallel over `count` devices. Otherwise each device has a full copy
    and encodes some of the items."""
    divides = getattr(TOWERS[media.family], "divides", None)
    if count == 1 or mode == "data":
        return False
    if divides is None or not divides(media, count):
        warn_once(
            log,
            f"The encoder of {media.family} cannot be divided over {count} devices: each device runs a full "
            "copy, as with mm_encoder_tp_mode=data",
        )
        return False
    return True
