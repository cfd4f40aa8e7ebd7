"""Command-line flags generated from the sections, and a parser that accepts the syntax of vLLM's scripts."""

import argparse
import ast
import functools
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

from quire.config.sections import SECTIONS, Option, options, options_of
from quire.config.unsupported import is_switch
from quire.config.vllm_names import IGNORED_SWITCHES, LISTS, SHORT, other_names
from quire.errors import nearest

SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_HUMAN_INT = re.compile(r"([+-]?\d+(?:\.\d+)?)([kKmMgGtT]?)")
_NUMBER_IN_JSON = re.compile(r'"(?:\\.|[^"\\])*"|\b(\d+(?:\.\d+)?[kKmMgGtT])\b')
_FLAG_NAME = re.compile(r"[^=.]+")
_DOTTED_FLAG = re.compile(r"(--?[A-Za-z][\w-]*)\.([^=\s]+)(?:=(.*))?", re.DOTALL)
_DOTTED_VALUE = "\0"
"""Prefix of a JSON flag value that sets one key: `\\0key.key=value`."""


def human_int(text: str) -> int:
    """Convert a number with a unit: `4k` is 4000, `4K` is 4096, `25.6k` is 25600. A fraction of a binary unit
    is an error."""
    match = _HUMAN_INT.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4096, 4k or 4K")
    number, unit = match[1], match[2]
    value = Decimal(number) * SUFFIXES.get(unit, 1)
    if unit.isupper() and "." in number:
        raise argparse.ArgumentTypeError(
            f"{text!r} is a fraction of a binary unit; write a whole number or {unit.lower()}"
        )
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def parse_json_or_text(text: str) -> Any:
    """Parse a JSON value (numbers may have a unit), or return the text itself if it is not JSON; None for an
    empty text or `None`."""

    def expand(match: re.Match[str]) -> str:
        return str(human_int(match[1])) if match[1] else match[0]

    try:
        return json.loads(_NUMBER_IN_JSON.sub(expand, text))
    except (ValueError, argparse.ArgumentTypeError):
        return None if text in ("", "None") else text


