"""Text to ids and back: files, tokenizers, batches."""

import bz2
import gzip
import io
import itertools
import lzma
import random
import unicodedata
import zipfile

import pytest

from attnfast._utils.checks import InputError
from attnfast.models import BOS, EOS, UNK
from attnfast.translate.data import (
    Example,
    SubwordTokenizer,
    WordTokenizer,
    batches,
    collate,
    decode_lines,
    encode_pairs,
    load_tokenizer,
    read_pairs,
    stream_lines,
)

pytest.importorskip("sentencepiece")


# Files


def test_pairs_are_read_plain_and_gzipped(tmp_path):
    (tmp_path / "a").write_bytes("eins\u2028zwei\r\n\ndrei".encode())
    (tmp_path / "b").write_bytes(gzip.compress(b"one two\nnothing\nthree\n"))
    pairs = read_pairs(tmp_path / "a", tmp_path / "b")
    assert pairs == [("eins\u2028zwei", "one two"), ("", "nothing"), ("drei", "three")]


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (b"x\ny\n", b"x\n", "b: expected 2 lines, as in .*a, got 1"),
        (b"x\ny\xff\n", b"x\ny\n", "a, line 2: expected UTF-8 text, got byte 0xff at position 2"),
        (b"", b"", "a: expected at least one line, got an empty file"),
        (b"", b"x\n", "a: expected at least one line, got an empty file"),
        (b"x\n", gzip.compress(b"", mtime=0), "b: expected at least one line, got an empty file"),
        (
            b"x\n",
            gzip.compress(b"x\n" * 99, mtime=0)[:-9],
            "b: expected a whole gzip file, got a broken one",
        ),
        (None, b"x\n", "cannot read .*a: No such file or directory"),
    ],
)
def test_bad_files_are_refused(tmp_path, a, b, message):
    for name, content in (("a", a), ("b", b)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_pairs(tmp_path / "a", tmp_path / "b")


def test_lines_end_as_the_file_has_them():
    assert decode_lines(b"a\rb\r", "x") == decode_lines(b"a\r\nb\r\n", "x") == ["a", "b"]
    assert decode_lines(b"a\rb\nc\n", "x") == ["a\rb", "c"]  # aligned files stay aligned
    assert decode_lines(b"\r\r", "x") == ["", ""] and decode_lines(b"", "x") == []


@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_lines_of_a_stream_are_those_of_the_whole(size):
    texts = ["", "a", "a\n", "a\r\nb\n", "\n\na\n\n", "a\rb\r", "a\nb\rc", "ä\nö", "\ufeffa\nb\n"]
    compressed = gzip.compress("\n".join(map(str, range(999))).encode())
    assert b"\n" in compressed
    for content in (*(text.encode() for text in texts), compressed):
        for most in (1, 2, 64):
            file = io.BytesIO(content)
            parts = list(stream_lines(lambda: file.read(size), "x", most))  # noqa: B023
            assert [line for part in parts for line in part] == decode_lines(content, "x")
            assert all(1 <= len(part) <= most for part in parts)


def test_lines_of_a_stream_come_at_once():
    blocks, read = [b"a\nb\nc", b"", b"d\n", b"e", b"\xff\n"], []

    def next_block():
        read.append(blocks.pop(0) or b"c")
        return read[-1]

    lines = stream_lines(next_block, "x")
    assert next(lines) == ["a", "b"] and len(read) == 1
    assert next(lines) == ["ccd"] and len(read) == 3
    message = "x, line 4: expected UTF-8 text, got byte 0xff at position 2"
    with pytest.raises(InputError, match=message):
        next(lines)


def zipped(content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("text", content)
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "compressed"),
    [("bzip2", bz2.compress), ("xz", lzma.compress), ("zip", zipped)],
)
def test_compressed_files_are_read_or_named(kind, compressed):
    assert decode_lines(gzip.compress(b"a\nb\n"), "x") == ["a", "b"]
    for text in (b"a\nb\n", b""):
        message = f"x: expected plain or gzipped text, got a {kind} file"
        with pytest.raises(InputError, match=message):
            decode_lines(compressed(text), "x")
    assert decode_lines(b"BZh is a name\n", "x") == ["BZh is a name"]


# Tokenizers


