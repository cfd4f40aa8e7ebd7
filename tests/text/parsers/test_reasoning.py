"""Tests of every reasoning parser: with both markers, only the end, or none; complete and in every split."""

import pytest

from quire.data.output_pieces import Piece, ReasoningPiece, TextPiece
from quire.text.parsers import REASONING, answer_parser
from quire.text.parsers.streaming import join

MARKS = {
    "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|>", False),
    "cohere_command4": ("<|START_THINKING|>", "<|END_THINKING|>", False),
    "deepseek_r1": ("<think>", "</think>", True),
    "deepseek_v3": ("<think>", "</think>", False),
    "deepseek_v4": ("<think>", "</think>", False),
    "dots": ("<think>", "</think>", True),
    "ernie45": ("<think>", "</think>", True),
    "gemma4": ("<|channel>thought\n", "<channel|>", False),
    "glm45": ("<think>", "</think>", True),
    "glm47": ("<think>", "</think>", True),
    "granite": ("Here is my thought process:", "Here is my response:", False),
    "holo2": ("<think>", "</think>", True),
    "hunyuan_a13b": ("<think>\n", "\n</think>", False),
    "hy_v3": ("<think:opensource>", "</think:opensource>", False),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>", True),
    "ling3": ("<think>", "</think>", True),
    "mimo": ("<think>", "</think>", True),
    "minimax_m3": ("<mm:think>", "</mm:think>", True),
    "poolside_v1": ("<think>", "</think>", True),
    "kimi_k2": ("<think>", "</think>", True),
    "minimax_m2": ("<think>", "</think>", True),
    "mistral": ("[THINK]", "[/THINK]", False),
    "nemotron_v3": ("<think>", "</think>", True),
    "olmo3": ("<think>", "</think>", True),
    "qwen3": ("<think>", "</think>", True),
    "seed_oss": ("<seed:think>", "</seed:think>", True),
    "step3": ("<think>", "</think>", True),
    "step3p5": ("<think>", "</think>", True),
}
OTHERS = {"identity", "inkling", "minimax_m2_append_think", "muse_glimmer", "openai_gptoss"}
each_parser = pytest.mark.parametrize("name", sorted(MARKS))


def read(name: str, text: str, prompt: str = "") -> list[Piece]:
    """Return the reasoning and the text of an answer, after a check that they are the same however the answer
    is split."""
    whole = answer_parser(reasoning=name, prompt=prompt).parse(text)
    for parts in [list(text)] + [[text[:cut], text[cut:]] for cut in range(1, len(text))]:
        one = answer_parser(reasoning=name, prompt=prompt)
        assert join([piece for part in parts for piece in one.feed(part)] + one.end()) == whole
    return whole


def test_every_parser_is_covered() -> None:
    assert set(MARKS) | OTHERS == set(REASONING)


@each_parser
def test_both_markers(name: str) -> None:
    start, end, _ = MARKS[name]
    assert read(name, f"{start}Hm <é> 1<2.{end}Yes </b>.") == [
        ReasoningPiece("Hm <é> 1<2."),
        TextPiece("Yes </b>."),
    ]


@each_parser
def test_only_the_end_marker(name: str) -> None:
    start, end, opened = MARKS[name]
    text = f"Hm.{end}Yes."
    split: list[Piece] = [ReasoningPiece("Hm."), TextPiece("Yes.")]
    assert read(name, text) == (split if opened else [TextPiece(text)])
    assert read(name, text, prompt=f"<|user|>Why?<|assistant|>{start}\n") == split


@each_parser
def test_no_markers(name: str) -> None:
    start, end, opened = MARKS[name]
    assert read(name, "Yes.") == [ReasoningPiece("Yes.") if opened else TextPiece("Yes.")]
    assert read(name, "Yes.", prompt=f"<|assistant|>{start}\n\n{end}\n\n") == [TextPiece("Yes.")]


@each_parser
def test_markers_of_earlier_turns_are_ignored(name: str) -> None:
    start, end, opened = MARKS[name]
    expected = read(name, "Yes.")
    assert read(name, "Yes.", prompt=f"{start}a{end}b<|user|>c<|assistant|>") == expected


@each_parser
def test_partial_marker_at_the_end_is_kept(name: str) -> None:
    start, end, _ = MARKS[name]
    for cut in range(1, len(end)):
        assert read(name, f"{start}Hm.{end[:cut]}") == [ReasoningPiece(f"Hm.{end[:cut]}")]


def test_tool_call_ends_the_reasoning() -> None:
    assert read("qwen3", "Hm.\n<tool_call>x") == [ReasoningPiece("Hm.\n"), TextPiece("<tool_call>x")]


def test_markers_around_the_answer_are_dropped() -> None:
    hunyuan = "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>"
    assert read("hunyuan_a13b", hunyuan) == [ReasoningPiece("Hm."), TextPiece("Yes.")]
    ernie = "Hm.\n</think>\n\n<response>\nYes.\n</response>\n"
    assert read("ernie45", ernie) == [ReasoningPiece("Hm.\n"), TextPiece("\n\nYes.")]
    cohere = "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"
    assert read("cohere_command3", cohere) == [ReasoningPiece("Hm."), TextPiece("Yes.")]


def test_parsers_without_reasoning_return_text() -> None:
    assert read("identity", "<think>a</think>b") == [TextPiece("<think>a</think>b")]
    assert read("minimax_m2_append_think", "a</think>b") == [TextPiece("<think>a</think>b")]
