"""A test matches a few key words of a message, not its sentence, so that sentences can be improved."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MOST_WORDS = 4
# With fewer patterns than this, the search below has lost them.
LEAST_PATTERNS = 400


def plain_words(pattern: str) -> list[str]:
    """Return the English words of a pattern: no quoted or dotted names, no numbers, no class names."""
    words = []
    for piece in re.split(r"\.\*|\s+|\|", pattern):
        if piece.lstrip("([\\").startswith(("'", '"', "`")):
            continue
        word = piece.strip("^$,.:;!?()[]'\"`")
        is_class_name = re.search("[a-z][A-Z]", word) is not None
        if re.fullmatch("[A-Za-z]+(['-][A-Za-z]*)*", word) and not is_class_name:
            words.append(word)
    return words


def text_of(value: ast.expr | None) -> str | None:
    """Return the text of a string, of an f-string with ``0`` for each value, or of ``re.escape`` of one."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "re.escape":
        return text_of(value.args[0])
    if isinstance(value, ast.JoinedStr):
        return "".join(text_of(part) or "0" for part in value.values)
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    return None


def parametrized(function: ast.FunctionDef, name: str) -> list[ast.expr]:
    """Return the values that ``pytest.mark.parametrize`` gives to an argument of a test."""
    values = []
    for mark in function.decorator_list:
        if not isinstance(mark, ast.Call) or not ast.unparse(mark.func).endswith("parametrize"):
            continue
        names = ast.literal_eval(mark.args[0])
        if name not in names or not isinstance(mark.args[1], ast.List):
            continue
        for row in mark.args[1].elts:
            columns = row.args if isinstance(row, ast.Call) else getattr(row, "elts", [])
            values.append(row if isinstance(names, str) else columns[names.index(name)])
    return values


def patterns(source: str) -> list[tuple[int, str]]:
    """Return the line and the text of each pattern that ``match=`` gets in a source."""
    tree = ast.parse(source)
    constants = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = node.value
    values: list[ast.expr] = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for keyword in ast.walk(function):
            if not isinstance(keyword, ast.keyword) or keyword.arg != "match":
                continue
            values.append(keyword.value)
            if isinstance(keyword.value, ast.Name):
                values += parametrized(function, keyword.value.id)
                if keyword.value.id in constants:
                    values.append(constants[keyword.value.id])
    texts = {(value.lineno, value.col_offset): text_of(value) for value in values}
    return [(line, text) for (line, _), text in sorted(texts.items()) if text is not None]


def sentences(source: str) -> list[tuple[int, str]]:
    """Return the patterns of a source that have too many words."""
    return [found for found in patterns(source) if len(plain_words(found[1])) > MOST_WORDS]


def test_messages_are_matched_by_a_few_words() -> None:
    count = 0
    too_long = []
    for path in sorted(TESTS.rglob("*.py")):
        source = path.read_text()
        count += len(patterns(source))
        for line, text in sentences(source):
            too_long.append(f"{path.relative_to(TESTS)}:{line}: {text}")
    assert count > LEAST_PATTERNS
    assert too_long == []


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("steps must be an integer, at least 1", ["steps", "must", "be", "an", "integer", "at", "least"]),
        (r"steps.*got -1", ["steps", "got"]),
        (r"'0\.weight' and model\.norm of BertModel", ["and", "of"]),
        ("the model's one-shot", ["the", "model's", "one-shot"]),
        ("written|made", ["written", "made"]),
    ],
)  # fmt: skip
def test_words_are_counted_without_names_and_values(pattern: str, words: list[str]) -> None:
    assert plain_words(pattern) == words


LONG = '"steps must be an integer"'


@pytest.mark.parametrize(
    "source",
    [
        f"def test(): raises(E, match={LONG})",
        f"def test(): raises(E, match=f{LONG})",
        f"def test(): raises(E, match=re.escape({LONG}))",
        f"WORDS = {LONG}\ndef test(): raises(E, match=WORDS)",
        f"@mark.parametrize('words', [{LONG}])\ndef test(words): raises(E, match=words)",
        f"@mark.parametrize(('x', 'words'), [(1, {LONG})])\ndef test(x, words): raises(E, match=words)",
        f"@mark.parametrize(('x', 'words'), [param(1, {LONG})])\n"
        "def test(x, words): raises(E, match=words)",
    ],
)
def test_a_sentence_is_found(source: str) -> None:
    assert [text for _, text in sentences(source)] == ["steps must be an integer"]
