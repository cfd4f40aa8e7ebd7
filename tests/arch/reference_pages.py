"""Generate pages of docs/ from the code: `python tests/arch/reference_pages.py`."""

import ast
import inspect
import itertools
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path

from quire.config.cli import field_help
from quire.config.env import _ENV_KINDS, _GROUPS, NO_EFFECT, Env
from quire.config.sections import SECTIONS, Option, options_of
from quire.config.server_sections import SERVER_SECTIONS
from quire.metrics.tables import COUNTERS, GAUGES, HISTOGRAMS, LABELLED, LENGTHS, START_GAUGES

DOCS = Path(__file__).parents[2] / "docs"


def arguments() -> str:
    return "\n".join(
        [
            "# Engine and server arguments\n",
            "Made from the sections of the configuration (`python tests/arch/reference_pages.py`). Flags are"
            " the names with dashes; in Python, `LLM(...)` and `EngineArgs(...)` take those of the engine.\n",
            "## Engine\n",
            *_sections(SECTIONS),
            "## Server\n",
            *_sections(SERVER_SECTIONS),
        ]
    )


def _sections(sections: Mapping[str, type]) -> list[str]:
    known, lines = options_of(sections), []
    for section, cls in sections.items():
        texts = field_help(cls)
        local = [option for option in known.values() if option.section == section]
        lines += [f"### {section.capitalize()}: {(cls.__doc__ or '').split(chr(10))[0]}\n"]
        lines += ["| flag | takes | default | |", "|---|---|---|---|"]
        lines += [
            f"| {' | '.join([_flag(option), _takes(option), _default(option), _cell(texts[option.name])])} |"
            for option in local
        ]
        lines.append("")
    return lines


def _flag(option: Option) -> str:
    return f"`--{option.name.replace('_', '-')}`"


def _takes(option: Option) -> str:
    if option.choices:
        return _cell(", ".join(f"`{choice}`" for choice in option.choices))
    kinds = {
        bool: "switch",
        int: "number",
        float: "number",
        str: "text",
        dict: "JSON",
        tuple: "list",
        list: "JSON",
    }
    bounds = str(option.rule)
    return kinds[option.kind] + (f", {bounds}" if bounds else "")


def _default(option: Option) -> str:
    value = option.default
    return "" if value is None or value in ((), {}, "") else f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def environment() -> str:
    texts, defaults = _field_docs(Env), _field_defaults(Env)
    for kind, prefix in _GROUPS.values():
        texts |= {f"{prefix}{name}": text for name, text in _field_docs(kind).items()}
        defaults |= {f"{prefix}{name}": default for name, default in _field_defaults(kind).items()}
    defaults["cache_root"] = "`~/.cache/quire`"
    lines = [
        "# Environment variables\n",
        "Each variable is read under both names; Quire's comes first. `python tests/arch/reference_pages.py`"
        " makes this page.\n",
        "| variable | vLLM's name | default | |",
        "|---|---|---|---|",
        *(
            f"| `QUIRE_{name.upper()}` | `VLLM_{name.upper()}` | {defaults[name]} | {_cell(texts[name])} |"
            for name in _ENV_KINDS
        ),
        "",
        "Variables of vLLM that are known and have no effect: "
        + ", ".join(f"`{name}`" for name in sorted(NO_EFFECT))
        + ".",
        "",
    ]
    return "\n".join(lines)


def _field_defaults(cls: type) -> dict[str, str]:
    """Return the defaults of the fields; those without one are not set."""
    return {
        item.name: "" if item.default in (None, "", MISSING) else f"`{item.default}`" for item in fields(cls)
    }


def _field_docs(cls: type) -> dict[str, str]:
    """Return the docstrings of the fields that have one."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    results = {}
    for item, after in itertools.pairwise(tree.body):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            results[item.target.id] = str(after.value.value) if is_text else ""  # type: ignore[attr-defined]
    return results


def metrics() -> str:
    lines = [
        "# Metrics\n",
        "At `/metrics`, under vLLM's names; each has the labels `model_name` and `engine`"
        " (`python tests/arch/reference_pages.py` makes this page; HTTP families and those of speculative"
        " decoding, adapters and keys come beside them).\n",
        "| name | kind | |",
        "|---|---|---|",
        *(f"| `vllm:{name}` | gauge | {text} |" for name, text in (GAUGES | START_GAUGES).items()),
        *(f"| `vllm:{name}_total` | counter | {text} |" for name, text in COUNTERS.items()),
        *(f"| `vllm:{name}` | histogram | {text} |" for name, (text, _) in HISTOGRAMS.items()),
        *(f"| `vllm:{name}` | histogram | {text} |" for name, text in LENGTHS.items()),
        *(
            f"| `vllm:{name}` | by `{label}`: {', '.join(values)} | {text} |"
            for name, (text, label, values) in LABELLED.items()
        ),
        "",
    ]
    return "\n".join(lines)


PAGES = {"arguments.md": arguments, "environment.md": environment, "metrics.md": metrics}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
