"""Tiny models with SSM states and their transformers models; a driver that runs ours on worker rows."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle import BLOCK_SIZE, check_transformers, make_batch
from torch import Tensor
from zoo import SHARED, ZOO

from quire.attention.batch import Batch
from quire.data.params import SamplingParams
from quire.data.step_plan import Admission, StepPlan
from quire.layers.attention import attention_layers
from quire.layers.ssm import state_layers
from quire.worker.state_checkpoints import StateCheckpoints

MAX_ROWS = 5
BASE: dict[str, Any] = {key: value for key, value in SHARED.items() if key != "head_dim"} | {
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
GRANITE = BASE | {
    "num_local_experts": 0,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 32,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
QWEN = BASE | {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # config class, model class, settings
    "granite": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", GRANITE),
    "granite-experts-rope": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        GRANITE
        | {
            "num_local_experts": 4,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
    ),
    "qwen3-next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", QWEN | EXPERTS | {"mlp_only_layers": [0]}),
    "qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", QWEN | {"attention_bias": True}),
    "qwen3.5-experts": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", QWEN | EXPERTS),
} | {
    name.lower(): (f"{name}Config", f"{name}ForCausalLM", SHARED | ZOO[f"{name}ForCausalLM"].settings)
    for name in ("FalconMamba", "Mamba2", "Lfm2", "FalconH1")
}


def make_twins(variant: str, path: Path) -> Any:
    """Save a seeded random transformers model to `path`."""
    import transformers

    config, model_class, settings = VARIANTS[variant]
    torch.manual_seed(0)
    model = check_transformers(model_class)(getattr(transformers, config)(**settings)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # norms, biases and rates would otherwise be constant
            if parameter.dim() == 1 or "conv1d" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(path)
    return model


def bind_states(model: Any) -> None:
    """Bind states full of NaN, of rows, padding and one checkpoint."""
    for layer in state_layers(model.modules()):
        device = layer.conv_weight.device
        layer.bind(
            *(
                torch.full((MAX_ROWS + 2, *shape), torch.nan, dtype=dtype, device=device)
                for shape, dtype in layer.state_shapes
            )
        )


def on_rows(batch: Batch, rows: list[int], device: str = "cpu") -> Batch:
    """Return the same batch for these rows of a worker."""
    tables = torch.zeros(MAX_ROWS + 1, batch.block_tables.shape[1], dtype=torch.int32)
    batch.rows = torch.tensor(rows, dtype=torch.int32)
    tables[rows] = batch.block_tables
    batch.block_tables = tables
    for name in ("token_ids", "positions", "slots", "query_starts", "seq_lens", "rows", "block_tables"):
        setattr(batch, name, getattr(batch, name).to(device))
    return batch


@torch.inference_mode()
def run_rows(
    model: Any,
    prompts: list[list[int]],
    steps: list[list[int]],
    rows: list[int],
    device: str = "cpu",
    num_computed: int = 0,
) -> list[Tensor]:
    """Return logits of every position of each prompt after the first `num_computed`; `steps` gives the tokens
    per prompt and step."""
    order = np.random.default_rng(7).permutation(np.arange(1, 64)).tolist()
    tables = [[order.pop() for _ in range(-(-len(ids) // BLOCK_SIZE))] for ids in prompts]
    done = [num_computed] * len(prompts)
    out: list[list[Tensor]] = [[] for _ in prompts]
    for step in steps:
        some = [i for i, count in enumerate(step) if count]
        chunks = [(prompts[i][done[i] : done[i] + step[i]], done[i]) for i in some]
        batch = make_batch(chunks, [tables[i] for i in some], BLOCK_SIZE)
        batch = on_rows(batch, [rows[i] for i in some], device)
        for layer in attention_layers(model.modules())[:1]:
            layer.backend.plan(batch)
        for i, piece in zip(some, model.logits(model(batch)).split([step[i] for i in some]), strict=True):
            out[i].append(piece)
            done[i] += step[i]
    assert done == [len(ids) for ids in prompts]
    return [torch.cat(pieces) for pieces in out]


def run_from_checkpoint(model: Any, ids: list[int], num_cached: int, device: str = "cpu") -> Tensor:
    """Return logits of the positions after `num_cached`: the first tokens are computed on one row, and the
    others on another row, from a checkpoint of the states of the first. Pages are shared."""
    checkpoints = StateCheckpoints(state_layers(model.modules()), MAX_ROWS)
    run_rows(model, [ids[:num_cached]], [[num_cached]], [4], device)
    plan = StepPlan.idle(1)
    plan.saves = np.array([[4], [1], [num_cached]], np.int32)
    checkpoints.save(plan)
    run_rows(model, [ids[::-1]], [[len(ids)]], [4], device)
    run_rows(model, [ids[:num_cached]], [[num_cached]], [3], device)  # the pages once more
    params = SamplingParams()
    plan.admitted = [Admission(2, "hit", ids, len(ids), num_cached, [[]], params, seed=0, state=1)]
    checkpoints.restore(plan)
    (logits,) = run_rows(model, [ids], [[len(ids) - num_cached]], [2], device, num_cached)
    return logits
