"""Ends a sample at the token that completes one of its stop strings.

In: the tokens of one sample as they are made, a tokenizer's `decode`. Out: how many of them to keep. Called by the
scheduler's harvest, for the requests that have stop strings. Waits for nobody.

Tokens are never altered: text that the last token has behind the stop string stays in it. The text searched is that of
`decode`, without special tokens.
"""

from collections.abc import Callable, Sequence

STOP_STRINGS = 16  # stop strings a request may have
LONGEST = 256  # characters of one; each token costs a decode of the tokens behind some two times as many
BROKEN = "\ufffd"  # what `decode` gives for bytes that are no character yet, or never will be


def check(stop_strings: Sequence[str]) -> None:
    """ValueError for stop strings that no server takes."""
    if len(stop_strings) > STOP_STRINGS:
        raise ValueError(f"{len(stop_strings)} stop strings; a request may have {STOP_STRINGS}")
    for text in stop_strings:
        if not text:
            raise ValueError("a stop string is empty, which every text holds; leave it out")
        if len(text) > LONGEST:
            raise ValueError(f"a stop string has {len(text)} characters; it may have {LONGEST}")
        if BROKEN in text:
            raise ValueError(f"the stop string {text!r} holds U+FFFD, which stands for bytes that are no text")


class StopStrings:
    """Watches one sample.

    It holds the last tokens only: those of `_before`, whose text is at least as long as the longest stop string, as the
    beginning of what `_since` may complete (a token's text may depend on the one before it, too). They are cut only
    where a character is whole, or after so many tokens that what they hold is no text.
    """

    def __init__(self, stop_strings: Sequence[str], decode: Callable[[Sequence[int]], str], *, ignored: int = 0):
        """What the first `ignored` tokens complete is no end."""
        self._strings = stop_strings
        self._decode = decode
        self._ignored = ignored
        self._longest = max(map(len, stop_strings))
        self._most = 16 + 4 * self._longest  # tokens of `_since`; a character has at most four bytes
        self._before: list[int] = []
        self._since: list[int] = []
        self._before_text = ""
        self._text = ""  # of all of them

    def skip(self, tokens: Sequence[int]) -> None:
        """Takes tokens that were searched before, on another server."""
        self._ignored = max(0, self._ignored - len(tokens))
        self._before = list(tokens[-self._most :])
        self._before_text = self._text = self._decode(self._before)

    def kept(self, tokens: Sequence[int]) -> int | None:
        """How many of these tokens to keep, the one that completes a stop string included; None: none does."""
        for count, token in enumerate(tokens, start=1):
            if self._completes(token):
                return count
        return None

    def _completes(self, token: int) -> bool:
        whole = len(self._text.rstrip(BROKEN))  # characters that were there before; what comes must reach beyond
        text = self._decode([*self._before, *self._since, token])
        found = any(text.find(string, max(0, whole - len(string) + 1)) >= 0 for string in self._strings)
        if text != self._text or text.endswith(BROKEN):  # else it is a token without a text
            self._since.append(token)
        self._text = text
        self._cut()
        self._ignored -= 1
        return found and self._ignored < 0

    def _cut(self) -> None:
        enough = len(self._text) - len(self._before_text) >= self._longest and not self._text.endswith(BROKEN)
        if enough or len(self._since) >= self._most:
            self._before, self._since = self._since, []
            self._before_text = self._text = self._decode(self._before)
