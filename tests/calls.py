"""Public functions and modules, each with a call that fits: see tests/test_arguments.py.

A name is a function's, a class's for its constructor, ``Class.method`` for a method,
``Class.forward`` for the call of a module. Behind a comma stands which of several calls it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import attnfast
from attnfast import Span, losses
from attnfast import nn as modules
from attnfast.decoding import attend_with_history

B, TQ, TK, A, V = 2, 3, 5, 4, 9


class Call(NamedTuple):
    """A callable and arguments that fit it; ``signature`` is that of another, if it takes any."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    signature: Callable[..., Any] | None = None


Table = dict[str, Call]


def words(*shape: int) -> torch.Tensor:
    return torch.randint(4, V, shape)


def lengths(most: int | None = None) -> torch.Tensor:
    most = TK if most is None else most
    return torch.tensor([most, 2][:B], dtype=torch.int64).clamp(max=most)


def seen() -> torch.Tensor:
    return torch.ones(B, TK, dtype=torch.bool)


def rows(*lead: int) -> torch.Tensor:
    return torch.rand(*lead or (B,), TQ, TK).softmax(-1)


def inputs() -> dict[str, Any]:
    return {
        "query": torch.randn(B, TQ, A), "key": torch.randn(B, TK, A),
        "value": torch.randn(B, TK, 3), "lengths": lengths(),
        "mask": torch.ones(B, TQ, TK, dtype=torch.bool), "bias": torch.randn(B, 1, TK),
        "backend": None, "temperature": 1.5, "need_weights": True,
    }  # fmt: skip


