"""Generate docs/models.md from the tables: `python tests/arch/models_page.py > docs/models.md`."""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from zoo import SHARED, UNTAPED, ZOO

from quire.checkpoint.families import ALIASES, FAMILIES, GGUF_FAMILIES
from quire.checkpoint.layout import cache_specs
from quire.checkpoint.multimodal import MEDIA_FAMILIES
from quire.checkpoint.reader import ConfigReader
from quire.models import CLASSIFIERS, MODELS

_KEPT = {"full": "pages", "window": "window", "latent": "latent", "state": "state"}
_ELSEWHERE = {"WhisperForConditionalGeneration": ("pages, cross-attention", "tape", "graphs")}
"""Decoders that cannot run alone. Their cache, CPU and GPU paths are tested in tests/multimodal/."""

GROUPS = {
    "dense": "Dense decoders",
    "gpt": "Dense decoders of GPT's kind",
    "alibi": "Decoders with slopes (ALiBi)",
    "llama_variants": "Decoders under names of their own",
    "sliding_window": "Sliding-window decoders",
    "moe": "Mixtures of experts",
    "gated": "Gated attention with experts",
    "mla": "Latent attention (MLA)",
    "linear_attention": "Linear attention",
    "lfm": "Short convolutions",
    "reshaped": "Llama with other layers",
    "ssm": "State-space and hybrid decoders",
    "encoder": "Encoders",
}
"""Titles of tables by the file in checkpoint/families/ that reads their models."""
HEAD = """# Models

Made by `python tests/arch/models_page.py > docs/models.md` out of the tables of `checkpoint/families/` and
`models/`; a test fails when it is stale.

Every architecture runs on a CPU and on a GPU, from safetensors (or pytorch_model.bin), and from GGUF where
a name of llama.cpp stands in the last column. Each is compared with transformers in float32, logit by logit:
`tests/models/test_parity.py`, `tests/engine/test_parity.py`, `tests/models/test_encoders.py`; on a GPU, where
decodes are captured graphs, by `pytest -m gpu tests/gpu/test_families.py`. Some are not in transformers:
Step3 (`step3_text`) is checked against a plain reference in torch (`tests/models/step_twin.py`); DeciLM,
Ouro, PLaMo 3, TeleChat 2 and TeleFLM against transformers' Llama and Gemma 3, changed as in vLLM
(`tests/models/reshaped_twins.py`).

On a CPU a decode is a *tape*: one call into C for the whole step, or else *calls*, one for each operation. An
encoder has no decodes.

What a layer keeps of the tokens it has seen: *pages* of all of them; *window*: pages of the last so many, the
others go back to the pool; *latent*: pages of one vector a token; *state*: a fixed size for each running
request, so that prefixes cannot be shared; *cross-attention*: keys and values of a sound, of one size for
each running request. An encoder keeps nothing.

Any other decoder of an installed transformers runs through it, only slower:
[transformers.md](transformers.md).
With `--runner pooling` (or `--convert embed`, `--convert classify`) a decoder embeds or classifies;
`...ForSequenceClassification` and `...ForTokenClassification` heads are read as they are, and so are reward
models and decoders that look ahead: [pooling.md](pooling.md).
"""


def page() -> str:
    return "\n".join([HEAD, _aliases(), *_tables(), *_seeing()])


def _aliases() -> str:
    same = ", ".join(f"`{name}` ({meant})" for name, meant in sorted(ALIASES.items()))
    return f"Other names of the same: {same}.\n"


def _seeing() -> Iterator[str]:
    yield "## Models that see or hear\n"
    yield "Their decoders are among those above.\n"
    yield "| architecture | read by |"
    yield "|---|---|"
    for name in sorted(MEDIA_FAMILIES):
        module = MEDIA_FAMILIES[name].__module__.removeprefix("quire.").replace(".", "/")
        yield f"| `{name}` | `{module}.py` |"
    yield ""


def _tables() -> Iterator[str]:
    for group, title in GROUPS.items():
        names = sorted(name for name, family in FAMILIES.items() if _group(family.read) == group)
        yield f"## {title}\n"
        yield "| architecture | model_type | keeps | CPU | GPU | read by | GGUF |"
        yield "|---|---|---|---|---|---|---|"
        yield from map(_line, names)
        yield ""


def _line(name: str) -> str:
    family = FAMILIES[name]
    module = MODELS.entries[name].partition(":")[0]
    read_by = f"`{module.removeprefix('quire.').replace('.', '/')}.py`"
    gguf = sorted(known for known, made in GGUF_FAMILIES.items() if made.architecture == name)
    classes = "" if name not in CLASSIFIERS else ", classifier"
    cells = [
        f"`{name}`{classes}",
        f"`{family.model_type}`",
        *(_ELSEWHERE.get(name) or _runs(name)),
        read_by,
        ", ".join(f"`{item}`" for item in gguf) or "-",
    ]
    return f"| {' | '.join(cells)} |"


def _runs(name: str) -> tuple[str, str, str]:
    if name not in ZOO:
        return "nothing", "-", "-"
    return _kept(name), "calls" if name in UNTAPED else "tape", "graphs"


def _kept(name: str) -> str:
    """Return the cache kinds of the layers of the tiny test model."""
    import transformers

    specimen = ZOO[name]
    config = SHARED | specimen.settings
    if specimen.twin is None:
        config = getattr(transformers, name).config_class(**config).to_dict()
    specs = [
        spec for spec in cache_specs(FAMILIES[name].read(ConfigReader(name, config))) if spec is not None
    ]
    return ", ".join(dict.fromkeys(_KEPT[part.kind] for spec in specs for part in spec.parts))


def _group(read: object) -> str:
    module = str(getattr(read, "__module__", "")).rpartition(".")[2]
    return "moe" if module == "step3" else module


if __name__ == "__main__":
    print(page(), end="")
