"""Custom logits processors in a worker, and the configuration that they read under vLLM's names."""

from functools import cached_property, partial
from typing import Any

import torch

from quire.config.engine import EngineConfig
from quire.config.extensions import load_class
from quire.errors import ConfigError, one_line
from quire.sampling.logits_processors import LogitsProcessor, ProcessorBatch
from quire.sampling.rows import History
from quire.worker.rows import Rows


class ConfigView:
    """A section of the configuration, whose fields are read by vLLM's names, with additional `values` for
    names that Quire does not have."""

    def __init__(self, section: Any, **values: Any) -> None:
        self._section = section
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._section, name)


class ModelConfigView(ConfigView):
    """The model section, with what vLLM reads of the checkpoint."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.model, dtype=getattr(torch, config.model.dtype))
        self._checkpoint, self._tp_size = config.checkpoint, config.parallel.tensor_parallel_size

    @cached_property
    def hf_config(self) -> Any:
        """Return the configuration of the checkpoint as transformers reads it."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(
            self._checkpoint.path, trust_remote_code=self._section.trust_remote_code
        )

    @property
    def hf_text_config(self) -> Any:
        return self.hf_config.get_text_config()

    def get_vocab_size(self) -> int:
        return self._checkpoint.facts.vocab

    def get_hidden_size(self) -> int:
        return self._checkpoint.facts.hidden

    def get_head_size(self) -> int:
        return self._checkpoint.facts.head_dim

    def get_num_layers(self, parallel_config: Any = None) -> int:
        return len(self._checkpoint.facts.layers)

    def get_num_attention_heads(self, parallel_config: Any = None) -> int:
        """Return the number of query heads on each tensor parallel rank."""
        return self._checkpoint.facts.heads // self._tp_size

    def get_num_kv_heads(self, parallel_config: Any = None) -> int:
        """Return the number of KV heads on each tensor parallel rank."""
        return max(1, self._checkpoint.facts.kv_heads // self._tp_size)


class VllmConfig:
    """The configuration of the engine as vLLM names it, for classes that were written for vLLM."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine_config = config
        parallel = config.parallel
        self.model_config = ModelConfigView(config)
        self.cache_config = ConfigView(config.cache)
        self.scheduler_config = ConfigView(config.scheduler, max_model_len=config.model.max_model_len)
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self.parallel_config = ConfigView(
            parallel, world_size=ranks, data_parallel_index=parallel.data_parallel_rank or 0
        )
        self.load_config = ConfigView(config.load)
        self.lora_config = ConfigView(config.lora) if config.lora.enable_lora else None
        self.device_config = ConfigView(config.machine, device=torch.device(config.machine.device))
        self.speculative_config = config.speculation
        self.quant_config = config.checkpoint.quant


def open_processors(config: EngineConfig, device: torch.device, all_rows: Rows) -> ProcessorBatch | None:
    """Return the logits processors of a worker; None if none are configured."""
    paths = config.extensions.logits_processors
    if not paths:
        return None
    classes = [load_class(path, "logits_processors") for path in paths]
    for path, processor in zip(paths, classes, strict=True):
        if not issubclass(processor, LogitsProcessor):
            raise ConfigError(
                f"logits_processors: {path!r} must be a subclass of LogitsProcessor (of"
                " quire.sampling.logits_processors, or of vllm.v1.sample.logits_processor)"
            )
    make = partial(_make_processors, classes, config, device)
    return ProcessorBatch(make, all_rows.sampling, History(*all_rows.history))


def _make_processors(
    classes: list[type[LogitsProcessor]], config: EngineConfig, device: torch.device
) -> list[LogitsProcessor]:
    processors = []
    for processor in classes:
        try:
            processors.append(processor(VllmConfig(config), device, device.type == "cuda"))
        except Exception as error:  # code of the operator, which may raise anything
            name = f"{processor.__module__}:{processor.__qualname__}"
            raise ConfigError(f"logits processor {name} cannot be built: {one_line(error)}") from error
    return processors
