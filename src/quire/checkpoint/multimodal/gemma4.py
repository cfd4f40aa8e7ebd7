"""Gemma 4: an image of any shape is up to 1120 soft tokens, a second of audio 25."""

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


@dataclass(frozen=True, slots=True)
class Gemma4AudioFacts:
    """The audio encoder: a conformer, as in Gemma 3n, of which every hidden state is a soft token."""

    layers: int
    hidden: int
    heads: int
    channels: tuple[int, int]
    """Output channels of the two convolutions before the conformer layers. The first is the number of mel
    bins, too."""
    norm_eps: float
    left: int
    """Number of earlier hidden states that each hidden state attends to."""
    cap: float
    """Soft cap on attention logits."""
    kernel: int
    """Kernel size of the convolution in a layer."""
    residual: float
    """Factor on the output of the feed-forward parts."""
    clip: float
    """Limit on the absolute value of hidden states."""
    is_clipped: bool
    """Whether inputs and outputs of linear layers are clipped to bounds in the checkpoint."""
    inner_out: int
    """Size of the hidden states after the last layer."""
    size_out: int
    audio_id: int
    start_id: int
    end_id: int

    @property
    def mels(self) -> int:
        return self.channels[0]

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        size = self.hidden
        layer = size * size * (5 + 16 + 3) + size * (self.kernel + 8)
        first = 9 * self.channels[0] * (1 + self.channels[1]) + self.channels[1] * (self.mels // 4) * size
        return self.layers * layer + first + self.inner_out * (size + 1 + self.size_out)


@dataclass(frozen=True, slots=True)
class Gemma4Facts:
    """The encoders of Gemma 4, and the placeholder token of video frames."""

    vision: Gemma4VisionFacts
    sound: Gemma4AudioFacts | None
    video_id: int

    @property
    def num_weights(self) -> int:
        return self.vision.num_weights + (0 if self.sound is None else self.sound.num_weights)


def gemma4(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts | None]:
    """Read Gemma 4. In larger models the tokens of an image attend to each other in both directions, in
    layers with a sliding window. These take neither videos here, whose frames would be one image, nor
    audio."""
    text = text_part(keys, default="gemma4_text")
    if not isinstance(keys.get("vision_config"), dict):
        return text, None
    is_whole = text.get("use_bidirectional_attention") == "vision"
    vision = _read_vision(keys, part(keys, "vision_config"), text)
    modalities, sound = ("image",) if is_whole else ("image", "video"), None
    if not is_whole and isinstance(keys.get("audio_config"), dict):
        sound, modalities = _read_audio(keys, part(keys, "audio_config"), text), (*modalities, "audio")
    facts = Gemma4Facts(vision, sound, token_id(keys, "video_token_id", default=258884))
    return text, MediaFacts("gemma4", modalities, facts, is_whole=is_whole, whole_in_windows=is_whole)


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


def _read_audio(keys: ConfigReader, audio: ConfigReader, text: ConfigReader) -> Gemma4AudioFacts:
    channels = audio.get("subsampling_conv_channels") or [128, 32]
    left = audio.size("attention_context_left", 13)
    if len(channels) != 2 or channels[0] % 4:
        raise audio.wrong("subsampling_conv_channels", "two numbers, the first a multiple of 4")
    if str(audio.get("hidden_act") or "silu") != "silu":
        raise audio.wrong("hidden_act", "silu")
    if audio.get("attention_context_right") or left < 2:
        raise audio.wrong("attention_context_right", "0, with an attention_context_left of at least 2")
    if audio.size("attention_chunk_size", 12) not in (left - 1, left):  # the range of position embeddings
        raise audio.wrong("attention_chunk_size", f"{left - 1}, one less than attention_context_left")
    return Gemma4AudioFacts(
        layers=audio.size("num_hidden_layers", 12),
        hidden=audio.size("hidden_size", 1024),
        heads=audio.size("num_attention_heads", 8),
        channels=(channels[0], channels[1]),
        norm_eps=audio.number("rms_norm_eps", 1e-6),
        left=left - 2,
        cap=audio.number("attention_logit_cap", 50.0),
        kernel=audio.size("conv_kernel_size", 5),
        residual=audio.number("residual_weight", 0.5),
        clip=audio.number("gradient_clipping", 1e10),
        is_clipped=audio.flag("use_clipped_linears", True),
        inner_out=audio.size("output_proj_dims", 1536),
        size_out=text.size("hidden_size"),
        audio_id=token_id(keys, "audio_token_id", default=258881),
        start_id=token_id(keys, "boa_token_id", default=256000),
        end_id=token_id(keys, "eoa_token_index", "eoa_token_id", default=258883),
    )