def functions() -> Table:
    """Return those of attnfast and attnfast.decoding, and those of losses."""
    span = {"span": Span(window=1), "position": "diagonal", "sigma": 2.0, "need_statistics": True}
    spanned = inputs() | span
    del spanned["mask"], spanned["bias"]
    at = {"position": torch.rand(B, TQ) * TK, "sigma": torch.rand(B, TQ) + 1}
    weight = {"score_vector": torch.randn(A)}
    memory = attnfast.prepare(torch.randn(B, TK, A), torch.randn(B, TK, 3), **weight)
    terms: dict[str, Any] = {
        "penalty": 0.5, "coverage_weight": torch.randn(A), "filters": torch.randn(2, 1, 3),
        "channels": "coverage", "projection": torch.randn(A, 2),
        "fertility": torch.rand(B, TK) + 1, "transition_prob": 0.5,
        "coverage": torch.rand(B, TK), "previous": torch.rand(B, TK), "scale": 1.0,
    }  # fmt: skip
    logarithms = {"transition_prob": 0.5, "log_previous": torch.rand(B, TK).log()}
    query = torch.randn(B, TQ, A)
    of_memory = {x: inputs()[x] for x in ("query", "mask", "bias", "temperature", "need_weights")}
    target = {"weights": rows(), "alignment": words(B, TQ) % max(TK, 1)}
    table = {
        "additive_attention": (
            attnfast.additive_attention,
            inputs() | weight | {"activation": "tanh", "normalisation": "entmax15"},
        ),
        "additive_score": (
            attnfast.additive_score,
            {"query": query, "key": torch.randn(B, TK, A), "activation": "relu", "backend": None}
            | weight,
        ),
        "additive_attention, span": (attnfast.additive_attention, spanned | weight),
        "dot_attention": (
            attnfast.dot_attention, inputs() | {"scale": 0.5, "normalisation": "sparsemax"},
        ),
        "dot_attention, span": (attnfast.dot_attention, spanned | at),
        "coverage_attention": (
            attnfast.coverage_attention,
            inputs() | weight | terms | {"activation": "relu", "normalisation": "softmax"},
        ),
        "coverage_attention, logarithms": (
            attnfast.coverage_attention, inputs() | weight | logarithms,
        ),
        "copy_distribution": (
            attnfast.copy_distribution,
            {"logits": torch.randn(B, TQ, V), "weights": rows(), "source": words(B, TK),
             "gate": torch.randn(B, TQ), "num_oov": 2, "log": True, "backend": None},
        ),
        "prepare": (
            attnfast.prepare,
            {"key": torch.randn(B, TK, A), "value": torch.randn(B, TK, 3), **weight,
             "activation": "tanh", "lengths": lengths(), "mask": seen(), "backend": None},
        ),
        "attend": (
            attnfast.attend,
            {"query": query, "memory": memory, "scale": 0.5, "bias": torch.randn(B, 1, TK),
             "normalisation": "softmax", "need_weights": True, **span},
        ),
        "attend, step": (
            attnfast.attend,
            {"query": query[:, :1], "memory": memory, "scale": 0.5, "need_weights": True,
             "need_statistics": True},
        ),
        "attend_with_history": (
            attend_with_history,
            of_memory | terms | {"memory": memory, "normalisation": "softmax"},
        ),
        "attend_with_history, logarithms": (
            attend_with_history, of_memory | logarithms | {"memory": memory},
        ),
        "Memory.append": (
            memory.append, {"key": torch.randn(B, 2, A), "value": torch.randn(B, 2, 3)},
        ),
        "Span": (Span, {"window": (1, 2), "causal": True, "stride": 2, "fixed": True}),
        "Span.columns": (Span(window=1).columns, {"Tk": TK}),
        "Span.key_indices": (
            Span(window=1).key_indices,
            {"Tq": TQ, "Tk": TK, "position": "end", "lengths": lengths(), "device": None},
        ),
        "gaussian_bias": (
            attnfast.gaussian_bias,
            {"Tq": TQ, "Tk": TK, "sigma": 2.0, "height": 1.5, "position": "diagonal",
             "lengths": lengths(), "dtype": torch.float32, "device": None},
        ),
        "gaussian_bias, tensors": (
            attnfast.gaussian_bias,
            {"Tq": TQ, "Tk": TK, "sigma": torch.rand(B, TQ) + 1, "height": torch.rand(B, TQ),
             "position": torch.rand(B, TQ)},
        ),
        "replace": (attnfast.replace, {"model": nn.Linear(1, 1), "strict": False}),
        "register_adapter": (
            attnfast.register_adapter,
            {"adapter": next(iter(attnfast.integrations.ADAPTERS.values()))},
        ),
        "alignment_loss": (
            attnfast.alignment_loss, target | {"key_indices": None, "kind": "squared"},
        ),
        "alignment_loss, keys": (
            attnfast.alignment_loss,
            target
            | {"weights": rows()[..., :3], "key_indices": Span(window=1).key_indices(TQ, TK)},
        ),
        "alignment_loss, numbers": (
            attnfast.alignment_loss, {"weights": rows(B, 2), "alignment": rows(B, 1)},
        ),
        "doubly_stochastic_loss": (
            losses.doubly_stochastic_loss, {"weights": rows(), "mask": seen()},
        ),
        "pointer_loss": (
            losses.pointer_loss,
            {"log_probs": torch.randn(B, TQ, 1 + TK).log_softmax(-1),
             "pointers": words(B, TQ) % max(TK, 1)},
        ),
        "Reinforce": (losses.Reinforce, {"weight": 1.0, "entropy_weight": 0.5, "decay": 0.5}),
        "Reinforce.forward": (
            losses.Reinforce(),
            {x: torch.randn(B) for x in ("log_likelihood", "log_prob", "entropy")},
        ),
    }  # fmt: skip
    return {name: Call(*of) for name, of in table.items()}


def kinds() -> dict[str, dict[str, Any]]:
    """Return attention with a memory: the arguments of its constructor, but for its dimensions."""
    return {
        "BahdanauAttention": {
            "attn_dim": A, "bias": True, "activation": "tanh", "normalisation": "softmax",
        },
        "LuongAttention": {"score": "concat", "attn_dim": A, "normalisation": "sparsemax"},
        "MultiHeadAttention": {
            "attn_dim": A, "num_heads": 2, "score": "dot", "value_dim": A,
            "positions": modules.RelativePositions(2, 3), "normalisation": "softmax",
        },
        "CoverageAttention": {
            "attn_dim": A, "feature": True, "penalty": 0.5, "fertility": 2.0, "bias": True,
            "activation": "tanh", "normalisation": "softmax",
        },
        "LocationAwareAttention": {
            "attn_dim": A, "num_filters": 2, "width": 3, "channels": "both", "bias": True,
            "initial_weights": "uniform", "activation": "tanh", "normalisation": "sigmoid",
        },
        "ForwardAttention": {
            "attn_dim": A, "num_filters": 2, "width": 3, "channels": "previous", "bias": True,
            "activation": "tanh",
        },
        "LocalAttention": {
            "window": 2, "score": "general", "attn_dim": A, "causal": False, "slope": 1.5,
            "sigma": 2.0, "gaussian_height": 1.0,
        },
        "LocalPredictiveAttention": {"window": 2, "score": "general", "attn_dim": A},
        "StridedAttention": {
            "stride": 2, "score": "general", "attn_dim": A, "fixed": False, "causal": False,
        },
        "HardMonotonicWindowAttention": {"ahead": 2, "score": "general", "attn_dim": A},
    }  # fmt: skip


