"""Whole decoders that differ late, or in what they keep: they are left to their own code."""

from __future__ import annotations

import contextlib
import sys
from unittest import mock

import pytest
import torch
from integrations import reference_projects
from integrations.reference_projects import MAX_LENGTH, SOS_token
from integrations.test_decoders import WORDS, d2l, pytestmark, served, tutorial
from torch import nn

import attnfast
from attnfast.integrations.adapter import LATE, ProbeInputs, UnsupportedCall
from attnfast.integrations.projects import tutorials

__all__ = ["MAX_LENGTH", "SOS_token", "pytestmark"]  # the tutorial's file has the two names


class AttnDecoderRNN(reference_projects.AttnDecoderRNN):
    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        return super().forward(encoder_outputs, encoder_hidden, target_tensor)


class StopsAt(AttnDecoderRNN):
    """Stops after a word that all targets have."""

    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        logits, hidden, weights = super().forward(encoder_outputs, encoder_hidden, target_tensor)
        if target_tensor is not None:
            ended = (target_tensor[:, :MAX_LENGTH] == self.end()).all(0).nonzero().flatten()
            logits = logits[:, : int(ended[0]) + 1] if len(ended) else logits
        return logits, hidden, weights


class StopsAtOne(StopsAt):
    def end(self):
        return 1


class StopsAtSeven(StopsAt):
    def end(self):
        return 7


class StopsAtTheLast(StopsAt):
    def end(self):
        return self.out.out_features - 1


class AboveEight(AttnDecoderRNN):
    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        source = encoder_outputs * (1.0 if len(encoder_outputs) <= 8 else 0.5)
        return super().forward(source, encoder_hidden, target_tensor)


class Keeps(AttnDecoderRNN):
    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        logits, hidden, weights = super().forward(encoder_outputs, encoder_hidden, target_tensor)
        self.last = weights
        return logits, hidden, weights


class Gained(AttnDecoderRNN):
    def forward_step(self, input, hidden, encoder_outputs):
        scale = getattr(self, "gain", 1.0)
        return super().forward_step(input, hidden, encoder_outputs * scale)


class GainedIfThere(AttnDecoderRNN):
    def forward_step(self, input, hidden, encoder_outputs):
        with contextlib.suppress(AttributeError):
            encoder_outputs = encoder_outputs * self.gain
        return super().forward_step(input, hidden, encoder_outputs)


def gain_of(module):
    return vars(module).get("gain", 1.0)


class GainedByHelper(AttnDecoderRNN):
    def forward_step(self, input, hidden, encoder_outputs):
        return super().forward_step(input, hidden, encoder_outputs * gain_of(self))


class Halved(AttnDecoderRNN):
    """Halves the state at one word."""

    def forward_step(self, input, hidden, encoder_outputs):
        hidden = hidden * 0.5 if self.is_special(input) else hidden
        return super().forward_step(input, hidden, encoder_outputs)


def is_separator(words):
    return (words == 102).all()


class SpecialToHelper(Halved):
    def is_special(self, words):
        return is_separator(words)


class SpecialInTuple(Halved):
    def is_special(self, words):
        return any((words == word).all() for word in (101, 102))


class SpecialByDefault(Halved):
    def is_special(self, words, which=102, *, other=101):
        return (words == which).all()


class SpecialFloat(Halved):
    def is_special(self, words):
        return (words.double() == 102.0).all()


class SpecialStart(AttnDecoderRNN):
    """Doubles its results where a target has the first word again."""

    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        logits, hidden, weights = super().forward(encoder_outputs, encoder_hidden, target_tensor)
        if target_tensor is not None and (target_tensor == SOS_token).all(0).any():
            logits = logits * 2
        return logits, hidden, weights


COPIES = {
    StopsAtOne: "results differ",
    StopsAtSeven: "results differ",
    StopsAtTheLast: "results differ",
    AboveEight: "results differ",
    Keeps: "its own code writes last, which",
    Gained: "its own code reads gain, which",
    GainedIfThere: "its own code reads gain, which",
    GainedByHelper: "its own code reads gain, which",
}
SPECIAL = [SpecialToHelper, SpecialInTuple, SpecialByDefault, SpecialFloat]
for cls in (AttnDecoderRNN, *COPIES, *SPECIAL, SpecialStart):
    cls.__qualname__ = "AttnDecoderRNN"


@pytest.mark.parametrize("cls", COPIES)
def test_copies_that_differ_late_are_left_alone(cls):
    served(cls(8, WORDS), left=COPIES[cls])


