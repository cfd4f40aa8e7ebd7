"""Vision models in plain torch, as published, that transformers does not have."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from step_twin import Step3
from tiny_seeing import TEXT


class OlderMiniCPM(torch.nn.Module):
    """MiniCPM-V 2.5 to 4.5 as published, which transformers does not have: SigLIP with fractional positions,
    queries that attend to all patches, and a decoder. The encoder of 2.5 is that of Idefics 2."""

    def __init__(self, config: dict[str, Any]) -> None:
        import transformers as hf

        super().__init__()
        self.config, size = config, config["hidden_size"]
        self.is_valued = config["version"] >= 4.5
        kind = {2.5: "Llama", 2.6: "Qwen2", 4.5: "Qwen3"}[config["version"]]
        text = {name: config[name] for name in (*TEXT, "head_dim")}
        self.llm = getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}Config")(**text))
        vision = hf.SiglipVisionConfig(**config["vision_config"], vision_use_head=False)
        self.vpm = hf.SiglipVisionModel(vision)
        if config["version"] == 2.5:
            from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

            self.vpm = Idefics2VisionTransformer(hf.Idefics2VisionConfig(**config["vision_config"]))
        self.resampler = torch.nn.Module()
        self.resampler.query = torch.nn.Parameter(torch.randn(config["query_num"], size))
        self.resampler.proj = torch.nn.Parameter(torch.randn(size, size) / size**0.5)
        self.resampler.kv_proj = torch.nn.Linear(32, size, bias=False)
        self.resampler.attn = torch.nn.MultiheadAttention(size, size // 128)
        for name in ("ln_q", "ln_kv", "ln_post"):
            setattr(self.resampler, name, torch.nn.LayerNorm(size, eps=1e-6))

    def save_pretrained(self, path: Path) -> None:
        _save(self, self.config, path)

    def encoded(self, square: torch.Tensor) -> torch.Tensor:
        """[3, height, width] -> [patches, 32]"""
        if self.config["version"] == 2.5:
            patches = square.unfold(1, 7, 7).unfold(2, 7, 7).permute(0, 3, 1, 2, 4).flatten(2)
            return self.vpm(patches[None]).last_hidden_state[0]
        patches = self.vpm.embeddings.patch_embedding(square[None])[0]
        rows, columns = patches.shape[1:]
        side = self.vpm.config.image_size // 7
        borders = torch.arange(1 / side, 1.0, 1 / side)
        down, along = (
            torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / count), borders, right=True)
            for count in (rows, columns)
        )
        at = (down[:, None] * side + along).flatten()
        x = patches.flatten(1).T + self.vpm.embeddings.position_embedding(at)
        return self.vpm.post_layernorm(self.vpm.encoder(inputs_embeds=x[None]).last_hidden_state[0])

    def seen(self, square: torch.Tensor) -> torch.Tensor:
        """[3, height, width] -> [queries, size]"""
        rows, columns, parts = square.shape[1] // 7, square.shape[2] // 7, self.resampler
        x = self.encoded(square)
        x = parts.ln_kv(parts.kv_proj(x))
        quarter = x.shape[1] // 4
        speeds = 1 / 10000 ** (torch.arange(quarter) / quarter)
        place = torch.empty(rows, columns, 4, quarter)
        for row in range(rows):
            for column in range(columns):
                by_column, by_row = column * speeds, row * speeds
                waves = by_column.sin(), by_column.cos(), by_row.sin(), by_row.cos()
                place[row, column] = torch.stack(waves)
        placed = x + place.view_as(x)
        keys, values = (x, placed) if self.is_valued else (placed, x)
        out, _ = parts.attn(parts.ln_q(parts.query)[:, None], keys[:, None], values[:, None])
        return parts.ln_post(out[:, 0]) @ parts.proj

    def generate(self, input_ids: torch.Tensor, squares: Any = (), **options: Any) -> Any:
        options.pop("attention_mask", None)
        embeds = self.llm.get_input_embeddings()(input_ids)
        if squares:
            embeds[input_ids == 0] = torch.cat([self.seen(square) for square in squares])
        out = self.llm.generate(inputs_embeds=embeds, attention_mask=torch.ones_like(input_ids), **options)
        out.sequences = torch.cat((input_ids, out.sequences), 1)
        return out


def dots(config: dict[str, Any]) -> Any:
    """Build dots.ocr as published, which transformers does not have."""
    import transformers as hf

    class RMS(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = RMS(), RMS()
            self.attn, self.mlp = torch.nn.Module(), torch.nn.Module()
            self.attn.qkv = torch.nn.Linear(32, 96, bias=False)
            self.attn.proj = torch.nn.Linear(32, 32, bias=False)
            for name, sizes in {"fc1": (32, 40), "fc2": (40, 32), "fc3": (32, 40)}.items():
                setattr(self.mlp, name, torch.nn.Linear(*sizes, bias=False))

        def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
            q, k, v = self.attn.qkv(self.norm1(x)).view(-1, 3, 2, 16).permute(1, 2, 0, 3)
            q, k = (self.rotate(item, turns) for item in (q, k))
            mixed = torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v
            x = x + self.attn.proj(mixed.transpose(0, 1).flatten(1))
            y = self.norm2(x)
            return x + self.mlp.fc2(torch.nn.functional.silu(self.mlp.fc1(y)) * self.mlp.fc3(y))

        def rotate(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
            cos, sin = turns.cos(), turns.sin()
            first, second = x.chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch_embed, self.merger = torch.nn.Module(), torch.nn.Module()
            self.patch_embed.patchifier = torch.nn.Module()
            self.patch_embed.patchifier.proj = torch.nn.Conv2d(3, 32, 7, 7)
            self.patch_embed.patchifier.norm = RMS()
            self.blocks = torch.nn.ModuleList(Layer() for _ in range(3))
            self.post_trunk_norm = RMS()
            self.merger.ln_q = torch.nn.LayerNorm(32, eps=1e-6)
            self.merger.mlp = torch.nn.Sequential(
                torch.nn.Linear(128, 128), torch.nn.GELU(), torch.nn.Linear(128, 32)
            )

        def forward(self, patches: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
            """[T, 3 * 7 * 7] of one image, square by square"""
            first = self.patch_embed.patchifier
            x = first.norm(first.proj(patches.view(-1, 3, 7, 7)).flatten(1))
            speeds = 1 / 10000 ** (torch.arange(0, 8, 2) / 8)
            places = [
                (2 * row + down, 2 * column + along)
                for row in range(grid[0] // 2)
                for column in range(grid[1] // 2)
                for down in range(2)
                for along in range(2)
            ]
            turns = torch.stack([torch.cat((row * speeds, column * speeds)) for row, column in places])
            for block in self.blocks:
                x = block(x, turns)
            return self.merger.mlp(self.merger.ln_q(self.post_trunk_norm(x)).view(-1, 128))

    class Dots(hf.Qwen2ForCausalLM):
        def __init__(self) -> None:
            super().__init__(hf.Qwen2Config(**TEXT, rms_norm_eps=1e-6, tie_word_embeddings=False))
            self.vision_tower = Tower()

        def save_pretrained(self, path: Path) -> None:
            _save(self, config, path)

        def seen(self, inputs: Any) -> torch.Tensor:
            grids = inputs["image_grid_thw"].tolist()
            parts = inputs["pixel_values"].split([rows * columns for _, rows, columns in grids])
            return torch.cat(
                [self.vision_tower(part, grid[1:]) for part, grid in zip(parts, grids, strict=True)]
            )

        def generate(self, input_ids: torch.Tensor, **options: Any) -> Any:
            embeds = self.get_input_embeddings()(input_ids)
            images = {name: options.pop(name, None) for name in ("pixel_values", "image_grid_thw")}
            if images["pixel_values"] is not None:
                embeds[input_ids == config["image_token_id"]] = self.seen(images)
            out = super().generate(inputs_embeds=embeds, **options)
            out.sequences = torch.cat((input_ids, out.sequences), 1)
            return out

    return Dots()


def step(config: dict[str, Any]) -> Any:
    """Build Step3-VL-10B as published: a vision encoder of size 32 with 2 heads, over patches of 7
    pixels."""
    import transformers as hf

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = torch.nn.LayerNorm(32, eps=1e-5), torch.nn.LayerNorm(32, eps=1e-5)
            self.attn, self.mlp = torch.nn.MultiheadAttention(32, 2), torch.nn.Module()
            self.mlp.c_fc, self.mlp.c_proj = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
            for name in ("ls_1", "ls_2"):
                setattr(self, name, torch.nn.Module())
                getattr(self, name).gamma = torch.nn.Parameter(torch.rand(32))

        def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
            qkv = self.ln_1(x) @ self.attn.in_proj_weight.T + self.attn.in_proj_bias
            q, k, v = qkv.view(-1, 3, 2, 16).permute(1, 2, 0, 3)
            q, k = (self.rotate(item, turns) for item in (q, k))
            mixed = torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v
            x = x + self.ls_1.gamma * self.attn.out_proj(mixed.transpose(0, 1).flatten(1))
            inner = self.mlp.c_fc(self.ln_2(x))
            return x + self.ls_2.gamma * self.mlp.c_proj(inner * torch.sigmoid(1.702 * inner))

        def rotate(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
            """Rotate adjacent pairs together."""
            numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(numbers * torch.polar(torch.ones_like(turns), turns)).flatten(-2)

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = torch.nn.Conv2d(3, 32, 7, 7, bias=False)
            self.positional_embedding = torch.nn.Parameter(torch.randn(64, 32))
            self.ln_pre = torch.nn.LayerNorm(32, eps=1e-5)
            self.transformer = torch.nn.Module()
            self.transformer.resblocks = torch.nn.ModuleList(Layer() for _ in range(3))
            self.vit_downsampler1 = torch.nn.Conv2d(32, 64, 3, 2, 1)
            self.vit_downsampler2 = torch.nn.Conv2d(64, 128, 3, 2, 1)

        def forward(self, square: torch.Tensor) -> torch.Tensor:
            """[3, side, side] -> [vectors, 128]"""
            patches = self.conv1(square[None])
            table = self.positional_embedding.T.reshape(1, 32, 8, 8)
            places = torch.nn.functional.interpolate(table, patches.shape[2:], mode="bilinear")
            x = self.ln_pre((patches + places)[0].flatten(1).T)
            side, speeds = patches.shape[2], 1 / 10000 ** (torch.arange(0, 8, 2) / 8)
            turns = [
                torch.cat((column * speeds, row * speeds)) for row in range(side) for column in range(side)
            ]
            for block in self.transformer.resblocks:
                x = block(x, torch.stack(turns))
            x = self.vit_downsampler2(self.vit_downsampler1(x.T.reshape(1, 32, side, side)))
            return x[0].flatten(1).T

    class Step(hf.Qwen3ForCausalLM):
        def __init__(self) -> None:
            super().__init__(
                hf.Qwen3Config(**TEXT, head_dim=16, rms_norm_eps=1e-6, tie_word_embeddings=False)
            )
            self.vision_model = Tower()
            self.vit_large_projector = torch.nn.Linear(128, 32, bias=False)

        def save_pretrained(self, path: Path) -> None:
            _save(self, config, path)

        def seen(self, squares: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([self.vit_large_projector(self.vision_model(item)) for item in squares])

        def generate(self, input_ids: torch.Tensor, squares: Any = (), **options: Any) -> Any:
            embeds = self.get_input_embeddings()(input_ids)
            if squares:
                embeds[input_ids == config["image_token_id"]] = self.seen(squares)
            out = super().generate(inputs_embeds=embeds, **options)
            out.sequences = torch.cat((input_ids, out.sequences), 1)
            return out

    return Step()


class Step3Vision(torch.nn.Module):
    """The vision encoder of Step3 as published, with size 32 and 2 heads, over patches of 7 pixels."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer_norm1, self.layer_norm2 = (torch.nn.LayerNorm(32, eps=1e-5) for _ in range(2))
            self.self_attn, self.mlp = torch.nn.Module(), torch.nn.Module()
            self.self_attn.qkv_proj, self.self_attn.out_proj = (
                torch.nn.Linear(32, 96),
                torch.nn.Linear(32, 32),
            )
            self.mlp.fc1, self.mlp.fc2 = torch.nn.Linear(32, 40), torch.nn.Linear(40, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.self_attn.qkv_proj(x).view(-1, 3, 2, 16).permute(1, 2, 0, 3)
            mixed = torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v
            x = x + self.layer_norm1(self.self_attn.out_proj(mixed.transpose(0, 1).flatten(1)))
            inner = self.mlp.fc1(x)
            return x + self.layer_norm2(self.mlp.fc2(inner * torch.sigmoid(1.702 * inner)))

    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.transformer = torch.nn.Module(), torch.nn.Module()
        self.embeddings.class_embedding = torch.nn.Parameter(torch.randn(1, 32))
        self.embeddings.patch_embedding = torch.nn.Conv2d(3, 32, 7, 7)
        self.embeddings.position_embedding = torch.nn.Embedding(65, 32)
        self.transformer.layers = torch.nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, square: torch.Tensor) -> torch.Tensor:
        """[3, side, side] -> [1, 32, rows, columns]"""
        patches, parts = self.embeddings.patch_embedding(square[None]), self.embeddings
        places = parts.position_embedding.weight
        table, size = places[1:].T.reshape(1, 32, 8, 8), patches.shape[2:]
        if size != table.shape[2:]:
            table = torch.nn.functional.interpolate(table, size, mode="bicubic", antialias=True)
        x = (patches + table)[0].flatten(1).T
        x = torch.cat((*[parts.class_embedding + places[:1]] * 4, x))
        for layer in self.transformer.layers:
            x = layer(x)
        return x[4:].T.reshape(1, 32, *size)


