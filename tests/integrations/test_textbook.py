"""Attention in the spellings of textbooks: doubles in the forms that people write."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from integrations.common import compare, preparations
from integrations.plain import projections
from integrations.reference_projects import (
    CaptionAttention,
    ConcatAttention,
    LastLayerAttention,
    LuongAttention,
    SourceFirstAttention,
    TensorFlowPort,
    TextbookAttention,
    TimeFirstAttention,
    bentrevett,
)
from torch import nn

import attnfast
from attnfast.integrations.projects import textbook

MODULES = {
    "context": lambda: TextbookAttention(6, 6),
    "TensorFlow": TensorFlowPort,
    "last layer": lambda: LastLayerAttention(6, 6),
    "time first": lambda: TimeFirstAttention(6, 6),
    "concat": lambda: ConcatAttention(6, 6),
    "source first": lambda: SourceFirstAttention(6, 6),
    "Luong": LuongAttention,
    "Luong's concat": lambda: LuongAttention("concat"),
    "of the state": lambda: LuongAttention("of the state"),
}
CALLS = {  # with states [3, B, 6], a source [B, Tk, 6] and a mask that is True at words
    "context": lambda m, s, h, seen: m(s[-1], h, src_mask=~seen),
    "last layer": lambda m, s, h, seen: m(h, s, seen.long()),
    "time first": lambda m, s, h, seen: m(s[-1:], h.transpose(0, 1)),
    "concat": lambda m, s, h, seen: m(s[-1], h, seen),
    "source first": lambda m, s, h, seen: m(s[-1], h, seen.float()),
}


def use(kind):
    def calls(attention, draw):
        call = CALLS.get(kind, lambda m, s, h, seen: m(s[-1], h))
        for lengths in ((7, 1, 4), (3,)):
            B, Tk = len(lengths), max(lengths)
            source, seen = draw(B, Tk, 6), draw.seen(lengths, Tk)
            for _ in range(3):
                yield call(attention, draw(3, B, 6), source, seen)
        if kind == "context":
            yield attention(draw(B, 6), source)

    return calls


@pytest.mark.parametrize("kind", MODULES)
def test_attention(kind):
    torch.manual_seed(0)
    compare(MODULES[kind](), use(kind))
    assert preparations(MODULES[kind](), use(kind)) == 2


@pytest.mark.parametrize(
    "make", [TextbookAttention, LastLayerAttention, TimeFirstAttention, ConcatAttention]
)
def test_source_and_state_of_other_sizes(make):
    torch.manual_seed(0)
    plain = make()
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    state, source = torch.randn(2, 6), torch.randn(2, 5, 8)
    seen = torch.ones(2, 5, dtype=torch.bool)
    inputs = {
        TextbookAttention: (state, source),
        LastLayerAttention: (source, state.unsqueeze(0), seen),
        TimeFirstAttention: (state.unsqueeze(0), source.transpose(0, 1)),
        ConcatAttention: (state, source, seen),
    }[make]
    with projections() as projected:
        torch.testing.assert_close(served(*inputs), plain(*inputs))
    assert projected.call_count == (make is not ConcatAttention)


def test_calls_in_other_forms_run_its_own_code():
    plain = TextbookAttention(6, 6)
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    state, source = torch.randn(2, 6), torch.randn(2, 5, 6)
    for call in (
        lambda m: m(state[:1], source),  # one state for all
        lambda m: m(state, source[:, :1], torch.zeros(1, 1, dtype=torch.bool)),
        lambda m: m(state, source, torch.zeros(5, dtype=torch.bool)),
    ):
        torch.testing.assert_close(call(served), call(plain))
    for module in (plain, served):
        with pytest.raises(TypeError):
            module(state)
        with pytest.raises(TypeError):
            module(state, source, None, None)
    served, states = LastLayerAttention(6, 6), torch.randn(2, 2, 6)
    attnfast.replace(served, strict=True)
    with pytest.raises(RuntimeError):
        served(source, states, torch.ones(2, 1, 5, dtype=torch.bool))


def test_a_copy_in_another_process(monkeypatch):
    """The form is found again at its first call."""
    served = LuongAttention("concat")
    attnfast.replace(served, strict=True)
    monkeypatch.setattr(textbook, "FORMS", {})
    twin = pickle.loads(pickle.dumps(served))
    inputs = torch.randn(2, 6), torch.randn(2, 5, 6)
    torch.testing.assert_close(twin(*inputs), served(*inputs))
    assert len(textbook.FORMS) == 1


def test_a_setting_that_is_changed_later():
    plain = LuongAttention("general")
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    inputs = torch.randn(2, 6), torch.randn(2, 5, 6)
    for method in ("of the state", "general"):
        plain.method = served.method = method
        torch.testing.assert_close(served(*inputs), plain(*inputs))
    with projections() as projected:
        for _ in range(3):
            served(*inputs)
    assert projected.call_count == 0  # the keys of the last call


def test_compiled():
    plain = TextbookAttention()
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    inputs = torch.randn(2, 6), torch.randn(2, 5, 8)
    compiled = torch.compile(served, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), plain(*inputs))


class Scores(TensorFlowPort):
    def forward(self, query, values):
        return self.V(torch.tanh(self.W1(query.unsqueeze(1)) + self.W2(values))).squeeze(2)


class Tripled(TextbookAttention):
    def forward(self, decoder_hidden, encoder_outputs, src_mask=None):
        context, weights = super().forward(decoder_hidden, encoder_outputs, src_mask)
        return context, weights, weights * 3


class Scaled(TextbookAttention):
    def forward(self, decoder_hidden, encoder_outputs, src_mask=None):
        return super().forward(decoder_hidden * 0.5, encoder_outputs, src_mask)


class Squeezed(TextbookAttention):
    def forward(self, decoder_hidden, encoder_outputs, src_mask=None):
        context, weights = super().forward(decoder_hidden, encoder_outputs, src_mask)
        return context.squeeze(), weights


class LongSources(TextbookAttention):
    def forward(self, decoder_hidden, encoder_outputs, src_mask=None):
        context, weights = super().forward(decoder_hidden, encoder_outputs, src_mask)
        return context * (1.0 if weights.shape[1] < 100 else 2.0), weights


@pytest.mark.parametrize("cls", [Scores, Tripled, Scaled, Squeezed, LongSources])
def test_what_looks_alike_is_left_alone(cls):
    cls.__qualname__ = "BahdanauAttention"
    report = attnfast.replace(cls())
    late = cls in (Squeezed, LongSources)
    reason = "results differ" if late else "its own code does not compute a textbook's formula"
    assert len(report.skipped) == 1 and f"skipped: {reason}" in str(report)


def test_a_mask_of_another_shape_is_left_to_its_own_code():
    """Scores [B, Tk, 1] take a mask [B, Tk, 1]."""

    class Masked(TensorFlowPort):
        def forward(self, query, values, mask=None):
            score = self.V(torch.tanh(self.W1(query.unsqueeze(1)) + self.W2(values)))
            score = score if mask is None else score.masked_fill(mask == 0, -1e9)
            weights = score.softmax(1)
            return (weights * values).sum(1), weights

    Masked.__qualname__ = "BahdanauAttention"
    plain = Masked()
    served = copy.deepcopy(plain)
    attnfast.replace(served, strict=True)
    state, source = torch.randn(2, 6), torch.randn(2, 5, 6)
    for mask in (None, torch.ones(2, 5, 1).tril()):
        torch.testing.assert_close(served(state, source, mask), plain(state, source, mask))


def test_classes_that_share_names_and_parameters():
    """Each adapter is tried: bentrevett's is time first, sgrvinod's has the rectifier."""
    assert "as bentrevett's" in str(attnfast.replace(bentrevett()))
    assert "as a textbook's" in str(attnfast.replace(ConcatAttention()))
    assert "as sgrvinod's" in str(attnfast.replace(CaptionAttention(8, 6, 5)))
    with_tanh, other = CaptionAttention(8, 6, 5), CaptionAttention(8, 6, 5)
    with_tanh.relu, other.relu = nn.Tanh(), nn.ELU()
    assert "as a textbook's" in str(attnfast.replace(with_tanh))
    report = str(attnfast.replace(other))
    assert "skipped: as a textbook's" in report and "; as sgrvinod's Attention, results" in report
