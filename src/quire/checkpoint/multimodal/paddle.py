"""PaddleOCR-VL: an encoder over a grid of patches with interpolated learned positions."""

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.common import part, side_of, token_id
from quire.checkpoint.multimodal.qwen import GridFacts, check_grid, decoder_part
from quire.checkpoint.reader import ConfigReader


def paddleocr_vl(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts]:
    """Read PaddleOCR-VL. Its decoder is Ernie's with NeoX-style M-RoPE."""
    vision = part(keys, "vision_config")
    text = decoder_part(
        keys, "LlamaForCausalLM", {"mrope_section": [16, 24, 24]}, rms_norm_eps=1e-5, rope_theta=500000.0
    )
    biased = text.flag("use_bias")
    text = text.but(head_dim=text.size("head_dim", 128), attention_bias=biased, mlp_bias=biased)
    patch = side_of(vision, "patch_size", 14)
    start, end = (
        token_id(keys, f"vision_{name}_token_id", default=default)
        for name, default in (("start", 101305), ("end", 101306))
    )
    grid = GridFacts(
        depth=vision.size("num_hidden_layers", 27),
        hidden=vision.size("hidden_size", 1152),
        heads=vision.size("num_attention_heads", 16),
        intermediate=vision.size("intermediate_size", 4304),
        size_out=text.size("hidden_size"),
        patch=patch,
        frames=1,
        merge=vision.size("spatial_merge_size", 2),
        activation=vision.get("hidden_act") or "gelu_pytorch_tanh",
        norm_eps=vision.number("layer_norm_eps", 1e-6),
        image_id=token_id(keys, "image_token_id", default=100295),
        video_id=token_id(keys, "video_token_id", default=100296),
        start_id=start,
        end_id=end,
        video_start_id=start,
        video_end_id=end,
        positions=side_of(vision, "image_size", 384) // patch,
    )
    return text, MediaFacts("paddleocr_vl", ("image",), check_grid(vision, grid))
