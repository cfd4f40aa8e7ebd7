"""Granite Speech: a conformer over audio, and a Q-Former that makes a few embeddings of each window."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import part, stack_weights, text_part, token_id
from quire.checkpoint.reader import ConfigReader
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class QFormerFacts:
    """A Q-Former: learned queries that attend to each other and to a window of hidden states."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    every: int
    """One of this many layers attends to the hidden states of the encoder."""
    size_in: int
    activation: str
    norm_eps: float

    def attends(self, layer: int) -> bool:
        return layer % self.every == 0

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        crosses = sum(map(self.attends, range(self.layers)))
        layers = stack_weights(self.layers, self.hidden, self.intermediate)
        return layers + 2 * crosses * self.hidden * (self.hidden + self.size_in)


@dataclass(frozen=True, slots=True)
class GraniteSpeechFacts:
    """The conformer and its projector."""

    layers: int
    hidden: int
    size_in: int
    """Size of an input vector: two spectrogram frames."""
    intermediate: int
    heads: int
    head_dim: int
    outputs: int
    """Number of classes of the CTC head, whose probabilities in the middle layer are added to its states."""
    context: int
    """Number of consecutive states that attend to each other."""
    reach: int
    """Largest distance with a relative position embedding."""
    inner: int
    """Channels of the convolution in a layer."""
    kernel: int
    former: QFormerFacts
    window: int
    """Number of states per window of the Q-Former."""
    queries: int
    """Number of embeddings per window."""
    size_out: int
    audio_id: int
    joined: tuple[int, ...] = ()
    """Layers whose outputs are concatenated with those of the last layer (0: the input of the first)."""

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        size, width = self.hidden, self.heads * self.head_dim
        layer = 4 * size * self.intermediate + 4 * size * width + (2 * self.reach + 1) * self.head_dim
        layer += self.inner * (3 * size + self.kernel + 6) + 2 * self.intermediate + 13 * size
        first = size * (self.size_in + 2 * self.outputs + 2)
        last = self.former.hidden * (self.size_out + self.queries) + self.size_out
        return self.layers * layer + first + self.former.num_weights + last


def granite_speech(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    text, audio = text_part(keys, default="granite"), part(keys, "encoder_config")
    window, rate = keys.size("window_size", 15), keys.size("downsample_rate", 5)
    hidden, heads = audio.size("hidden_dim", 1024), audio.size("num_heads", 8)
    joined = tuple(sorted({*audio.integers("cat_hidden_layers")}))
    facts = GraniteSpeechFacts(
        layers=audio.size("num_layers", 10),
        hidden=hidden,
        size_in=audio.size("input_dim", 160),
        intermediate=hidden * audio.size("feedforward_mult", 4),
        heads=heads,
        head_dim=audio.size("dim_head", hidden // heads),
        outputs=audio.size("output_dim", 42),
        context=audio.size("context_size", 200),
        reach=audio.size("max_pos_emb", 512),
        inner=hidden * audio.size("conv_expansion_factor", 2),
        kernel=audio.size("conv_kernel_size", 15),
        former=_read_former(part(keys, "projector_config"), hidden * (1 + len(joined))),
        window=window,
        queries=window // rate,
        size_out=text.size("hidden_size"),
        audio_id=token_id(keys, "audio_token_index", "audio_token_id", default=49155),
        joined=joined,
    )
    if not all(0 <= layer < facts.layers for layer in joined):
        raise audio.wrong("cat_hidden_layers", f"layers below {facts.layers}")
    if window % rate:
        raise keys.wrong("window_size", f"a multiple of downsample_rate, {rate}")
    if facts.context > facts.reach:
        raise audio.wrong("context_size", f"at most max_pos_emb, {facts.reach}")
    if keys.flag("has_lora_adapter", True):
        warn_once(
            logger,
            "This model has a LoRA adapter for audio, which is not applied by itself: serve it with "
            "--enable-lora --lora-modules speech=MODEL and name it as the model in requests with audio",
        )
    return text, MediaFacts("granite_speech", ("audio",), facts)


def _read_former(keys: ConfigReader, size_in: int) -> QFormerFacts:
    if keys.size("encoder_hidden_size", size_in) != size_in:
        raise keys.wrong("encoder_hidden_size", f"{size_in}, the size of the encoder's outputs")
    return QFormerFacts(
        layers=keys.size("num_hidden_layers", 12),
        hidden=keys.size("hidden_size", 768),
        heads=keys.size("num_attention_heads", 12),
        intermediate=keys.size("intermediate_size", 3072),
        every=keys.size("cross_attention_frequency", 2),
        size_in=size_in,
        activation=str(keys.get("hidden_act") or "gelu"),
        norm_eps=keys.number("layer_norm_eps", 1e-12),
    )
