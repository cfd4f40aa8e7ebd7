"""Tests of adapters on every layer that PEFT selects, in every family: outputs match PEFT, or it is
rejected.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoders import ENCODERS, make, texts
from lora_oracle import PLAIN, Adapted, save_adapter, slots_for
from oracle import make_tiny, random_prompts, run_hf
from zoo import STORED, ZOO

from quire import LLM, LoRARequest, PoolingParams
from quire.errors import RequestsFailed

PROMPTS = random_prompts(9, 7)
RANK: dict[str, Any] = {"r": 4, "lora_alpha": 8}
QUICK = [
    "ApertusForCausalLM",
    "Cohere2MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "FalconH1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "JambaForCausalLM",
    "Llama4ForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MixtralForCausalLM",
    "NemotronHForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Starcoder2ForCausalLM",
    "Step3TextForCausalLM",
    "Step3p5ForCausalLM",
]
"""Families least like Llama that no other adapter test covers."""
NOT_OF_TRANSFORMERS = {"DeciLMForCausalLM", "OuroForCausalLM", "Plamo3ForCausalLM"}
"""Families whose reference models have other names of layers than their checkpoints."""
NOT_BY_PEFT = {
    "FalconH1ForCausalLM": {"out_proj"},
    "FalconMambaForCausalLM": {"out_proj", "dt_proj"},
    "Gemma3nForCausalLM": {"modality_router", "prediction_coefs", "correction_coefs", "0", "1", "2"},
    "JambaForCausalLM": {"dt_proj"},
    "Llama4ForCausalLM": {"router"},
    "LongcatFlashForCausalLM": {"classifier"},
    "Mamba2ForCausalLM": {"out_proj"},
    "MambaForCausalLM": {"out_proj", "dt_proj"},
    "NemotronHForCausalLM": {"out_proj"},
    "Zamba2ForCausalLM": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj", "0", "1"},
    "PhimoeForCausalLM": {"router"},
}
"""Linear layers without adapters. PEFT rejects or cannot run them, transformers uses only their weight, they
are too small, or they are shared: PEFT would have one adapter per use.
"""


def chosen(architecture: str, hf: Any) -> dict[str, Any]:
    """Return all linear layers except the head, and the experts, which are one tensor each."""
    experts = {
        ".".join(name.split(".")[-3:])
        for name, parameter in hf.named_parameters()
        if parameter.ndim == 3 and "conv" not in name
    }
    actual: dict[str, Any] = {"target_modules": "all-linear"}
    if left_out := NOT_BY_PEFT.get(architecture):
        linear = {
            name.rpartition(".")[2]
            for name, module in hf.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        actual = {"target_modules": sorted(linear - left_out - {"lm_head"})}
    return actual | ({"target_parameters": sorted(experts)} if experts else {})


@pytest.mark.parametrize(
    "architecture",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name, specimen in ZOO.items()
        if not specimen.alike and name not in NOT_OF_TRANSFORMERS
    ],
)
def test_all_layers_that_peft_selects(architecture: str, tmp_path: Path) -> None:
    """Check layers with another name in transformers, and a single slot."""
    path, hf = make_tiny(architecture, tmp_path, **STORED.get(architecture, {}))
    adapted = save_adapter(hf, tmp_path / "a", 1, **RANK, **chosen(architecture, hf))
    expected = [run_hf(adapted, PROMPTS[0]), run_hf(adapted.unload(), PROMPTS[1])]
    actual = Adapted(path, slots_for(1, 8))
    actual.put(0, tmp_path / "a")
    for result, wanted in zip(actual.run(PROMPTS, [0, PLAIN]), expected, strict=True):
        assert (result - wanted).abs().max() < 1e-3
    assert (run_hf(hf, PROMPTS[0]) - expected[0]).abs().max() > 0.02, "the adapter changes nothing"


@pytest.mark.parametrize(
    "name",
    [
        encoder
        if encoder in ("BertModel", "ModernBertModel")
        else pytest.param(encoder, marks=pytest.mark.slow)
        for encoder in ENCODERS
    ],
)
def test_all_layers_of_an_encoder(name: str, tmp_path: Path) -> None:
    family, settings = ENCODERS[name]
    tiny, ids = make(tmp_path / "model", family, **settings), texts(12)[0]
    adapted = save_adapter(tiny.body, tmp_path / "a", 1, **RANK, target_modules="all-linear")
    with torch.inference_mode():
        wanted = adapted(torch.tensor([ids])).last_hidden_state[0].numpy()
    llm = LLM(
        str(tiny.path),
        convert="embed",
        dtype="float32",
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        enable_lora=True,
    )
    lora = LoRARequest("a", 1, str(tmp_path / "a"))
    # Hidden states are read before the pooler of two; files of the others have other layer names.
    if family in ("Bert", "Ernie", "NomicBert", "Gte", "JinaEmbeddingsV3"):
        with pytest.raises(RequestsFailed):
            llm.encode([ids], RAW, pooling_task="token_embed", lora_request=lora, use_tqdm=False)
        return
    actual = llm.encode([ids], RAW, pooling_task="token_embed", lora_request=lora, use_tqdm=False)
    assert np.abs(actual[0].outputs.data - wanted).max() < 1e-3


RAW = PoolingParams(use_activation=False)
