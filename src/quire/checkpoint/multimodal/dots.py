"""dots.ocr: an encoder like Qwen2-VL's, and a decoder with plain token positions."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import part, token_id
from quire.checkpoint.multimodal.qwen import GridFacts
from quire.checkpoint.reader import ConfigReader


@dataclass(frozen=True, slots=True)
class DotsFacts(GridFacts):
    """The vision encoder of dots.ocr: an encoder like Qwen2-VL's, with RMS norms."""

    is_normed: bool = True
    """Whether there is a norm after all layers."""


def dots_ocr(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read dots.ocr; the decoder's keys are at the top level of config.json."""
    vision, image_id = part(keys, "vision_config"), token_id(keys, "image_token_id", default=151665)
    facts = DotsFacts(
        depth=vision.size("num_hidden_layers", 42),
        hidden=vision.size("embed_dim", 1536),
        heads=vision.size("num_attention_heads", 12),
        intermediate=vision.size("intermediate_size", 4224),
        size_out=vision.size("hidden_size", 1536),
        patch=vision.size("patch_size", 14),
        frames=vision.size("temporal_patch_size", 1),
        merge=vision.size("spatial_merge_size", 2),
        activation="silu",
        norm_eps=vision.number("rms_norm_eps", 1e-5),
        image_id=image_id,
        video_id=image_id,
        start_id=image_id,
        end_id=image_id,
        video_start_id=image_id,
        video_end_id=image_id,
        channels=vision.size("num_channels", 3),
        qkv_bias=vision.flag("use_bias"),
        is_normed=vision.flag("post_norm", True),
    )
    if facts.frames != 1:
        raise vision.wrong("temporal_patch_size", "1")
    return keys.but(architectures=["Qwen2ForCausalLM"]), MediaFacts("dots_ocr", ("image",), facts)
