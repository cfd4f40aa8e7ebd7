"""Tests of the reference implementation of Step3-VL's vision encoder against that of Step-3.7 in
transformers."""

import pytest
import torch
from published import step

NAMES = {
    "conv1": "embeddings.patch_embedding",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_pre": "pre_layernorm",
    "vit_down": "down",
    "transformer.resblocks": "layers",
    "ln_1": "layernorm_before",
    "ln_2": "layernorm_after",
    "ls_1.gamma": "lambda_1",
    "ls_2.gamma": "lambda_2",
    "c_fc": "fc1",
    "c_proj": "fc2",
    ".attn.": ".self_attn.",
}


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename weights as in transformers: separate query, key and value, and rotary halves instead of adjacent
    pairs."""
    out = {}
    for name, tensor in tensors.items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if "in_proj_" not in name:
            out[name] = tensor
            continue
        for part, projection in zip("qkv", tensor.chunk(3), strict=True):
            if part != "v":
                projection = projection.unflatten(0, (2, -1, 2)).transpose(1, 2).flatten(0, 2)
            out[name.replace("in_proj_", f"{part}_proj.")] = projection
    return out


@torch.inference_mode()
@pytest.mark.parametrize("side", [56, 42])
def test_plain_step_encoder_equals_transformers(side: int) -> None:
    """Catches a missing layer, or patches rotated by their row first: transformers took the row before
    5.23."""
    from transformers.models.step3p7.configuration_step3p7 import Step3p7VisionConfig
    from transformers.models.step3p7.modeling_step3p7 import Step3p7VisionModel

    torch.manual_seed(0)
    plain = step({"image_token_id": 1}).vision_model.eval()
    for tensor in plain.state_dict().values():
        if tensor.ndim == 1:
            tensor.add_(torch.randn_like(tensor) * 0.2)
    sizes = {"width": 32, "layers": 3, "heads": 2, "mlp_ratio": 2.0, "image_size": 56, "patch_size": 7}
    reference = Step3p7VisionModel(Step3p7VisionConfig(**sizes)).eval()
    reference.load_state_dict(renamed(plain.state_dict()))
    square = torch.randn(3, side, side)
    torch.testing.assert_close(
        reference(square[None]).last_hidden_state[0], plain(square), atol=1e-5, rtol=1e-5
    )