class JsonFlag(argparse.Action):
    """A flag with a JSON value (`--flag '{...}'`), or with one key (`--flag.key value`) that is added to its
    value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        if not values.startswith(_DOTTED_VALUE):
            setattr(namespace, self.dest, parse_json_or_text(values))
            return
        path, _, text = values[1:].partition("=")
        before = getattr(namespace, self.dest, None)
        root: dict[str, Any] = dict(before) if isinstance(before, dict) else {}
        setattr(namespace, self.dest, root)
        *parents, leaf = path.split(".")
        inner = root
        for name in parents:
            inner[name] = dict(inner[name]) if isinstance(inner.get(name), dict) else {}
            inner = inner[name]
        if leaf.endswith("+"):
            inner[leaf[:-1]] = [*inner.get(leaf[:-1], []), parse_json_or_text(text)]
        else:
            inner[leaf] = parse_json_or_text(text)


class FlagParser(argparse.ArgumentParser):
    """argparse that also reads `--a_b` as `--a-b`, `--json-flag.key value` and `--config FILE`, with help by
    topic and one-line errors."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace = argparse.Namespace() if namespace is None else namespace
        tokens = self._normalize(list(sys.argv[1:] if args is None else args))
        self._print_help_topic(tokens)
        for path in self._config_files(tokens):
            self._read_config(path, namespace)
        return super().parse_known_args(tokens, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = self.parse_known_args(args, namespace)
        flag = next((token for token in rest if token.startswith("-")), None)
        if flag is not None:
            name = flag.split("=")[0]
            self.error(f"unknown flag {name}{nearest(name, sorted(set(self._all_flags())))}")
        if rest:
            self.error(f"unexpected argument {rest[0]!r}")
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def format_help(self) -> str:
        """Format one line per flag; `--help=all` and `--help=TOPIC` print the full text."""
        if self._subparsers is not None:
            return super().format_help()
        lines = [f"usage: {self.prog} [flags]{self._usage_rest()}"]
        lines += ["", self.description] if self.description else []
        for group in self._action_groups:
            shown = [
                _format_line(action) for action in group._group_actions if action.help != argparse.SUPPRESS
            ]
            lines += ["", f"{group.title}:", *shown] if shown else []
        if topics := ", ".join(self._topics()):
            lines += ["", "Defaults are in brackets. More: --help=all, --help=FLAG, --help=listgroup,"]
            lines += ["--help=WORD for the flags with that word in their names, or"]
            lines += [f"--help=GROUP with GROUP of {topics}."]
        return "\n".join([*lines, *(["", self.epilog] if self.epilog else [])]) + "\n"

    def _topics(self) -> list[str]:
        return [str(group.title) for group in self._action_groups if group.title not in _NO_TOPICS]

    def _usage_rest(self) -> str:
        named = (action.metavar or action.dest for action in self._get_positional_actions())
        return "".join(f" [{name}]" for name in named)

    def _all_flags(self) -> Iterator[str]:
        yield from self._option_string_actions
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._all_flags() if isinstance(parser, FlagParser) else ()

    def _normalize(self, args: Sequence[str]) -> list[str]:
        """Return `args` with `-` in flag names, and with `--flag.key value` of a JSON flag as one token."""
        tokens: list[str] = []
        rest = iter(args)
        for token in rest:
            if token == "--":
                return [*tokens, token, *rest]
            dotted = _DOTTED_FLAG.fullmatch(token)
            flag = self._flag(dotted[1]) if dotted else None
            if dotted and flag and isinstance(self._option_string_actions[flag], JsonFlag):
                value = dotted[3] if dotted[3] is not None else next(rest, None)
                if value is None:
                    self.error(f"{token} needs a value")
                tokens.append(f"{flag}={_DOTTED_VALUE}{dotted[2]}={value}")
            elif token.startswith("--"):
                tokens.append(_FLAG_NAME.sub(lambda name: name[0].replace("_", "-"), token, count=1))
            else:
                tokens.append(token)
        return tokens

    def _flag(self, name: str) -> str | None:
        """Return the flag `name`, or the only flag that starts with `name`; else None."""
        name = name.replace("_", "-")
        if name in self._option_string_actions:
            return name
        longer = [flag for flag in self._option_string_actions if flag.startswith(name)]
        return longer[0] if name.startswith("--") and len(longer) == 1 else None

    def _print_help_topic(self, tokens: Sequence[str]) -> None:
        before_command = tokens
        if self._subparsers is not None:
            first = next((i for i, token in enumerate(tokens) if not token.startswith("-")), len(tokens))
            before_command = tokens[:first]
        topic = next(
            (token.partition("=")[2] for token in before_command if token.startswith("--help=")), None
        )
        if topic is not None:
            self._print_message(self._help_on(topic), sys.stdout)
            self.exit()

    def _help_on(self, topic: str) -> str:
        if topic.lower() == "all":
            return super().format_help()
        if topic.lower() == "listgroup":
            return "\n".join(self._topics()) + "\n"
        for group in self._action_groups:
            if str(group.title).lower().removesuffix("config") == topic.lower().removesuffix("config"):
                return "\n".join([f"{group.title}:", *map(_format_full, group._group_actions)]) + "\n"
        if flag := self._flag("--" + topic.lstrip("-")):
            return _format_full(self._option_string_actions[flag]) + "\n"
        word = topic.lstrip("-").replace("_", "-").lower()
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        named = [action for action in shown if any(word in name for name in action.option_strings)]
        if not named:
            known = [*self._topics(), *(name.lstrip("-") for name in self._option_string_actions)]
            self.error(f"no help on {topic!r}{nearest(topic, known)}")
        return "\n".join(map(_format_line, named)) + "\n"

    def _config_files(self, tokens: Sequence[str]) -> Iterator[str]:
        if "--config" not in self._option_string_actions:
            return
        for token, after in zip(tokens, [*tokens, None][1:], strict=True):
            if token == "--":
                return
            if token == "--config" and after is not None:
                yield after
            elif token.startswith("--config="):
                yield token.partition("=")[2]

    def _read_config(self, path: str, namespace: argparse.Namespace) -> None:
        """Store the values of a --config file as defaults that the command line can override."""
        import yaml

        try:
            content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            self.error(f"--config {path} cannot be read: {' '.join(str(error).split())}")
        if not isinstance(content, dict | None):
            self.error(f"--config {path} must hold `flag: value` lines, not a {type(content).__name__}")
        self.apply(content or {}, f"--config {path}", namespace)

    def apply(self, content: dict[Any, Any], where: str, namespace: argparse.Namespace) -> None:
        """Store the values of a file (`content`, by flag name) in the namespace; errors begin with
        `where`."""
        for key, value in content.items():
            flag = "--" + str(key).replace("_", "-")
            action = self._option_string_actions.get(flag)
            if action is None and isinstance(value, dict):
                self.apply(value, where, namespace)
            elif action is None:
                self.error(f"{where}: unknown flag {key!r}{nearest(flag, [*self._option_string_actions])}")
            elif value is not None:
                setattr(namespace, action.dest, self._config_value(action, key, value, where))

    def _config_value(self, action: argparse.Action, key: str, value: Any, where: str) -> Any:
        if isinstance(action, JsonFlag):
            return parse_json_or_text(value) if isinstance(value, str) else value
        if action.nargs == 0:
            if not isinstance(value, bool):
                self.error(f"{where}: {key} must be true or false, not {value!r}")
            return value
        texts = [str(entry) for entry in (value if isinstance(value, list) else [value])]
        try:
            return self._get_values(action, texts)
        except argparse.ArgumentError as error:
            self.error(f"{where}: {error}")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add every engine flag, one group per section; the namespace contains only flags that are set. A flag
    that the parser already has is left alone."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file of flags; the command line wins.",
    )
    add_section_flags(parser, SECTIONS)
    hidden = parser.add_argument_group(HIDDEN_TITLE)
    taken = parser._option_string_actions
    for name in sorted(name for name in other_names() if _flags(name, "")[0] not in taken):
        switch = name in IGNORED_SWITCHES or is_switch("engine argument", name)
        add_foreign_flag(hidden, name, switch=switch, several=name in LISTS)


