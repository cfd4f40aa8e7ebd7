"""Tests of pooling engines against transformers: embeddings, classes and scores, with any schedule."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from oracle import make_tiny
from tiny import prompts_of
from tiny_text import TextModel, text_model

from quire import LLM, PoolingParams, SamplingParams
from quire.configure import configure
from quire.entrypoints.child_cores import private_engine
from quire.errors import ConfigError, RequestError
from quire.frontend.inputs import Prompt

TOLERANCE = 1e-3
RAW = PoolingParams(use_activation=False)
LENGTHS = (1, 2, 5, 8, 17, 31)


def open_pooling(path: Path, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "runner": "pooling",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_num_seqs": 8,
        "block_size": 4,
        "num_gpu_blocks_override": 128,
        "use_tqdm_on_load": False,
    }
    return LLM(str(path), **(defaults | settings))


@torch.inference_mode()
def states(hf: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    """Return hidden states [len(ids), hidden] after the final norm."""
    body = getattr(hf, "model", hf)
    actual: np.ndarray[Any, Any] = body(torch.tensor([ids])).last_hidden_state[0].numpy()
    return actual


POOLED = {
    "LAST": lambda result: result[-1],
    "CLS": lambda result: result[0],
    "MEAN": lambda result: result.mean(0),
}


def expected(hf: Any, prompts: list[list[int]], kind: str = "LAST") -> np.ndarray[Any, Any]:
    return np.stack([POOLED[kind](states(hf, ids)) for ids in prompts])


def embeddings(llm: LLM, prompts: list[list[int]], params: Any = RAW) -> np.ndarray[Any, Any]:
    return np.array([output.outputs.embedding for output in llm.embed(prompts, params, use_tqdm=False)])


def normalised(vectors: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    actual: np.ndarray[Any, Any] = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return actual


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return make_tiny("qwen3", tmp_path_factory.mktemp("pooling"))


# ---- embeddings of a decoder


@pytest.mark.parametrize("kind", POOLED)
@pytest.mark.parametrize("chunk", [5, 256])
def test_every_pooling_type_whole_and_in_chunks(qwen3: tuple[Path, Any], kind: str, chunk: int) -> None:
    path, hf = qwen3
    llm = open_pooling(
        path, pooler_config={"pooling_type": kind}, max_num_batched_tokens=chunk, max_num_seqs=3
    )
    prompts = prompts_of(*LENGTHS)
    for _ in range(2):  # the second time from the prefix cache, if there is one
        assert np.abs(embeddings(llm, prompts) - expected(hf, prompts, kind)).max() < TOLERANCE


def test_only_last_pooling_shares_prefixes(qwen3: tuple[Path, Any]) -> None:
    path, hf = qwen3
    (common,) = prompts_of(19)
    prompts = [common + tail for tail in prompts_of(1, 5, seed=8)] + [common]
    llm = open_pooling(path)
    llm.embed(prompts, use_tqdm=False)
    second = llm.embed(prompts, RAW, use_tqdm=False)
    assert [item.num_cached_tokens for item in second] == [16, 20, 16]
    assert np.abs([item.outputs.embedding for item in second] - expected(hf, prompts)).max() < TOLERANCE
    assert (
        open_pooling(path, pooler_config={"pooling_type": "MEAN"}).config.cache.enable_prefix_caching is False
    )


def test_pooling_with_small_caches_and_full_contexts(qwen3: tuple[Path, Any]) -> None:
    """Check prompts that fill max_model_len, since no token follows, and rows that wait for blocks."""
    path, hf = qwen3
    llm = open_pooling(path, max_model_len=32, num_gpu_blocks_override=12, max_num_batched_tokens=16)
    prompts = prompts_of(32, 31, 32, 9, 30)
    assert np.abs(embeddings(llm, prompts) - expected(hf, prompts)).max() < TOLERANCE
    with pytest.raises(RequestError, match="maximum context length is 32 tokens"):
        llm.embed(prompts_of(33))


def test_mixed_pooling_params_in_one_batch(qwen3: tuple[Path, Any]) -> None:
    """Check normalized and raw, truncated, and per-token vectors in one batch."""
    path, hf = qwen3
    llm = open_pooling(path, hf_overrides={"is_matryoshka": True}, max_num_batched_tokens=12)
    prompts = prompts_of(7, 9, 11, 13)
    params = [
        PoolingParams(),
        RAW,
        PoolingParams(dimensions=8),
        PoolingParams(task="token_embed", normalize=False),
    ]
    actual = [
        output.outputs.data for output in llm.encode(prompts, params, pooling_task="embed", use_tqdm=False)
    ]
    plain = expected(hf, prompts)
    wanted = [normalised(plain[0]), plain[1], normalised(plain[2, :8]), states(hf, prompts[3])]
    for vector, reference in zip(actual, wanted, strict=True):
        assert vector.shape == reference.shape and np.abs(vector - reference).max() < TOLERANCE


def test_model_without_prefix_and_sentence_transformers_config(
    qwen3: tuple[Path, Any], tmp_path: Path
) -> None:
    """Check weights saved without `model.`, as Qwen3-Embedding's, with modules that configure the pooling."""
    _, hf = qwen3
    hf.model.save_pretrained(tmp_path)
    st = "sentence_transformers.models."
    modules = [{"path": "", "type": st + "Transformer"}, {"path": "1_Pooling", "type": st + "Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    prefix = {"prompts": {"query": "find: ", "document": ""}}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prefix))
    llm = open_pooling(tmp_path, runner="auto")
    prompts = prompts_of(*LENGTHS)
    assert llm.config.model.max_model_len == 40
    assert llm.config.pooling is not None
    assert dict(llm.config.pooling.instructions) == prefix["prompts"]
    assert np.abs(embeddings(llm, prompts, None) - expected(hf, prompts, "MEAN")).max() < TOLERANCE
    normalises = open_pooling(tmp_path, pooler_config={"pooling_type": "LAST", "use_activation": True})
    assert np.abs(embeddings(normalises, prompts, None) - normalised(expected(hf, prompts))).max() < TOLERANCE


def test_pooling_from_a_packed_gguf_file(qwen3: tuple[Path, Any], tmp_path: Path) -> None:
    _, hf = make_tiny("qwen3", tmp_path)
    llm = open_pooling(write_gguf(tmp_path / "tiny.gguf", hf, "Q8_0"))
    prompts = prompts_of(*LENGTHS)
    assert np.abs(normalised(expected(hf, prompts)) - embeddings(llm, prompts, None)).max() < 0.02


# ---- classes and scores of a decoder


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_sequence_classification(family: str, tmp_path: Path) -> None:
    path, hf = classifier(family, tmp_path, num_labels=3)
    llm = open_pooling(path, runner="auto", max_num_batched_tokens=9)
    prompts = prompts_of(*LENGTHS)
    with torch.inference_mode():
        logits = np.stack([hf(torch.tensor([ids])).logits[0].numpy() for ids in prompts])
    actual = llm.classify(prompts, RAW, use_tqdm=False)
    assert np.abs([item.outputs.probs for item in actual] - logits).max() < TOLERANCE
    probs = np.array([item.outputs.probs for item in llm.classify(prompts, use_tqdm=False)])
    assert np.abs(probs - torch.from_numpy(logits).softmax(-1).numpy()).max() < TOLERANCE
    with pytest.raises(RequestError, match="--convert embed"):
        llm.embed(prompts)
    with pytest.raises(RequestError, match="num_labels == 1"):
        llm.score("a", "b")


def classifier(family: str, tmp_path: Path, **settings: Any) -> tuple[Path, Any]:
    import transformers

    path, hf = make_tiny(family.lower(), tmp_path)
    torch.manual_seed(1)
    config = hf.config.__class__(**(hf.config.to_dict() | settings | {"pad_token_id": None}))
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).float().eval()
    model.model.load_state_dict(hf.model.state_dict())
    model.save_pretrained(path / "classifier")
    return path / "classifier", model


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


def test_reranker_from_two_token_logits(text: TextModel) -> None:
    """Check Qwen3-Reranker's form: the score of a pair of texts is the probability of `yes` against `no`."""
    tokens = ["A", "B"]
    overrides = {
        "architectures": ["LlamaForSequenceClassification"],
        "classifier_from_token": tokens,
        "is_original_qwen3_reranker": True,
    }
    llm = open_pooling(text.path, runner="auto", skip_tokenizer_init=False, hf_overrides=overrides)
    tokenizer = llm.get_tokenizer()
    no, yes = (tokenizer.convert_tokens_to_ids(token) for token in tokens)
    queries, documents = "the fox", ["a page", "the dog", "ten"]
    actual = llm.score(queries, documents, use_tqdm=False)
    for document, item in zip(documents, actual, strict=True):
        ids = tokenizer.encode_pair(queries, document)[0]
        logits = text.logits(ids)[-1]
        assert item.prompt_token_ids == ids
        assert abs(item.outputs.score - float(torch.sigmoid(logits[yes] - logits[no]))) < TOLERANCE
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    (rendered,) = llm.score("fox", "dog", chat_template=template, use_tqdm=False)
    wanted = tokenizer.encode("query: fox\ndocument: dog\n", add_special_tokens=False)
    assert rendered.prompt_token_ids == wanted


def test_scores_of_an_embedding_model_are_cosines(text: TextModel) -> None:
    llm = open_pooling(text.path, skip_tokenizer_init=False)
    texts = ["the fox", "a page", "the dog"]
    vectors = embeddings(llm, texts, None)  # type: ignore[arg-type]
    many = [item.outputs.score for item in llm.score(texts[0], texts, use_tqdm=False)]
    assert np.abs(many - vectors @ vectors[0]).max() < TOLERANCE
    pairwise = llm.score(texts, texts[::-1], use_tqdm=False)
    assert np.abs([e.outputs.score for e in pairwise] - (vectors * vectors[::-1]).sum(-1)).max() < TOLERANCE
    with pytest.raises(RequestError, match="1:1, 1:N or N:N"):
        llm.score(texts[:2], texts)


# ---- engine core in another process


def test_core_in_another_process_sends_vectors(qwen3: tuple[Path, Any]) -> None:
    path, hf = qwen3
    prompts = prompts_of(5, 9, 12)
    settings = {"model": str(path), "runner": "pooling", "skip_tokenizer_init": True, "dtype": "float32"}

    async def encode() -> list[np.ndarray[Any, Any]]:
        async with private_engine(configure(settings | {"num_gpu_blocks_override": 64})) as engine:
            with pytest.raises(RequestError, match="--runner generate"):
                engine.generate(Prompt(prompts[0]), SamplingParams(), "a")
            answers = [engine.encode(Prompt(ids), RAW, f"r{i}") for i, ids in enumerate(prompts)]
            outputs = [[output async for output in answer] for answer in answers]
        assert [[output.finished for output in item] for item in outputs] == [[True]] * len(prompts)
        return [item[0].outputs.data for item in outputs]

    assert np.abs(np.stack(asyncio.run(encode())) - expected(hf, prompts)).max() < TOLERANCE


# ---- unsupported tasks


def test_unsupported_pooling_tasks_are_rejected(qwen3: tuple[Path, Any]) -> None:
    path, _ = qwen3
    prompts = prompts_of(3)
    llm = open_pooling(path)
    with pytest.raises(RequestError, match="--runner generate"):
        llm.generate(prompts, SamplingParams())
    with pytest.raises(RequestError, match="--convert classify"):
        llm.classify(prompts)
    with pytest.raises(RequestError, match="pooling_task required"):
        llm.encode(prompts)
    with pytest.raises(RequestError, match="matryoshka"):
        llm.embed(prompts, PoolingParams(dimensions=8))
    generates = open_pooling(path, runner="auto")
    for call in (generates.embed, generates.classify):
        with pytest.raises(RequestError, match="--runner pooling"):
            call(prompts)
    with pytest.raises(ConfigError, match="pooling_type"):
        open_pooling(path, pooler_config={"pooling_type": "SOME"})
    with pytest.raises(ConfigError, match="convert"):
        open_pooling(path, convert="none")
