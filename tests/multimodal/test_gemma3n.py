"""Tests of Gemma 3n's encoders against the parts of transformers' model, which as a whole needs timm, and
against timm's vision encoder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finished import finished
from hearing import sound
from PIL import Image
from safetensors.torch import save_file
from tiny_engine import check_answers, load_tower, open_llm
from tiny_mobilenet import FACTOR, FACTS, HIDDEN, SIDE, TOKENS, make, squares
from tiny_seeing import STRONG, make_tokenizer, picture

from quire import SamplingParams
from quire.checkpoint import weights
from quire.checkpoint.model import read_checkpoint
from quire.errors import ConfigError, RequestError
from quire.multimodal.placeholders import place
from quire.multimodal.processing import PreparedItem
from quire.multimodal.processors import PROCESSORS
from quire.text.tokenizer import load_tokenizer

COUNT = 5
LENGTHS = [513, 1000, 1600, 5000, 16001, 24000]
MARKS = ["<boa>", "<boi>", "<eoi>", "<image>", "<eoa>", "<audio>"]
"""The tokens of the vision encoder come before those of the audio encoder."""
SPANS = {
    "<audio>": "\n\n<boa>" + "<audio>" * 12 + "<eoa>\n\n",
    "<image>": "\n\n<boi>" + "<image>" * TOKENS + "<eoi>\n\n",
}
Item = int | tuple[int, int]
"""Number of samples of audio, or size of an image."""
CONTENTS: list[tuple[str, list[Item]]] = [
    ("what is <audio> this", [5000]),
    ("a <image>\nand <image>", [(40, 90), (30, 20)]),
    ("<image>with\n<audio>", [(200, 31), 1000]),
    ("nothing to hear here, only words", []),
    ("<audio>one\n<audio>\nand then", [16001, 1000]),
    ("user\n\n<audio>again", [5000]),
]


class Twin:
    """Checkpoint with the parts of transformers' model."""

    def __init__(self, path: Path) -> None:
        import transformers as hf
        from transformers.models.gemma3n import modeling_gemma3n as modeling

        torch.manual_seed(0)
        self.path, self.hf = path, make_tokenizer(MARKS)
        begin, first, last, image, end, audio = self.hf.convert_tokens_to_ids(MARKS)
        audio_config = {
            "hidden_size": 32,
            "input_feat_size": 16,
            "conf_num_hidden_layers": 2,
            "vocab_size": 8,
        }
        audio_config |= {"conf_num_attention_heads": 2, "sscp_conv_channel_size": [6, 4], "vocab_offset": end}
        audio_config |= {"conf_attention_context_left": 5, "conf_attention_context_right": 2}
        audio_config |= {"conf_attention_chunk_size": 4, "initializer_range": 0.2}
        hearing = hf.Gemma3nAudioConfig(**audio_config)
        text = hf.Gemma3nTextConfig(
            **STRONG | {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 16},
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=100,
            laurel_rank=4,
            activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        )
        self.model = hf.Gemma3nForCausalLM(text).float().eval()
        self.tower = modeling.Gemma3nAudioEncoder(hearing).float().eval()
        self.embed = modeling.Gemma3nMultimodalEmbedder(hearing, text).float().eval()
        seeing = hf.Gemma3nVisionConfig(hidden_size=HIDDEN, vocab_size=8, vocab_offset=last)
        self.embed_image = modeling.Gemma3nMultimodalEmbedder(seeing, text).float().eval()
        self.features = hf.Gemma3nAudioFeatureExtractor(feature_size=16)
        tensors: dict[str, torch.Tensor] = {}
        parts = {"audio_tower.": self.tower, "embed_audio.": self.embed, "language_model.": self.model.model}
        parts["embed_vision."] = self.embed_image
        for name, part in parts.items():
            for inner, tensor in part.state_dict().items():
                if tensor.ndim < 2 or not tensor.any():
                    tensor.add_(torch.randn_like(tensor) * 0.2)
                tensors[f"model.{name}{inner}"] = tensor.clone()
        self.net, inner = make()
        tensors |= {f"model.vision_tower.timm_model.{name}": tensor for name, tensor in inner.items()}
        save_file(tensors, path / "model.safetensors")
        settings = {
            "architectures": ["Gemma3nForConditionalGeneration"],
            "text_config": text.to_dict(),
            "audio_config": hearing.to_dict(),
            "vision_config": seeing.to_dict() | {"model_args": {"channel_multiplier": FACTOR}},
            "vision_soft_tokens_per_image": TOKENS,
            "boi_token_id": first,
            "eoi_token_id": last,
            "image_token_id": image,
            "audio_soft_tokens_per_image": 12,
            "boa_token_id": begin,
            "eoa_token_id": end,
            "audio_token_id": audio,
        }
        (path / "config.json").write_text(json.dumps(settings))
        self.hf.save_pretrained(path)
        self.features.save_pretrained(path)
        self.image_end, self.end, self.places = last, end, [image, last, audio, end]
        self.checkpoint = read_checkpoint(path)
        media = self.checkpoint.facts.media
        assert media is not None
        self.tokenizer = load_tokenizer(path, "hf")
        self.ours = PROCESSORS[media.family](path, media, self.tokenizer)

    def processed(self, item: Item) -> PreparedItem:
        content: Any = sound(item) if isinstance(item, int) else picture(*item)
        kind = "audio" if isinstance(item, int) else "image"
        return PreparedItem(kind, repr(item).encode(), self.ours.process(kind, content, {}))

    def mel(self, count: int) -> torch.Tensor:
        return finished(self.ours.process("audio", sound(count), {}).arrays)["mel"]

    def vectors(self, item: Item) -> torch.Tensor:
        """Return transformers' embeddings of padded audio, or of an image, and of the end token."""
        if not isinstance(item, int):
            resized = np.array(picture(*item).resize((SIDE, SIDE), Image.Resampling.BILINEAR))
            states = self.net(torch.from_numpy(resized).permute(2, 0, 1)[None] / 255)
            end = self.embed_image(input_ids=torch.tensor([[self.image_end]]))[0]
            return torch.cat((self.embed_image(inputs_embeds=states * HIDDEN**0.5)[0], end))
        heard = self.features(sound(item).samples, return_tensors="pt")
        states = self.tower(heard["input_features"], ~heard["input_features_mask"]).last_hidden_state
        projected = self.embed(inputs_embeds=states)[0]
        silence, end = (self.embed(input_ids=torch.tensor([[i]]))[0] for i in (self.end + 7, self.end))
        return torch.cat((projected, silence.expand(12 - len(projected), -1), end))

    def token_ids(self, text: str, items: list[Item]) -> list[int]:
        for mark, span in SPANS.items() if items else ():
            text = text.replace(mark, span)
        ids: list[int] = self.hf(text)["input_ids"]
        return ids

    @torch.inference_mode()
    def generate_reference(self, text: str, items: list[Item]) -> tuple[list[int], list[float]]:
        ids, generated, likely = self.token_ids(text, items), list[int](), list[float]()
        for _ in range(COUNT):
            input_ids = torch.tensor([[*ids, *generated]])
            embeds = self.model.model.embed_tokens(input_ids)
            if items:
                places = torch.isin(input_ids[0], torch.tensor(self.places))
                places[len(ids) :] = False
                embeds[0, places] = torch.cat([self.vectors(item) for item in items])
            per_layer = self.model.model.get_per_layer_inputs(input_ids)
            states = self.model.model(inputs_embeds=embeds, per_layer_inputs=per_layer).last_hidden_state
            logits = self.model.lm_head(states[0, -1])
            cap = self.model.config.final_logit_softcapping
            logits = (torch.tanh(logits / cap) * cap).log_softmax(-1)
            generated.append(int(logits.argmax()))
            likely.append(float(logits.max()))
        return generated, likely


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(tmp_path_factory.mktemp("gemma3n"))


