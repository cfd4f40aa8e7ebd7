"""Tests of conversations as prompts."""

from pathlib import Path
from typing import Any

import pytest
from tiny_text import VOCAB, text_model

from quire.errors import ConfigError, RequestError
from quire.frontend.chat import chat_prompt, read_template
from quire.frontend.inputs import InputProcessor
from quire.text.tokenizer import load_tokenizer

TURN = [{"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]}]
PARTS = "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}"
WHOLE = "{{ messages[0].content }}"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> InputProcessor:
    tokenizer = load_tokenizer(text_model(tmp_path_factory.getbasetemp()).path, "hf")
    return InputProcessor(
        tokenizer=tokenizer, vocab=VOCAB, max_model_len=64, eos_ids=(2,), max_logprobs=20, seed=0
    )


def test_chat_template_is_a_file_or_text(tmp_path: Path) -> None:
    file = tmp_path / "plain.jinja"
    file.write_text(WHOLE)
    assert read_template(str(file)) == read_template(WHOLE) == WHOLE
    assert read_template(None) is None
    with pytest.raises(ConfigError, match="neither a readable file .* nor a template"):
        read_template(str(tmp_path / "missing.jinja"))


@pytest.mark.parametrize(
    ("template", "form", "text"),
    [
        (WHOLE, "auto", "One\ntwo"),
        (PARTS, "auto", "[One][two]"),
        (PARTS, "openai", "[One][two]"),
        (WHOLE, "string", "One\ntwo"),
    ],
)
def test_content_format_follows_the_template(
    inputs: InputProcessor, template: str, form: str, text: str
) -> None:
    prompt = chat_prompt(inputs, TURN, chat_template=template, chat_template_content_format=form)
    assert prompt.text == text


def test_special_tokens_are_added_only_if_requested(inputs: InputProcessor) -> None:
    for add in (False, True):
        prompt = chat_prompt(inputs, TURN, chat_template=WHOLE, add_special_tokens=add)
        assert (prompt.token_ids[0] == 1) is add


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chat_template_content_format": "html"}, "known: auto, string, openai"),
        ({"chat_template_kwargs": {"tokenize": True}}, "may not contain tokenize"),
        ({"chat_template": "{% if %}"}, "not valid Jinja"),
        ({"chat_template": "{{ raise_exception('no system role') }}"}, "no system role"),
        ({"chat_template": "{{ messages[5].content.x }}"}, "chat template"),
        ({"chat_template": "{{ '' }}"}, "cannot be empty"),
        ({"chat_template": "{{ 'word ' * 500 }}"}, "maximum context length is 64"),
        ({"continue_final_message": True}, "Cannot set both"),
    ],
)
def test_invalid_requests_are_request_errors(
    inputs: InputProcessor, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        chat_prompt(inputs, TURN, **settings)
