"""The ``repr`` of each public module shows sizes, and options that are not defaults."""

import inspect

import pytest
import torch
from torch import nn

from attnfast import Span, models, speech
from attnfast import nn as modules

PUBLIC = [
    name
    for module in (modules, models, speech)
    for name, x in vars(module).items()
    if inspect.isclass(x) and issubclass(x, nn.Module) and name in module.__all__
]


def bahdanau(**options):
    return modules.BahdanauAttention(6, 8, 4, **options)


def decoder(readout="deep"):
    return models.RecurrentDecoder(3, 8, 6, bahdanau(), readout=readout)


def seq2seq():
    model = models.Seq2Seq(models.Encoder(3, 4), decoder(), 50, 3)
    model.length_ratio = 3.0
    return model


def linear_hops():
    attention = modules.MultiHopAttention(8, 2, "layer-wise")
    attention.linear = True
    return attention


def cooled():
    attention = bahdanau(activation="relu", normalisation="sparsemax", backend="reference")
    attention.temperature = 0.5
    return attention


def learned_penalty():
    penalty = nn.Parameter(torch.ones(1))
    return modules.CoverageAttention(6, 8, 4, feature=False, penalty=penalty, fertility=2.0)


def sparse():
    return modules.SparseSelfAttention(8, [Span(window=1), Span(stride=2, fixed=True)])


