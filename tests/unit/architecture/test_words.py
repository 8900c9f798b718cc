"""The words of the project: Kafka's, HTTP's and asyncio's nouns, and no metaphors."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
CODE = [path for folder in ("packages", "bench", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
CODE.remove(
    ROOT / "packages/headrace-devkit/src/headrace_devkit/testing/pump_harness.py"
)  # the unit tests of delivery use its names
READMES = sorted(ROOT.glob("packages/*/README.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")), *READMES]

NAMES = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text())
"""A part of an identifier, and what to write instead."""

PERMITTED_NAMES = {
    "ascii_letters": "of the standard library",
    "came_from": "field `cameFrom` of the HTTP API",
    "in_doubt": "the term for a transaction whose commit is not confirmed",
    "_in_doubt": "the same",
    "keeps_offsets_elsewhere": "of the error OffsetsKeptElsewhere",
    "OffsetsKeptElsewhere": "a code of the HTTP API",
    "seed": "of random numbers",
    "tell": "of files",
}

PHRASES: dict[str, str] = yaml.safe_load(Path(__file__).with_name("phrases.yaml").read_text())
"""A phrase of a comment, text or page, and what to write instead."""

PERMITTED_PHRASES = {
    "small letters": "lower case",
    "ASCII letters": "characters",
    '"letters"': "field of the HTTP API",
    "`letters`": "the same",
    "X-Headrace-Header-Place": "a header of an example",
    ".tell()": "of files",
}

MOST_WORDS = 25

PHRASE = re.compile("|".join(rf"(?<![\w`./{{-])(?:{phrase})(?![\w`/])" for phrase in PHRASES), re.IGNORECASE)
PERMITTED = re.compile("|".join(map(re.escape, PERMITTED_PHRASES)))


def parts(name: str) -> list[str]:
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


def tokens(path: Path) -> Iterator[tokenize.TokenInfo]:
    yield from tokenize.generate_tokens(io.StringIO(path.read_text()).readline)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments and texts of a file, or the prose of a page, with their lines."""
    if path.suffix == ".py":
        for token in tokens(path):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                text = re.sub(r"(?<=\n) +", "", token.string)
                yield token.start[0], re.sub(r"(?<=dead)\n(?=letter)", " ", text)
        return
    prose = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), path.read_text(), flags=re.M | re.S)
    for number, line in enumerate(prose.split("\n"), 1):
        yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)


def test_names_are_of_the_usual_nouns() -> None:
    """Kafka's word, HTTP's or asyncio's; a word of the project has an entry in docs/glossary.md."""
    found = set()
    for path in CODE:
        for token in tokens(path):
            if token.type == tokenize.NAME and token.string not in PERMITTED_NAMES:
                split = parts(token.string)
                for before, part in zip(["", *split], split, strict=False):
                    if part in NAMES and not (part.startswith("letter") and before == "dead"):
                        found.add(f"{path.relative_to(ROOT)}: {token.string}: write {NAMES[part]}")
    assert found == set()


def test_sentences_have_no_metaphors() -> None:
    """A reader who knows Kafka, and perhaps not much English, reads each sentence once."""
    found = []
    for path in [*CODE, *PAGES]:
        for number, text in texts(path):
            for match in PHRASE.finditer(PERMITTED.sub("", text)):
                use = next(use for phrase, use in PHRASES.items() if re.fullmatch(phrase, match[0], re.IGNORECASE))
                line = number + text[: match.start()].count("\n")
                found.append(f"{path.relative_to(ROOT)}:{line}: {match[0]}: write {use}")
    assert "\n".join(found) == ""


def sentences(docstring: str) -> Iterator[str]:
    """Yield what ends with a full stop, a semicolon or a colon; tables and drawings are left out."""
    for paragraph in re.split(r"\n\s*\n|\n\s*\w+: ", docstring):
        if "|" not in paragraph and "--" not in paragraph and not re.search(r"\S {3,}\S", paragraph):
            yield from re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_sentences_are_short() -> None:
    """One idea, and at most 25 words, in docstrings and on pages; tables and lists of code have no sentences."""
    prose = [(path, line, text) for path in CODE for line, text in docstrings(path)]
    pages = [path for path in PAGES if path.parent.name != "reference"]
    prose += [(path, line, text.lstrip("-* ")) for path in pages for line, text in texts(path)]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {sentence}"
        for path, line, text in prose
        for sentence in sentences(text)
        if len(sentence.split()) > MOST_WORDS
    ]
    assert "\n".join(found) == ""
