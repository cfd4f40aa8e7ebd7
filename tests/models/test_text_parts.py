"""Checkpoints of models that also see: their decoders run alone, and say what the whole says of text."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import load_tiny, random_prompts, run_hf, run_paged
from zoo import SHARED, ZOO

from quire.config.families import WITH_OTHER_PARTS
from quire.config.model import read_checkpoint

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION = _SIZES | {"image_size": 28, "patch_size": 14}
_LLAMA = {"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32}
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama4ForConditionalGeneration": ("Llama4ForCausalLM", _VISION | _LLAMA),
}


@pytest.mark.parametrize("whole", WITH_OTHER_PARTS)
def test_the_decoder_of_a_model_that_also_sees_runs_alone(
    whole: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names with another in front, a head that is tied by the whole, thousands of tensors of no use here."""
    import transformers

    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    text, vision = PARTS[whole]
    settings = getattr(transformers, text).config_class(**SHARED | ZOO[text].settings).to_dict()
    model_class = getattr(transformers, whole)
    torch.manual_seed(0)
    hf_model = model_class(model_class.config_class(text_config=settings, vision_config=vision))
    hf_model.float().eval().save_pretrained(tmp_path)
    ids = random_prompts(23)[0]
    ours = run_paged(load_tiny(tmp_path), [ids], [[23]])[0]
    torch.testing.assert_close(ours, run_hf(hf_model, ids), atol=3e-4, rtol=1e-3)
    assert "images are not supported" in caplog.text and "not used" not in caplog.text
    facts = read_checkpoint(tmp_path, {"text_config": {"vocab_size": 77}}).facts
    assert (facts.architecture, facts.vocab) == (text, 77)
