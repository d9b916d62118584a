"""Float64 in, float64 throughout: no operation takes or makes numbers of a narrower type."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from calls import TK, TQ, A, B, V, functions_and_modules, words
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnfast import Span, losses, models, nn, speech
from attnfast.analysis import diagnostics, faithfulness
from attnfast.translate import data

LENGTHS, TARGETS = torch.tensor([5, 2]), torch.tensor([3, 1])
Cases = dict[str, Callable[[], Any]]


class OnlyFloat64(TorchDispatchMode):
    """Raise where an operation takes or makes floating-point numbers that are not float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel():
                if x.dim() == 0 and x == x.round():
                    continue  # a count, such as Adam's of its steps
                assert x.dtype == torch.float64, f"{func} has {x.dtype} {list(x.shape)}"
        return result


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def alphas(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).softmax(-1).requires_grad_()


def functions() -> Cases:
    """Return the calls of functions and modules, but for constructors."""
    other = "build|register_adapter|PointerGenerator.*|gaussian_bias.*"  # whose dtype is given
    return {
        name: lambda call=call: call.function(**call.arguments)
        for name, call in functions_and_modules().items()
        if not isinstance(call.function, type) and not re.fullmatch(other, name)
    }


def of_weights() -> Cases:
    """Return the diagnostics and the losses."""
    weights, sizes = alphas(B, 2, TQ, TK), (LENGTHS, TARGETS)
    fertility, aligned = torch.rand(B, TK) + 1, alphas(B, TQ, TK)
    logits, drawn = torch.randn(B, TQ, V), torch.randn(3, B).unbind()
    pointers, given, reinforce = words(B, TQ) % 2, words(B, TQ), losses.Reinforce()
    names = [
        "row_statistics", "kl_from_uniform", "key_coverage", "diagonality", "monotonicity",
        "extract_alignment", "head_roles", "failures",
    ]  # fmt: skip
    return {
        name: lambda name=name: getattr(diagnostics, name)(weights, *sizes) for name in names
    } | {
        "translated": lambda: diagnostics.over_under_translation(
            weights, *sizes, fertility=fertility
        ),
        "alignment_loss": lambda: losses.alignment_loss(aligned, aligned.detach()),
        "doubly_stochastic_loss": lambda: losses.doubly_stochastic_loss(aligned),
        "pointer_loss": lambda: losses.pointer_loss(aligned.log(), pointers),
        "Reinforce": lambda: reinforce(*drawn),
        "sequence_loss": lambda: models.sequence_loss(logits, given, 0.1),
        "scheduled_sampling": lambda: models.scheduled_sampling(given, logits, 0.5),
    }


def explanations() -> Cases:
    table: Cases = {}
    ids, ranking = words(B, TK), torch.randn(B, TK)
    asked = {
        "gradient_times_input": {}, "leave_one_out": {}, "weight_gradient": {},
        "permutation_test": {"count": 3}, "adversarial": {"restarts": 1, "steps": 2},
        "erasure": {"ranking": ranking},
    }  # fmt: skip
    for pooling in models.POOLINGS:
        model = models.Classifier(models.Encoder(A, A), V, A, 3, pooling).eval()
        table[f"Classifier, {pooling}"] = lambda model=model: model(ids, LENGTHS)
        if pooling != "max":
            given = model.read, model.embed(ids).detach(), LENGTHS
            for name, more in asked.items():
                function = getattr(faithfulness, name)
                table[f"{name}, {pooling}"] = lambda f=function, x=given, more=more: f(*x, **more)
    a, b = alphas(B, TK).detach(), alphas(B, TK).detach()
    return table | {
        "kendall_tau": lambda: faithfulness.kendall_tau(a, b, LENGTHS),
        "jensen_shannon": lambda: faithfulness.jensen_shannon(a, b),
        "total_variation": lambda: faithfulness.total_variation(a, b),
    }


def layers() -> Cases:
    table: Cases = {}
    x, states, points = torch.randn(B, TQ, A), torch.randn(B, TK, A), torch.rand(B, TK, 2)
    for kind in (nn.AttentionGRU, nn.AttentionLSTM, nn.AttentionRNN):
        for attention in (nn.BahdanauAttention(A, A, A), nn.CoverageAttention(A, A, A)):
            layer = kind(A, A, A, attention)
            table[f"{kind.__name__}, {type(attention).__name__}"] = lambda layer=layer: layer(
                x, layer.prepare(states, LENGTHS)
            )
    hops, both = nn.MultiHopAttention(A, 2), nn.BidirectionalAttention(A)
    machine, network = nn.NeuralTuringMachine(A, A, 6, 4), nn.PointerNetwork(2, A, A)
    encoder = nn.TransformerEncoderLayer(nn.SparseSelfAttention(A, [Span(window=1)] * 2), 2 * A)
    learned, relative = nn.LearnedPositions(9, A), nn.RelativePositions(2, 3)
    pointer, aligned = nn.PointerGenerator(A), alphas(B, TQ, TK)
    logits, source = torch.randn(B, TQ, V), words(B, TK)
    return table | {
        "MultiHopAttention": lambda: hops(x[:, 0], hops.prepare([states] * 3, LENGTHS)),
        "BidirectionalAttention": lambda: both(states, x, LENGTHS, TARGETS),
        "NeuralTuringMachine": lambda: machine(x),
        "PointerNetwork": lambda: network(points, LENGTHS, words(B, TQ) % 2),
        "PointerGenerator": lambda: pointer(logits, aligned, source, x),
        "TransformerEncoderLayer": lambda: encoder(states, LENGTHS),
        "SinusoidalPositions": lambda: nn.SinusoidalPositions()(x),
        "LearnedPositions": lambda: learned(x),
        "RelativePositions": lambda: relative(TQ, TK),
    }