#: Text that is often changed: characters, blanks, and what sentencepiece keeps for itself.
TEXTS = [
    "کتاب\u200cهای من", "ශ්\u200dරී", "👩\u200d👧", "½ cup … m²", "ＡＢＣ１２", "10\u00a0000\u202f€",
    "Donau\xaddampf", "ﬁne", "Acme™", unicodedata.normalize("NFD", "Größe"), "Größe", "a  b   c",
    "a\u2581b", "▅ full", "a <unk> b </s> c <s> <pad>", "a\u2028b", "א\u200fב", "a\tb", "a\0b",
    "a\x1fb", "a\rb", "⁇ ?",
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "size"), [("bpe", 140), ("unigram", 78)])
def test_subwords_give_the_text_back(model_type, size):
    tokenizer = SubwordTokenizer.train(TEXTS * 5, size, model_type)
    for _ in range(2):
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text and min(ids) > UNK
        assert not tokenizer.lacking(TEXTS)
        tokenizer = load_tokenizer(tokenizer.kind, tokenizer.content())


def test_what_a_vocabulary_lacks_is_counted():
    texts = ["½ a", "½ b", "a bc"]
    subwords = SubwordTokenizer.train(["a b"] * 9, 8)
    assert subwords.lacking(texts) == {"½": 2, "c": 1}
    assert WordTokenizer.train(["a b"]).lacking(texts) == {"½": 2, "bc": 1}
    own = SubwordTokenizer.train(["a\tb \ufdd1"] * 9, 10)  # what a tab is written as
    assert own.lacking(["a\tb", "\ufdd1"]) == {"\ufdd1": 1}


def test_a_normalisation_form_is_kept():
    tokenizer = SubwordTokenizer.train(["Größe ½"] * 9, 15, form="NFC")
    tokenizer = load_tokenizer(tokenizer.kind, tokenizer.content())
    apart = unicodedata.normalize("NFD", "Größe ½")
    assert tokenizer.decode(tokenizer.encode(apart)) == "Größe ½"
    assert not tokenizer.lacking([apart]), "letters that are composed are not lost"
    compatible = SubwordTokenizer.train(["ｆｉｎｅ ½"] * 9, 16, form="NFKC")
    assert compatible.decode(compatible.encode("fine ﬁne ½")) == "fine fine 1⁄2"
    assert compatible.lacking(["½"]) == {"½": 1}
    with pytest.raises(ValueError, match="form must be 'NFC' or 'NFKC', got 'NFD'"):
        SubwordTokenizer.train(["a"], 9, form="NFD")


def test_long_lines_are_learnt_too():
    """Not only lines of at most 4,192 bytes, sentencepiece's own limit."""
    line = " ".join(f"w{i}" for i in range(2000)) + " ξ"
    tokenizer = SubwordTokenizer.train(["a b c", line], 60)
    assert UNK not in tokenizer.encode(line)


def test_an_error_of_the_sentences_stays_what_it_is():
    """Ctrl-C too, in a generator that sentencepiece would read from."""

    def sentences(error):
        yield "a b c"
        raise error

    for error in (KeyboardInterrupt(), UnicodeError("broken")):
        with pytest.raises(type(error)) as caught:
            SubwordTokenizer.train(sentences(error), 8)
        assert caught.value is error
    with pytest.raises(InputError, match="cannot learn subwords of this text: "):
        SubwordTokenizer.train([], 8)


def test_tokens_belong_to_words():
    texts = ["le  prix : 10\u00a0000 €", "prix\u00a0: le", "a\tle"]
    tokenizer = SubwordTokenizer.train([texts[0].replace("\u00a0", " "), *texts[1:]] * 9, 25)
    for text in texts:
        words = text.split()
        joined = dict.fromkeys(range(len(words)), "")
        for number, piece in zip(tokenizer.word_numbers(text), tokenizer.tokens(text)):
            joined[number] += piece.replace("\u2581", "").strip()
        assert list(joined.values()) == words
    together = SubwordTokenizer.train(["10\u00a0000 a"] * 9, 17)
    assert set(together.word_numbers("10\u00a0000 a")) == {-1}, "a token of two words"


