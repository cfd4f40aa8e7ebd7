"""The plain tower of Step3-VL, which ours is compared with, against that of Step-3.7 in transformers."""

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
    """As transformers has them: query, key and value apart, and halves of a head turn together."""
    out = {}
    for name, each in tensors.items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if "in_proj_" not in name:
            out[name] = each
            continue
        for part, own in zip("qkv", each.chunk(3), strict=True):
            if part != "v":
                own = own.unflatten(0, (2, -1, 2)).transpose(1, 2).flatten(0, 2)
            out[name.replace("in_proj_", f"{part}_proj.")] = own
    return out


@torch.inference_mode()
@pytest.mark.parametrize("side", [56, 42])
def test_the_plain_tower_of_step_is_that_of_transformers(side: int) -> None:
    """A layer left out, or patches rotated by their row first: transformers took the row before 5.23."""
    from transformers.models.step3p7.configuration_step3p7 import Step3p7VisionConfig
    from transformers.models.step3p7.modeling_step3p7 import Step3p7VisionModel

    torch.manual_seed(0)
    plain = step({"image_token_id": 1}).vision_model.eval()
    for tensor in plain.state_dict().values():
        if tensor.ndim == 1:
            tensor.add_(torch.randn_like(tensor) * 0.2)
    sizes = {"width": 32, "layers": 3, "heads": 2, "mlp_ratio": 2.0, "image_size": 56, "patch_size": 7}
    theirs = Step3p7VisionModel(Step3p7VisionConfig(**sizes)).eval()
    theirs.load_state_dict(renamed(plain.state_dict()))
    square = torch.randn(3, side, side)
    torch.testing.assert_close(theirs(square[None]).last_hidden_state[0], plain(square), atol=1e-5, rtol=1e-5)
