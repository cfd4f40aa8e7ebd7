"""Transformers backend: any decoder of transformers, with attention over Quire's paged KV cache."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.transformers_config import IMPL_OWN_CACHE
from quire.errors import ConfigError
from quire.kernels.cpu.tape import torch_recorded
from quire.layers.scope import Scope, Target
from quire.logs import get_logger, warn_once
from quire.models.transformers_attention import (
    SelfTest,
    TransformersStep,
    bind_blank,
    build,
    config_errors,
    is_same,
    load_by_transformers,
    place_attention,
    stored_parts,
)
from quire.models.transformers_modules import use_fast_modules

logger = get_logger(__name__)


class TransformersModel(nn.Module):
    """A model of transformers in two parts: its body over the paged cache, and its LM head."""

    difference = (
        "over the paged cache it computes other logits than in plain transformers. Its attention or its"
        " positions depend on more than queries, keys and values: set"
        f" model_impl={IMPL_OWN_CACHE!r}, which is slower"
    )
    """Error message if the logits differ from those of plain transformers."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        assert facts.borrowed is not None
        if scope.adapters is not None:
            raise ConfigError(
                f"enable_lora is not supported with {facts.architecture}, which runs through transformers"
            )
        self.facts = facts
        self.scope = scope
        self.tail = build(facts.borrowed, scope)
        self.name = type(self.tail).__name__
        base = self.tail.base_model
        self.body: nn.Module = base.decoder if type(base).__name__.endswith("DecoderWrapper") else base
        self.has_all_parts = True
        """Whether Quire's loader fills all weights; if not, transformers loads the checkpoint."""
        warn_once(
            logger,
            f"{self.name} runs through transformers, which is slower than a native model: without fused "
            "kernels, CUDA graphs and quantized formats",
        )

    def targets(self) -> Iterator[Target]:
        """Yield every checkpoint tensor with the part of a parameter that it fills."""
        parts, self.has_all_parts = stored_parts(self.tail)
        yield from (Target(name, part) for name, part in parts.items())

    @torch.inference_mode()
    def finish(self) -> None:
        """Attach the KV cache to the loaded model, and raise a ConfigError if its logits in a self-test
        differ from those of plain transformers."""
        tail: Any = self.tail
        if self.body is tail:
            raise ConfigError(f"{self.name} is not supported: it has no base model separate from its head")
        if not self.has_all_parts:
            assert self.facts.borrowed is not None
            load_by_transformers(tail, self.facts.borrowed.path)
        trial = SelfTest.of(self.facts.vocab, self.scope.device)
        expected = trial.expected(tail)
        if expected.shape[1] != self.facts.vocab:
            raise ConfigError(
                f"{self.name} computes {expected.shape[1]} logits; vocab_size in config.json is "
                f"{self.facts.vocab}"
            )
        use_fast_modules(tail, self.scope.ops)
        self.place_cache()
        setattr(tail, tail.base_model_prefix, _PassThrough())
        if not self.matches(expected, trial):
            raise ConfigError(f"{self.name} is not supported: {self.difference}")

    def place_cache(self) -> None:
        """Attach paged attention to every layer."""
        layers = place_attention(self.body, self.facts, self.scope, self.name)
        bind_blank(layers, self.scope.device)

    def matches(self, expected: Tensor, trial: SelfTest) -> bool:
        """Return whether the model computes the `expected` logits for the sequences of a self-test
        (`trial`)."""
        return is_same(self.logits_of(trial), expected)

    def logits_of(self, trial: SelfTest) -> Tensor:
        """Return the logits [T, vocab] that the model computes for all tokens of a self-test's sequences."""
        return torch.cat([self._run(batch) for batch in trial.steps()])

    def _run(self, batch: Batch) -> Tensor:
        with config_errors(self.name):
            self.scope.backend.plan(batch)
            return self.logits(self(batch))

    def forward(self, batch: Batch) -> Tensor:
        """Return hidden states [T, hidden] after the final norm."""
        with torch_recorded():
            out = self.body(
                **self.inputs_of(batch),
                position_ids=batch.positions[None],
                use_cache=False,
                quire_step=TransformersStep(batch),
            )
            return out[0][0]

    def inputs_of(self, batch: Batch) -> dict[str, Tensor]:
        """Return the body's input by argument name: token ids [1, T], or embeddings [1, T, hidden] if a
        prompt of the batch has embeddings."""
        if batch.embeds is None:
            return {"input_ids": batch.token_ids[None]}
        body: Any = self.body
        x: Tensor = body.get_input_embeddings()(batch.token_ids)
        tokens, vectors = batch.embeds
        return {"inputs_embeds": x.index_copy(0, tokens, vectors.to(x.dtype))[None]}

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, vocab] of hidden states [N, hidden]."""
        with torch_recorded():
            return self.tail(inputs_embeds=hidden[None], use_cache=False).logits[0]


class _PassThrough(nn.Module):
    """Replaces the body inside of the model: passes `inputs_embeds` to the head unchanged."""

    @property
    def decoder(self) -> "_PassThrough":
        """Return this module for models that call the decoder inside of a wrapper, such as Bart's."""
        return self

    def forward(self, *others: Any, inputs_embeds: Tensor, **rest: Any) -> "_Output":
        return _Output(inputs_embeds)


class _Output:
    """Output of a body with only the last hidden state."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None
