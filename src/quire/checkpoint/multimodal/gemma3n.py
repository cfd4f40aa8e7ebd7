"""Gemma 3n: an audio clip is 188 soft tokens. Its vision encoder is not supported yet."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import part, text_part, token_id
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

_SSCP = {"sscp_conv_kernel_size": [[3, 3], [3, 3]], "sscp_conv_stride_size": [[2, 2], [2, 2]]}
"""The only supported kernel and stride sizes of the two convolutions before the conformer layers, by config
key."""


@dataclass(frozen=True, slots=True)
class Gemma3nFacts:
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


def gemma3n(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts | None]:
    text, audio = text_part(keys, default="gemma3n_text"), keys.get("audio_config")
    if not isinstance(audio, dict):
        return text, None
    return text, MediaFacts("gemma3n", ("audio",), _read_audio(keys, part(keys, "audio_config"), text))


def _read_audio(keys: ConfigReader, audio: ConfigReader, text: ConfigReader) -> Gemma3nFacts:
    for name, known in _SSCP.items():
        if audio.get(name) is not None and [list(size) for size in audio.get(name)] != known:
            raise audio.wrong(name, str(known))
    channels = audio.get("sscp_conv_channel_size") or [128, 32]
    if len(channels) != 2:
        raise ConfigError(f"{audio.source}: sscp_conv_channel_size is {channels}, expected two numbers")
    left, right = audio.get("conf_attention_context_left"), audio.get("conf_attention_context_right")
    return Gemma3nFacts(
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