class Step3VL(Step3):
    """Step3 with its vision encoder as published."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config["text_config"])
        self.whole_config = config
        self.vision_model = Step3Vision()
        self.vit_downsampler = torch.nn.Conv2d(32, 24, 2, config["understand_projector_stride"])
        self.vit_downsampler2 = torch.nn.Conv2d(24, 48, 3, 2, 1)
        self.vit_large_projector = torch.nn.Linear(48, 32)

    def save_pretrained(self, path: Path, **_: Any) -> None:
        (path / "config.json").write_text(json.dumps(self.whole_config))
        save_file(self.stored(), path / "model.safetensors")

    def seen(self, squares: list[torch.Tensor]) -> torch.Tensor:
        reduced = [self.vit_downsampler2(self.vit_downsampler(self.vision_model(item))) for item in squares]
        return self.vit_large_projector(torch.cat([item[0].flatten(1).T for item in reduced]))

    def generate(self, input_ids: torch.Tensor, squares: Any = (), **options: Any) -> Any:
        embeds = self.get_input_embeddings()(input_ids)
        if squares:
            embeds[input_ids == self.whole_config["image_token_id"]] = self.seen(squares)
        out = super().generate(inputs_embeds=embeds, **options)
        out.sequences = torch.cat((input_ids, out.sequences), 1)
        return out


def _save(model: torch.nn.Module, config: dict[str, Any], path: Path) -> None:
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: item.clone() for name, item in model.state_dict().items()}, path / "model.safetensors")
