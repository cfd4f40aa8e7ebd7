"""Qwen2-Audio, Audio Flamingo 3, Voxtral and GLM-ASR: Whisper's encoder and a decoder."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import part, text_part, token_id
from quire.checkpoint.multimodal.whisper import WhisperFacts, encoder_of
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class QwenAudioFacts:
    """An audio encoder, and the projector that turns its hidden states into decoder tokens."""

    encoder: WhisperFacts
    size_out: int
    """Output size: the decoder's hidden size."""
    audio_id: int
    """Placeholder token of audio."""
    activation: str = ""
    """Activation between the two linear layers of the projector; empty: the projector has one linear
    layer."""
    bias: bool = True
    stack: int = 0
    """Number of encoder hidden states that are concatenated for one token; 0: the mean of two hidden
    states."""

    inner: int = 0
    """Hidden size of the projector; 0: the output size."""
    rotary_dim: int = 0
    """Number of rotated dimensions of each head; 0: the encoder has learned positions instead."""
    theta: float = 10000.0
    """Base of the rotary embedding."""

    @property
    def num_frames(self) -> int:
        """Return the number of mel frames per encoder input."""
        return self.encoder.num_frames

    @property
    def tokens(self) -> int:
        """Return the number of tokens per encoder input."""
        return self.encoder.positions // self.states

    @property
    def states(self) -> int:
        """Return the number of encoder hidden states per token."""
        return self.stack or 2

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        inner = self.inner or self.size_out
        return self.encoder.num_weights + inner * (
            max(1, self.stack) * self.encoder.hidden + (self.size_out if self.activation else 0)
        )


def qwen2_audio(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text, encoder = text_part(keys, default="qwen2"), encoder_of(part(keys, "audio_config"))
    audio_id = token_id(keys, "audio_token_index", "audio_token_id", default=151646)
    tower = QwenAudioFacts(encoder, text.size("hidden_size"), audio_id)
    return text, MediaFacts("qwen2_audio", ("audio",), tower)


def audio_flamingo3(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text = text_part(keys, default="qwen2")
    tower = QwenAudioFacts(
        encoder=encoder_of(part(keys, "audio_config")),
        size_out=text.size("hidden_size"),
        audio_id=token_id(keys, "audio_token_id", default=151669),
        activation=keys.get("projector_hidden_act") or "gelu",
        bias=keys.flag("projector_bias", True),
    )
    return text, MediaFacts("audio_flamingo3", ("audio",), tower)


def voxtral(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text = text_part(keys)
    encoder = encoder_of(part(keys, "audio_config"))
    tower = QwenAudioFacts(
        encoder=encoder,
        size_out=text.size("hidden_size"),
        audio_id=token_id(keys, "audio_token_id", default=24),
        activation=keys.get("projector_hidden_act") or "gelu",
        bias=False,
        stack=encoder.intermediate // encoder.hidden,
    )
    if encoder.intermediate % encoder.hidden or encoder.positions % tower.states:
        raise ConfigError(
            f"{keys.source}: {encoder.positions} encoder states of size {encoder.hidden} cannot be stacked "
            f"to size {encoder.intermediate}"
        )
    return text, MediaFacts("voxtral", ("audio",), tower, transcribes=True)


def glm_asr(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read GLM-ASR: rotary embedding in the encoder, and four of its states per token."""
    text, audio = text_part(keys), part(keys, "audio_config")
    encoder = encoder_of(audio.renamed({"max_position_embeddings": "max_source_positions"}))
    audio.require("num_key_value_heads", encoder.heads)
    rope = part(audio.defaults(rope_parameters={}), "rope_parameters")
    share = rope.number("partial_rotary_factor", audio.number("partial_rotary_factor", 0.5))
    tower = QwenAudioFacts(
        encoder=encoder,
        size_out=text.size("hidden_size"),
        audio_id=token_id(keys, "audio_token_id", default=59260),
        activation=keys.get("projector_hidden_act") or "gelu",
        stack=encoder.intermediate // encoder.hidden,
        inner=2 * text.size("hidden_size"),
        rotary_dim=int(encoder.hidden // encoder.heads * share),
        theta=rope.number("rope_theta", 10000.0),
    )
    if encoder.intermediate != tower.stack * encoder.hidden or encoder.positions % tower.states:
        raise audio.wrong("intermediate_size", f"a multiple of {encoder.hidden} that divides the states")
    return text, MediaFacts("glm_asr", ("audio",), tower)
