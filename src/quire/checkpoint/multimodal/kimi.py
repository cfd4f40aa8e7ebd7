"""Kimi-VL and Kimi-K2.5: MoonViT, and a decoder like DeepSeek-V3."""

from dataclasses import dataclass, replace

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import part, side_of, stack_weights, text_part, token_id
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MoonFacts:
    """MoonViT and its projector."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    patch: int
    """Patch side in pixels."""
    rows: int
    """Number of rows in the grid of learned positions."""
    columns: int
    merge: int
    """Side of the square of patches that are merged into one token."""
    norm_eps: float
    """Epsilon of the projector's norm."""
    size_out: int
    image_id: int
    """Placeholder token of an image."""
    projector: str
    """Tensor name of the projector in checkpoints."""
    products: tuple[str, str]
    """Tensor names of the projector's two linear layers."""
    frames: int = 1
    """Number of video frames that are encoded together and averaged."""
    activation: str = "gelu_pytorch_tanh"

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        return (
            stack_weights(self.layers, self.hidden, self.intermediate)
            + self.hidden * (3 * self.patch**2 + self.rows * self.columns)
            + self.merge**2 * self.hidden * (self.merge**2 * self.hidden + self.size_out)
        )


def kimi_vl(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text = text_part(keys, default="deepseek_v3")
    facts = _read_facts(keys, text, "multi_modal_projector", ("linear_1", "linear_2"))
    return text, MediaFacts("kimi_vl", ("image",), facts)


def kimi_k25(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text, vision = text_part(keys, default="deepseek_v3"), part(keys, "vision_config")
    facts = _read_facts(keys, text, "mm_projector", ("proj.0", "proj.2"))
    facts = replace(facts, frames=_size(vision, 4, "init_pos_emb_time", "pos_emb_time"))
    return text, MediaFacts("kimi_vl", ("image", "video"), facts)


def _read_facts(
    keys: ConfigReader, text: ConfigReader, projector: str, products: tuple[str, str]
) -> MoonFacts:
    vision = part(keys, "vision_config")
    facts = MoonFacts(
        layers=_size(vision, 27, "num_hidden_layers", "vt_num_hidden_layers"),
        hidden=_size(vision, 1152, "hidden_size", "vt_hidden_size"),
        intermediate=_size(vision, 4304, "intermediate_size", "vt_intermediate_size"),
        heads=_size(vision, 16, "num_attention_heads", "vt_num_attention_heads"),
        patch=side_of(vision, "patch_size", 14),
        rows=_size(vision, 64, "init_pos_emb_height", "pos_emb_height"),
        columns=_size(vision, 64, "init_pos_emb_width", "pos_emb_width"),
        merge=side_of(vision, "merge_kernel_size", 2),
        norm_eps=keys.number("projection_layer_norm_eps", vision.number("projector_ln_eps", 1e-5)),
        size_out=text.size("hidden_size"),
        image_id=token_id(keys, "media_placeholder_token_id", "image_token_id", default=163605),
        projector=projector,
        products=products,
    )
    if facts.hidden // facts.heads % 4:
        raise ConfigError(f"{vision.source}: heads of size {facts.hidden // facts.heads} do not fit 2-D rope")
    return facts


def _size(keys: ConfigReader, default: int, *names: str) -> int:
    """Return the size under the first of these keys that is set, or the default."""
    return next((keys.size(name) for name in names if keys.get(name) is not None), default)
