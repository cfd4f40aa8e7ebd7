"""Tests of multimodal pooling models: embeddings and scores equal transformers, in any chunks."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hearing import save_qwen_audio, save_whisper, sound
from PIL import Image
from seeing import Twin as Seeing
from test_audio_models import MARK
from test_audio_models import Twin as Hearing
from test_qwen import IMAGE_TOKENS, LARGE, SMALL, WIDE, Content, prompts, request_of
from test_qwen import Twin as Qwen
from test_vision_engine import prompts as seen_prompts
from tiny_engine import open_llm
from tiny_seeing import part, url_of

from quire import LLM
from quire.configure import configure
from quire.entrypoints.child_cores import private_engine
from quire.errors import ConfigError
from quire.server.app import Application
from quire.server.settings import make_settings

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "max_num_seqs": 8,
    "max_model_len": 512,
    "num_gpu_blocks_override": 400,
}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}"
    + IMAGE_TOKENS
    + "{% endif %}{% endfor %}{% endfor %}"
)
RERANKER = {
    "architectures": ["Qwen3VLForSequenceClassification"],
    "classifier_from_token": ["n", "y"],
    "is_original_qwen3_reranker": True,
}


@torch.inference_mode()
def states(model: Any, inputs: Any) -> torch.Tensor:
    """Return the hidden states after the last layer, [T, hidden]."""
    result: torch.Tensor = model.model(**inputs).last_hidden_state[0]
    return result


def normed(vector: torch.Tensor) -> np.ndarray[Any, Any]:
    return (vector / vector.norm(dim=-1, keepdim=True)).numpy()


def twin_of(family: str, base: Path) -> tuple[Path, Any, list[Any], list[Any]]:
    """Return a model path, transformers' model, prompts, and its inputs for them."""
    if family.startswith("Qwen"):
        twin = Qwen(family, base)
        contents: list[Any] = prompts(is_glm=False)
        return twin.path, twin.model, [*map(request_of, contents)], [*map(twin.inputs, contents)]
    path = base / f"pooled_{family}"
    seeing, contents = Seeing(path, family), []
    inputs = []
    for text, images in seen_prompts(seeing.mark):
        contents.append({"prompt": text, "multi_modal_data": {"image": images}} if images else text)
        inputs.append(
            seeing.inputs(text, images)
            if images
            else {"input_ids": torch.tensor([seeing.tokenizer.encode(text)])}
        )
    return seeing.path, seeing.model, contents, inputs


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL", "gemma3", "llava"])
def test_embeddings_equal_transformers(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Covers texts and images in one batch, in chunks, and from the prefix cache, and embeddings of single
    tokens."""
    path, model, contents, inputs = twin_of(family, tmp_path_factory.getbasetemp())
    expected = [states(model, item) for item in inputs]
    llm = LLM(str(path), runner="pooling", max_num_batched_tokens=32, use_tqdm_on_load=False, **SETTINGS)
    for turn in range(2):
        outputs = llm.embed(contents, use_tqdm=False)
        for output, item, wanted in zip(outputs, inputs, expected, strict=True):
            assert output.prompt_token_ids == item["input_ids"][0].tolist()
            assert np.abs(np.array(output.outputs.embedding) - normed(wanted[-1])).max() < 1e-5
            assert not turn or output.num_cached_tokens > 0.5 * len(output.prompt_token_ids)
    by_token = llm.encode(contents, pooling_task="token_embed", use_tqdm=False)
    for output, wanted in zip(by_token, expected, strict=True):
        assert np.abs(output.outputs.data - normed(wanted)).max() < 1e-5


def test_audio_is_embedded(tmp_path: Path) -> None:
    """Audio is in a batch with texts. Whisper, which has no audio tokens, cannot pool."""
    twin = Hearing(tmp_path / "hears", save_qwen_audio)
    contents = [("what is " + MARK, [sound(5000)]), (f"{MARK}or{MARK}?", [sound(9000, 1), sound(700, 2)])]
    prompts = [
        {"prompt": text, "multi_modal_data": {"audio": [(item.samples, item.rate) for item in sounds]}}
        for text, sounds in contents
    ]
    llm = LLM(str(twin.path), runner="pooling", max_num_batched_tokens=32, use_tqdm_on_load=False, **SETTINGS)
    outputs = llm.embed([*prompts, "nothing to hear"], use_tqdm=False)
    for (text, sounds), output in zip(contents, outputs[:2], strict=True):
        last = states(twin.model, twin.inputs(text, sounds))[-1]
        assert np.abs(np.array(output.outputs.embedding) - normed(last)).max() < 1e-5
    save_whisper(tmp_path / "writes")
    with pytest.raises(ConfigError, match="does not support pooling"):
        configure({"model": str(tmp_path / "writes"), "runner": "pooling"})


def test_mean_pooling_includes_images(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Mean pooling needs every token, so the prefix cache must not skip any."""
    twin = Qwen("Qwen2VL", tmp_path_factory.getbasetemp())
    llm = open_llm(
        twin.path, runner="pooling", pooler_config={"pooling_type": "MEAN"}, max_num_batched_tokens=24
    )
    contents: list[Content] = prompts(is_glm=False)
    for _ in range(2):
        for content, output in zip(
            contents, llm.embed([*map(request_of, contents)], use_tqdm=False), strict=True
        ):
            mean = states(twin.model, twin.inputs(content)).mean(0)
            assert np.abs(np.array(output.outputs.embedding) - normed(mean)).max() < 1e-5


def test_multimodal_classifier(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Check a projection of the last token to the classes of config.json."""
    import transformers

    seeing = Seeing(tmp_path_factory.mktemp("classifier"), "gemma3")
    config = seeing.model.config
    config.id2label = {0: "bad", 1: "fair", 2: "good"}
    torch.manual_seed(1)
    model = transformers.Gemma3ForSequenceClassification(config).float().eval()
    model.save_pretrained(seeing.path)
    contents = seen_prompts(seeing.mark)
    llm = LLM(str(seeing.path), max_num_batched_tokens=32, use_tqdm_on_load=False, **SETTINGS)
    requests = [
        {"prompt": text, "multi_modal_data": {"image": images}} for text, images in contents if images
    ]
    outputs = llm.classify(requests, use_tqdm=False)
    for (text, images), output in zip([content for content in contents if content[1]], outputs, strict=True):
        state = states(model, seeing.inputs(text, images))[-1]
        with torch.inference_mode():
            wanted = model.score(state).softmax(-1)
        assert output.outputs.probs == pytest.approx(wanted.tolist(), abs=1e-5)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Qwen, Path]:
    """Return a model and its directory with a chat template."""
    base = tmp_path_factory.getbasetemp()
    twin, path = Qwen("Qwen3VL", base), base / "tiny_Qwen3VL_chat"
    if not path.exists():
        shutil.copytree(twin.path, path)
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return twin, path


def scores_of(twin: Qwen, contents: list[Content]) -> list[float]:
    """Return how much likelier `y` is than `n` after each prompt."""
    no, yes = (twin.tokenizer.encode(word)[0] for word in "ny")
    results = []
    for content in contents:
        with torch.inference_mode():
            logits = twin.model.lm_head(states(twin.model, twin.inputs(content))[-1])
        results.append(float((logits[yes] - logits[no]).sigmoid()))
    return results


TEXT = {"type": "text", "text": "who is"}


def test_reranking_of_images(qwen3: tuple[Qwen, Path]) -> None:
    """Covers a query and an image in one prompt, joined directly and by a template, offline and over HTTP."""
    twin, path = qwen3
    llm = open_llm(path, hf_overrides=RERANKER)
    query, documents = "who is", [{"content": [part(WIDE)]}, "this", {"content": [TEXT, part(SMALL)]}]
    scores = [item.outputs.score for item in llm.score(query, documents, use_tqdm=False)]
    joined: list[Content] = [
        (f"who is{IMAGE_TOKENS}", [WIDE], []),
        ("who isthis", [], []),
        (f"who is{IMAGE_TOKENS}\nwho is", [SMALL], []),
    ]
    wanted = scores_of(twin, joined)
    assert scores == pytest.approx(wanted, abs=1e-5) and max(wanted) - min(wanted) > 1e-3
    prompt = {"prompt": IMAGE_TOKENS, "multi_modal_data": {"image": WIDE}}
    (score,) = llm.score(query, prompt, use_tqdm=False)
    assert score.outputs.score == pytest.approx(wanted[0], abs=1e-5)
    templated: list[Content] = [
        (f"[query]who is[document]{IMAGE_TOKENS}", [WIDE], []),
        ("[query]who is[document]this", [], []),
        (f"[query]who is[document]who is{IMAGE_TOKENS}", [SMALL], []),
    ]
    wanted = scores_of(twin, templated)
    scores = [s.outputs.score for s in llm.score(query, documents, chat_template=TEMPLATE, use_tqdm=False)]
    assert scores == pytest.approx(wanted, abs=1e-5)

    async def go() -> list[float]:
        config = configure(
            {"model": str(path), **SETTINGS, "hf_overrides": RERANKER, "chat_template": TEMPLATE}
        )
        async with private_engine(config) as engine:
            application = Application(engine, make_settings({}))
            transport = httpx.ASGITransport(application.asgi)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
                reply = await client.post("/rerank", json={"query": query, "documents": documents})
                results = {result["index"]: result["relevance_score"] for result in reply.json()["results"]}
                return [results[at] for at in range(3)]

    assert asyncio.run(go()) == pytest.approx(wanted, abs=1e-5)


def test_http_embeddings_equal_transformers(qwen3: tuple[Qwen, Path]) -> None:
    """Covers conversations, Cohere's inputs, and images. A broken image is refused while other requests are
    answered."""
    twin, path = qwen3

    def vector(text: str, *images: Image.Image) -> Any:
        content: Content = (text, [*images], [])
        return normed(states(twin.model, twin.inputs(content))[-1])

    async def go() -> None:
        config = configure({"model": str(path), **SETTINGS, "runner": "pooling"})
        async with private_engine(config) as engine:
            transport = httpx.ASGITransport(Application(engine, make_settings({})).asgi)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:

                async def post(path: str, **body: Any) -> Any:
                    return await client.post(path, json=body)

                message = {"role": "user", "content": [TEXT, part(LARGE)]}
                broken = {"role": "user", "content": [TEXT, part(LARGE)]}
                broken["content"] = [{"type": "image_url", "image_url": {"url": url_of(LARGE)[:-400]}}]
                talk, wrong, cohere, images, scores = await asyncio.gather(
                    post("/v1/embeddings", messages=[message]),
                    post("/v1/embeddings", messages=[broken]),
                    post("/v2/embed", inputs=[message, {"content": [TEXT]}]),
                    post("/v2/embed", images=[url_of(LARGE), url_of(WIDE)]),
                    post("/score", data_1={"content": [part(LARGE)]}, data_2=["who is", message]),
                )
                both, text = vector(f"[user]who is{IMAGE_TOKENS}", LARGE), vector("[user]who is")
                embedding = talk.json()["data"][0]["embedding"]
                assert np.abs(embedding - both).max() < 1e-5
                assert wrong.status_code == 400
                assert wrong.json()["error"]["message"].startswith("messages[0].content[0]: ")
                vectors = np.array(cohere.json()["embeddings"]["float"])
                assert np.abs(vectors - [both, text]).max() < 1e-5
                alone = [vector(f"[user]{IMAGE_TOKENS}", image) for image in (LARGE, WIDE)]
                vectors = np.array(images.json()["embeddings"]["float"])
                assert np.abs(vectors - alone).max() < 1e-5
                one, *others = (
                    vector(IMAGE_TOKENS, LARGE),
                    vector("who is"),
                    vector(f"{IMAGE_TOKENS}\nwho is", LARGE),
                )
                wanted = [float(one @ other) for other in others]
                assert [entry["score"] for entry in scores.json()["data"]] == pytest.approx(wanted, abs=1e-5)

    asyncio.run(go())
