"""Whole decoders that differ late, or in what they keep: they are left to their own code."""

from __future__ import annotations

import contextlib

import pytest
import torch
from integrations import doubles
from integrations.doubles import MAX_LENGTH, SOS_token
from integrations.test_decoders import WORDS, d2l, pytestmark, served, tutorial
from torch import nn

import attnfast
from attnfast.integrations.adapter import LATE, Draw

__all__ = ["MAX_LENGTH", "SOS_token", "pytestmark"]  # the tutorial's file has the two names


class AttnDecoderRNN(doubles.AttnDecoderRNN):
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
for cls in (AttnDecoderRNN, *COPIES):
    cls.__qualname__ = "AttnDecoderRNN"


@pytest.mark.parametrize("cls", COPIES)
def test_copies_that_differ_late_are_left_alone(cls):
    served(cls(8, WORDS), left=COPIES[cls])


def test_a_copy_that_calls_its_base_is_served():
    served(AttnDecoderRNN(8, WORDS))


def test_a_sparse_embedding():
    """Its gradients have a layout of their own, and are added up in both."""
    plain = tutorial()
    plain.embedding = nn.Embedding(WORDS, 8, sparse=True)
    served(plain)


def test_what_one_call_writes_and_the_next_overwrites():
    """The probe's last call runs the own code on both sides."""
    adapter = attnfast.integrations.registry.adapter_of(tutorial())
    decoder = Keeps(8, WORDS)
    why, _ = attnfast.integrations.probe.compare(decoder, adapter)
    assert why is not None and why.startswith("state differ in last after call")


class Late(doubles.Seq2SeqAttentionDecoder):
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


def test_words_of_a_late_target_stand_in_all_rows():
    draw = Draw(torch.float64, torch.device("cpu"), late=True, known=[57, 400, -1])
    assert draw.steps(4, 1) == (4, 1, LATE) and draw.steps(4) == (4,)
    words = draw.words(100, 3, LATE)
    same = {int(x[0]) for x in words.T if (x == x[0]).all()}
    assert same >= {0, 1, 2, 3, 57, 99} and int(words.max()) < 100
