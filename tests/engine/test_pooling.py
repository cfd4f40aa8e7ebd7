"""Pooling engines say what transformers says: embeddings, classes, scores, however the tokens went."""

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
    """[len(ids), hidden], after the final norm."""
    body = getattr(hf, "model", hf)
    found: np.ndarray[Any, Any] = body(torch.tensor([ids])).last_hidden_state[0].numpy()
    return found


POOLED = {
    "LAST": lambda found: found[-1],
    "CLS": lambda found: found[0],
    "MEAN": lambda found: found.mean(0),
}


def expected(hf: Any, prompts: list[list[int]], kind: str = "LAST") -> np.ndarray[Any, Any]:
    return np.stack([POOLED[kind](states(hf, ids)) for ids in prompts])


def embeddings(llm: LLM, prompts: list[list[int]], params: Any = RAW) -> np.ndarray[Any, Any]:
    return np.array([each.outputs.embedding for each in llm.embed(prompts, params, use_tqdm=False)])


def normalised(vectors: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return found


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return make_tiny("qwen3", tmp_path_factory.mktemp("pooling"))


# ---- embeddings of a decoder


@pytest.mark.parametrize("kind", POOLED)
@pytest.mark.parametrize("chunk", [5, 256])
def test_every_type_of_pooling_whole_and_in_chunks(qwen3: tuple[Path, Any], kind: str, chunk: int) -> None:
    path, hf = qwen3
    llm = open_pooling(
        path, pooler_config={"pooling_type": kind}, max_num_batched_tokens=chunk, max_num_seqs=3
    )
    prompts = prompts_of(*LENGTHS)
    for _ in range(2):  # the second time out of the prefix cache, where there is one
        assert np.abs(embeddings(llm, prompts) - expected(hf, prompts, kind)).max() < TOLERANCE


def test_prefixes_are_shared_by_last_pooling_only(qwen3: tuple[Path, Any]) -> None:
    path, hf = qwen3
    (common,) = prompts_of(19)
    prompts = [common + tail for tail in prompts_of(1, 5, seed=8)] + [common]
    llm = open_pooling(path)
    llm.embed(prompts, use_tqdm=False)
    again = llm.embed(prompts, RAW, use_tqdm=False)
    assert [each.num_cached_tokens for each in again] == [16, 20, 16]
    assert np.abs([each.outputs.embedding for each in again] - expected(hf, prompts)).max() < TOLERANCE
    assert (
        open_pooling(path, pooler_config={"pooling_type": "MEAN"}).config.cache.enable_prefix_caching is False
    )


def test_small_caches_and_full_contexts(qwen3: tuple[Path, Any]) -> None:
    """A prompt may fill max_model_len: no token follows it. Rows wait for blocks and lose no part."""
    path, hf = qwen3
    llm = open_pooling(path, max_model_len=32, num_gpu_blocks_override=12, max_num_batched_tokens=16)
    prompts = prompts_of(32, 31, 32, 9, 30)
    assert np.abs(embeddings(llm, prompts) - expected(hf, prompts)).max() < TOLERANCE
    with pytest.raises(RequestError, match="maximum context length is 32 tokens"):
        llm.embed(prompts_of(33))


def test_mixed_requests_in_one_batch(qwen3: tuple[Path, Any]) -> None:
    """Each row gets what it asked for: normalised or not, cut, one vector or one for every token."""
    path, hf = qwen3
    llm = open_pooling(path, hf_overrides={"is_matryoshka": True}, max_num_batched_tokens=12)
    prompts = prompts_of(7, 9, 11, 13)
    asked = [
        PoolingParams(),
        RAW,
        PoolingParams(dimensions=8),
        PoolingParams(task="token_embed", normalize=False),
    ]
    found = [each.outputs.data for each in llm.encode(prompts, asked, pooling_task="embed", use_tqdm=False)]
    plain = expected(hf, prompts)
    wanted = [normalised(plain[0]), plain[1], normalised(plain[2, :8]), states(hf, prompts[3])]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape and np.abs(ours - theirs).max() < TOLERANCE


def test_a_body_alone_and_the_files_of_sentence_transformers(qwen3: tuple[Path, Any], tmp_path: Path) -> None:
    """Saved without `model.`, as Qwen3-Embedding is; its folders say what is pooled and how."""
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


def test_a_packed_gguf_file(qwen3: tuple[Path, Any], tmp_path: Path) -> None:
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
    found = llm.classify(prompts, RAW, use_tqdm=False)
    assert np.abs([each.outputs.probs for each in found] - logits).max() < TOLERANCE
    probs = np.array([each.outputs.probs for each in llm.classify(prompts, use_tqdm=False)])
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


def test_a_reranker_out_of_two_tokens(text: TextModel) -> None:
    """The form of Qwen3-Reranker: how much likelier `yes` is than `no`, as a score of a pair of texts."""
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
    found = llm.score(queries, documents, use_tqdm=False)
    for document, each in zip(documents, found, strict=True):
        ids = tokenizer.encode_pair(queries, document)[0]
        logits = text.logits(ids)[-1]
        assert each.prompt_token_ids == ids
        assert abs(each.outputs.score - float(torch.sigmoid(logits[yes] - logits[no]))) < TOLERANCE
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    (rendered,) = llm.score("fox", "dog", chat_template=template, use_tqdm=False)
    wanted = tokenizer.encode("query: fox\ndocument: dog\n", add_special_tokens=False)
    assert rendered.prompt_token_ids == wanted


def test_scores_of_an_embedding_model_are_cosines(text: TextModel) -> None:
    llm = open_pooling(text.path, skip_tokenizer_init=False)
    texts = ["the fox", "a page", "the dog"]
    vectors = embeddings(llm, texts, None)  # type: ignore[arg-type]
    many = [each.outputs.score for each in llm.score(texts[0], texts, use_tqdm=False)]
    assert np.abs(many - vectors @ vectors[0]).max() < TOLERANCE
    pairwise = llm.score(texts, texts[::-1], use_tqdm=False)
    assert np.abs([e.outputs.score for e in pairwise] - (vectors * vectors[::-1]).sum(-1)).max() < TOLERANCE
    with pytest.raises(RequestError, match="1:1, 1:N or N:N"):
        llm.score(texts[:2], texts)


# ---- over the wire


def test_a_core_in_another_process_sends_vectors(qwen3: tuple[Path, Any]) -> None:
    path, hf = qwen3
    prompts = prompts_of(5, 9, 12)
    settings = {"model": str(path), "runner": "pooling", "skip_tokenizer_init": True, "dtype": "float32"}

    async def encode() -> list[np.ndarray[Any, Any]]:
        async with private_engine(configure(settings | {"num_gpu_blocks_override": 64})) as engine:
            with pytest.raises(RequestError, match="--runner generate"):
                engine.generate(Prompt(prompts[0]), SamplingParams(), "a")
            answers = [engine.encode(Prompt(ids), RAW, f"r{i}") for i, ids in enumerate(prompts)]
            outputs = [[output async for output in answer] for answer in answers]
        assert [[output.finished for output in each] for each in outputs] == [[True]] * len(prompts)
        return [each[0].outputs.data for each in outputs]

    assert np.abs(np.stack(asyncio.run(encode())) - expected(hf, prompts)).max() < TOLERANCE


# ---- what cannot be had


def test_each_kind_of_model_says_what_it_is_not(qwen3: tuple[Path, Any]) -> None:
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
