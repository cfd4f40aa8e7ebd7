"""Whisper: an encoder of sounds, whose states every token of a decoder sees."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.reader import ConfigReader


@dataclass(frozen=True, slots=True)
class WhisperFacts:
    """An encoder of sounds."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    mels: int
    """Pitches of a moment."""
    positions: int
    """States of the longest sound; each is of two moments."""
    activation: str

    @property
    def moments(self) -> int:
        """Of what it hears at once."""
        return 2 * self.positions

    @property
    def num_weights(self) -> int:
        """About: without biases."""
        layer = self.hidden * (4 * self.hidden + 2 * self.intermediate)
        return self.layers * layer + self.hidden * (3 * self.mels + 3 * self.hidden + self.positions)


def encoder_of(audio: ConfigReader) -> WhisperFacts:
    """What is not said is as in Whisper-large-v3; the files of some have the names of today's models."""
    return WhisperFacts(
        layers=audio.size("encoder_layers", audio.size("num_hidden_layers", 32)),
        hidden=audio.size("d_model", audio.size("hidden_size", 1280)),
        intermediate=audio.size("encoder_ffn_dim", audio.size("intermediate_size", 5120)),
        heads=audio.size("encoder_attention_heads", audio.size("num_attention_heads", 20)),
        mels=audio.size("num_mel_bins", 128),
        positions=audio.size("max_source_positions", 1500),
        activation=audio.get("activation_function") or "gelu",
    )


def whisper(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    encoder = encoder_of(keys)
    return keys, MediaFacts("whisper", ("audio",), encoder, crossed=encoder.positions, transcribes=True)
