"""How heavy the English of the pages is: sentences, cells, old words. Code is not read.

Tables between `<!-- .. -->` and `<!-- end -->` are made by programs; results/log/ holds old plans.
"""

import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("examples", "plain", "results", "theory")
PAGES = [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in ROOT.glob(f"{name}/**/*.md"))]
PAGES = [page for page in PAGES if page.parent.name != "log"]
OLD_WORD = re.compile(  # what we write instead: model, select, method, fraction, again, ..
    r"\b(?:nets?|draws?|drawn|arms?|shares?|anew|beside|parts|heeds?|unlike|alike|trainings|whose"
    r"|dealt|deals|somebody's|stands? for|in place of|of which|that of|those of|of ours|but for"
    r"|hence|likewise|wherein|thereof|so many|as printed|maybe)\b",
    re.I,
)
NO_ZERO = re.compile(r"(?<![\w.\]/*])[+−-]?\.\d")  # .6, but not 0.6, x.5 or v1.2
UNREAD = (
    r"<!-- (?!end).*?<!-- end.*?-->",  # a table made by a program
    r"^ *```.*?^ *```",
    r"(?<=\])\([^)]*\)",  # where a link leads
    r"^#+ .*?$",
)


def read(text: str) -> str:
    """What a reader reads, paragraphs separated by an empty line."""
    for pattern in UNREAD:
        text = re.sub(pattern, "", text, flags=re.S | re.M)
    return re.sub(r"\$`.*?`\$", "x", text)


def sentence_lengths(text: str) -> list[int]:
    """The words of each sentence outside tables; a list item ends one, too."""
    prose = re.sub(r"^\s*\|.*$", "", text, flags=re.M)
    lengths = []
    for block in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", prose, flags=re.M):
        for sentence in re.split(r"(?<=[.?!:])[*`)]*\s+(?=[A-Z*`\[])", block):
            lengths.append(len(sentence.split()))
    return sorted(length for length in lengths if length > 2)


def longest_cell(text: str) -> int:
    cells = [0]
    for row in re.findall(r"^\s*\|(.*)\|\s*$", text, flags=re.M):
        cells += [len(cell.split()) for cell in re.split(r"(?<!\\)\|", row)]
    return max(cells)


def old_words(text: str) -> list[str]:
    """Names of the code and texts of links may keep theirs."""
    return OLD_WORD.findall(re.sub(r"`[^`]*`|\[[^\]]*\]", "", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_plain(page):
    text = read(page.read_text())
    lengths = sentence_lengths(text)
    assert statistics.median(lengths) <= 13
    assert lengths[int(0.95 * len(lengths))] <= 25
    assert longest_cell(text) <= 20
    assert len(old_words(text)) <= 4 * len(text.split()) / 1000, old_words(text)
    assert NO_ZERO.findall(text) == []


def test_the_front_page_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 1100


def test_the_measures_by_hand():
    text = "One two three. Four five six seven!\n\n- eight nine ten\n\n| a b | c |\n|---|---|\n"
    assert sentence_lengths(read(text + "```\nnot this one\n```\n")) == [3, 3, 4]
    assert longest_cell(text) == 2
    assert old_words("a net draws the `net` of [a share](x) anew") == ["net", "draws", "anew"]
    assert NO_ZERO.findall("0.5, .6, [-.7, x.8], file.py, 1.0") == [".6", "-.7"]