def test_tokenizers_come_back_from_their_bytes():
    words, draw = ["eins", "zwei", "drei", "vier", "fünf"], random.Random(1)
    lines = [" ".join(draw.choices(words, k=draw.randint(3, 7))) for _ in range(240)]
    for tokenizer in (
        SubwordTokenizer.train(lines, 40),
        SubwordTokenizer.train(lines, 21, "unigram"),
        WordTokenizer.train(lines),
    ):
        again = load_tokenizer(tokenizer.kind, tokenizer.content())
        assert again.vocab_size == tokenizer.vocab_size
        assert again.encode("fünf drei") == tokenizer.encode("fünf drei")
        assert again.decode(again.encode("fünf drei")) == "fünf drei"
        assert min(again.encode("fünf drei")) > 3
        assert UNK in again.encode("fünf 漢")
    assert (
        SubwordTokenizer.train(lines, 40).content() == SubwordTokenizer.train(lines, 40).content()
    )
    with pytest.raises(InputError, match=r"vocab_size must be at most \d+ .*, got 9999"):
        SubwordTokenizer.train(lines, 9999)


def test_tokens_of_ids_and_of_a_source():
    tokenizer = SubwordTokenizer.train(["eins zwei drei \u2581 a\tb"] * 9, 30)
    source = "eins 漢字 a\tb"
    ids, tokens = tokenizer.encode(source), tokenizer.tokens(source)
    shown = tokenizer.to_tokens(ids)
    assert [x for x, i in zip(shown, ids) if i != UNK] == [
        x for x, i in zip(tokens, ids) if i != UNK
    ]
    assert UNK in ids and "漢字" in tokens and "漢字" not in shown
    replaced = [30 + j if i == UNK else i for j, i in enumerate(ids)]
    assert tokenizer.to_tokens(replaced, tokens) == tokens
    assert tokenizer.decode(replaced, tokens) == source


def test_words_of_a_source_that_the_vocabulary_lacks():
    tokenizer = WordTokenizer.train(["a b a c", "b a d"], vocab_size=6)
    assert tokenizer.content() == b"a\nb"  # the most frequent two
    own = tokenizer.oov_words("a zwei drei zwei")
    assert own == ["zwei", "drei"]
    ids = tokenizer.encode("drei a vier zwei", own)
    assert ids == [7, 4, UNK, 6]
    assert tokenizer.decode([7, 4, 6], own) == "drei a zwei"
    assert tokenizer.to_tokens([7, 4, 6], own) == ["drei", "a", "zwei"]
    pairs = [("a zwei", "zwei b drei")]
    assert encode_pairs(tokenizer, pairs, 9, copying=True)[0] == [Example([4, 6], [6, 5, UNK])]
    assert encode_pairs(tokenizer, pairs, 9)[0] == [Example([4, UNK], [UNK, 5, UNK])]


# Batches


def test_pairs_that_teach_nothing_are_left_out_and_counted():
    tokenizer = WordTokenizer.train(["a b c"])
    pairs = [("a", "b"), ("", "b"), ("a", ""), ("a b c", "a"), ("c z", "c")]
    examples, said = encode_pairs(tokenizer, pairs, max_length=2)
    assert examples == [Example([4], [5]), Example([6, UNK], [6])]
    assert said == "left out 3 of 5 pairs: 2 with an empty side, 1 longer than 2 tokens"
    assert encode_pairs(tokenizer, pairs[:1], max_length=2)[1] == ""


def test_batches_hold_every_pair_once_in_an_order_of_their_own():
    draw = random.Random(0)
    sizes = [(draw.randint(1, 20), draw.randint(1, 20)) for _ in range(100)]
    examples, _ = encode_pairs(
        WordTokenizer(["a"]), [("a " * n, "a " * m) for n, m in sizes], max_length=20
    )
    first = batches(examples, 8, seed=1, epoch=0)
    assert sorted(itertools.chain(*first)) == sorted(examples)
    assert first == batches(examples, 8, seed=1, epoch=0)
    for other in (batches(examples, 8, 1, 1), batches(examples, 8, 2, 0)):
        assert other != first
    spread = [max(len(e.target) for e in g) - min(len(e.target) for e in g) for g in first]
    assert max(spread) <= 4


def test_a_batch_is_padded_between_start_and_end():
    batch = collate(encode_pairs(WordTokenizer(["a", "b"]), [("a b", "b"), ("a", "b a")], 9)[0])
    assert batch.source.tolist() == [[4, 5, EOS], [4, EOS, 0]]
    assert batch.lengths.tolist() == [3, 2]
    assert batch.target_in.tolist() == [[BOS, 5, 0], [BOS, 5, 4]]
    assert batch.target_out.tolist() == [[5, EOS, 0], [5, 4, EOS]]