#: A module of each class, and its options as ``repr`` shows them; parts show their sizes.
SHOWN = {
    "AttentionGRU": (
        lambda: modules.AttentionGRU(3, 6, 8, bahdanau()),
        "input_size=3, hidden_size=6, context_size=8",
    ),
    "AttentionLSTM": (
        lambda: modules.AttentionLSTM(
            3, 6, 8, bahdanau(), num_layers=2, bias=False, recurrence="input_feeding",
            query_layer="last", dropout=0.1, recurrent_dropout=0.2,
        ),
        "input_size=3, hidden_size=6, context_size=8, num_layers=2, bias=False, "
        "recurrence='input_feeding', query_layer='last', dropout=0.1, recurrent_dropout=0.2",
    ),
    "AttentionRNN": (
        lambda: modules.AttentionRNN(3, 6, 8, bahdanau()),
        "input_size=3, hidden_size=6, context_size=8",
    ),
    "BahdanauAttention": (
        cooled,
        "query_dim=6, key_dim=8, attn_dim=4, activation='relu', normalisation='sparsemax', "
        "temperature=0.5, backend='reference'",
    ),
    "BidirectionalAttention": (lambda: modules.BidirectionalAttention(8, "reference"),
                               "dim=8, backend='reference'"),
    "BiDAF": (lambda: models.BiDAF(modules.BidirectionalAttention(8), 32, 50, 3, 4), ""),
    "CharacterCNN": (lambda: models.CharacterCNN(30, 4, 6), ""),
    "Classifier": (
        lambda: models.Classifier(models.Encoder(3, 4), 50, 3, 2, "max"), "pooling='max'",
    ),
    "CoverageAttention": (
        learned_penalty,
        "query_dim=6, key_dim=8, attn_dim=4, feature=False, penalty=Parameter[1], fertility=2.0",
    ),
    "Encoder": (lambda: models.Encoder(3, 4, residual=True), "residual=True"),
    "FeatureNormalizer": (lambda: speech.FeatureNormalizer(40, 2), "features=40, speakers=2"),
    "FixedContext": (lambda: models.FixedContext(bidirectional=False), "bidirectional=False"),
    "ForwardAttention": (
        lambda: modules.ForwardAttention(6, 8, 4, 2, 3, channels="both"),
        "query_dim=6, key_dim=8, attn_dim=4, channels='both'",
    ),
    "GatedAttention": (lambda: modules.GatedAttention(bahdanau(), 6), ""),
    "GridEncoder": (lambda: models.GridEncoder(1, [4], [2], 2.0), "place_scale=2.0"),
    "HardAttention": (lambda: modules.HardAttention(bahdanau()), "average=0.5"),
    "HardMonotonicWindowAttention": (
        lambda: modules.HardMonotonicWindowAttention(6, 8, 2),
        "query_dim=6, key_dim=8, score='general', span=Span(window=(0, 2))",
    ),
    "HighwayNetwork": (lambda: models.HighwayNetwork(8), ""),
    "HistoryAttention": (
        lambda: modules.HistoryAttention(6, 8, 4, bias=True, activation="tanh", backend=None),
        "query_dim=6, key_dim=8, attn_dim=4",
    ),
    "LearnedPositions": (lambda: modules.LearnedPositions(10, 8), "max_length=10, dim=8"),
    "ListenAttendSpell": (
        lambda: models.ListenAttendSpell(models.PyramidEncoder(5, 4), bahdanau(), 20, 6, 3), "",
    ),
    "LocalAttention": (
        lambda: modules.LocalAttention(6, 8, (3, None), slope=2, sigma=1.5),
        "query_dim=6, key_dim=8, score='general', span=Span(window=(3, None)), slope=2, sigma=1.5",
    ),
    "LocalPredictiveAttention": (
        lambda: modules.LocalPredictiveAttention(6, 8, 2),
        "query_dim=6, key_dim=8, score='general', span=Span(window=(2, 2))",
    ),
    "LocationAwareAttention": (
        lambda: modules.LocationAwareAttention(6, 8, 4, initial_weights="uniform"),
        "query_dim=6, key_dim=8, attn_dim=4, initial_weights='uniform'",
    ),
    "LogMel": (lambda: speech.LogMel(), "rate=16000, mels=80, samples=400, hop=160"),
    "LuongAttention": (
        lambda: modules.LuongAttention(6, 8, "concat", 5),
        "query_dim=6, key_dim=8, score='concat', attn_dim=5",
    ),
    "MeanContext": (models.MeanContext, ""),
    "MemoryNetwork": (lambda: models.MemoryNetwork(50, 8), "dim=8, max_sentences=50"),
    "MultiHeadAttention": (
        lambda: modules.MultiHeadAttention(6, 8, 4, 2),
        "query_dim=6, key_dim=8, attn_dim=4, num_heads=2, score='dot'",
    ),
    "MultiHopAttention": (linear_hops, "dim=8, hops=2, tying='layer-wise', linear=True"),
    "NeuralTuringMachine": (
        lambda: modules.NeuralTuringMachine(3, 8),
        "num_slots=128, slot_size=20, num_reads=1, num_writes=1, shift=1",
    ),
    "NoContext": (lambda: models.NoContext("reference"), "backend='reference'"),
    "PointerGenerator": (
        lambda: modules.PointerGenerator(6, 4, backend="reference"), "backend='reference'",
    ),
    "PointerNetwork": (lambda: modules.PointerNetwork(2, 8, 8), ""),
    "PyramidEncoder": (lambda: models.PyramidEncoder(5, 4), "factor=2"),
    "RecurrentDecoder": (decoder, ""),
    "RelativePositions": (lambda: modules.RelativePositions(2, 3), "num_heads=2, max_distance=3"),
    "Seq2Seq": (seq2seq, "length_ratio=3.0"),
    "ShowAttendTell": (
        lambda: models.ShowAttendTell(
            models.GridEncoder(1, [6], [2]), modules.LuongAttention(6, 8), 20, 6, 3
        ),
        "max_length=50",
    ),
    "SinusoidalPositions": (modules.SinusoidalPositions, ""),
    "SparseSelfAttention": (
        sparse,
        "attn_dim=8, heads=[Span(window=(1, 1)), Span(stride=2, fixed=True)], score='dot'",
    ),
    "SpecAugment": (
        speech.SpecAugment,
        "feature_masks=2, feature_width=8, frame_masks=2, frame_width=20, share=0.2",
    ),
    "StridedAttention": (
        lambda: modules.StridedAttention(8, 8, 3, "dot", causal=True),
        "query_dim=8, key_dim=8, score='dot', span=Span(causal=True, stride=3)",
    ),
    "TopKAttention": (lambda: modules.TopKAttention(bahdanau(), 3), "k=3"),
    "TransformerEncoder": (
        lambda: models.TransformerEncoder(3, 4, backend="reference"), "backend='reference'",
    ),
    "TransformerEncoderLayer": (lambda: modules.TransformerEncoderLayer(sparse(), 16), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_sizes_and_options(name):
    make, shown = SHOWN[name]
    module = make()
    assert type(module).__name__ == name
    assert module.extra_repr() == shown
    assert shown in repr(module) and " at 0x" not in repr(module)
    assert shown or list(module.children()) or name in ("MeanContext", "SinusoidalPositions")


def test_a_span_shows_its_conditions():
    assert repr(Span()) == "Span()"
    span = Span(window=(1, None), causal=True, stride=2, fixed=True)
    assert repr(span) == "Span(window=(1, None), causal=True, stride=2, fixed=True)"
    assert eval(repr(span)) == span
