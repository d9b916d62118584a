"""Float64 in, float64 throughout: no operation takes or makes numbers of a narrower type."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from calls import TK, TQ, A, B, V, functions_and_modules, words
from model_registry import MODELS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnfast import decoding, losses, models, nn, speech
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
    """Return layers with a history, and what functions() leaves out."""
    table: Cases = {}
    x, states, pointer = torch.randn(B, TQ, A), torch.randn(B, TK, A), nn.PointerGenerator(A)
    logits, source, aligned = torch.randn(B, TQ, V), words(B, TK), alphas(B, TQ, TK)
    for kind in (nn.AttentionGRU, nn.AttentionLSTM, nn.AttentionRNN):
        layer = kind(A, A, A, nn.CoverageAttention(A, A, A))
        table[kind.__name__] = lambda layer=layer: layer(x, layer.prepare(states, LENGTHS))
    return table | {"PointerGenerator": lambda: pointer(logits, aligned, source, x)}


def whole_models() -> Cases:
    """Return the models, their losses, and searches of those that say something."""
    table: Cases = {}
    for name, case in MODELS.items():
        model, inputs = case.make().double().eval(), case.inputs()
        table[name] = lambda case=case, model=model, x=inputs: case.run(model, x)
        if case.sought and not case.alike:
            source = [inputs[x] for x in case.sought]
            scorer = models.CTCPrefixScorer() if "speech" in name else None
            table[f"{name}, search"] = lambda model=model, x=source, scorer=scorer: (
                decoding.greedy_search(model, *x, max_length=2),
                decoding.beam_search(model, *x, 2, scorer=scorer, max_length=2),
            )
    frames, lengths = torch.randn(B, 12, 3), torch.tensor([12, 7])
    normalised, masked = speech.FeatureNormalizer(3), speech.SpecAugment(frame_width=3)
    said = models.LASOutput(torch.randn(B, TQ, V), alphas(B, 9, V).log(), torch.tensor([9, 5]))
    table |= {
        "hybrid_loss": lambda: models.hybrid_loss(said, words(B, TQ)),
        "FeatureNormalizer": lambda: (normalised.fit(frames), normalised(frames, lengths)),
        "SpecAugment": lambda: masked(frames, lengths),
    }
    for kind in models.ATTENTIONS:
        config = models.Config(
            V, attention=kind, embed_dim=A, hidden_dim=A, pointer_generator=kind == "bahdanau"
        )
        model = models.build(config)
        table[kind] = lambda model=model: model(words(B, TK), LENGTHS, words(B, TQ))
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
