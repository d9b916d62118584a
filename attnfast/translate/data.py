"""Parallel text: files to lines, lines to word ids, word ids to batches."""

from __future__ import annotations

import bisect
import codecs
import gzip
import io
import itertools
import random
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attnfast._utils.checks import InputError, argument_message, check_choice, optional, reason
from attnfast.models import BOS, EOS, PAD, UNK

#: First bytes of a gzip file.
GZIP = b"\x1f\x8b"
#: First bytes of compressed files that are not read.
FOREIGN = {
    "bzip2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",
    "xz": rb"\xfd7zXZ\0",
    "zip": rb"PK(\x03\x04|\x05\x06)",
    "zstd": rb"\x28\xb5\x2f\xfd",
}


def decode_lines(content: bytes, name: str) -> list[str]:
    r"""Split UTF-8 text, gzipped or not, at ``\n`` and nowhere else: aligned files stay aligned.

    Text without any ``\n`` is split at ``\r``, which ended lines on old Macs. A byte order mark at
    the start of the file and white space around a line are removed.

    Raises:
        InputError: a broken gzip file, another compressed file, or bytes that are not UTF-8, whose
            line it names.
    """
    if content.startswith(GZIP):
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise InputError(
                f"{name}: expected a whole gzip file, got a broken one ({error})"
            ) from error
    for kind, start in FOREIGN.items():
        if re.match(start, content):
            raise InputError(f"{name}: expected plain or gzipped text, got a {kind} file")
    content = content.removeprefix(codecs.BOM_UTF8)
    end = b"\r" if b"\n" not in content and b"\r" in content else b"\n"
    lines = content.removesuffix(end).split(end) if content else []
    return [_decode(line, name, number) for number, line in enumerate(lines, 1)]


def _decode(line: bytes, name: str, number: int) -> str:
    try:
        return line.decode().strip()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}, line {number}: expected UTF-8 text, "
            f"got byte 0x{line[error.start]:02x} at position {error.start + 1}"
        ) from error


def stream_lines(read: Callable[[], bytes], name: str, batch_size: int = 64) -> Iterator[list[str]]:
    r"""Yield the lines of :func:`decode_lines` as they arrive, up to ``batch_size`` at a time.

    Gzipped text, and text without any ``\n``, is read to its end first.

    Args:
        read: waits for bytes and returns those available, or none at the end.
        name: as in :func:`decode_lines`.

    Raises:
        InputError: as :func:`decode_lines`, when the invalid line is read.
    """
    number = 1
    for part in _whole_lines(read):
        if number == 1:
            lines = decode_lines(part, name)
        else:
            every = part.removesuffix(b"\n").split(b"\n")
            lines = [_decode(line, name, number + i) for i, line in enumerate(every)]
        number += len(lines)
        for i in range(0, len(lines), batch_size):
            yield lines[i : i + batch_size]


def _whole_lines(read: Callable[[], bytes]) -> Iterator[bytes]:
    """Yield the bytes read up to the last end of a line; gzipped content at once."""
    content, is_first = bytearray(), True
    while block := read():
        content += block
        if b"\n" in block and not (is_first and content.startswith(GZIP)):
            end = content.rfind(b"\n") + 1
            yield bytes(content[:end])
            del content[:end]
            is_first = False
    if content:
        yield bytes(content)