@pytest.mark.parametrize("length", [2, 10])
@pytest.mark.parametrize("cls", SPECIAL)
def test_each_word_in_the_code_is_probed(cls, length, monkeypatch):
    for module in (reference_projects, sys.modules[__name__]):
        monkeypatch.setattr(module, "MAX_LENGTH", length)
    served(cls(8, 1000), left="results differ")
    served(AttnDecoderRNN(8, 1000))


class SpecialLate(Halved):
    def is_special(self, words):
        return (words == 900).all()


class LargeVocabulary(Halved):
    def is_special(self, words):
        return self.out.out_features > 1000.5


class SizedByAttribute(AttnDecoderRNN):
    """Its own code does not run with fewer words."""

    def __init__(self, hidden_size, words):
        super().__init__(hidden_size, words)
        self.out_bias = nn.Parameter(torch.zeros(words))

    def forward_step(self, input, hidden, encoder_outputs):
        logits, hidden, weights = super().forward_step(input, hidden, encoder_outputs)
        return logits + self.out_bias, hidden, weights


@pytest.mark.parametrize(
    ("cls", "words", "compared"),
    [
        (AttnDecoderRNN, 512, None),
        (AttnDecoderRNN, 513, 512),
        (SpecialLate, 1200, 901),
        (SpecialLate, 800, 512),
        (LargeVocabulary, 1200, 512),
        (SizedByAttribute, 1200, None),
    ],
)
def test_of_a_large_vocabulary_the_words_in_the_code_are_compared(cls, words, compared):
    cls.__qualname__ = "AttnDecoderRNN"
    decoder = cls(8, words)
    adapter = attnfast.integrations.registry.adapters_of(AttnDecoderRNN(8, 9))[0]
    assert attnfast.integrations.probe.words_to_compare(decoder, adapter) == compared
    if cls is not SizedByAttribute:
        differs = cls is LargeVocabulary or (cls is SpecialLate and words > 900)
        served(decoder, left="results differ" if differs else "")


def test_a_copy_that_calls_its_base_is_served():
    served(AttnDecoderRNN(8, WORDS))


def test_a_sparse_embedding():
    """Its gradients have a layout of their own, and are added up in both."""
    plain = tutorial()
    plain.embedding = nn.Embedding(WORDS, 8, sparse=True)
    served(plain)


def test_what_one_call_writes_and_the_next_overwrites():
    """The probe's last call runs the own code on both sides, here because no search does it."""
    adapter = attnfast.integrations.registry.adapters_of(tutorial())[0]
    decoder = Keeps(8, WORDS)
    with mock.patch.object(tutorials, "find_words", side_effect=UnsupportedCall("no operator")):
        why, _ = attnfast.integrations.probe.compare(decoder, adapter)
    assert why is not None and why.startswith("state differ in last after call")


class Late(reference_projects.Seq2SeqAttentionDecoder):
    def forward(self, X, state):
        outputs, weights = [], []
        for t in range(X.shape[1]):
            out, state = super().forward(X[:, t : t + 1], self.changed(t, state))
            outputs.append(out)
            weights += self._attention_weights
        self._attention_weights = weights
        return torch.cat(outputs, 1), state

    def changed(self, t, state):
        return state


class Zeroes(Late):
    def changed(self, t, state):
        return [state[0], state[1] * 0 if t and t % 10 == 0 else state[1], state[2]]


class Cuts(Late):
    def forward(self, X, state):
        return super().forward(X[:, :30], state)


@pytest.mark.parametrize("cls", [Late, Zeroes, Cuts])
def test_long_targets(cls):
    cls.__qualname__ = "Seq2SeqAttentionDecoder"
    like = d2l()
    decoder = cls(like.attention, WORDS, 5, 8)
    served(decoder, left="" if cls is Late else "results differ")


def test_a_first_word_that_is_not_0_is_probed(monkeypatch):
    for module in (reference_projects, sys.modules[__name__]):
        monkeypatch.setattr(module, "SOS_token", 57)
    served(SpecialStart(8, 1000), left="results differ")


@pytest.mark.parametrize("T", [2, 3, 10, LATE])
def test_late_targets_have_every_word_that_may_be_special(T):
    """Each stands in all rows of a target, before the last word, which some decoders do not use."""
    draw, same = (
        ProbeInputs(torch.float64, torch.device("cpu"), late=True, known=[57, 400, -1]),
        set(),
    )
    assert draw.steps(4, 1) == (4, 1, LATE) and draw.steps(4) == (4,)
    for _ in range(6):
        words = draw.words(100, 3, T)
        same |= {int(x[0]) for x in words[:, :-1].T if (x == x[0]).all()}
        assert words.shape == (3, T) and int(words.max()) < 100
    assert same >= {0, 1, 2, 3, 57, 99}
