"""Whatever is passed in the place of an argument: it works, or one sentence names the argument."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import attnfast
from attnfast import Span, models
from attnfast import nn as modules
from attnfast.errors import LONGEST, describe, refuse

B, TQ, TK, A, V = 2, 3, 5, 4, 9


def words(*shape: int) -> torch.Tensor:
    return torch.randint(4, V, shape)


WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "word": lambda: "word",
    "real": lambda: 3.5,
    "negative": lambda: -1,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "huge": lambda: 10**400,
    "list": lambda: [1.0, 2.0],
    "list of tensors": lambda: [torch.randn(30, 30)] * 9,
    "array": lambda: np.ones((40, 40)),
    "array of its shape": lambda: np.zeros((B, TQ, A), np.float32),
    "rank": lambda: torch.randn(2, 2, 2, 2, 2),
    "vector": lambda: torch.randn(3),
    "scalar": lambda: torch.tensor(0.5),
    "size": lambda: torch.randn(B, TQ + 5, A + 1),
    "dtype": lambda: torch.randn(B, TQ, A, dtype=torch.float64),
    "whole": lambda: torch.ones(B, TK, dtype=torch.int64),
    "truth": lambda: torch.ones(B, TK, dtype=torch.bool),
    "meta": lambda: torch.randn(B, TQ, A, device="meta"),
    "empty": lambda: torch.empty(0),
    "module": lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)),
    "type": lambda: dict,
}


def inputs() -> dict[str, Any]:
    return {
        "query": torch.randn(B, TQ, A), "key": torch.randn(B, TK, A),
        "value": torch.randn(B, TK, 3),
        "lengths": torch.tensor([5, 2]), "mask": torch.ones(B, TQ, TK, dtype=torch.bool),
        "bias": torch.randn(B, 1, TK), "backend": None, "temperature": 1.5,
    }  # fmt: skip


def spanned() -> dict[str, Any]:
    names = ("query", "key", "value", "lengths", "temperature")
    more = {"span": Span(window=1), "position": "diagonal", "sigma": 2.0, "need_weights": True}
    return {name: inputs()[name] for name in names} | more


def calls_of(module: nn.Module) -> dict[str, tuple[Callable, dict[str, Any]]]:
    name = type(module).__name__
    states, lengths = torch.randn(B, TK, A), torch.tensor([5, 2])
    mask = torch.ones(B, TK, dtype=torch.bool)
    memory = module.prepare(states, lengths)
    call: dict[str, Any] = {"state": torch.randn(B, TQ, A), "memory": memory, "need_weights": True}
    if module.has_history:
        call |= {"history": module.start(memory), "target_mask": torch.ones(B, TQ) > 0}
    if name == "ForwardAttention":
        call["transition_prob"] = 0.5
    prepare = {"states": states, "lengths": lengths, "mask": mask}
    return {f"{name}.prepare": (module.prepare, prepare), name: (module, call)}


KINDS: dict[str, tuple[Callable, dict[str, Any]]] = {
    "BahdanauAttention": (
        modules.BahdanauAttention, {"attn_dim": A, "bias": True, "activation": "tanh"},
    ),
    "LuongAttention": (modules.LuongAttention, {"score": "concat", "attn_dim": A}),
    "MultiHeadAttention": (
        modules.MultiHeadAttention, {"attn_dim": A, "num_heads": 2, "score": "dot"},
    ),
    "CoverageAttention": (
        modules.CoverageAttention,
        {"attn_dim": A, "feature": True, "penalty": 0.5, "fertility": 2.0, "bias": True},
    ),
    "LocationAwareAttention": (
        modules.LocationAwareAttention,
        {"attn_dim": A, "filters": 2, "width": 3, "channels": "both", "bias": True},
    ),
    "ForwardAttention": (
        modules.ForwardAttention,
        {"attn_dim": A, "filters": 2, "width": 3, "channels": "previous", "bias": True},
    ),
    "LocalAttention": (
        modules.LocalAttention,
        {"window": 2, "score": "general", "attn_dim": A, "causal": False, "slope": 1.5},
    ),
    "LocalPredictiveAttention": (
        modules.LocalPredictiveAttention, {"window": 2, "score": "general", "attn_dim": A},
    ),
    "StridedAttention": (
        modules.StridedAttention,
        {"stride": 2, "score": "general", "attn_dim": A, "fixed": False, "causal": False},
    ),
    "MonotonicAttention": (
        modules.MonotonicAttention, {"ahead": 2, "score": "general", "attn_dim": A},
    ),
}  # fmt: skip
KINDS = {
    name: (make, {"query_dim": A, "key_dim": A} | more) for name, (make, more) in KINDS.items()
}


def made(name: str) -> nn.Module:
    make, arguments = KINDS[name]
    return make(**arguments)


def calls() -> dict[str, tuple[Callable, dict[str, Any]]]:
    """Every public callable, with arguments that fit."""
    torch.manual_seed(0)
    rows = torch.rand(B, TQ, TK).softmax(-1)
    table: dict[str, tuple[Callable, dict[str, Any]]] = {
        "additive_attention": (
            attnfast.additive_attention,
            inputs() | {"weight": torch.randn(A), "activation": "tanh"},
        ),
        "additive_attention, span": (
            attnfast.additive_attention, spanned() | {"weight": torch.randn(A)},
        ),
        "dot_attention": (attnfast.dot_attention, inputs() | {"scale": 0.5}),
        "dot_attention, span": (attnfast.dot_attention, spanned()),
        "coverage_attention": (
            attnfast.coverage_attention,
            inputs() | {
                "weight": torch.randn(A), "penalty": 0.5, "coverage_weight": torch.randn(A),
                "filters": torch.randn(2, 1, 3), "channels": "coverage",
                "projection": torch.randn(A, 2), "fertility": torch.rand(B, TK) + 1,
                "transition_prob": 0.5, "coverage": torch.rand(B, TK),
                "previous": torch.rand(B, TK),
                "scale": 1.0, "need_weights": True,
            },
        ),
        "copy_distribution": (
            attnfast.copy_distribution,
            {
                "logits": torch.randn(B, TQ, V), "weights": rows, "source": words(B, TK),
                "gate": torch.randn(B, TQ), "extra_words": 2, "log": True, "backend": None,
            },
        ),
        "alignment_loss": (
            attnfast.alignment_loss,
            {"weights": rows, "alignment": words(B, TQ) % TK, "keys": None, "kind": "squared"},
        ),
        "alignment_loss, keys": (
            attnfast.alignment_loss,
            {"weights": rows[..., :3], "alignment": words(B, TQ) % TK,
             "keys": Span(window=1).keys(TQ, TK)},
        ),
        "Span": (Span, {"window": (1, 2), "causal": True, "stride": 2, "fixed": True}),
        "Span.keys": (
            Span(window=1).keys, {"Tq": TQ, "Tk": TK, "position": "end", "lengths": words(B)},
        ),
        "SparseSelfAttention, made": (
            modules.SparseSelfAttention, {"dim": A, "heads": [Span(window=1)] * 2, "score": "dot"},
        ),
        "SparseSelfAttention": (
            modules.SparseSelfAttention(A, [Span(window=1)] * 2),
            {"states": torch.randn(B, TK, A), "lengths": torch.tensor([5, 2]),
             "mask": torch.ones(B, TK, dtype=torch.bool), "need_weights": True},
        ),
        "PointerGenerator, made": (
            lambda feature_dims: modules.PointerGenerator(feature_dims), {"feature_dims": A},
        ),
        "PointerGenerator": (
            lambda features, **more: modules.PointerGenerator(A)(
                more["logits"], more["weights"], more["source"], features,
                extra_words=more["extra_words"], log=more["log"],
            ),
            {"logits": torch.randn(B, TQ, V), "weights": rows, "source": words(B, TK),
             "features": torch.randn(B, TQ, A), "extra_words": 2, "log": True},
        ),
        "Config": (
            models.Config,
            {"vocab_size": V, "attention": "local", "input_feeding": True, "cell": "gru",
             "embed_dim": A, "hidden_dim": A, "layers": 1, "dropout": 0.1, "copying": True,
             "window": 2, "sigma": 1.0, "height": 2.0, "stride": 2, "fixed_stride": False,
             "self_attention": True, "encoder": "rnn"},
        ),
        "build": (models.build, {"config": models.Config(V, embed_dim=A, hidden_dim=A)}),
        "Encoder, made": (
            models.Encoder,
            {"embed_dim": A, "hidden_dim": A, "cell": "gru", "layers": 1, "dropout": 0.1,
             "self_attention": None},
        ),
        "Encoder": (
            models.Encoder(A, A),
            {"embedded": torch.randn(B, TK, A), "lengths": torch.tensor([5, 2])},
        ),
        **{name + ", made": (make, dict(arguments)) for name, (make, arguments) in KINDS.items()},
    }  # fmt: skip
    for name in KINDS:
        table |= calls_of(made(name))
    for kind in (models.BahdanauDecoder, models.LuongDecoder):
        sizes: dict[str, Any] = {"embed_dim": A, "context_dim": A, "hidden_dim": A}
        sizes |= {"attention": made("BahdanauAttention"), "cell": "gru"}
        decoder = kind(**sizes)
        table[kind.__name__ + ", made"] = kind, sizes
        call = {
            "embedded": torch.randn(B, TQ, A), "state": decoder.initial(torch.randn(B, A)),
            "memory": decoder.attention.prepare(torch.randn(B, TK, A)), "need_weights": True,
            "target_mask": torch.ones(B, TQ, dtype=torch.bool),
        }  # fmt: skip
        table[kind.__name__] = decoder, call
        table[kind.__name__ + ".initial"] = decoder.initial, {"hidden": torch.randn(B, A)}
    model = models.build(models.Config(V, embed_dim=A, hidden_dim=A)).eval()
    pair: dict[str, Any] = {"source": words(B, TK), "lengths": torch.tensor([5, 2])}
    source, state = model.encode(**pair)
    table |= {
        "Seq2Seq, made": (
            models.Seq2Seq,
            {"encoder": model.encoder, "decoder": model.decoder, "vocab_size": V, "embed_dim": A,
             "dropout": 0.1, "pointer": None},
        ),
        "Seq2Seq": (model, pair | {"target_in": words(B, TQ)}),
        "Seq2Seq.encode": (model.encode, pair),
        "Seq2Seq.decode": (model.decode, {"words": words(B, TQ), "state": state, "source": source}),
        "greedy_search": (models.greedy_search, {"model": model} | pair),
        "beam_search": (
            models.beam_search, {"model": model, "beam": 2, "length_penalty": 1.0} | pair,
        ),
    }  # fmt: skip
    return table


CALLS = calls()
#: What an argument is called in the sentence where it is not by its own name.
ALIKE = {
    "weights": ("weights", "alignment", "keys"),
    "embedded": ("embedded", "lengths"),
    "history": ("history", "coverage", "previous"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_one_sentence(name):
    call, arguments = CALLS[name]
    call(**arguments)
    for argument in arguments:
        for kind, wrong in WRONG.items():
            case = f"{name}({argument}={kind})"
            try:
                with warnings.catch_warnings():
                    call(**arguments | {argument: wrong()})
            except (ValueError, TypeError, RuntimeError) as error:
                text = str(error)
                assert len(text) <= LONGEST and "\n" not in text, f"{case}: {text}"
                assert any(x in text for x in ALIKE.get(argument, (argument,))), f"{case}: {text}"
            except Exception as error:
                raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("name", KINDS)
def test_states_in_the_place_of_a_memory(name):
    module, states = made(name), torch.randn(B, TK, A)
    for state in (torch.randn(B, A), torch.randn(B, TQ, A)):
        with pytest.raises(TypeError) as error:
            module(state, states)
        assert str(error.value) == (
            "memory must be what prepare(...) returns, got a Tensor of torch.float32 [2, 5, 4]"
        )


@pytest.mark.parametrize("name", [x for x in KINDS if x != "LocalPredictiveAttention"])
def test_a_mask_of_keys_says_the_same_as_lengths(name):
    module, states, lengths = made(name), torch.randn(B, TK, A), torch.tensor([4, 2])
    mask = torch.arange(TK) < lengths[:, None]
    for state in (torch.randn(B, A), torch.randn(B, TQ, A)):
        outputs = [
            module(state, module.prepare(states, **seen), need_weights=True)
            for seen in ({"lengths": lengths}, {"mask": mask})
        ]
        torch.testing.assert_close(outputs[0][:2], outputs[1][:2])


def test_descriptions_are_short():
    assert describe(torch.ones(2, 3)) == "a Tensor of torch.float32 [2, 3]"
    assert describe(np.ones(4)) == "an ndarray of float64 [4]"
    assert describe("a" * 500).startswith("'aaa")
    assert max(len(describe(x)) for x in ("a" * 500, [torch.ones(50)] * 50, {1: "b" * 500})) <= 80
    with pytest.raises(ValueError, match="name must be") as error:
        refuse("name", "expected " * 90, "got")
    assert len(str(error.value)) == LONGEST
