"""Tests of adapters on all layers that PEFT selects, on a GPU: experts, MLA and fused layers."""

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_oracle import save_adapter
from on_gpu import SETTINGS
from oracle import make_tiny
from test_lora_all_families import RANK, chosen
from tiny import check_against, open_tiny, prompts_of

from quire import LoRARequest, SamplingParams

pytestmark = pytest.mark.gpu
SHAPES = [
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "Llama4ForCausalLM",
    "MixtralForCausalLM",
    "NemotronHForCausalLM",
    "Phi3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Starcoder2ForCausalLM",
]
WAYS: dict[str, dict[str, Any]] = {"graphs": {}, "eager": {"enforce_eager": True}}


@pytest.mark.parametrize("architecture", SHAPES)
def test_outputs_match_peft(architecture: str, tmp_path: Path) -> None:
    """Check rows with and without the adapter, with and without graphs."""
    gc.collect()
    torch.cuda.empty_cache()
    path, hf = make_tiny(architecture, tmp_path)
    adapted = save_adapter(hf, tmp_path / "a", 1, **RANK, **chosen(architecture, hf))
    lora, more = LoRARequest("a", 1, str(tmp_path / "a")), {"enable_lora": True, "max_lora_rank": 8}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=-1)
    prompts, loras = prompts_of(23, 9, 40, 5), [lora, None, lora, None]
    for way in WAYS.values():
        llm = open_tiny(path, dtype="float32", **SETTINGS, **more, **way)
        actual = llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
        check_against(adapted, actual[::2], tolerance=5e-3, ties=5e-3)
        llm.llm_engine.close()
    check_against(adapted.unload(), actual[1::2], tolerance=5e-3, ties=5e-3)


def test_graphs_are_captured_while_a_thread_pins_memory(tmp_path: Path) -> None:
    """Check the thread that pins memory for the next adapters."""
    path, _ = make_tiny("LlamaForCausalLM", tmp_path)
    pinned: list[torch.Tensor] = []
    ends = threading.Event()

    def pin() -> None:
        while not ends.wait(0.002):
            pinned.append(torch.empty(2**18, pin_memory=True))

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        llm = open_tiny(path, dtype="float32", **SETTINGS)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        assert len(llm.generate(prompts_of(5), params, use_tqdm=False)[0].outputs[0].token_ids) == 4
        count = len(pinned)
        llm.llm_engine.close()
    finally:
        ends.set()
        thread.join()
    assert count > 10