def read_lines(path: str | Path) -> list[str]:
    """Read a text file, gzipped or not, one sentence per line.

    Raises:
        InputError: the file is missing, or as for :func:`decode_lines`.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason(error)}") from error
    return decode_lines(content, str(path))


def read_pairs(source: str | Path, target: str | Path) -> list[tuple[str, str]]:
    """Read two files in which line n of one is the translation of line n of the other.

    Raises:
        InputError: as :func:`read_lines`; or the files differ in length, or are empty.
    """
    sources, targets = read_lines(source), read_lines(target)
    for path, lines in ((source, sources), (target, targets)):
        if not lines:
            raise InputError(f"{path}: expected at least one line, got an empty file")
    if len(sources) != len(targets):
        raise InputError(
            f"{target}: expected {len(sources)} lines, as in {source}, got {len(targets)}"
        )
    return list(zip(sources, targets))


class Links(NamedTuple):
    """Word alignment of a pair: indices of a source word and a target word for each link."""

    sure: set[tuple[int, int]]
    possible: set[tuple[int, int]]


def read_alignments(path: str | Path, pairs: Sequence[tuple[str, str]]) -> list[Links]:
    """Read the word alignments of ``pairs``, one line each, in Pharaoh's format.

    ``0-0 1-2`` links the first words, and the source's second with the target's third; ``1?2`` is
    a link that is possible, not sure. White space, including no-break spaces, separates words, as
    for ``str.split``. An empty line is a pair without alignment links.

    Raises:
        InputError: as :func:`read_lines`; or a line is not in this format, or links a word that
            its pair does not have, or the numbers of lines and pairs differ.
    """
    lines = read_lines(path)
    if len(lines) != len(pairs):
        raise InputError(f"{path}: expected {len(pairs)} lines, one per pair, got {len(lines)}")
    alignments = []
    for number, (line, pair) in enumerate(zip(lines, pairs), 1):
        links, counts = Links(set(), set()), [len(text.split()) for text in pair]
        for text in line.split():
            found = re.fullmatch(r"(\d{1,9})([-?])(\d{1,9})", text)
            if found is None:
                raise InputError(
                    f"{path}, line {number}: expected links such as 0-0 1-2, got {text[:40]!r}"
                )
            link = int(found[1]), int(found[3])
            for side, word, count in zip(("source", "target"), link, counts):
                if word >= count:
                    raise InputError(
                        f"{path}, line {number}: expected a {side} word below {count}, got {word} "
                        f"in {text}"
                    )
            (links.sure if found[2] == "-" else links.possible).add(link)
        alignments.append(links)
    return alignments


class Tokenizer(Protocol):
    """Text to word ids and back; ids 0 to 3 are padding, unknown, start and end."""

    kind: str
    vocab_size: int
    #: The units that the vocabulary may lack: ``"characters"`` or ``"words"``.
    parts: str

    def oov_words(self, text: str) -> list[str]:
        """Return the out-of-vocabulary words of a text, each once; their ids start at V."""
        ...

    def encode(self, text: str, own: Sequence[str] = ()) -> list[int]: ...

    def decode(self, ids: Sequence[int], own: Sequence[str] = ()) -> str:
        """Return the text of ids; those from V on are the tokens ``own``."""
        ...

    def to_tokens(self, ids: Sequence[int], own: Sequence[str] = ()) -> list[str]:
        """Return the tokens of ids as readable strings; those from V on are the tokens ``own``."""
        ...

    def lacking(self, texts: Iterable[str]) -> Counter[str]:
        """Count the characters or words of the texts that decoding their ids does not restore."""
        ...

    def word_numbers(self, text: str) -> list[int]:
        """Return the index of the word, split at white space, that each token of a text belongs to.

        All are −1 if a token belongs to two words, or words encoded alone have other letters.
        """
        ...

    def tokens(self, text: str) -> list[str]:
        """Return a text's tokens as readable strings."""
        ...

    def content(self) -> bytes:
        """Return the serialized tokenizer, for a checkpoint."""
        ...


#: Substitutes for characters with a special meaning in sentencepiece: Unicode reserves U+FDD0 to
#: U+FDEF for the internal use of programs.
RESERVED = {ord(c): 0xFDD0 + i for i, c in enumerate("\0\t\n\x1f\u2581\u2585")}
BLANK = "\u2581"
#: The supported normalisation forms of text.
FORMS = ("NFC", "NFKC")


