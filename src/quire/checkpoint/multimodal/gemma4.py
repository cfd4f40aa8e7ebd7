"""Gemma 4: an image of any shape is up to 1120 soft tokens. Its audio encoder is not supported yet."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import part, stack_weights, text_part, token_id
from quire.checkpoint.reader import ConfigReader

_ACTIVATION = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class Gemma4VisionFacts:
    """A vision encoder over grids of patches. The mean of each square of patches is one soft token."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    head_dim: int
    patch: int
    merge: int
    """Side of the square of patches that becomes one token."""
    positions: int
    """Number of learned positions per axis."""
    theta: float
    norm_eps: float
    is_clipped: bool
    """Whether inputs and outputs of linear layers are clipped to bounds in the checkpoint."""
    is_standardized: bool
    """Whether a bias and a scale in the checkpoint are applied to the soft tokens."""
    size_out: int
    image_id: int
    begin_id: int
    end_id: int

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        first = self.hidden * (3 * self.patch**2 + 2 * self.positions)
        layers = stack_weights(self.layers, self.hidden, self.intermediate, matrices=3)
        return first + layers + self.hidden * self.size_out


def gemma4(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts | None]:
    """Read Gemma 4. In larger models the tokens of an image attend to each other in both directions, in
    layers with a sliding window."""
    text = text_part(keys, default="gemma4_text")
    if not isinstance(keys.get("vision_config"), dict):
        return text, None
    is_whole = text.get("use_bidirectional_attention") == "vision"
    facts = _read_vision(keys, part(keys, "vision_config"), text)
    return text, MediaFacts("gemma4", ("image",), facts, is_whole=is_whole, whole_in_windows=is_whole)


def gemma4_unified(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts | None]:
    return text_part(keys, default="gemma4_unified_text"), None


def _read_vision(keys: ConfigReader, vision: ConfigReader, text: ConfigReader) -> Gemma4VisionFacts:
    heads, head_dim = vision.size("num_attention_heads", 12), vision.size("head_dim", 64)
    rope = vision.get("rope_parameters") or {}
    if vision.size("num_key_value_heads", heads) != heads:
        raise vision.wrong("num_key_value_heads", f"{heads}, as many as there are queries")
    if str(vision.get("hidden_activation") or _ACTIVATION) != _ACTIVATION:
        raise vision.wrong("hidden_activation", _ACTIVATION)
    if not isinstance(rope, dict) or str(rope.get("rope_type") or "axial") not in ("axial", "default"):
        raise vision.wrong("rope_parameters", "an object with rope_type axial")
    if head_dim % 4 or vision.flag("attention_bias"):
        raise vision.wrong("head_dim", "a multiple of 4, without attention_bias")
    return Gemma4VisionFacts(
        layers=vision.size("num_hidden_layers", 16),
        hidden=vision.size("hidden_size", 768),
        intermediate=vision.size("intermediate_size", 3072),
        heads=heads,
        head_dim=head_dim,
        patch=vision.size("patch_size", 16),
        merge=vision.size("pooling_kernel_size", 3),
        positions=vision.size("position_embedding_size", 10240),
        theta=float(rope.get("rope_theta") or 100.0),
        norm_eps=vision.number("rms_norm_eps", 1e-6),
        is_clipped=vision.flag("use_clipped_linears"),
        is_standardized=vision.flag("standardize"),
        size_out=text.size("hidden_size"),
        image_id=token_id(keys, "image_token_id", default=258880),
        begin_id=token_id(keys, "boi_token_id", default=255999),
        end_id=token_id(keys, "eoi_token_id", default=258882),
    )