#: Attention around another, and the arguments besides that.
AROUND: dict[str, dict[str, Any]] = {
    "GatedAttention": {"query_dim": A},
    "HardAttention": {"average": 0.5},
    "TopKAttention": {"k": 2},
}


def made(name: str) -> Any:
    """Return an attention of this kind."""
    if name in AROUND:
        return getattr(modules, name)(modules.BahdanauAttention(A, A, A), **AROUND[name])
    return getattr(modules, name)(query_dim=A, key_dim=A, **kinds()[name])


def attentions() -> Table:
    """Return constructors, ``prepare`` and calls of all attention that is asked with a state."""
    table: dict[str, Any] = {}
    for name in (*kinds(), *AROUND):
        attention = made(name)
        own = kinds().get(name) or AROUND[name]
        dims = {"query_dim": A, "key_dim": A, "backend": None}
        if name in AROUND:
            dims = {"attention": modules.BahdanauAttention(A, A, A)}
        table[name] = getattr(modules, name), {**dims, **own}
        states = torch.randn(B, TK, A)
        memory = attention.prepare(states, lengths())
        prepare = {"states": states, "lengths": lengths(), "mask": seen(), "values": states}
        call: dict[str, Any] = {
            "state": torch.randn(B, TQ, A), "memory": memory, "need_weights": True,
        }  # fmt: skip
        if getattr(attention, "has_history", False):
            call |= {"history": attention.start(memory), "target_mask": torch.ones(B, TQ) > 0}
            table[name + ".start"] = attention.start, {"memory": memory}
        if name in ("BahdanauAttention", "LuongAttention", "MultiHeadAttention"):
            call["need_statistics"] = True
        if name == "MultiHeadAttention":
            call["offset"] = 1
        if name == "ForwardAttention":
            call["transition_prob"] = torch.rand(B, TQ)
        if name == "TopKAttention":
            choose = {x: call[x] for x in ("state", "memory")}
            table["TopKAttention.choose"] = attention.choose, choose
        if name in kinds() and name != "CoverageAttention":
            more = {"memory": memory, "states": torch.randn(B, 2, A), "values": states[:, :2]}
            table[name + ".append"] = attention.append, more
        table[name + ".prepare"] = attention.prepare, prepare
        table[name + ".forward"] = attention, call
    table["LocalPredictiveAttention.positions"] = (
        made("LocalPredictiveAttention").positions,
        {"state": torch.randn(B, TQ, A), "memory": made("LuongAttention").prepare(states)},
    )  # fmt: skip
    return {name: Call(*of) for name, of in table.items()}


