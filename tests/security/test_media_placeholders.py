"""Media placeholder tokens in plain text (CVE-2026-44222): a prompt with the image token of a vision model
and no image ended vLLM's worker. In Quire they are ordinary tokens if no media come with them, and a prompt
with placeholders that do not match its media is refused before the engine."""

from pathlib import Path
from typing import Any

import pytest
from fake_inputs import picture
from tiny_qwen import BEGIN, END, IMAGE, VIDEO, made

from quire import LLM, SamplingParams
from quire.errors import RequestError

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
ALONE: list[Any] = [
    "a <begin><image><end> b",
    "<image>",
    "<video><video><image>",
    "<begin>",
    "<end><image><begin>",
    {"prompt_token_ids": [BEGIN, IMAGE, END]},
    {"prompt_token_ids": [VIDEO] * 40},
    {"prompt_token_ids": [IMAGE, 5, BEGIN, VIDEO]},
]


@pytest.fixture(scope="module", params=["Qwen2_5_VL", "Qwen3VL", "Glm4v"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    base: Path = tmp_path_factory.getbasetemp()
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8}
    return LLM(str(made(request.param, base)[0]), use_tqdm_on_load=False, **settings)


def test_placeholders_without_media_are_ordinary_tokens(llm: LLM) -> None:
    beside = {"prompt": "<image><video>", "multi_modal_data": {"image": picture(32, 32)}}
    for output in llm.generate([*ALONE, beside], PARAMS, use_tqdm=False):
        assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize("text", ["<begin><image><end><begin><image><end>", "<video>", "no place"])
def test_mismatched_placeholders_are_refused(llm: LLM, text: str) -> None:
    for data in ({"image": picture(32, 32)}, {"image": [picture(32, 32)] * 3}):
        with pytest.raises(RequestError):
            llm.generate([{"prompt": text, "multi_modal_data": data}], PARAMS, use_tqdm=False)
    (answer,) = llm.generate(["<image>"], PARAMS, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 3, "the engine answers the next request"