class SubwordTokenizer:
    """A sentencepiece model, held as its serialized bytes.

    Decoding the ids of a text gives back every character that the training text has.

    Args:
        proto: the serialized model.
        form: a normalisation form of Unicode, ``"NFC"`` or ``"NFKC"``, applied to text before it
            is split; None does not normalise.

    Paper: Kudo and Richardson, "SentencePiece", EMNLP 2018, arXiv:1808.06226.
    """

    parts = "characters"

    def __init__(self, proto: bytes, form: str | None = None):
        sentencepiece = optional("sentencepiece", "subword tokenization")
        self._proto, self.form = proto, form
        self.kind = "subword" if form is None else f"subword {form}"
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=proto)
        except RuntimeError as error:
            raise InputError("expected a sentencepiece model, got other bytes") from error
        self.vocab_size = self._processor.vocab_size()
        known = {c for c in RESERVED.values() if self._processor.piece_to_id(chr(c)) != UNK}
        self._reserved = {c: own for c, own in RESERVED.items() if own in known}
        self._restored = {own: c for c, own in self._reserved.items()}

    @classmethod
    def train(
        cls,
        sentences: Iterable[str],
        vocab_size: int,
        model_type: str = "bpe",
        form: str | None = None,
    ) -> SubwordTokenizer:
        """Learn ``vocab_size`` subwords, all characters included, from sentences of both languages.

        Args:
            sentences: text; the same text gives the same subwords.
            vocab_size: V, the four special ids included.
            model_type: ``"bpe"`` or ``"unigram"``.
            form: as for the class.

        Raises:
            InputError: the text has too few or too many distinct characters for that size.
        """
        sentencepiece = optional("sentencepiece", "subword tokenization")
        if form is not None:
            check_choice("form", form, FORMS)
        proto = io.BytesIO()
        # A list, because sentencepiece reports an exception of a generator, Ctrl-C too, as its own.
        texts = [_normalised(text, form).translate(RESERVED) for text in sentences]
        characters = set().union(*texts) - {" "}
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts),
                model_writer=proto,
                vocab_size=vocab_size,
                model_type=model_type,
                character_coverage=1.0,
                required_chars="".join(sorted(characters)),
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                max_sentence_length=2**30,
                num_threads=1,
                pad_id=PAD,
                unk_id=UNK,
                bos_id=BOS,
                eos_id=EOS,
                minloglevel=2,
            )
        except RuntimeError as error:
            detail = str(error).strip().splitlines()[-1].rpartition("] ")[2]
            limit = re.search(r"value <= (\d+)|\d+ vs (\d+)", detail)
            if limit is None and vocab_size <= EOS:
                expected = f"above {EOS}, the last special id"
                raise InputError(argument_message("vocab_size", expected, vocab_size)) from error
            if limit is None:
                raise InputError(f"cannot learn subwords of this text: {detail[:80]}") from error
            bound = f"at most {limit[1]}" if limit[1] else f"at least {limit[2]}"
            raise InputError(
                f"vocab_size must be {bound} for subwords of this text, got {vocab_size}"
            ) from error
        return cls(proto.getvalue(), form)

    def _prepared(self, text: str) -> str:
        return _normalised(text, self.form).translate(self._reserved)

    def oov_words(self, text: str) -> list[str]:
        return []

    def encode(self, text: str, own: Sequence[str] = ()) -> list[int]:
        return self._processor.encode(self._prepared(text))

    def decode(self, ids: Sequence[int], own: Sequence[str] = ()) -> str:
        pieces = self._pieces(ids, own) if own else list(ids)
        return self._processor.decode(pieces).translate(self._restored)

    def _pieces(self, ids: Sequence[int], own: Sequence[str]) -> list[str]:
        V = self.vocab_size
        return [self._processor.id_to_piece(i) if i < V else own[i - V] for i in ids]

    def to_tokens(self, ids: Sequence[int], own: Sequence[str] = ()) -> list[str]:
        return [piece.translate(self._restored) for piece in self._pieces(ids, own)]

    def lacking(self, texts: Iterable[str]) -> Counter[str]:
        counts: Counter[str] = Counter()
        form = None if self.form is None else "NFC"  # marks that both forms compose do not count
        for text in texts:
            counts.update(_normalised(text, form))
        return Counter({c: n for c, n in counts.items() if self.decode(self.encode(c)) != c})

    def word_numbers(self, text: str) -> list[int]:
        pieces = [_letters(piece) for piece in self.tokens(text)]
        words = [_letters("".join(self.tokens(word))) for word in text.split()]
        ends = list(itertools.accumulate(map(len, words)))
        numbers, end = [], 0
        for piece in pieces:
            numbers.append(min(bisect.bisect_right(ends, end), len(words) - 1))
            end += len(piece)
            if end > ends[numbers[-1]]:
                return [-1] * len(pieces)
        return numbers if "".join(pieces) == "".join(words) else [-1] * len(pieces)

    def tokens(self, text: str) -> list[str]:
        pieces = self._processor.encode(self._prepared(text), out_type=str)
        return [piece.translate(self._restored) for piece in pieces]

    def content(self) -> bytes:
        return self._proto