def layers() -> Table:
    """Return what else attnfast.nn has."""
    x, states = torch.randn(B, TQ, A), torch.randn(B, TK, A)
    heads = [Span(window=1)] * 2
    sparse = modules.SparseSelfAttention(A, heads, positions=modules.RelativePositions(2, 3))
    hops = modules.MultiHopAttention(A, 2)
    sources = [torch.randn(B, TK, A) for _ in range(3)]
    pointer = modules.PointerNetwork(A, A, A)
    turing = modules.NeuralTuringMachine(A, A, TK, A)
    memory, _ = pointer.encode(states, lengths())
    items = {"items": states, "lengths": lengths()}

    def generator(features: torch.Tensor, **more: Any) -> torch.Tensor:
        names = ("logits", "weights", "source")
        options = {name: x for name, x in more.items() if name not in names}
        return modules.PointerGenerator(A)(*(more[x] for x in names), features, **options)

    table: dict[str, Any] = {
        "SparseSelfAttention": (
            modules.SparseSelfAttention,
            {"dim": A, "heads": heads, "score": "dot", "backend": None,
             "positions": modules.RelativePositions(2, 3)},
        ),
        "SparseSelfAttention.forward": (
            sparse,
            {"states": states, "lengths": lengths(), "mask": seen(), "need_weights": True},
        ),
        "TransformerEncoderLayer": (
            modules.TransformerEncoderLayer,
            {"attention": sparse, "feedforward_dim": A, "dropout": 0.1},
        ),
        "TransformerEncoderLayer.forward": (
            modules.TransformerEncoderLayer(sparse, A),
            {"states": states, "lengths": lengths(), "need_weights": True},
        ),
        "MultiHopAttention": (
            modules.MultiHopAttention,
            {"dim": A, "hops": 2, "tying": "adjacent", "backend": None},
        ),
        "MultiHopAttention.prepare": (
            hops.prepare, {"sources": sources, "lengths": lengths(), "mask": seen()},
        ),
        "MultiHopAttention.forward": (
            hops, {"query": x, "memory": hops.prepare(sources), "need_weights": True},
        ),
        "BidirectionalAttention": (
            modules.BidirectionalAttention, {"dim": A, "backend": None},
        ),
        "BidirectionalAttention.forward": (
            modules.BidirectionalAttention(A),
            {"text": states, "question": x, "text_lengths": lengths(),
             "question_lengths": lengths(TQ), "need_weights": True},
        ),
        "PointerGenerator": (
            lambda feature_dims, backend: modules.PointerGenerator(feature_dims, backend=backend),
            {"feature_dims": A, "backend": None}, modules.PointerGenerator,
        ),
        "PointerGenerator.forward": (
            generator,
            {"logits": torch.randn(B, TQ, V), "weights": rows(), "source": words(B, TK),
             "features": x, "num_oov": 2, "log": True},
            modules.PointerGenerator.forward,
        ),
        "PointerNetwork": (
            modules.PointerNetwork,
            {"item_dim": A, "hidden_dim": A, "attn_dim": A, "backend": None},
        ),
        "PointerNetwork.encode": (pointer.encode, items),
        "PointerNetwork.point": (pointer.point, {"states": x, "memory": memory}),
        "PointerNetwork.forward": (
            pointer, items | {"pointers": torch.tensor([1, 2, 0]).expand(B, 3).contiguous()},
        ),
        "PointerNetwork.decode": (pointer.decode, items | {"distinct": True}),
        "LearnedPositions": (modules.LearnedPositions, {"max_length": TK, "dim": A}),
        "LearnedPositions.forward": (modules.LearnedPositions(9, A), {"x": x, "offset": 1}),
        "SinusoidalPositions.forward": (modules.SinusoidalPositions(), {"x": x, "offset": 1}),
        "RelativePositions": (modules.RelativePositions, {"num_heads": 2, "max_distance": 3}),
        "RelativePositions.forward": (
            modules.RelativePositions(2, 3), {"Tq": TQ, "Tk": TK, "offset": 1},
        ),
        "NeuralTuringMachine": (
            modules.NeuralTuringMachine,
            {"input_size": A, "hidden_size": A, "num_slots": TK, "slot_size": A, "num_reads": 1,
             "num_writes": 1, "shift": 1},
        ),
        "NeuralTuringMachine.start": (turing.start, {"batch": B}),
        "NeuralTuringMachine.forward": (
            turing, {"x": x, "state": turing.start(B), "need_weights": True},
        ),
    }  # fmt: skip
    for name in ("AttentionRNN", "AttentionGRU", "AttentionLSTM"):
        sizes = {"input_size": A, "hidden_size": A, "context_size": A}
        sizes["attention"] = made("BahdanauAttention")
        kind = getattr(modules, name)
        layer = kind(**sizes)
        table[name] = (
            kind,
            {**sizes, "num_layers": 2, "bias": True, "recurrence": "input_feeding",
             "query_layer": "last", "output_size": A, "dropout": 0.1, "recurrent_dropout": 0.1},
        )  # fmt: skip
        prepare = {"states": states, "lengths": lengths(), "mask": seen(), "values": states}
        table[name + ".prepare"] = layer.prepare, prepare
        table[name + ".forward"] = (
            layer,
            {"input": x, "memory": layer.prepare(states), "hx": torch.randn(1, B, A),
             "target_lengths": lengths(TQ), "need_weights": True},
        )  # fmt: skip
    return {name: Call(*of) for name, of in table.items()}


def functions_and_modules() -> Table:
    """Return all of attnfast, attnfast.decoding, attnfast.losses and attnfast.nn."""
    return {name: call for part in (functions, attentions, layers) for name, call in part().items()}