def add_section_flags(
    parser: argparse.ArgumentParser, sections: Mapping[str, type], *, prefix: str = ""
) -> None:
    """Add the flags of these sections, one group each. In the namespace their names start with `prefix`."""
    known, groups = options_of(sections), {}
    help_of: dict[str, str] = {}
    for section, cls in sections.items():
        groups[section] = parser.add_argument_group(cls.__name__.removesuffix("Section"))
        help_of |= field_help(cls)
    for option in known.values():
        text = help_of[option.name] + _default_note(option)
        _add_flag(groups[option.section], option, text, prefix)


def engine_args_from(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the engine arguments that the user set: the first argument of `resolve()`."""
    known = options().keys() | other_names()
    return {name: value for name, value in vars(namespace).items() if name in known}


def _flags(name: str, short: str) -> list[str]:
    return [f"--{name.replace('_', '-')}", *([short] if short else [])]


def _add_flag(group: Any, option: Option, text: str, prefix: str) -> None:
    shared: dict[str, Any] = {
        "dest": prefix + option.name,
        "default": argparse.SUPPRESS,
        "help": text.replace("%", "%%"),
    }
    flags = _flags(option.name, option.rule.short)
    if option.kind is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **shared)
    elif option.kind in (dict, list):
        group.add_argument(*flags, action=JsonFlag, metavar="JSON", **shared)
    elif option.kind is tuple:
        action = "extend" if option.rule.repeats else "store"
        group.add_argument(*flags, nargs="+", action=action, metavar="NAME", **shared)
    else:
        metavar = "{" + ",".join(option.choices) + "}" if option.choices else _METAVARS[option.kind]
        group.add_argument(*flags, type=_reader(option), metavar=metavar, **shared)


def add_foreign_flag(group: Any, name: str, *, switch: bool, several: bool = False, prefix: str = "") -> None:
    """Add a flag of another engine, which the help does not show. A `switch` has no value; `several` values
    are a list."""
    shared: dict[str, Any] = {"dest": prefix + name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    flags = _flags(name, SHORT.get(name, ""))
    if switch:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **shared)
    elif several:
        group.add_argument(*flags, nargs="+", type=parse_json_or_text, **shared)
    else:
        group.add_argument(*flags, action=JsonFlag, **shared)


def _reader(option: Option) -> Callable[[str], Any]:
    read: Callable[[str], Any] = human_int if option.rule.human else option.kind

    def value(text: str) -> Any:
        if option.optional and text in ("", "None"):
            return None
        if option.choices and text not in option.choices:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(option.choices)}")
        return text if option.rule.auto and text == "auto" else read(text)

    value.__name__ = option.kind.__name__
    return value


_METAVARS = {int: "N", float: "X", str: "TEXT"}
HIDDEN_TITLE = "Other engines' flags"
_NO_TOPICS = ("positional arguments", "options", HIDDEN_TITLE)


@functools.cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    """Return the syntax trees of a module's classes: the file is parsed once for all its sections."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


@functools.cache
def field_help(section: type) -> dict[str, str]:
    """Return the docstring of each field of the section, read from its source."""
    cls = _classes_of(section.__module__)[section.__name__]
    help_of = {}
    for item, after in zip(cls.body, cls.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            help_of[item.target.id] = " ".join(str(after.value.value).split())
    return help_of


def _default_note(option: Option) -> str:
    if option.default in (None, {}, (), ""):
        return ""
    shown = " ".join(option.default) if option.kind is tuple else option.default
    return f" Default: {shown}."


def _title(action: argparse.Action) -> str:
    names = ", ".join(flag for flag in action.option_strings if not flag.startswith("--no-"))
    if isinstance(action, argparse.BooleanOptionalAction):
        names = names.replace("--", "--[no-]")
    shown = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return f"{names}{shown}" if names else str(action.metavar or action.dest)


def _format_line(action: argparse.Action) -> str:
    title = re.sub(r"\{.*\}", "CHOICE", _title(action))
    text = (action.help or "").replace("%%", "%")
    sentence = re.split(r"(?<=\.) ", text)[0]
    default = re.search(r" Default: (.*?)\.( |$)", text)
    return f"  {title:<36} {sentence}" + (f" [{default[1]}]" if default else "")


def _format_full(action: argparse.Action) -> str:
    is_shown = action.help != argparse.SUPPRESS
    text = (
        (action.help or "").replace("%%", "%")
        if is_shown
        else "Accepted for old scripts: ignored, or not supported yet."
    )
    return f"  {_title(action)}\n{textwrap.indent(textwrap.fill(text, 100), '      ')}"