def _normalised(text: str, form: str | None) -> str:
    return text if form is None else unicodedata.normalize(form, text)  # type: ignore[arg-type]


def _letters(text: str) -> str:
    """Return text without white space, and without sentencepiece's sign for a blank."""
    return "".join(text.replace(BLANK, " ").split())


class WordTokenizer:
    """A list of words split at blanks, for text whose vocabulary is small."""

    kind = "word"
    parts = "words"

    def __init__(self, words: Sequence[str]):
        self._words = list(words)
        self._ids = {word: i for i, word in enumerate(self._words, 4)}
        self.vocab_size = 4 + len(self._words)

    @classmethod
    def train(cls, sentences: Iterable[str], vocab_size: int | None = None) -> WordTokenizer:
        """Take the most frequent words of the sentences, or all, in alphabetical order.

        ``vocab_size`` counts the four special ids too.
        """
        if vocab_size is not None and vocab_size < 5:
            raise InputError(f"vocab_size must be at least 5 for words, got {vocab_size}")
        counts = Counter(word for sentence in sentences for word in sentence.split())
        words = sorted(sorted(counts), key=counts.__getitem__, reverse=True)
        return cls(sorted(words if vocab_size is None else words[: vocab_size - 4]))

    def oov_words(self, text: str) -> list[str]:
        return [word for word in dict.fromkeys(text.split()) if word not in self._ids]

    def encode(self, text: str, own: Sequence[str] = ()) -> list[int]:
        extra = {word: i for i, word in enumerate(own, self.vocab_size)}
        return [self._ids.get(word, extra.get(word, UNK)) for word in text.split()]

    def decode(self, ids: Sequence[int], own: Sequence[str] = ()) -> str:
        return " ".join(self.to_tokens(ids, own))

    def to_tokens(self, ids: Sequence[int], own: Sequence[str] = ()) -> list[str]:
        V = self.vocab_size
        return [self._words[i - 4] if i < V else own[i - V] for i in ids]

    def lacking(self, texts: Iterable[str]) -> Counter[str]:
        counts = Counter(word for text in texts for word in text.split())
        return Counter({word: n for word, n in counts.items() if word not in self._ids})

    def word_numbers(self, text: str) -> list[int]:
        return list(range(len(text.split())))

    def tokens(self, text: str) -> list[str]:
        return text.split()

    def content(self) -> bytes:
        return "\n".join(self._words).encode()


def load_tokenizer(kind: str, content: bytes) -> Tokenizer:
    """Make a tokenizer from the kind and content in a checkpoint."""
    name, _, form = kind.partition(" ")
    if name == "subword" and form in ("", *FORMS):
        return SubwordTokenizer(content, form or None)
    if kind == WordTokenizer.kind:
        return WordTokenizer(content.decode().split("\n"))
    raise InputError(f"expected a tokenizer of this version, got {kind}")


class Example(NamedTuple):
    """A sentence pair as word ids, without start and end.

    ``alignment``: for each target token the source tokens that it translates, none for NULL; or
    None if the alignment is not known.
    """

    source: list[int]
    target: list[int]
    alignment: list[list[int]] | None = None

    def __repr__(self) -> str:
        """Return the text used in a training's fingerprint, unchanged since before alignments."""
        more = "" if self.alignment is None else f", alignment={self.alignment}"
        return f"Example(source={self.source}, target={self.target}{more})"


