"""Tests of /tokenize and /detokenize."""

from typing import Any

from ask import MESSAGES, ask, refused
from fake_engine import EOS


def tokens(**body: Any) -> dict[str, Any]:
    response = ask("POST", "/tokenize", json=body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def test_tokenize_and_detokenize_round_trip() -> None:
    reply = tokens(prompt="Żab", return_token_strs=True)
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"]) == 4
    assert reply["max_model_len"] == 512
    back = ask("POST", "/detokenize", json={"tokens": [*reply["tokens"], EOS]})
    assert back.json() == {"prompt": "Żab</s>"}


def test_conversation_is_tokenized_with_its_template() -> None:
    assert tokens(messages=MESSAGES)["count"] == len("user:hi\nassistant:")
    assert tokens(messages=MESSAGES, add_generation_prompt=False)["count"] == len("user:hi\n")
    assert tokens(messages=MESSAGES)["token_strs"] is None


def test_prompt_longer_than_the_context_is_counted() -> None:
    assert tokens(prompt="x" * 1000)["count"] == 1000
    assert tokens(messages=[{"role": "u", "content": "x" * 1000}])["count"] > 1000
    assert tokens(prompt="")["count"] == 0


def test_invalid_ids_models_and_templates_are_refused() -> None:
    assert refused(ask("POST", "/detokenize", json={"tokens": [258]}))["param"] == "tokens"
    refused(ask("POST", "/detokenize", json={"tokens": [-1]}))
    refused(ask("POST", "/detokenize", json={"tokens": [2**70]}))
    refused(ask("POST", "/tokenize", json={"prompt": "a", "model": "x"}), 404)
    refused(ask("POST", "/tokenize", json={}))
    empty = [{"role": "user", "content": None}]
    assert "content is null" in refused(ask("POST", "/tokenize", json={"messages": empty}))["message"]
    assert (
        refused(ask("POST", "/tokenize", json={"messages": MESSAGES, "chat_template": "x"}))["param"]
        == "chat_template"
    )
