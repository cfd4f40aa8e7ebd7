"""Tests of adapters that add tokens, against PEFT, in mixed batches."""

import copy
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_on_cpu import NEEDS_KERNELS, WithGraphs, use_fake_graphs
from oracle import make_tiny, run_hf
from safetensors.torch import load_file, save_file
from tiny import SMALL

from quire import LLM, LoRARequest, SamplingParams
from quire.data.outputs import RequestOutput
from quire.errors import RequestError, RequestsFailed
from quire.worker.device import Model
from quire.worker.rows import Rows

VOCAB, STEPS = 128, 12
GREEDY = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    **SMALL,
    "max_num_seqs": 5,
    "max_logprobs": -1,
    "logprobs_mode": "raw_logits",
    "enable_lora": True,
    "max_loras": 3,
    "max_lora_rank": 8,
    "lora_whole_modules": ["embed_tokens", "lm_head"],
}
BOTH = ["embed_tokens", "lm_head"]
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "saved": (3, {"target_modules": ["q_proj", "v_proj"]}),
    "adapted": (5, {"target_modules": ["q_proj", *BOTH]}),
    "whole": (3, {"target_modules": ["v_proj"], "modules_to_save": BOTH}),
    "trained": (3, {"target_modules": ["q_proj"], "trainable_token_indices": [7, 128, 129, 130]}),
}
"""PEFT's formats of added tokens, and their number."""


class Base:
    """A model with adapters that add tokens."""

    def __init__(self, folder: Path, tied: bool, family: str = "llama", **settings: Any) -> None:
        self.path, hf = make_tiny(family, folder, tie_word_embeddings=tied, **settings)
        hf.config._name_or_path = hf.name_or_path = str(self.path)
        self.models: dict[str, Any] = {"": hf}
        self.loras: dict[str, LoRARequest | None] = {"": None}
        self.prompts: dict[str, list[int]] = {"": [3, 9, 30, 31]}
        for number, (name, (count, settings)) in enumerate(KINDS.items(), 1):
            self.models[name] = self._adapter(hf, folder / name, number, count, settings)
            self.loras[name] = LoRARequest(name, number, str(folder / name))
            self.prompts[name] = [5, VOCAB + 1, 7, VOCAB + count - 1, 40, VOCAB, number]

    def _adapter(self, hf: Any, path: Path, seed: int, count: int, settings: dict[str, Any]) -> Any:
        from peft import LoraConfig, get_peft_model

        grown, draw = copy.deepcopy(hf), torch.Generator().manual_seed(seed)
        grown.resize_token_embeddings(VOCAB + count, mean_resizing=False)
        for table in {grown.get_input_embeddings(), grown.get_output_embeddings()}:
            table.weight.data[VOCAB:] = torch.randn(count, table.weight.shape[1], generator=draw) * 0.6
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = get_peft_model(grown, LoraConfig(r=4, lora_alpha=8, **settings))
            for name, parameter in adapted.named_parameters():
                if "lora_" in name or "modules_to_save" in name or "trainable_tokens_delta" in name:
                    parameter.data += torch.randn(parameter.shape, generator=draw) * 0.1
            adapted.save_pretrained(path)
        return adapted.eval()

    def logits(self, name: str) -> torch.Tensor:
        return run_hf(self.models[name], self.prompts[name])

    def tokens(self, name: str) -> list[int]:
        ids = list(self.prompts[name])
        for _ in range(STEPS):
            ids.append(int(run_hf(self.models[name], ids)[-1].argmax()))
        return ids[len(self.prompts[name]) :]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(tmp_path_factory.mktemp("own"), tied=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="module", params=["untied", "tied"])
def base(request: pytest.FixtureRequest) -> Base:
    actual: Base = request.getfixturevalue(request.param)
    return actual


@pytest.fixture(scope="module")
def llm(base: Base) -> Iterator[LLM]:
    llm = LLM(str(base.path), **SETTINGS)
    yield llm
    llm.llm_engine.close()