def whole_models() -> Cases:
    """Return the models, and searches of those that say something."""
    table: Cases = {}
    stories, target = words(B, 4, TK), words(B, TQ)
    stories[:, 1:, 2:], target[1, 1:] = 0, 0
    for tying in ("adjacent", "layer-wise"):
        memory = models.MemoryNetwork(V, A, 2, tying)
        table[f"MemoryNetwork, {tying}"] = lambda memory=memory: memory(stories, target, True)
    reader = models.BiDAF(nn.BidirectionalAttention(2 * A), 8 * A, V, 3, A)
    table["BiDAF"] = lambda: reader(target, TARGETS, target, TARGETS, True)
    grid = models.GridEncoder(2, (4, 5), (1, 2), place_scale=3.0)
    images, sizes = torch.randn(B, 2, 9, 12), torch.tensor([[9, 12], [7, 5]])
    frames, encoded = torch.randn(B, 12, 3), torch.tensor([12, 7])
    soft = nn.BahdanauAttention(A, grid.output_dim, A)
    for kind, attention in {
        "soft": soft,
        "hard": nn.GatedAttention(nn.HardAttention(soft), A),
        "few": nn.TopKAttention(nn.LuongAttention(A, grid.output_dim), 3),
        "mean": models.MeanContext(),
    }.items():
        decoder = models.ShowAttendTell(grid, attention, V, A, A, max_length=4)
        table[f"ShowAttendTell, {kind}"] = lambda decoder=decoder: decoder(images, sizes, target)
        table[f"ShowAttendTell, {kind}, beam_search"] = lambda decoder=decoder: models.beam_search(
            decoder, images, sizes, 2
        )
    pyramid = models.PyramidEncoder(3, A, 1)
    location = nn.LocationAwareAttention(A, 2 * A, A, filters=2, width=3)
    decoder = models.ListenAttendSpell(pyramid, location, V, A, A)
    scorer = models.CTCPrefixScorer()
    normalised, masked = speech.FeatureNormalizer(3), speech.SpecAugment(frame_width=3)
    table |= {
        "ListenAttendSpell": lambda: models.hybrid_loss(decoder(frames, encoded, target), target),
        "ListenAttendSpell, beam_search": lambda: models.beam_search(
            decoder, frames, encoded, 2, scorer=scorer
        ),
        "FeatureNormalizer": lambda: (normalised.fit(frames), normalised(frames, encoded)),
        "SpecAugment": lambda: masked(frames, encoded),
    }
    for kind in models.ATTENTIONS:
        config = models.Config(
            V, attention=kind, embed_dim=A, hidden_dim=A, pointer_generator=kind == "bahdanau"
        )
        model = models.build(config)
        table[kind] = lambda model=model: model(words(B, TK), LENGTHS, target)
        table[f"{kind}, greedy_search"] = lambda model=model: models.greedy_search(
            model.eval(), words(B, TK), LENGTHS
        )
    return table


def test_what_data_are_made_of_is_float32_whatever_the_default():
    example = data.Example([4, 5, 6], [7], [[0, 1, 2]])
    alignment, window = data.collate([example]).alignment, speech.LogMel().window
    with default_dtype(torch.bfloat16):
        assert data.collate([example]).alignment.equal(alignment)
        assert speech.LogMel().window.equal(window)
    assert alignment.dtype == window.dtype == torch.float32


@pytest.mark.parametrize("of", [functions, of_weights, explanations, layers, whole_models])
def test_float64_throughout(of):
    """Quotients of integers have the default dtype, which is a narrower one here, and so found."""
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        cases = of()
    found = {}
    with default_dtype(torch.bfloat16):
        for name, call in cases.items():
            try:
                with OnlyFloat64():
                    results = tree_leaves(call())
                    ends = [x.sum() for x in results if getattr(x, "requires_grad", False)]
                    if ends:
                        torch.stack(ends).sum().backward(retain_graph=True)  # calls share sources
            except AssertionError as error:
                found[name] = str(error)
    assert not found