def test_mel_frames_and_placeholders_equal_transformers(twin: Twin) -> None:
    """Catches a wrong window or filter, a frame too many, and newlines that are not merged."""
    for count in LENGTHS:
        expected = twin.features(sound(count).samples, return_tensors="np")["input_features"][0]
        np.testing.assert_allclose(twin.mel(count).numpy(), expected, atol=1e-5)
    for text, items in CONTENTS:
        ready = [twin.processed(item) for item in items]
        ids = twin.tokenizer.encode(text)
        assert (place(ids, ready, twin.ours)[0] if ready else ids) == twin.token_ids(text, items)
    with pytest.raises(RequestError, match="too short: it has 512 samples at 16000 Hz, and 513"):
        twin.ours.process("audio", sound(512), {})
    with pytest.raises(RequestError, match="30.1 seconds long, and 30.0 are the maximum"):
        twin.ours.process("audio", sound(481000), {"truncation": False})


@torch.inference_mode()
def test_audio_embeddings_equal_transformers(twin: Twin) -> None:
    """Catches attention that reaches too far, a norm over the whole input, and padding that is attended
    to."""
    tower = load_tower(twin.path)
    embeddings = tower.encode("audio", [{"mel": twin.mel(count)} for count in LENGTHS])
    for embedding, count in zip(embeddings, LENGTHS, strict=True):
        torch.testing.assert_close(embedding, twin.vectors(count), atol=1e-4, rtol=1e-4)
    numbers = sum(parameter.numel() for parameter in tower.parameters())
    assert weights.count_parameters(twin.checkpoint.facts).tower == pytest.approx(numbers, rel=0.06)
    for kind, count in (("audio", 13), ("image", TOKENS + 1)):
        (blank,) = tower.encode(kind, [tower.blank(kind, count)])
        assert len(blank) == twin.ours.max_vectors(kind) == count


