"""Qwen2-VL to Qwen3.5, EXAONE 4.5, HyperCLOVA X, GLM-4.1V, 4.5V and GLM-OCR: encoders over a grid of patches
for images and videos."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import part, stack_weights
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError

Read = Callable[[ConfigReader], tuple[ConfigReader, MediaFacts]]


@dataclass(frozen=True, slots=True)
class GridFacts:
    """A vision encoder over a grid of patches, and its placeholder tokens."""

    depth: int
    """Number of layers."""
    hidden: int
    heads: int
    intermediate: int
    size_out: int
    """Output size: the decoder's hidden size."""
    patch: int
    """Patch side in pixels."""
    frames: int
    """Number of video frames per patch; an image is repeated that many times."""
    merge: int
    """Side of the square of patches that are merged into one token."""
    activation: str
    norm_eps: float
    image_id: int
    """Placeholder token of an image."""
    video_id: int
    start_id: int
    """Token before the placeholders of an image or a frame; `end_id` follows them."""
    end_id: int
    video_start_id: int
    """Token before the placeholders of a video in chat templates; `video_end_id` follows them."""
    video_end_id: int
    channels: int = 3
    qkv_bias: bool = True
    window: int = 0
    """Side in pixels of the attention window of most layers; 0: all layers have full attention."""
    far: tuple[int, ...] = ()
    """Indices of the layers with full attention, if `window` is set."""
    positions: int = 0
    """Side of the square of learned positions; 0: there are none."""
    aux_layers: tuple[int, ...] = ()
    """Layers after which further outputs are taken for the first layers of the decoder (DeepStack)."""
    pace: float = 0.0
    """M-RoPE positions per second of video; 0: one per temporal patch."""
    times: str = ""
    """Place of timestamps of video frames in the prompt: `before` them, `behind` them, or `seconds` (behind
    them, followed by the word "seconds"). Empty: prompts contain no timestamps."""
    merger: int = 0
    """Intermediate size of a gated merger; 0: the merger has no gate."""
    head_norms: bool = False
    """Whether queries and keys have a norm per head."""
    kv_heads: int = 0
    """Number of key/value heads; 0: as many as query heads."""
    merged: int = 0
    """Output size of the merger, if a projection to the decoder's size follows it; 0: there is none."""

    @property
    def num_weights(self) -> int:
        """Return the approximate number of parameters."""
        first = self.hidden * (self.channels * self.frames * self.patch**2 + self.positions**2)
        wide, size = self.merge**2 * self.hidden, self.merged or self.size_out
        first += self.merged * self.size_out
        if self.merger:
            merger = size * (wide + size + 3 * self.merger)
            return first + merger + stack_weights(self.depth, self.hidden, self.intermediate, 3)
        matrices = 3 if self.activation == "silu" else 2
        mergers = (1 + len(self.aux_layers)) * wide * (wide + size)
        missing = self.heads - self.kv_heads if self.kv_heads else 0
        first -= 2 * self.depth * self.hidden**2 * missing // self.heads
        return first + mergers + stack_weights(self.depth, self.hidden, self.intermediate, matrices)


