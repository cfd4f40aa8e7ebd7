"""Incremental JSON: a value is emitted as far as it is certain to be the beginning of valid JSON."""

import re

from quire.text.parsers.streaming import Emit, Parser, Wait

_VALUE = '{["-0123456789tfn'
_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[-+.\w]*")
SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SCALAR_PREFIX = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE][-+]?[0-9]*)?)?|[eE][-+]?[0-9]*)?)?"
    r"|t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?"
)
_HEX = re.compile(r"[0-9a-fA-F]{0,4}")
_MAX_SCALAR = 4300
"""Maximum length of a number in characters: Python parses no more digits."""
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class JsonParser(Parser):
    """Base of parsers that read JSON."""

    def json_value(self, emit: Emit) -> Wait[bool]:
        """Pass the text of one JSON value to `emit`. Return False if the value is incomplete or invalid; the
        emitted text is the beginning of a valid value even then.

        Control characters and invalid escapes in strings, which models write at times, are corrected."""
        closers: list[str] = []
        expected = _VALUE
        while True:
            char = yield from self._json_space(emit)
            if not char or char not in expected:
                return False
            if char == '"':
                if not (yield from self._json_string(emit)):
                    return False
                is_key = expected[0] == '"'
                expected = ":" if is_key else ""
            elif char in "{[":
                self._emit_char(emit)
                closers.append("}" if char == "{" else "]")
                expected = '"}' if char == "{" else _VALUE + "]"
            elif char in "}]":
                self._emit_char(emit)
                closers.pop()
                expected = ""
            elif char == ",":
                self._emit_char(emit)
                expected = '"' if closers[-1] == "}" else _VALUE
            elif char == ":":
                self._emit_char(emit)
                expected = _VALUE
            else:
                if not (yield from self._json_scalar(emit)):
                    return False
                expected = ""
            if not expected:
                if not closers:
                    return True
                expected = "," + closers[-1]

    def _emit_char(self, emit: Emit) -> None:
        emit(self._buffer[self._position])
        self._position += 1

    def _json_space(self, emit: Emit) -> Wait[str]:
        while (char := (yield from self.peek())) and char in " \t\r\n":
            self._emit_char(emit)
        return char

    def _json_string(self, emit: Emit) -> Wait[bool]:
        self._emit_char(emit)
        while char := (yield from self.peek()):
            if run := _RUN.match(self._buffer, self._position):
                emit(run[0])
                self._position = run.end()
            elif char == '"':
                self._emit_char(emit)
                return True
            elif char == "\\":
                yield from self._json_escape(emit)
            else:
                emit(_CONTROL.get(char) or f"\\u{ord(char):04x}")
                self._position += 1
        return False

    def _json_escape(self, emit: Emit) -> Wait[None]:
        self._position += 1
        char = yield from self.peek()
        if char == "u":
            digits = _HEX.match(self._buffer, self._position + 1)
            while digits and digits.end() == len(self._buffer) and len(digits[0]) < 4:
                if not (yield from self.more()):
                    break
                digits = _HEX.match(self._buffer, self._position + 1)
            if digits and (len(digits[0]) == 4 or digits.end() == len(self._buffer)):
                emit("\\u" + digits[0])
                self._position = digits.end()
                return
        elif char and char in '"\\/bfnrt':
            emit("\\" + char)
            self._position += 1
            return
        elif char == "'":
            return
        emit("\\\\" if char else "\\")

    def _json_scalar(self, emit: Emit) -> Wait[bool]:
        """Emit a number or word when it ends; return False if it is invalid or truncated."""
        while True:
            word = _WORD.match(self._buffer, self._position, self._position + _MAX_SCALAR + 1)
            assert word is not None
            if word.end() < len(self._buffer) or not (yield from self.more()):
                break
        if len(word[0]) > _MAX_SCALAR:
            return False
        is_complete = SCALAR.fullmatch(word[0]) is not None
        is_truncated = (
            self._ended and word.end() == len(self._buffer) and _SCALAR_PREFIX.fullmatch(word[0]) is not None
        )
        if is_complete or is_truncated:
            emit(word[0])
            self._position = word.end()
        return is_complete