@torch.inference_mode()
def test_vision_encoder_equals_timm() -> None:
    """The numbers are those of `forward_features` of timm 1.0.31 (`mobilenetv5_300m_enc`) with these weights:
    the maximum difference to all of its output was 0."""
    net, tensors = make()
    out = net(squares(2))
    assert out.shape == (2, TOKENS, HIDDEN) and len(tensors) == 548
    expected = torch.tensor([-0.03187, -2.44391, -0.03927, 0.08574, 0.4926, 0.20634])
    torch.testing.assert_close(out[1, 5, :6], expected, atol=1e-4, rtol=1e-3)
    assert (float(out.mean()), float(out.std())) == pytest.approx((-0.308322, 0.958020), abs=1e-4)


@torch.inference_mode()
def test_image_embeddings_equal_transformers(twin: Twin) -> None:
    """The facts are read from the names of timm, and an image ends with the embedding of its end token."""
    media = twin.checkpoint.facts.media
    assert media is not None and media.modalities == ("image", "audio")
    assert media.tower.vision.widths == FACTS.widths and media.tower.vision.image == SIDE
    tower, sizes = load_tower(twin.path), [(30, 90), (192, 192), (300, 20)]
    items = [finished(twin.processed(size).processed.arrays) for size in sizes]
    for vectors, size in zip(tower.encode("image", items), sizes, strict=True):
        torch.testing.assert_close(vectors, twin.vectors(size), atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="architecture is 'vit', expected mobilenetv5_300m_enc"):
        read_checkpoint(twin.path, {"vision_config": {"architecture": "vit"}})
    with pytest.raises(RequestError, match="image_embeds: 3 vectors, expected 17, one for the end"):
        twin.ours.process_embeds("image", {"embeds": np.zeros((3, 32), np.float32)})


def test_answers_equal_transformers(twin: Twin) -> None:
    """Covers one item, several, images and audio, and none: at once, in chunks that end within items, with
    the prefix cache, and with preemptions."""
    expected = [twin.generate_reference(*content) for content in CONTENTS]
    requests: list[Any] = []
    for text, items in CONTENTS:
        sounds = [sound(item) for item in items if isinstance(item, int)]
        images = [picture(*item) for item in items if not isinstance(item, int)]
        data = {kind: found for kind, found in (("audio", sounds), ("image", images)) if found}
        requests.append({"prompt": text, "multi_modal_data": data} if data else text)
    llm = open_llm(twin.path, max_model_len=256, max_num_batched_tokens=16, max_logprobs=-1)
    check_answers(llm, requests, expected, at=(1, 3, 6))


def test_encoders_run_in_bfloat16(twin: Twin) -> None:
    """The inputs of the encoders are in float32, whatever the dtype of the weights."""
    llm = open_llm(twin.path, dtype="bfloat16", max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    request = {
        "prompt": "<image>with\n<audio>",
        "multi_modal_data": {"image": picture(200, 31), "audio": sound(1000)},
    }
    (output,) = llm.generate([request], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == COUNT
