"""Engine without a model with Whisper's prompts, through the real media readers."""

from collections.abc import Mapping
from typing import Any

from fake_engine import EOS, FakeEngine, byte_tokenizer
from fake_inputs import FakeProcessor
from tokenizers import AddedToken

from quire.config.env import MediaEnv
from quire.config.sections import MultimodalSection
from quire.data.multimodal import Array
from quire.frontend.multimodal import MediaInputReader
from quire.frontend.speech import RATE, WhisperTranscriber
from quire.multimodal.processing import MediaProcessor
from quire.multimodal.processors import Audio, Content, ProcessedItem
from quire.text.tokenizer import Tokenizer

NAMES = ["startoftranscript", "en", "de", "translate", "transcribe", "startofprev", "notimestamps"]
START, EN, DE, TRANSLATE, TRANSCRIBE, BEFORE, UNTIMED = range(258, 265)
TIME = UNTIMED + 1
"""Token id of the timestamp of 0 seconds."""
VOCAB = TIME + 1501


def whisper_tokenizer() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokens = [AddedToken(f"<|{name}|>", special=True) for name in NAMES]
    tokenizer.backend.add_special_tokens(tokens)
    tokenizer.backend.add_tokens([AddedToken(f"<|{k * 0.02:.2f}|>") for k in range(1501)])
    return Tokenizer(tokenizer.backend, special_tokens=tokenizer.special_tokens_map)


class FakeSpeechProcessor(FakeProcessor):
    modalities = ("audio",)

    def marks(self, modality: str) -> list[int]:
        return []

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        assert isinstance(content, Audio) and content.rate == RATE
        self.seen.append(content)
        return ProcessedItem([], [(0, 4)], {"count": 4}, {"mel": Array.of(content.samples)})


class Writer(FakeEngine):
    """Engine that ignores its audio and answers with a script; a language detection gives German."""

    def __init__(self) -> None:
        super().__init__(" Hallo.")
        self.tokenizer = self.inputs.tokenizer = whisper_tokenizer()
        self.inputs.vocab = self.facts.vocab = VOCAB
        self.ear = FakeSpeechProcessor()
        speech = WhisperTranscriber(self.tokenizer, max_len=448, max_samples=30 * RATE)
        media_processor = MediaProcessor(self.ear, MultimodalSection(), MediaEnv())
        self.inputs.media = MediaInputReader("fake", media_processor, {"audio": 1}, speech=speech)
        self.usual = self.script

    def begin(self, script: list[int] | None = None) -> None:
        self.script = self.usual if script is None else [*script, EOS]
        for seen in (self.seen, self.aborted, self.ear.seen):
            seen.clear()

    def _step(self, requests: Any, position: int) -> Any:
        asks = requests[0].params.allowed_token_ids
        script, self.script = self.script, [DE] if asks else self.script
        try:
            step = super()._step(requests, position)
        finally:
            self.script = script
        for request in requests:
            if (alignment := request.params.aligning) is not None:  # one token per fifth of a second
                count = request.prompt_len - 1 - alignment.first
                step.aligned[request.id] = [min(10 * k, alignment.num_states - 1) for k in range(count)]
        return step
