r"""Text from outside on a terminal and in a page: control characters are shown, never sent.

File names, labels of data and messages of other libraries can hold anything. An escape character could recolor or
rewrite the terminal, a line break could forge a line of output, and an override of the writing direction could show
one name as another. All output of the lab goes through this file:

    a\x1b[2Jb   is printed as the characters   a \ x 1 b [ 2 J b
"""

import sys
import unicodedata
from typing import TextIO

# Control and formatting characters (which reorder or hide text), line and paragraph separators, and surrogates, which
# stand for bytes of file names that are not UTF-8 and cannot be encoded.
HIDDEN_CATEGORIES = ("Cc", "Cf", "Zl", "Zp", "Cs")
MAX_LINE_CHARACTERS = 2000  # A message may quote a file.
JOINERS = "\u200c\u200d"  # of category Cf, but parts of words in some scripts


def printable(text: object) -> str:
    r"""Return text with control characters as escape sequences, as in Python's string literals.

    >>> print(printable("a\x1b[2J\nb"), printable("d\u202eef"), printable("é ∑ 日本"))
    a\x1b[2J\nb d\u202eef é ∑ 日本
    """
    given = str(text)
    if given.isprintable():
        return given
    return "".join(_escaped(c) if _is_hidden(c) else c for c in given)


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in HIDDEN_CATEGORIES and character not in JOINERS


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", errors="backslashreplace").decode()


def one_line(text: object) -> str:
    """Return a message that may span several lines as a single printable line of limited length."""
    line = " ".join(str(text).split())
    return printable(line if len(line) <= MAX_LINE_CHARACTERS else f"{line[: MAX_LINE_CHARACTERS - 4]} ...")


def say(*lines: object, to_error: bool = False, flush: bool = False) -> None:
    """Print lines to standard output or standard error; line breaks inside a line are escaped."""
    stream: TextIO = sys.stderr if to_error else sys.stdout
    stream.write("".join(f"{printable(line)}\n" for line in lines))
    if flush:
        stream.flush()


def warn(message: object) -> None:
    """Print a warning as a single line."""
    say(f"subquad: warning: {one_line(message)}", to_error=True)
