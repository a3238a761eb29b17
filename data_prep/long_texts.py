"""Texts that tiktoken's regular expression would choke on, cut such that the ids stay those of the whole.

The patterns of MODELS split a text from left to right, without looking back, and look ahead only after white space (`\\s+(?!\\S)`). Hence:

- Between a letter and a character that is neither letter nor mark there is always a border, and the text after it splits as it would alone.
- A run of blanks, up to the end of the text or a character that is none, is one piece without its last blank (which may go with what
  follows), or whole at the end of the text. The expression matches it by backtracking and overflows its stack beyond some 100,000.
"""

import re

WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
BLANKS = "\t\v\f \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""White space without line ends, which Llama 3 and Qwen 3 keep apart: a run of white space there splits after its last line end."""

SEGMENT = 250_000
LONG_RUN = 2_000
# ASCII letters and common ideographs: letters in every version of Unicode. The lookahead is true at once in nearly every text.
_BORDER = re.compile(r"[A-Za-z\u4e00-\u9fff](?=[\x00-@\[-`{-~\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])")


def segments(text: str) -> list[str]:
    """Cut a text of over 500,000 characters after letters about every 250,000; one without such borders stays whole."""
    if len(text) <= 2 * SEGMENT:
        return [text]
    cuts = [0]
    while len(text) - cuts[-1] > 2 * SEGMENT and (match := _BORDER.search(text, cuts[-1] + SEGMENT)):
        cuts.append(match.end())
    return [text[first:last] for first, last in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def long_runs(text: str, characters: str) -> list[tuple[int, int]]:
    """First and last of every piece that is a run of 2,000 or more of `characters`, which are BLANKS or WHITE_SPACE."""
    # A run that long shows in every 200th character ten times in a row; so most of the text need not be looked at.
    if len(text) < LONG_RUN or not _run(characters, 10).search(text[:: LONG_RUN // 10]):
        return []
    found = []
    for match in _run(characters, LONG_RUN).finditer(text):
        first, last = match.span()
        if last == len(text):
            found.append((first, last))
        elif text[last] not in "\r\n":  # else it splits after a line end further on
            found.append((first, last - 1))
    return found


def _run(characters: str, least: int) -> re.Pattern[str]:
    return re.compile(f"[{characters}]{{{least},}}")
