"""Tests of the vision encoders of Qwen and GLM against transformers in float32: layers and embeddings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import load_tiny, random_prompts, run_paged
from safetensors.torch import load_file, save_file
from threads import run_threads, tp_worlds
from tiny_engine import load_tower
from tiny_qwen import FAMILIES, made
from torch.utils._python_dispatch import TorchDispatchMode

from quire.checkpoint import weights
from quire.checkpoint.model import read_checkpoint
from quire.errors import ConfigError
from quire.layers import vision
from quire.models.towers import TOWERS
from quire.parallel.world import World

GRIDS = [(1, 4, 6), (3, 10, 8), (1, 2, 2), (2, 14, 6)]


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_layers_and_embeddings_equal_transformers(family: str, base: Path) -> None:
    path, model = made(family, base)
    body, tower = model.model, load_tower(path)
    names = [name for name in ("vision_model", "vision_tower", "visual") if hasattr(body, name)]
    reference = getattr(body, names[0])
    blocks = reference.layers if family == "Lfm3Vl" else reference.blocks
    items = [torch.randn(*grid, 96) for grid in GRIDS]
    states: dict[str, list[Any]] = {"theirs": [], "ours": []}
    for name, layers in (("theirs", blocks), ("ours", tower.layers)):
        for layer in layers:
            layer.register_forward_hook(lambda _, inputs, out, name=name: states[name].append(out))
    vectors = torch.cat(tower.encode("image", [{"pixels": item} for item in items]))
    numbers = sum(parameter.numel() for parameter in tower.parameters())
    assert weights.count_parameters(read_checkpoint(path).facts).tower == pytest.approx(numbers, rel=0.06)
    grids = torch.tensor(GRIDS)
    if family.startswith("Glm"):  # transformers passes its videos to the encoder as images
        grids = torch.tensor([(1, *grid[1:]) for grid in GRIDS for _ in range(grid[0])])
    expected = reference(torch.cat([item.flatten(0, 2) for item in items]), grid_thw=grids)
    for state, other in zip(states["ours"], states["theirs"], strict=True):
        torch.testing.assert_close(state, other, atol=1e-4, rtol=1e-4)
    deep = getattr(expected, "deepstack_features", None) or []
    output = expected.pooler_output
    if hasattr(body, "projector"):
        output = body.projector(output)
    elif family == "Lfm3Vl":
        output = body.multi_modal_projector(expected.last_hidden_state)
    torch.testing.assert_close(vectors, torch.cat([output, *deep], 1), atol=1e-4, rtol=1e-4)
    for layer in [*blocks, *tower.layers]:
        layer._forward_hooks.clear()


@torch.inference_mode()
@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen2_5_VL"])
def test_padded_mlp_gives_the_same_embeddings(
    family: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = made(family, base)
    items = [{"pixels": torch.randn(*grid, 96)} for grid in GRIDS]
    expected = torch.cat(load_tower(path).encode("image", items))
    monkeypatch.setitem(vision._UNITS, "cpu", 56)
    wider = load_tower(path)
    assert wider.layers[0].mlp.down.weight.weight.shape[1] % 56 == 0
    torch.testing.assert_close(torch.cat(wider.encode("image", items)), expected, atol=1e-5, rtol=1e-5)


class OnDevice(TorchDispatchMode):
    """Torch mode that refuses operations that copy from the host or wait for the device."""

    REFUSED = {"lift_fresh", "_local_scalar_dense", "nonzero", "is_nonzero"}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.REFUSED, func
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Glm4v"])
def test_encoder_with_a_layout_needs_no_host_work(
    family: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the computation can be captured in a graph and replayed with other inputs."""
    with torch.inference_mode(), OnDevice(), pytest.raises(AssertionError, match="lift_fresh"):
        torch.tensor([1])
    tower = load_tower(made(family, base)[0])
    first, second = ([{"pixels": torch.randn(*grid, 96)} for grid in GRIDS] for _ in range(2))
    layout = tower.lay_out("image", first)
    expected = tower.encode("image", second)
    monkeypatch.delattr(torch, "from_numpy")
    with torch.inference_mode(), OnDevice():
        result = tower.compute("image", second, layout)
    assert all(torch.equal(*item) for item in zip(result, expected, strict=True))


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL", "Glm4v", "GlmOcr"])
def test_tensor_parallel_encoder_equals_one_device(family: str, base: Path) -> None:
    path, _ = made(family, base)
    items = [{"pixels": torch.randn(*grid, 96)} for grid in GRIDS]
    with torch.inference_mode():
        expected = torch.cat(load_tower(path).encode("image", items))
    worlds = tp_worlds(2)
    towers = [load_tower(path, world=world) for world in worlds]

    @torch.inference_mode()
    def run(world: World) -> Any:
        return torch.cat(towers[world.tp.rank].encode("image", items))

    for vectors in run_threads(2, run, worlds=lambda _: worlds):
        torch.testing.assert_close(vectors, expected, atol=1e-4, rtol=1e-4)
    media = read_checkpoint(path).facts.media
    assert media is not None
    can_shard = TOWERS[media.family].can_shard
    assert can_shard(media, 2) and not can_shard(media, 4)


@torch.inference_mode()
def test_blank_items_have_about_the_requested_size(base: Path) -> None:
    tower = load_tower(made("Qwen2_5_VL", base)[0])
    for count in (1, 7, 100):
        blank = tower.blank("image", count)
        assert 0.8 * count <= len(tower.encode("image", [blank])[0]) <= count
    small, large = (tower.cost("image", {"pixels": (1, side, side, 96)}) for side in (4, 16))
    assert large > 16 * small


def test_older_names_are_loaded_and_missing_ones_reported(base: Path, tmp_path: Path) -> None:
    """Weights of older Qwen2-VL checkpoints have only `visual.` as prefix."""
    path, _ = made("Qwen2VL", base)
    tensors = load_file(path / "model.safetensors")
    first = {name.replace("model.visual.", "visual."): tensor for name, tensor in tensors.items()}
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    save_file(first, tmp_path / "model.safetensors")
    item = {"pixels": torch.randn(1, 4, 4, 96)}
    (older,), (same,) = load_tower(tmp_path).encode("image", [item]), load_tower(path).encode("image", [item])
    torch.testing.assert_close(older, same)
    del first["visual.blocks.1.attn.qkv.bias"]
    save_file(first, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks 1 .*visual\.blocks\.1\.attn\.qkv\.bias"):
        load_tower(tmp_path)


@torch.inference_mode()
def test_experts_are_loaded_in_either_layout(base: Path, tmp_path: Path) -> None:
    """transformers saves the weights of experts with outputs first; checkpoints on the hub have inputs
    first."""
    path, _ = made("Qwen3VLMoe", base)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    ids = random_prompts(9)
    loaded, same = (run_paged(load_tiny(folder), ids, [[9]])[0] for folder in (tmp_path, path))
    torch.testing.assert_close(loaded, same)
