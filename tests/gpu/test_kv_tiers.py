"""Tests of the lower tiers of the KV cache on a GPU: blocks in pinned host memory and on disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
from on_gpu import opened
from oracle import make_tiny

from quire import LLM, SamplingParams
from quire.data.kv_tiers import BlockLoad, BlockStores

pytestmark = pytest.mark.gpu
PARAMS = SamplingParams(temperature=0, max_tokens=8)


def prompt_of(first: int) -> dict[str, Any]:
    return {"prompt_token_ids": [(first * 13 + 7 * at) % 90 + 3 for at in range(161)]}


def run(llm: LLM, first: int) -> tuple[list[int], int]:
    (output,) = llm.generate([prompt_of(first)], PARAMS, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_answers_are_the_same_with_blocks_from_a_lower_tier(tier: str, tmp_path: Path) -> None:
    path, _ = make_tiny("qwen3", tmp_path / "model")
    settings: dict[str, Any] = {"num_gpu_blocks_override": 30, "max_model_len": 256, "max_num_seqs": 2}
    settings |= {"enable_prefix_caching": True}
    settings |= (
        {"kv_offloading_size": 0.25} if tier == "host" else {"kv_offloading_dir": str(tmp_path / "kv")}
    )
    llm = opened(path, "bfloat16", **settings)
    expected, _ = run(llm, 0)
    for number in range(1, 6):
        run(llm, number)
    tokens, num_cached = run(llm, 0)
    assert tokens == expected and num_cached == 160
    llm.llm_engine.close()


def test_blocks_are_copied_byte_by_byte_beside_the_steps(tmp_path: Path) -> None:
    path, _ = make_tiny("qwen3", tmp_path / "model")
    settings = {"num_gpu_blocks_override": 40, "max_model_len": 256, "kv_offloading_size": 0.25}
    llm = opened(path, "bfloat16", enable_prefix_caching=True, **settings)
    tiers = llm.llm_engine.core.executor._worker._tiers
    pages = tiers.kinds[0].copies.entries
    for tensor in pages.tensors:
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    expected = pages.gather(torch.tensor([5, 9, 30], device="cuda"))
    torch.cuda._sleep(100_000_000)  # the entries are asked for long before they are in host memory
    tiers.store(BlockStores([5, 9, 30], [b"a", b"b", b"c"], [2, 6, 1], [False] * 3))
    for tensor in pages.tensors:
        tensor.zero_()  # the next step overwrites the blocks at once
    assert tiers.load(BlockLoad([11, 12, 13], [1, 2, 6], [b"a", b"b", b"c"])).failed == []
    loaded = pages.gather(torch.tensor([11, 12, 13], device="cuda"))
    assert torch.equal(loaded, expected[[2, 0, 1]])
    llm.llm_engine.close()
