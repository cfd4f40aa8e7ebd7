"""Gemma 3n: an image is 256 soft tokens, an audio clip 188."""

from dataclasses import dataclass
from math import isqrt

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import part, text_part, token_id
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

_SSCP = {"sscp_conv_kernel_size": [[3, 3], [3, 3]], "sscp_conv_stride_size": [[2, 2], [2, 2]]}
"""The only supported kernel and stride sizes of the two convolutions before the conformer layers, by config
key."""


@dataclass(frozen=True, slots=True)
class Gemma3nAudioFacts:
    """A conformer (the Universal Speech Model), and the selection of its hidden states that become soft
    tokens."""

    layers: int
    hidden: int
    heads: int
    mels: int
    channels: tuple[int, int]
    """Output channels of the two convolutions before the conformer layers."""
    group_eps: float
    norm_eps: float
    left: int
    """Number of earlier hidden states that each hidden state attends to."""
    right: int
    """Number of later hidden states that each hidden state attends to."""
    cap: float
    """Soft cap on attention logits."""
    kernel: int
    """Kernel size of the convolution in a layer."""
    every: int
    """One of this many consecutive hidden states becomes a soft token."""
    residual: float
    """Factor on the output of the feed-forward parts."""
    clip: float
    """Limit on the absolute value of hidden states."""
    vocab: int
    """Number of tokens with an embedding in the encoder."""
    first: int
    """First token id of the encoder's vocabulary."""
    size_out: int
    tokens: int
    """Tokens per audio clip, whatever its length; shorter clips are padded with the end embedding."""
    audio_id: int
    start_id: int
    end_id: int

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        size, bands = self.hidden, -(-self.mels // 4)
        layer = size * size * (5 + 16 + 3) + size * (self.kernel + 9)
        first = 9 * self.channels[0] * (1 + self.channels[1]) + self.channels[1] * bands * size
        return self.layers * layer + first + size * (self.vocab + self.size_out)


@dataclass(frozen=True, slots=True)
class Gemma3nVisionFacts:
    """MobileNet-V5 over square images."""

    image: int
    """Image side in pixels."""
    side: int
    """Number of soft tokens per image side."""
    stem: int
    """Channels of the first convolution."""
    widths: tuple[int, int, int, int]
    """Channels of the four stages."""
    hidden: int
    norm_eps: float
    vocab: int
    """Number of tokens with an embedding in the encoder."""
    first: int
    """First token id of the encoder's vocabulary."""
    size_out: int
    image_id: int
    start_id: int
    end_id: int

    @property
    def tokens(self) -> int:
        return self.side**2

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        edge, low, middle, last = self.widths
        edges = 36 * (self.stem**2 + 2 * edge**2) + 4 * edge * (self.stem + 2 * edge)
        inverted = 6 * edge * (edge + 27 + low) + 4 * low * (8 * low + 20)
        inverted += 6 * low * (low + 27 + middle) + 7 * 4 * middle * (2 * middle + 9) + 2 * middle**2
        inverted += 6 * middle * (middle + 27 + last) + 14 * middle * (4 * middle + 6)
        inverted += 19 * last * (4 * last + 6)
        attention = 14 * middle * (2 * 12 * 64 + 2 * 64 + 24) + 19 * last * (2 * 16 * 96 + 2 * 96 + 2)
        both = middle + last
        fusion = 2 * both * (both + self.hidden + 1) + 2 * self.hidden
        return edges + inverted + attention + fusion + self.hidden * (self.vocab + self.size_out)


@dataclass(frozen=True, slots=True)
class Gemma3nFacts:
    """The encoders of a checkpoint; None: it has no such encoder."""

    vision: Gemma3nVisionFacts | None
    sound: Gemma3nAudioFacts | None
    size_out: int

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        return sum(part.num_weights for part in (self.vision, self.sound) if part is not None)


def gemma3n(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts | None]:
    text = text_part(keys, default="gemma3n_text")
    sees, hears = (bool(keys.get(name)) for name in ("vision_config", "audio_config"))
    if not sees and not hears:
        return text, None
    facts = Gemma3nFacts(
        vision=_read_vision(keys, part(keys, "vision_config"), text) if sees else None,
        sound=_read_audio(keys, part(keys, "audio_config"), text) if hears else None,
        size_out=text.size("hidden_size"),
    )
    return text, MediaFacts("gemma3n", ("image",) * sees + ("audio",) * hears, facts)


def _read_vision(keys: ConfigReader, vision: ConfigReader, text: ConfigReader) -> Gemma3nVisionFacts:
    vision.require("architecture", "mobilenetv5_300m_enc")
    factor = part(vision.defaults(model_args={}), "model_args").number("channel_multiplier", 1.0)
    tokens = keys.size("vision_soft_tokens_per_image", 256)
    if isqrt(tokens) ** 2 != tokens:
        raise keys.wrong("vision_soft_tokens_per_image", "a square number")
    edge, low, middle, last = (_scaled_channels(width * factor) for width in (128, 256, 640, 1280))
    return Gemma3nVisionFacts(
        image=48 * isqrt(tokens),
        side=isqrt(tokens),
        stem=_scaled_channels(64 * max(factor, 1.0)),
        widths=(edge, low, middle, last),
        hidden=vision.size("hidden_size", 2048),
        norm_eps=vision.number("rms_norm_eps", 1e-6),
        vocab=vision.size("vocab_size", 128),
        first=vision.size("vocab_offset", 262144),
        size_out=text.size("hidden_size"),
        image_id=token_id(keys, "image_token_id", default=262145),
        start_id=token_id(keys, "boi_token_id", default=255999),
        end_id=token_id(keys, "eoi_token_id", default=262144),
    )


def _scaled_channels(width: float) -> int:
    """Return the multiple of 8 nearest to a number of channels, but not below 90 % of it."""
    rounded = max(8, int(width + 4) // 8 * 8)
    return rounded + 8 * (rounded < 0.9 * width)


def _read_audio(keys: ConfigReader, audio: ConfigReader, text: ConfigReader) -> Gemma3nAudioFacts:
    for name, known in _SSCP.items():
        if audio.get(name) is not None and [list(size) for size in audio.get(name)] != known:
            raise audio.wrong(name, str(known))
    channels = audio.get("sscp_conv_channel_size") or [128, 32]
    if len(channels) != 2:
        raise ConfigError(f"{audio.source}: sscp_conv_channel_size is {channels}, expected two numbers")
    left, right = audio.get("conf_attention_context_left"), audio.get("conf_attention_context_right")
    return Gemma3nAudioFacts(
        layers=audio.size("conf_num_hidden_layers", 12),
        hidden=audio.size("hidden_size", 1536),
        heads=audio.size("conf_num_attention_heads", 8),
        mels=audio.size("input_feat_size", 128),
        channels=(channels[0], channels[1]),
        group_eps=audio.number("sscp_conv_group_norm_eps", 1e-3),
        norm_eps=audio.number("rms_norm_eps", 1e-6),
        left=max(0, (13 if left is None else left) - 1),
        right=right or 0,
        cap=audio.number("conf_attention_logit_cap", 50.0),
        kernel=audio.size("conf_conv_kernel_size", 5),
        every=audio.size("conf_reduction_factor", 4),
        residual=audio.number("conf_residual_weight", 0.5),
        clip=audio.number("gradient_clipping", 1e10),
        vocab=audio.size("vocab_size", 128),
        first=audio.size("vocab_offset", 262272),
        size_out=text.size("hidden_size"),
        tokens=keys.size("audio_soft_tokens_per_image", 188),
        audio_id=token_id(keys, "audio_token_id", default=262273),
        start_id=token_id(keys, "boa_token_id", default=256000),
        end_id=token_id(keys, "eoa_token_id", default=262272),
    )