def qwen2_vl(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read Qwen2-VL: in vision_config, `hidden_size` is the decoder's size and `embed_dim` the encoder's."""
    vision = part(keys, "vision_config")
    hidden = vision.size("embed_dim", 1280)
    grid = _read_grid(
        keys,
        hidden=hidden,
        intermediate=int(hidden * vision.number("mlp_ratio", 4.0)),
        size_out=vision.size("hidden_size", 3584),
        channels=_channels(vision),
        activation=vision.get("hidden_act") or "quick_gelu",
    )
    return _qwen2_decoder(keys), MediaFacts("qwen2_vl", ("image", "video"), grid)


def qwen2_5_vl(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    vision = part(keys, "vision_config")
    grid = _read_grid(
        keys,
        channels=_channels(vision),
        window=vision.size("window_size", 112),
        far=_read_layer_numbers(vision, "fullatt_block_indexes", (7, 15, 23, 31)),
        pace=vision.number("tokens_per_second", 4.0),
    )
    return _qwen2_decoder(keys), MediaFacts("qwen2_5_vl", ("image", "video"), grid)


def exaone45(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read EXAONE 4.5: the encoder of Qwen2.5-VL with fewer key/value heads, and plain positions."""
    vision = part(keys, "vision_config")
    grid = _read_grid(
        keys,
        marks=_EXAONE_MARKS,
        channels=_channels(vision),
        window=vision.size("window_size", 112),
        far=_read_layer_numbers(vision, "fullatt_block_indexes", (7, 15, 23, 31)),
        kv_heads=vision.size("num_key_value_heads", 8),
    )
    text = decoder_part(keys, "Exaone4ForCausalLM", {})
    return text, MediaFacts("exaone4_5", ("image", "video"), grid)


def hyperclovax(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read HyperCLOVA X SEED Think: the encoder of Qwen2.5-VL, a projection, and plain positions."""
    vision, text = part(keys, "vision_config"), decoder_part(keys, "HyperCLOVAXForCausalLM", {})
    grid = _read_grid(
        keys,
        marks=_HYPERCLOVAX_MARKS,
        channels=_channels(vision),
        window=vision.size("window_size", 112),
        far=_read_layer_numbers(vision, "fullatt_block_indexes", (7, 15, 23, 31)),
        merged=vision.size("out_hidden_size", 3584),
        size_out=text.size("hidden_size"),
    )
    return text, MediaFacts("hyperclovax", ("image", "video"), grid)


def _channels(vision: ConfigReader) -> int:
    return vision.size("in_channels", vision.size("in_chans", 3))


def _qwen2_decoder(keys: ConfigReader) -> ConfigReader:
    rope = {"mrope_section": [16, 24, 24]}
    return decoder_part(keys, "Qwen2ForCausalLM", rope, rms_norm_eps=1e-5, rope_theta=1000000.0)


def qwen3_vl(architecture: str, *, sections: tuple[int, ...] = (24, 20, 20), deep: bool = True) -> Read:
    """Return a function that reads configs with this decoder architecture; if `deep`, first decoder layers
    add further encoder outputs (DeepStack). `sections` are the M-RoPE sections."""

    def read(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
        vision = part(keys, "vision_config")
        aux_layers = _read_layer_numbers(vision, "deepstack_visual_indexes", (8, 16, 24)) if deep else ()
        grid = _read_grid(
            keys,
            {"hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16, "depth": 27},
            activation=vision.get("hidden_act") or "gelu_pytorch_tanh",
            positions=round(vision.size("num_position_embeddings", 2304) ** 0.5),
            aux_layers=aux_layers,
            times="before",
        )
        text = decoder_part(keys, architecture, {"mrope_section": [*sections]}, rope_theta=500000.0)
        text = _with_rope(text.but(norm_topk_prob=True), {"mrope_interleaved": True}, over=True)
        return text, MediaFacts("qwen3_vl", ("image", "video"), grid, levels=len(aux_layers))

    return read


def glm4v(keys: ConfigReader, times: str = "behind") -> tuple[ConfigReader, MediaFacts]:
    """Read GLM-4.1V, and GLM-4.5V with experts. The layers' intermediate size is `out_hidden_size`; the key
    `intermediate_size` is the merger's."""
    vision = part(keys, "vision_config")
    grid = _read_grid(
        keys,
        {"hidden_size": 1536, "num_heads": 12, "depth": 24, "out_hidden_size": 4096},
        _GLM_MARKS,
        intermediate=vision.size("out_hidden_size", 4096),
        merger=vision.size("intermediate_size", 13696),
        norm_eps=vision.number("rms_norm_eps", 1e-5),
        qkv_bias=vision.flag("attention_bias"),
        positions=vision.size("image_size", 336) // vision.size("patch_size", 14),
        times=times,
    )
    return _glm4_decoder(keys), MediaFacts("glm4v", ("image", "video"), grid)


def glm_ocr(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read GLM-OCR: no learned positions, and norms of queries and keys."""
    vision = part(keys, "vision_config")
    sizes = {"hidden_size": 1024, "depth": 24, "intermediate_size": 4096, "out_hidden_size": 1536}
    grid = _read_grid(
        keys,
        sizes,
        _GLM_MARKS,
        merger=vision.size("out_hidden_size", 1536) * vision.size("in_channels", 3),
        norm_eps=vision.number("rms_norm_eps", 1e-5),
        qkv_bias=vision.flag("attention_bias", True),
        times="seconds",
        head_norms=True,
    )
    return _glm4_decoder(keys), MediaFacts("glm4v", ("image", "video"), grid)


def glm46v(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read GLM-4.6V, with a dense or an MoE decoder."""
    return glm4v(keys, "seconds")


def _glm4_decoder(keys: ConfigReader) -> ConfigReader:
    rope = {"mrope_section": [8, 12, 12]}
    kind = (keys.get("text_config") or {}).get("model_type")
    has_experts = kind == "glm4v_moe_text"
    if has_experts:
        text = decoder_part(keys, "Glm4MoeForCausalLM", rope, rms_norm_eps=1e-5, partial_rotary_factor=0.5)
    else:
        text = decoder_part(keys, "Glm4ForCausalLM", rope, rms_norm_eps=1e-5, partial_rotary_factor=1.0)
    head_dim = text.size("hidden_size") // text.size("num_attention_heads")
    if kind == "glm_ocr_text":
        return text.defaults(head_dim=head_dim).but(attention_bias=False)
    defaults = {"attention_bias": True, "head_dim": head_dim}
    return text.defaults(**defaults) if has_experts else text.but(**defaults)


_MARKS = {
    "image_id": ("image_token_id", 151655),
    "video_id": ("video_token_id", 151656),
    "start_id": ("vision_start_token_id", 151652),
    "end_id": ("vision_end_token_id", 151653),
    "video_start_id": ("vision_start_token_id", 151652),
    "video_end_id": ("vision_end_token_id", 151653),
}
_EXAONE_MARKS = _MARKS | {"image_id": ("image_token_id", 67), "video_id": ("video_token_id", 68)}
_HYPERCLOVAX_MARKS = _MARKS | {
    "image_id": ("image_token_id", 128060),
    "video_id": ("video_token_id", 128061),
}
_GLM_MARKS = {
    "image_id": ("image_token_id", 151343),
    "video_id": ("video_token_id", 151344),
    "start_id": ("image_start_token_id", 151339),
    "end_id": ("image_end_token_id", 151340),
    "video_start_id": ("video_start_token_id", 151341),
    "video_end_id": ("video_end_token_id", 151342),
}
_SIZES = {
    "depth": ("depth", 32),
    "hidden": ("hidden_size", 3584),
    "heads": ("num_heads", 16),
    "intermediate": ("intermediate_size", 3420),
    "size_out": ("out_hidden_size", 3584),
    "patch": ("patch_size", 14),
    "frames": ("temporal_patch_size", 2),
    "merge": ("spatial_merge_size", 2),
    "channels": ("in_channels", 3),
}
"""Maps fields of GridFacts to (key in vision_config, default value, which is Qwen2.5-VL's)."""


def _read_grid(
    keys: ConfigReader,
    defaults: dict[str, int] | None = None,
    marks: dict[str, tuple[str, int]] = _MARKS,
    **facts: Any,
) -> GridFacts:
    """Read a vision encoder by the keys that Qwen-VL and GLM-V models share. `defaults` replace those in
    `_SIZES`; `marks` are keys and defaults of token ids; `facts` are fields of GridFacts, which replace those
    that are read."""
    vision, defaults = part(keys, "vision_config"), defaults or {}
    read: dict[str, Any] = {"activation": vision.get("hidden_act") or "silu", "norm_eps": 1e-6}
    read |= {name: (keys.token_ids(key) or (default,))[0] for name, (key, default) in marks.items()}
    read |= {
        name: vision.size(key, defaults.get(key, default))
        for name, (key, default) in _SIZES.items()
        if name not in facts
    }
    return check_grid(vision, GridFacts(**(read | facts)))


def check_grid(vision: ConfigReader, grid: GridFacts) -> GridFacts:
    """Return the facts; raise if the head size is no multiple of 4, which 2-D rope needs."""
    if grid.hidden % grid.heads or grid.hidden // grid.heads % 4:
        raise ConfigError(f"{vision.source}: {grid.heads} heads of {grid.hidden} do not fit 2-D rope")
    return grid


def _read_layer_numbers(keys: ConfigReader, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    numbers = keys.get(key)
    numbers = default if numbers is None else numbers
    if not isinstance(numbers, (list, tuple)) or not all(isinstance(number, int) for number in numbers):
        raise keys.wrong(key, "a list of layers")
    return tuple(numbers)


def decoder_part(
    keys: ConfigReader, architecture: str, rope: dict[str, Any], **defaults: Any
) -> ConfigReader:
    """Return the keys of the decoder: from text_config or, in the first checkpoints, from the top level.
    `rope` and `defaults` apply where config.json has no value."""
    section = keys.get("text_config")
    text = section if isinstance(section, dict) else {}
    whole = {key: keys.get(key) for key in ("bos_token_id", "eos_token_id") if keys.get(key) is not None}
    tied = keys.flag("tie_word_embeddings", bool(text.get("tie_word_embeddings")))
    if not architecture.startswith("Qwen3"):  # older files have the flag in either place
        tied = tied or bool(text.get("tie_word_embeddings"))
    values = {**keys.values, **text, **whole, "tie_word_embeddings": tied, "architectures": [architecture]}
    return _with_rope(ConfigReader(keys.source, values).defaults(**defaults), rope)


def _with_rope(keys: ConfigReader, facts: dict[str, Any], *, over: bool = False) -> ConfigReader:
    """Return the keys of the decoder with the rope settings `facts` added. They override settings of
    config.json only if `over`."""
    name = "rope_parameters" if keys.get("rope_parameters") else "rope_scaling"
    block = keys.get(name) or {}
    if not isinstance(block, dict):
        raise keys.wrong(name, "an object")
    rope = block | facts if over else facts | block
    if rope.get("rope_type", rope.get("type")) == "mrope":
        rope = {key: value for key, value in rope.items() if key != "type"} | {"rope_type": "default"}
    return keys.but(**{name: rope})
