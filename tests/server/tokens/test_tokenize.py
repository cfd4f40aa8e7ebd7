"""/tokenize and /detokenize."""

from typing import Any

from ask import MESSAGES, ask, refused
from fake_engine import EOS


def tokens(**body: Any) -> dict[str, Any]:
    response = ask("POST", "/tokenize", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_text_and_back() -> None:
    found = tokens(prompt="Żab", return_token_strs=True)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == 4
    assert found["max_model_len"] == 512
    back = ask("POST", "/detokenize", json={"tokens": [*found["tokens"], EOS]})
    assert back.json() == {"prompt": "Żab</s>"}


def test_a_conversation_is_counted_with_its_template() -> None:
    assert tokens(messages=MESSAGES)["count"] == len("user:hi\nassistant:")
    assert tokens(messages=MESSAGES, add_generation_prompt=False)["count"] == len("user:hi\n")
    assert tokens(messages=MESSAGES)["token_strs"] is None


def test_more_than_the_model_can_hold_is_still_counted() -> None:
    assert tokens(prompt="x" * 1000)["count"] == 1000
    assert tokens(messages=[{"role": "u", "content": "x" * 1000}])["count"] > 1000
    assert tokens(prompt="")["count"] == 0


def test_wrong_ids_models_and_templates_are_refused() -> None:
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
