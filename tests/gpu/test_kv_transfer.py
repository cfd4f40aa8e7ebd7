"""Tests of prefixes that move between two engines on a GPU, through host memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from on_gpu import opened
from oracle import make_tiny

from quire import LLM, SamplingParams
from quire.data.kv_tiers import BlockRead

pytestmark = pytest.mark.gpu
SETTINGS: dict[str, Any] = {"num_gpu_blocks_override": 60, "max_model_len": 512, "max_num_seqs": 2}


def run(llm: LLM, first: int, transfer: dict[str, Any] | None = None, max_tokens: int = 8) -> Any:
    prompt = {"prompt_token_ids": [(first * 13 + 7 * at) % 90 + 3 for at in range(401)]}
    extra_args = None if transfer is None else {"kv_transfer_params": transfer}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=extra_args)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output


def test_answers_are_the_same_with_a_prefix_from_another_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
    monkeypatch.setenv("QUIRE_CLUSTER_TOKEN", "secret")
    path, _ = make_tiny("qwen3", tmp_path / "model", max_position_embeddings=1024)
    alone, first, second = (
        opened(path, "bfloat16", enable_prefix_caching=True, **SETTINGS, **config)
        for config in (
            {},
            {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}},
            {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}},
        )
    )
    for number in range(3):
        expected = run(alone, number).outputs[0].token_ids
        kept = run(first, number, {"do_remote_decode": True}, max_tokens=1).kv_transfer_params
        assert kept["remote_num_tokens"] == 400
        output = run(second, number, kept)
        assert output.num_cached_tokens == 400 and output.outputs[0].token_ids == expected
    assert second.llm_engine.core.scheduler.kv.tiers.stats.num_failed_transfers == 0
    for llm in (alone, first, second):
        llm.llm_engine.close()


def test_entries_are_read_byte_by_byte_beside_the_steps(tmp_path: Path) -> None:
    path, _ = make_tiny("qwen3", tmp_path / "model", max_position_embeddings=1024)
    llm = opened(path, "bfloat16", enable_prefix_caching=True, kv_offloading_size=0.25, **SETTINGS)
    tiers = llm.llm_engine.core.executor._worker._tiers
    copies = tiers.kinds[0].copies
    for tensor in copies.entries.tensors:
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    ids = [*range(5, 45), 3]
    expected = copies.entries.gather(torch.tensor(ids, device="cuda")).cpu()
    copies._load_buffers = [type(b)(b.memory[:7]) for b in copies._load_buffers]  # several parts
    assert torch.equal(copies.read(ids), expected)
    assert bytes(tiers.read(BlockRead(0, ids, False))) == expected.numpy().tobytes()
    llm.llm_engine.close()
