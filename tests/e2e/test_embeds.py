"""Tests of prompt embeddings over HTTP: correct answers, and hostile embeddings."""

import base64
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import torch
from saved import saved, sent
from serve_process import LONGEST, ServeProcess, eventually
from tiny_text import TextModel

IDS = [1, 40, 300, 77, 310, 90, 5, 17, 201]


def vectors(tiny: TextModel, ids: list[int] = IDS) -> torch.Tensor:
    result: torch.Tensor = tiny.hf.get_input_embeddings()(torch.tensor(ids)).detach()
    return result


def complete(server: ServeProcess, **body: Any) -> httpx.Response:
    defaults = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    return server.client.post("/v1/completions", json=defaults | body)


def test_prompt_embeds_equal_their_tokens(server: ServeProcess, tiny: TextModel) -> None:
    """Covers one and several embeddings, next to a text prompt, streamed, and concurrently."""
    expected = tiny.greedy(IDS, 12)
    embeds = sent(vectors(tiny))
    (alone,) = complete(server, prompt_embeds=embeds).json()["choices"]
    assert alone["token_ids"] == expected and alone["prompt_token_ids"] == [0] * len(IDS)
    answer = complete(server, prompt_embeds=[embeds, embeds], prompt=IDS[:4]).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(3))
    token_ids = [choice["token_ids"] for choice in answer["choices"]]
    assert token_ids == [expected, expected, tiny.greedy(IDS[:4], 12)]
    assert answer["usage"]["prompt_tokens"] == 2 * len(IDS) + 4
    streamed = complete(server, prompt_embeds=embeds, stream=True, return_token_ids=False)
    assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")
    bodies: list[dict[str, Any]] = [{"prompt_embeds": embeds}, {"prompt": IDS}] * 8
    with ThreadPoolExecutor(8) as pool:
        for result in pool.map(lambda body: complete(server, **body), bodies):
            assert result.json()["choices"][0]["token_ids"] == expected


def test_hostile_prompt_embeds_are_refused_and_leave_nothing(server: ServeProcess, tiny: TextModel) -> None:
    good = vectors(tiny)
    hidden = good.shape[1]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"prompt_embeds": "%%%"}, "is not base64"),
        ({"prompt_embeds": ["", sent(good)]}, "torch.save"),
        ({"prompt_embeds": base64.b64encode(saved(good)[:-30]).decode()}, "torch.save"),
        ({"prompt_embeds": sent({"a": good})}, "torch.save"),
        ({"prompt_embeds": sent(good[0])}, "has the shape"),
        ({"prompt_embeds": sent(good[:, 1:])}, f"the hidden size is {hidden}"),
        ({"prompt_embeds": sent(good.long())}, "must be of float32"),
        ({"prompt_embeds": sent(good / 0)}, "not finite"),
        ({"prompt_embeds": sent(torch.zeros(1).expand(LONGEST + 1, hidden))}, "maximum context length"),
        ({"prompt_embeds": sent(good), "echo": True}, "Echo is unsupported with prompt embeds."),
        ({"prompt_embeds": sent(good), "prompt_logprobs": 1}, "not compatible with prompt embeds"),
        ({"prompt_embeds": sent(good), "truncate_prompt_tokens": 3}, "unsupported with prompt embeds"),
        ({"prompt_embeds": sent(good), "use_beam_search": True, "n": 2}, "Beam search is unsupported"),
        ({"prompt_embeds": [sent(good)] * 1025}, "exceeds the maximum allowed count"),
        ({"prompt_embeds": [sent(good), 3]}, "valid string"),
        ({"prompt_embeds": []}, "must be provided and non-empty"),
        ({"prompt_embeds": ""}, "Either prompt or prompt_embeds must be provided"),
    ]
    for body, words in refused:
        answer = complete(server, **body)
        assert answer.status_code == 400 and words in answer.text, (words, answer.text)
    content = [{"type": "prompt_embeds", "data": sent(good)}]
    chat = server.client.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]}
    )
    assert chat.status_code == 400, chat.text
    eventually("no request runs", lambda: server.metrics()["num_requests_running"] == 0)
