"""DeepSeek-OCR: a SAM encoder, a second encoder over its outputs, and a DeepSeek decoder without latent
attention. The second encoder is CLIP or, in the second version, Qwen 2 with learned queries."""

from dataclasses import dataclass

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import ViTFacts, part, stack_weights
from quire.checkpoint.reader import ConfigReader

_HALVINGS = 2
"""Number of convolutions with stride 2 after the SAM encoder."""


@dataclass(frozen=True, slots=True)
class SamFacts:
    """The image encoder of Segment Anything: attention in windows in most layers."""

    layers: int
    hidden: int
    heads: int
    image: int
    """Side in pixels of the images that the stored positions are for."""
    patch: int
    window: int
    """Side in patches of a window."""
    whole_layers: tuple[int, ...]
    """Layers whose attention spans the whole image."""
    channels: tuple[int, int, int]
    """Channels of the neck, and of the two convolutions after it."""

    @property
    def side(self) -> int:
        """Return the number of patches per side of an image of the size for which positions are stored."""
        return self.image // self.patch

    def sizes(self, layer: int) -> int:
        """Return the side in patches over which a layer attends."""
        return self.side if layer in self.whole_layers else self.window

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        size, (neck, *others) = self.hidden, self.channels
        first = size * (3 * self.patch**2 + self.side**2)
        relative = sum(4 * self.sizes(layer) * size // self.heads for layer in range(self.layers))
        last = neck * (size + 9 * neck + 9 * others[0]) + 9 * others[0] * others[1]
        return first + stack_weights(self.layers, size, 4 * size) + relative + last


@dataclass(frozen=True, slots=True)
class DeepseekOCRFacts:
    """Both encoders and the projector of their outputs."""

    sam: SamFacts
    clip: ViTFacts
    size_out: int
    image_id: None = None
    """None: the processor finds the placeholder token in the tokenizer."""

    def side(self, pixels: int) -> int:
        """Return the number of embeddings per side of a view with this side in pixels."""
        stride: int = 2**_HALVINGS
        return -(-(pixels // self.sam.patch) // stride)

    @property
    def num_weights(self) -> int:
        width = self.clip.hidden + self.sam.channels[-1]
        clip = self.clip.num_weights() - 3 * self.clip.patch**2 * self.clip.hidden
        return self.sam.num_weights + clip + (width + 3) * self.size_out


@dataclass(frozen=True, slots=True)
class QueryEncoderFacts:
    """A transformer like Qwen 2's decoder, in which learned queries attend to patches."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    theta: float
    norm_eps: float

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        keys = 2 * self.kv_heads * self.hidden // self.heads
        return self.layers * self.hidden * (2 * self.hidden + keys + 3 * self.intermediate + 4)


@dataclass(frozen=True, slots=True)
class DeepseekOCR2Facts:
    """Both encoders of the second version, and the projector of the queries."""

    sam: SamFacts
    encoder: QueryEncoderFacts
    size_out: int
    image_id: None = None
    """None: the processor finds the placeholder token in the tokenizer."""

    @property
    def queries(self) -> dict[str, int]:
        """Return the number of queries of a tile and of a whole image, by their names in checkpoints."""
        return {"query_768": 144, "query_1024": 256}

    @property
    def num_weights(self) -> int:
        queries = sum(self.queries.values()) * self.encoder.hidden
        return self.sam.num_weights + self.encoder.num_weights + queries + self.encoder.hidden * self.size_out


def deepseek_ocr(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read DeepSeek-OCR as published; the decoder is that of DeepSeek 1."""
    text = _decoder_part(keys)
    width = part(part(keys, "vision_config"), "width")
    sam, clip = part(width, "sam_vit_b"), part(width, "clip-l-14-224")
    stored = sam.get("downsample_channels") or [512, 1024]
    hidden = clip.size("width", 1024)
    if len(stored) != _HALVINGS or stored[1] != hidden:
        raise sam.wrong("downsample_channels", f"two numbers, the second {hidden}, the width of CLIP")
    facts = DeepseekOCRFacts(
        sam=_read_sam(keys, sam, (stored[0], stored[1])),
        clip=ViTFacts(
            layers=clip.size("layers", 24),
            hidden=hidden,
            intermediate=4 * hidden,
            heads=clip.size("heads", 16),
            image=clip.size("image_size", 224),
            patch=clip.size("patch_size", 14),
            activation="quick_gelu",
            norm_eps=1e-5,
            has_class=True,
        ),
        size_out=text.size("hidden_size"),
    )
    return text, MediaFacts("deepseek_ocr", ("image",), facts)


def deepseek_ocr2(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read the second version of DeepSeek-OCR as published. Its config.json has only the hidden size of the
    second encoder."""
    text = _decoder_part(keys)
    width = part(part(keys, "vision_config"), "width")
    sam, encoder = part(width, "sam_vit_b"), part(width, "qwen2-0-5b")
    hidden = encoder.size("dim", 896)
    first = (sam.get("downsample_channels") or [512])[0]
    facts = DeepseekOCR2Facts(
        sam=_read_sam(keys, sam, (first, hidden)),
        encoder=QueryEncoderFacts(
            layers=encoder.size("layers", 24),
            hidden=hidden,
            intermediate=encoder.size("intermediate_size", 4864),
            heads=encoder.size("heads", 14),
            kv_heads=encoder.size("kv_heads", 2),
            theta=encoder.number("rope_theta", 1e6),
            norm_eps=1e-6,
        ),
        size_out=text.size("hidden_size"),
    )
    return text, MediaFacts("deepseek_ocr2", ("image",), facts)


def _decoder_part(keys: ConfigReader) -> ConfigReader:
    text = part(keys, "language_config")
    if text.flag("use_mla", True):
        raise text.wrong("use_mla", "false")
    decoder = ConfigReader(keys.source, {**keys.values, **text.values}).defaults(rms_norm_eps=1e-6)
    return decoder.but(architectures=["DeepseekForCausalLM"])


def _read_sam(keys: ConfigReader, sam: ConfigReader, channels: tuple[int, int]) -> SamFacts:
    """Read the SAM encoder; `channels` are those of the convolutions after it."""
    whole = sam.get("global_attn_indexes")
    return SamFacts(
        layers=sam.size("layers", 12),
        hidden=sam.size("width", 768),
        heads=sam.size("heads", 12),
        image=part(keys, "vision_config").size("image_size", 1024),
        patch=sam.size("patch_size", 16),
        window=sam.size("window_size", 14),
        whole_layers=tuple(map(int, [2, 5, 8, 11] if whole is None else whole)),
        channels=(sam.size("output_channels", 256), *channels),
    )
