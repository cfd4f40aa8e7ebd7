"""Count violations of the language rules: docstring fragments, data described as persons, vague names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from sources import nodes_of, text_of

FRAGMENT = re.compile(
    r"(Of|What|Who|Whom|Whose|That|Its|Those|These|Theirs|Such|The same|Which|And|But|Or|As|Where)\b"
)
"""First words of a docstring that is no sentence. "Whether ..." describes a flag."""
_IMPERATIVES = """
    abort accept add admit advance align allocate allow answer append apply assert assign attach await
    begin bind block bring broadcast build bump cache call cancel capture cast change charge check
    choose clean clear clone close collect combine compare compile complete compute concatenate
    configure connect constrain construct convert copy count create cut deal decide declare decode
    decompress decrement define delete deliver dequantize derive describe detect determine disable download
    discard dispatch divide do drain draw drop dump emit empty enable encode end enforce ensure enter
    estimate evaluate evict examine execute exit expand expect export extend extract fail feed fetch fill
    filter find finish fit flatten flush follow forget format forward free freeze fuse gather
    generate get give group guess handle hash hold hide hand ignore import include increase index
    infer initialize insert install interleave invert issue join keep kill launch lay leave let
    limit link list listen load lock log look lower make map mark mask match measure merge mix move
    multiply name narrow normalize note notify number offer offload open order pack pad parse pass
    pause pick pin place plan play poll pool pop prepare prefill preempt print probe process profile
    project propose provide publish pull push put quantize queue raise rank read rebuild receive record
    recover reduce refresh refuse register reject release reload remember remove render reorder
    repack repeat replace reply report request reserve reset reshape resize resolve restart restore
    resume retire retry return reuse rotate round route run sample save scale scan schedule score
    search select send serve set shard share show shrink shut signal skip sleep slice sort split
    spread stack start state stay step stop store stream strip submit subtract sum swap switch
    synchronize take tell tokenize train transform translate transpose trim try tune turn undo
    unload unpack update use validate verify visit wait wake walk warm warn watch widen wrap write
    yield
"""
IMPERATIVES = frozenset(_IMPERATIVES.split())
VERB = re.compile(
    r"\b(is|are|was|were|be|been|has|have|had|does|do|did|can|cannot|could|may|might|must|will|would|should|"
    r"need|needs|take|takes|give|gives|make|makes|return|returns|raise|raises|hold|holds|keep|keeps|read|reads|"
    r"write|writes|say|says|stand|stands|come|comes|go|goes|get|gets|use|uses|see|sees|belong|belongs|end|ends|"
    r"begin|begins|ask|asks|know|knows|count|counts|run|runs|wait|waits|call|calls|mean|means|contain|"
    r"contains|fit|fits|become|becomes|send|sends|start|starts|stop|stops|depend|depends|follow|follows|compute|computes|"
    r"multiply|multiplies|apply|applies|share|shares|lie|lies|leave|leaves|allow|allows|differ|differs|"
    r"accept|accepts)\b"
)
PERSON = re.compile(
    r"\b(who|whom|nobody|somebody|anybody|everybody|whoever|someone|anyone|everyone)\b", re.IGNORECASE
)
_VAGUE = "given asked told found own each said has who which theirs ours mine those these it they"
VAGUE = frozenset(_VAGUE.split())


def documented(nodes: list[ast.AST]) -> Iterator[tuple[int, str, bool]]:
    """Yield every docstring with its line, and whether it belongs to a function; fields have strings after
    them."""
    for node in nodes:
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for i, entry in enumerate(body):
            if not (isinstance(entry, ast.Expr) and isinstance(entry.value, ast.Constant)):
                continue
            if not isinstance(entry.value.value, str):
                continue
            of_function = i == 0 and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            is_first = i == 0 and isinstance(node, ast.Module | ast.ClassDef)
            if of_function or is_first or isinstance(body[i - 1], ast.AnnAssign | ast.Assign):
                yield entry.lineno, entry.value.value, of_function


def is_fragment(text: str, of_function: bool) -> bool:
    """Return whether a docstring is no sentence: by its first word, or because a function's has no verb."""
    text = " ".join(text.split())
    if FRAGMENT.match(text):
        return True
    if not of_function:
        return False
    sentence = re.split(r"(?<=[.:;])\s", text, maxsplit=1)[0]
    first = re.match(r"`?(\w+)", text)
    word = first[1].lower() if first else ""
    if word in IMPERATIVES or word.removesuffix("s") in IMPERATIVES or word.removesuffix("es") in IMPERATIVES:
        return False
    return not (word.startswith("whether") or VERB.search(sentence))


def comments(source: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.splitlines(), 1):
        if (at := line.find("# ")) >= 0 and line[:at].count('"') % 2 == 0:
            yield number, line[at + 2 :]


def vague_names(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield parameters and variables with vague names; those of one- or two-line loops may be short."""
    for node in nodes:
        if isinstance(node, ast.arg) and node.arg in VAGUE:
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            yield node.lineno, node.id


def findings(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield the kind, line and text of every finding in a file."""
    source, nodes = text_of(path), nodes_of(path)
    for line, text, of_function in documented(nodes):
        if is_fragment(text, of_function):
            yield "fragment", line, " ".join(text.split())[:100]
        if PERSON.search(text):
            yield "person", line, " ".join(text.split())[:100]
    for line, text in comments(source):
        if PERSON.search(text):
            yield "person", line, text[:100]
    for line, name in vague_names(nodes):
        yield "vague", line, name
