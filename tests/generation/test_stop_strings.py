"""Where a sample ends, against a search in the whole text after every token."""

import random

import numpy as np
import pytest

from areal_jax.generation import stop_strings
from areal_jax.generation.stop_strings import LONGEST, STOP_STRINGS, StopStrings


def pieces(*texts: bytes):
    """A tokenizer whose token i is these bytes; None is a special token, which has no text."""
    return lambda ids: b"".join(texts[int(i)] or b"" for i in ids).decode("utf-8", errors="replace")


def kept(strings, decode, tokens, *, size=None, ignored=0):
    """How many of all tokens are kept when they come `size` at a time; None: all."""
    stop = StopStrings(strings, decode, ignored=ignored)
    size = size or len(tokens)
    for first in range(0, len(tokens), size):
        count = stop.kept(tokens[first : first + size])
        if count is not None:
            return first + count
    return None


def slow_kept(strings, decode, tokens):
    """The slow twin: the whole text after each token."""
    ends = (n for n in range(1, len(tokens) + 1) if any(string in decode(tokens[:n]) for string in strings))
    return next(ends, None)


def test_a_sample_ends_with_the_token_that_completes_a_stop_string():
    decode = pieces(b"He", b"llo", b"\n", b"\nUser", b": hi")
    assert kept(["\n\n"], decode, [0, 1, 2, 3, 4]) == 4  # "\n" + "\nUser": the text behind it stays in the token
    assert kept(["User:"], decode, [0, 1, 2, 3, 4]) == 5
    assert kept(["x", "Hello"], decode, [0, 1, 2, 3, 4]) == 2
    assert kept(["hello"], decode, [0, 1, 2, 3, 4]) is None


def test_a_stop_string_may_be_split_within_a_character():
    euro = "€".encode()
    decode = pieces(b"5 ", euro[:1], euro[1:2], euro[2:] + b"!", None)
    assert kept(["5 €"], decode, [0, 1, 2, 3]) == 4
    assert kept(["€"], decode, [1, 2, 4, 3]) == 4  # a special token between its bytes has no text
    assert kept(["!"], decode, [1, 0, 3]) == 3  # bytes that never become a character are passed over


def test_tokens_ignored_complete_nothing():
    decode = pieces(b"E", b"N", b"D")
    assert kept(["END"], decode, [0, 1, 2, 0, 1, 2], ignored=2) == 3
    assert kept(["END"], decode, [0, 1, 2, 0, 1, 2], ignored=3) == 6
    assert kept(["END"], decode, [0, 1, 2, 0, 1], ignored=3) is None  # and what they hold is not found later


def test_tokens_of_another_server_are_the_beginning_of_a_stop_string_but_no_end():
    stop = StopStrings(["END", "EN"], pieces(b"E", b"N", b"D"), ignored=0)
    stop.skip([2, 2, 0, 1])
    assert stop.kept([2]) == 1
    stop = StopStrings(["N"], pieces(b"E", b"N", b"D"), ignored=5)
    stop.skip([2, 2, 0, 1])
    assert stop.kept([1, 0, 1]) == 3  # the fifth token is ignored, too


@pytest.mark.parametrize("seed", range(40))
def test_any_text_in_any_tokens_ends_where_the_whole_text_says(seed):
    rng = random.Random(seed)
    text = "".join(rng.choice("ab €😀é\n") for _ in range(400)).encode()
    edges = sorted(rng.sample(range(1, len(text)), rng.randint(60, len(text) - 1)))
    texts = [text[begin:end] for begin, end in zip([0, *edges], [*edges, len(text)], strict=True)]
    for at in range(0, len(texts), 7):
        texts.insert(at, None)
    decode, tokens = pieces(*texts), list(range(len(texts)))
    whole = text.decode()
    for length in (1, 2, 3, 5, 9):
        begin = rng.randrange(len(whole) - length)
        strings = [whole[begin : begin + length], "never there"]
        assert kept(strings, decode, tokens, size=rng.randint(1, 9)) == slow_kept(strings, decode, tokens)


@pytest.mark.parametrize("texts", [(b"a b ", b"c"), (b"\xe2", b"\x82"), (None, None), (b"a", None)])
def test_a_token_costs_a_decode_of_the_last_tokens_alone(texts):
    """Also where they are bytes without end that are no text, or have none."""
    sizes: list[int] = []
    decode = pieces(*texts)

    def counted(ids):
        sizes.append(len(ids))
        return decode(ids)

    assert kept(["\n\nUser:"], counted, [0, 1] * 2000) is None
    assert max(sizes) <= 2 * (16 + 4 * 7) + 1
    assert len(sizes) <= 2 * 4000


def test_sentencepiece_texts_whose_spaces_depend_on_the_token_before():
    tokenizers = pytest.importorskip("tokenizers")
    words = {"\u2581the": 0, "\u2581end": 1, "s": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5, "\u2581": 6, "<unk>": 7}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    library.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    decode = lambda ids: library.decode(list(ids))  # noqa: E731
    assert decode([0, 1, 2, 3, 4, 5]) == "the ends€"
    tokens = [0] * 30 + [3, 4, 5] * 30 + [0, 1, 2]
    for strings in (["the ends"], ["€the", "s"], ["€€"], [" the end"], ["the€€€€€€€€€€€€"]):
        assert kept(strings, decode, tokens, size=4) == slow_kept(strings, decode, tokens)


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        (["a"] * (STOP_STRINGS + 1), "17 stop strings; a request may have 16"),
        (["a", ""], "is empty"),
        (["a" * (LONGEST + 1)], "has 257 characters; it may have 256"),
        (["\ufffd"], r"holds U\+FFFD"),
    ],
)
def test_stop_strings_that_no_server_takes_are_refused(strings, message):
    with pytest.raises(ValueError, match=message):
        stop_strings.check(strings)
    stop_strings.check(["a", "b" * LONGEST])


def test_numpy_tokens_are_taken():
    assert kept(["b"], pieces(b"a", b"b"), np.array([0, 1], np.int32)) == 2
