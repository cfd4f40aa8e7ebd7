"""Tests of Granite Speech against transformers: spectrograms, placeholders, embeddings, answers."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from finished import finished
from hearing import sound
from tiny_engine import check_answers, generate_reference, load_tower, open_llm
from tiny_seeing import STRONG, make_tokenizer, save_tiny

from quire.checkpoint import weights
from quire.checkpoint.model import read_checkpoint
from quire.errors import ConfigError, RequestError
from quire.multimodal.processors import PROCESSORS
from quire.text.tokenizer import load_tokenizer

COUNT = 5
LENGTHS = [257, 480, 1600, 4800, 9601, 16001, 33000]
CONTENTS = [
    ("what is <|audio|> this", [5000]),
    ("nothing to hear here, only words", []),
    ("<|audio|>one\n<|audio|>and then", [16001, 1000]),
]


class Twin:
    """A tiny checkpoint, and transformers' model. Its feature extractor needs torchaudio, so that the
    spectrogram is computed here."""

    def __init__(self, path: Path, kind: str = "GraniteSpeech", joined: Sequence[int] = ()) -> None:
        import transformers as hf

        self.path, self.hf = path, make_tokenizer(["<|audio|>"])
        self.audio_id = self.hf.convert_tokens_to_ids("<|audio|>")
        encoder = {"input_dim": 40, "num_layers": 4, "hidden_dim": 32, "num_heads": 2, "output_dim": 7}
        encoder |= {"context_size": 8, "max_pos_emb": 12, "conv_kernel_size": 5}
        former = {"model_type": "blip_2_qformer", "hidden_size": 24, "num_hidden_layers": 2}
        former |= {"num_attention_heads": 2, "intermediate_size": 40}
        former |= {"encoder_hidden_size": 32 * (1 + len(joined))}
        encoder |= {"cat_hidden_layers": [*joined]} if joined else {}
        config = getattr(hf, f"{kind}Config")(
            text_config=hf.GraniteConfig(**STRONG, embedding_multiplier=3.0).to_dict(),
            encoder_config=encoder,
            projector_config=former,
            audio_token_index=self.audio_id,
            has_lora_adapter=False,
            window_size=6,
            downsample_rate=2,
            tie_word_embeddings=False,
        )
        self.model = save_tiny(path, partial(self._build, kind), config, self.hf)
        self.checkpoint = read_checkpoint(path)
        media = self.checkpoint.facts.media
        assert media is not None
        self.ours = PROCESSORS[media.family](path, media, load_tokenizer(path, "hf"))

    @staticmethod
    def _build(kind: str, config: Any) -> Any:
        """Build a model whose batch norms have statistics."""
        import transformers as hf

        model = getattr(hf, f"{kind}ForConditionalGeneration")(config)
        for name, tensor in model.named_buffers():
            if "running_" in name:
                tensor.copy_(torch.rand_like(tensor) + 0.5)
        return model

    def features(self, count: int) -> torch.Tensor:
        """Return the log-mel spectrogram with two frames in a row, [states, 40]."""
        from transformers.audio_utils import mel_filter_bank

        filters = mel_filter_bank(257, 20, 0.0, 8000.0, 16000, mel_scale="htk")
        samples, window = torch.from_numpy(sound(count).samples), torch.hann_window(400)
        spectrum = torch.stft(samples, 512, 160, 400, window=window, center=True, return_complex=True)
        mel = (spectrum.abs() ** 2).T @ torch.from_numpy(filters).float()
        out = mel.clip(min=1e-10).log10()
        out = torch.maximum(out, out.amax() - 8.0) / 4 + 1
        return out[: len(out) // 2 * 2].reshape(-1, 40)

    def mel(self, count: int) -> torch.Tensor:
        return finished(self.ours.process("audio", sound(count), {}).arrays)["mel"]

    def inputs(self, text: str, counts: list[int]) -> dict[str, torch.Tensor]:
        features = [self.features(count) for count in counts]
        nums = [-(-len(item) // 6) * 3 for item in features]
        for num in nums:
            text = text.replace("<|audio|>", "\0" * num, 1)
        tokens = self.hf(text.replace("\0", "<|audio|>"), return_tensors="pt", return_token_type_ids=False)
        return dict(tokens)

    def vectors(self, count: int) -> torch.Tensor:
        vectors: torch.Tensor = self.model.get_audio_features(self.features(count)[None]).pooler_output[0]
        return vectors

    @torch.inference_mode()
    def generate_reference(self, text: str, counts: list[int]) -> tuple[list[int], list[float]]:
        """Return transformers' answer. It encodes audio of different lengths together with padding, which
        changes the result; each item is encoded alone here."""
        inputs = self.inputs(text, counts)
        if not counts:
            return generate_reference(self.model, inputs, COUNT)
        ids = inputs["input_ids"]
        embeds = self.model.get_input_embeddings()(torch.where(ids == self.audio_id, 0, ids))
        embeds[ids == self.audio_id] = torch.cat([self.vectors(count) for count in counts])
        out = self.model.generate(
            inputs_embeds=embeds,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=COUNT,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        token_ids = out.sequences[0].tolist()
        logprobs = torch.cat(out.logits).log_softmax(-1)
        return token_ids, [float(logprobs[at, token]) for at, token in enumerate(token_ids)]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(tmp_path_factory.mktemp("granite_speech"))


def test_spectrograms_equal_the_definition(twin: Twin) -> None:
    for count in LENGTHS:
        torch.testing.assert_close(twin.mel(count), twin.features(count), atol=1e-4, rtol=1e-4)
    with pytest.raises(RequestError, match="too short: it has 256 samples at 16000 Hz, and 257"):
        twin.ours.process("audio", sound(256), {})


@torch.inference_mode()
def test_embeddings_equal_transformers(twin: Twin) -> None:
    """Catches attention between blocks, padding that is attended to, and a wrong middle layer."""
    tower = load_tower(twin.path)
    embeddings = tower.encode("audio", [{"mel": twin.mel(count)} for count in LENGTHS])
    for embedding, count in zip(embeddings, LENGTHS, strict=True):
        torch.testing.assert_close(embedding, twin.vectors(count), atol=1e-3, rtol=1e-3)
        assert len(embedding) == len(twin.ours.process("audio", sound(count), {}).token_ids)
    numbers = sum(parameter.numel() for parameter in tower.parameters())
    assert weights.count_parameters(twin.checkpoint.facts).tower == pytest.approx(numbers, rel=0.06)
    (blank,) = tower.encode("audio", [tower.blank("audio", 12)])
    assert len(blank) == 12 and twin.ours.max_vectors("audio") == 15000
    assert tower.cost("audio", {"mel": (300, 40)}) > tower.cost("audio", {"mel": (100, 40)}) > 0


@torch.inference_mode()
def test_outputs_of_several_layers_are_joined(tmp_path: Path) -> None:
    """Granite Speech Plus: the input of the first layer, the layer in the middle, which gets the classes of
    its states, and the last one."""
    twin = Twin(tmp_path, "GraniteSpeechPlus", joined=(0, 2))
    embeddings = load_tower(tmp_path).encode("audio", [{"mel": twin.mel(count)} for count in LENGTHS])
    for embedding, count in zip(embeddings, LENGTHS, strict=True):
        torch.testing.assert_close(embedding, twin.vectors(count), atol=1e-3, rtol=1e-3)
    with pytest.raises(ConfigError, match=r"cat_hidden_layers is \[9, 1\], expected layers below 4"):
        read_checkpoint(tmp_path, {"encoder_config": {"cat_hidden_layers": [9, 1]}})


def test_answers_about_audio_equal_transformers(twin: Twin) -> None:
    """Covers one audio item, several, and none: at once, in chunks that end within items, with the prefix
    cache, and with preemptions. The decoder scales embeddings."""
    expected = [twin.generate_reference(*content) for content in CONTENTS]
    requests: list[Any] = [
        {"prompt": text, "multi_modal_data": {"audio": [sound(count) for count in counts]}}
        if counts
        else text
        for text, counts in CONTENTS
    ]
    llm = open_llm(twin.path, max_num_batched_tokens=16, max_logprobs=-1)
    outputs = check_answers(llm, requests, expected, at=(1, 3, 6))
    for content, output in zip(CONTENTS, outputs, strict=True):
        assert output.prompt_token_ids == twin.inputs(*content)["input_ids"][0].tolist()


def test_settings_are_checked(twin: Twin) -> None:
    for wrong, message in (
        ({"window_size": 7}, "window_size is 7, expected a multiple of downsample_rate, 2"),
        ({"encoder_config": {"context_size": 20}}, "context_size is 20, expected at most max_pos_emb, 12"),
        ({"projector_config": {"encoder_hidden_size": 9}}, "encoder_hidden_size is 9, expected 32"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_checkpoint(twin.path, wrong)