def token_ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def run(llm: LLM, base: Base, names: list[str], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    prompts, loras = [base.prompts[name] for name in names], [base.loras[name] for name in names]
    return llm.generate(prompts, params, lora_request=loras, use_tqdm=False)


@pytest.mark.parametrize("name", KINDS)
def test_logits_match_peft(llm: LLM, base: Base, name: str) -> None:
    check_logits(llm, base, name)


def check_logits(llm: LLM, base: Base, name: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    (output,) = run(llm, base, [name], params)
    expected, size = base.logits(name), VOCAB + KINDS[name][0]
    for position, actual in enumerate((output.prompt_logprobs or [])[1:]):
        assert actual is not None and sorted(actual) == list(range(size)), "exactly these tokens"
        logprobs = torch.tensor([actual[token_id].logprob for token_id in range(size)])
        torch.testing.assert_close(logprobs, expected[position], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("base", ["tied"], indirect=True)
def test_tied_head_uses_the_added_rows_of_the_embedding(llm: LLM, base: Base, tmp_path: Path) -> None:
    path = tmp_path / "embedding"
    shutil.copytree(base.loras["saved"].path, path)
    tensors = load_file(path / "adapter_model.safetensors")
    without_head = {name: tensor for name, tensor in tensors.items() if "lm_head" not in name}
    assert len(without_head) == len(tensors) - 1
    save_file(without_head, path / "adapter_model.safetensors")
    (output,) = llm.generate(
        [base.prompts["saved"]], GREEDY, lora_request=LoRARequest("embedding", 9, str(path)), use_tqdm=False
    )
    assert list(output.outputs[0].token_ids) == base.tokens("saved")
    assert max(output.outputs[0].token_ids) >= VOCAB


def test_mixed_batch_matches_peft_and_base_model_excludes_new_tokens(llm: LLM, base: Base) -> None:
    names = ["", *KINDS, "", "adapted", "trained"]
    actual = token_ids_of(run(llm, base, names))
    assert actual == [base.tokens(name) for name in names]
    assert actual == [token_ids_of(run(llm, base, [name]))[0] for name in names]
    new = [sum(token_id >= VOCAB for token_id in ids) for ids in actual]
    assert not new[0] and sum(new) > 5, "some generated tokens are new"


def test_sampling_parameters_apply_to_new_tokens(llm: LLM, base: Base) -> None:
    name, new = "saved", [VOCAB, VOCAB + 1, VOCAB + 2]

    def ask(**params: Any) -> list[int]:
        fields = {"temperature": 0.0, "max_tokens": STEPS, "ignore_eos": True} | params
        (output,) = run(llm, base, [name], SamplingParams(**fields))
        return list(output.outputs[0].token_ids)

    plain = base.tokens(name)
    first = next(token_id for token_id in plain if token_id >= VOCAB)
    assert {*ask(allowed_token_ids=new)} <= {*new}
    assert {*ask(logit_bias={VOCAB + 2: 100.0})} == {VOCAB + 2}
    assert first not in ask(logit_bias={first: -100.0})
    assert ask(stop_token_ids=[first])[-1] == first
    held = ask(stop_token_ids=[first], min_tokens=STEPS)
    assert len(held) == STEPS and first not in held[:-1]
    most = max(ask(frequency_penalty=2.0, allowed_token_ids=new).count(item) for item in new)
    assert most < STEPS, "new tokens are counted"
    drawn = [ask(temperature=1.0, seed=seed, top_k=20, top_p=0.9) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    (output,) = run(llm, base, [name], SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=new))
    assert {*new} <= {*(output.outputs[0].logprobs or [{}])[0]}


def test_logprobs_cover_exactly_the_adapters_tokens(llm: LLM, base: Base) -> None:
    """Check for unused rows, tokens of another adapter in the step, and the last ids of the model."""
    names = ["", "saved", "adapted", ""]
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=-1, ignore_eos=True)
    outputs = run(llm, base, names, params)
    for name, output in zip(names, outputs, strict=True):
        size = VOCAB + (KINDS[name][0] if name else 0)
        actual = output.outputs[0].logprobs or []
        assert [sorted(item) for item in actual] == [list(range(size))] * 3
        logprobs = torch.tensor([actual[0][token_id].logprob for token_id in range(size)])
        torch.testing.assert_close(logprobs, base.logits(name)[-1], atol=1e-3, rtol=1e-3)


def test_nonexistent_ids_are_not_returned_as_top_logprobs(untied: Base) -> None:
    """Check a request whose finite logits are fewer than its logprobs."""
    llm = LLM(str(untied.path), **SETTINGS | {"logprobs_mode": "processed_logits"})
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=-1, allowed_token_ids=[5, 6])
    names = ["", "saved", "adapted"]
    try:
        for name, output in zip(names, run(llm, untied, names, params), strict=True):
            size = VOCAB + (KINDS[name][0] if name else 0)
            assert all(sorted(item) == list(range(size)) for item in output.outputs[0].logprobs or [])
    finally:
        llm.llm_engine.close()


def test_soft_capped_logits_match_peft(tmp_path: Path) -> None:
    """Check a soft cap, which must leave minus infinity and include new tokens, and scaled embeddings."""
    capped = Base(tmp_path, True, "gemma2", final_logit_softcapping=4.0, attn_logit_softcapping=None)
    llm = LLM(str(capped.path), **SETTINGS | {"num_gpu_blocks_override": 160})
    names = ["", *KINDS]
    try:
        for name in KINDS:
            check_logits(llm, capped, name)
        assert token_ids_of(run(llm, capped, names)) == [capped.tokens(name) for name in names]
    finally:
        llm.llm_engine.close()


def test_unknown_ids_are_rejected(llm: LLM, base: Base) -> None:
    with pytest.raises(RequestError, match="Token id 128 is out of vocabulary: ids of this model are 0 to 1"):
        llm.generate([[3, VOCAB]], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="contain out-of-vocab token ids. Vocabulary size: 128"):
        llm.generate([[3]], SamplingParams(allowed_token_ids=[VOCAB]), use_tqdm=False)
    for prompt, params in (
        ([3, VOCAB + 3], GREEDY),
        ([3], SamplingParams(temperature=0, logit_bias={VOCAB + 3: 1.0})),
    ):
        with pytest.raises(RequestsFailed, match="Token id 131 is out of vocabulary: ids of this adapter"):
            llm.generate([prompt], params, lora_request=base.loras["saved"], use_tqdm=False)
    assert token_ids_of(run(llm, base, ["saved"])) == [base.tokens("saved")]


def test_added_tokens_beyond_the_limit_are_rejected(untied: Base) -> None:
    for settings, message in (
        ({"lora_extra_vocab_size": 4}, "has 5 tokens of its own, above the 4 of --lora-extra-vocab-size"),
        ({"lora_extra_vocab_size": 0}, "cannot bring tokens here, --lora-extra-vocab-size is 0"),
    ):
        llm = LLM(str(untied.path), **SETTINGS | settings)
        try:
            with pytest.raises(RequestsFailed, match=message):
                llm.generate([[3]], GREEDY, lora_request=untied.loras["adapted"], use_tqdm=False)
        finally:
            llm.llm_engine.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
        {"enforce_eager": True, "max_loras": 1, "enable_chunked_prefill": True, "max_num_batched_tokens": 5},
    ],
    ids=str,
)
def test_added_tokens_with_tensor_parallelism_and_drafts(untied: Base, settings: dict[str, Any]) -> None:
    llm = LLM(str(untied.path), **SETTINGS | settings)
    names = ["", *KINDS]
    try:
        assert token_ids_of(run(llm, untied, names)) == [untied.tokens(name) for name in names]
    finally:
        llm.llm_engine.close()


@pytest.mark.slow
@NEEDS_KERNELS
def test_steps_with_added_tokens_are_not_replayed(untied: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a CUDA-like device: captured steps for other rows, and `LoRAVocabRows` for these."""

    def open_device(model: Model, all_rows: Rows, device: torch.device, *drafts: Any) -> WithGraphs:
        for room in model.adapters.vocab_rows.values() if model.adapters else ():
            room._replace = room._replace_by_slots
        return WithGraphs(model, all_rows, lambda logits, *args: logits.argmax(-1), device)

    use_fake_graphs(monkeypatch)
    monkeypatch.setattr("quire.worker.loaded_model.open_device", open_device)
    llm = LLM(str(untied.path), **SETTINGS)
    names = ["", *KINDS]
    try:
        assert token_ids_of(run(llm, untied, names)) == [untied.tokens(name) for name in names]
    finally:
        llm.llm_engine.close()
