"""Qwen2.5-Omni and Qwen3-Omni, as far as they think: a tower that sees, beside one that hears."""

from dataclasses import dataclass, replace

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.parts import part
from quire.checkpoint.multimodal.qwen import GridFacts, qwen2_5_vl, qwen3_vl
from quire.checkpoint.multimodal.whisper import WhisperFacts, encoder_of
from quire.checkpoint.reader import ConfigReader


@dataclass(frozen=True, slots=True)
class HearingFacts:
    """Whisper's layers, over pieces of a sound. Each two states become a vector, or each one, of eight
    moments (`channels`)."""

    encoder: WhisperFacts
    window: int
    """Moments of a piece."""
    size_out: int
    audio_id: int
    """The token in whose places a sound's vectors stand,"""
    start_id: int
    """what stands before them,"""
    end_id: int
    """and behind."""
    seen: int = 0
    """Pieces whose states see each other; 0: only those of one do."""
    channels: int = 0
    """Of convolutions over moments and pitches; 0: they are over moments alone."""

    @property
    def num_weights(self) -> int:
        """About: places are computed."""
        own = self.encoder
        layers = own.num_weights - own.hidden * (own.positions + 3 * own.mels + 3 * own.hidden)
        if not self.channels:
            return own.num_weights + own.hidden * (self.size_out - own.positions)
        convolutions = 9 * self.channels * (1 + 2 * self.channels)
        pitches = -(-own.mels // 8) * self.channels
        return layers + convolutions + own.hidden * (pitches + own.hidden + self.size_out)


@dataclass(frozen=True, slots=True)
class OmniFacts:
    """Two towers."""

    grid: GridFacts
    sound: HearingFacts

    @property
    def num_weights(self) -> int:
        return self.grid.num_weights + self.sound.num_weights


_MODALITIES = ("image", "video", "audio")


def qwen2_5_omni(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    keys = thinker(keys)
    pace = keys.number("position_id_per_seconds", 25.0)
    vision = part(keys, "vision_config").but(tokens_per_second=pace).values
    text, media = qwen2_5_vl(keys.but(vision_config=vision))
    audio = part(keys, "audio_config")
    sound = HearingFacts(
        encoder=encoder_of(audio),
        window=2 * audio.size("n_window", 100),
        size_out=audio.size("output_dim", 3584),
        **marks(keys, 151646, 151647, 151648),
    )
    return text, MediaFacts("qwen2_5_omni", _MODALITIES, OmniFacts(media.tower, sound))


def qwen3_omni(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    keys = thinker(keys)
    text, media = qwen3_vl("Qwen3MoeForCausalLM")(keys)
    grid = replace(media.tower, times="", pace=keys.number("position_id_per_seconds", 25.0))
    audio = part(keys, "audio_config")
    window = 2 * audio.size("n_window", 50)
    sound = HearingFacts(
        encoder=encoder_of(audio),
        window=window,
        size_out=audio.size("output_dim", 3584),
        **marks(keys, 151675, 151669, 151670),
        seen=max(1, audio.size("n_window_infer", 800) // window),
        channels=audio.size("downsample_hidden_size", 480),
    )
    return text, replace(media, family="qwen3_omni", modalities=_MODALITIES, tower=OmniFacts(grid, sound))


def thinker(keys: ConfigReader) -> ConfigReader:
    """The part that reads, sees and hears, as if it were alone, by the names that others have for tokens."""
    own = keys.get("thinker_config")
    keys = ConfigReader(keys.source, {**keys.values, **own}) if isinstance(own, dict) else keys
    if keys.get("tie_word_embeddings") is not None:  # of the whole, whatever the decoder's part says
        text = part(keys, "text_config").but(tie_word_embeddings=keys.flag("tie_word_embeddings"))
        keys = keys.but(text_config=text.values)
    for kind in ("image", "video", "audio"):
        if keys.get(f"{kind}_token_id") is None and keys.get(f"{kind}_token_index") is not None:
            keys = keys.but(**{f"{kind}_token_id": keys.get(f"{kind}_token_index")})
    return keys


def marks(keys: ConfigReader, audio: int, start: int, end: int) -> dict[str, int]:
    """Of a sound; these are the published ones."""
    names = {"audio_id": ("audio_token_id", audio), "start_id": ("audio_start_token_id", start)}
    names["end_id"] = ("audio_end_token_id", end)
    return {name: (keys.token_ids(key) or (usual,))[0] for name, (key, usual) in names.items()}