class Batch(NamedTuple):
    """Padded word ids.

    ``source [B, Tk]``, each sentence with its end; ``lengths [B]`` on the CPU;
    ``target_in [B, T]``, the target after the start; ``target_out [B, T]``, the target with its
    end: the word to predict after each word of ``target_in``. ``alignment [B, T, Tk]``: equal
    weights on the source tokens that each word of ``target_out`` translates; 0 for NULL, the end
    and unknown alignments.
    """

    source: Tensor
    lengths: Tensor
    target_in: Tensor
    target_out: Tensor
    alignment: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """Move all tensors but the lengths to a device."""
        source, lengths, target_in, target_out, alignment = self
        if alignment is not None:
            alignment = alignment.to(device)
        return Batch(
            source.to(device), lengths, target_in.to(device), target_out.to(device), alignment
        )


def encode_pairs(
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    max_length: int,
    copying: bool = False,
    alignments: Sequence[Links] | None = None,
) -> tuple[list[Example], str]:
    """Turn text into examples, without pairs that are empty or too long for training.

    With ``copying``, out-of-vocabulary words of a source have their own ids, in its target
    too. With ``alignments`` every token of a target word is aligned to all tokens of the words that
    are linked with it, unless the tokenizer's words differ from those between white space.

    Returns:
        The examples, and a sentence about the skipped pairs: those with an empty side and those
        with more than ``max_length`` tokens on one. It is empty if no pair was skipped.
    """
    examples, empty, long = [], 0, 0
    for i, pair in enumerate(pairs):
        own = tokenizer.oov_words(pair[0]) if copying else []
        source, target = (tokenizer.encode(text, own) for text in pair)
        aligned = None if alignments is None else _aligned(tokenizer, pair, alignments[i])
        example = Example(source, target, aligned)
        shorter, longer = sorted((len(source), len(target)))
        if shorter == 0:
            empty += 1
        elif longer > max_length:
            long += 1
        else:
            examples.append(example)
    if not (empty or long):
        return examples, ""
    return examples, (
        f"left out {empty + long} of {len(pairs)} pairs: {empty} with an empty side, "
        f"{long} longer than {max_length} tokens"
    )


def _aligned(tokenizer: Tokenizer, pair: tuple[str, str], links: Links) -> list[list[int]] | None:
    """Return the source tokens that each target token is aligned to, or None."""
    source, target = (tokenizer.word_numbers(text) for text in pair)
    if -1 in source or -1 in target:
        return None
    both = links.sure | links.possible
    return [[j for j, s in enumerate(source) if (s, t) in both] for t in target]


def pad(sentences: Sequence[Sequence[int]]) -> Tensor:
    """Return sentences as one tensor ``[B, T]``, padded at the end."""
    rows = [torch.tensor(sentence, dtype=torch.long) for sentence in sentences]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def pad_sources(sources: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Return ``source [B, Tk]``, each sentence with its end, and ``lengths [B]``."""
    return pad([ids + [EOS] for ids in sources]), torch.tensor([len(ids) + 1 for ids in sources])


def collate(examples: Sequence[Example]) -> Batch:
    """Make a batch of examples."""
    target_in = pad([[BOS, *example.target] for example in examples])
    target_out = pad([[*example.target, EOS] for example in examples])
    source, lengths = pad_sources([example.source for example in examples])
    alignment = None
    if any(example.alignment is not None for example in examples):
        alignment = torch.zeros(*target_out.shape, source.shape[1], dtype=torch.float32)
        entries = [
            (b, t, word, 1 / len(words))
            for b, example in enumerate(examples)
            for t, words in enumerate(example.alignment or [])
            for word in words
        ]
        if entries:
            *index, shares = zip(*entries)
            alignment[tuple(map(torch.tensor, index))] = alignment.new_tensor(shares)
    return Batch(source, lengths, target_in, target_out, alignment)


def batches(examples: Sequence[Example], size: int, seed: int, epoch: int) -> list[list[Example]]:
    """Split examples into batches of ``size`` sentences of similar length, in random order.

    The result is a function of the arguments alone, so that a run can be resumed anywhere.
    """
    shuffle = random.Random(f"{seed} {epoch}").shuffle
    order = list(examples)
    shuffle(order)
    order.sort(key=lambda example: (len(example.target), len(example.source)))
    groups = [order[i : i + size] for i in range(0, len(order), size)]
    shuffle(groups)
    return groups
