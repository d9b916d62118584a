"""Attention in the spellings of textbooks: v · tanh(W s + U h), v · tanh(W [s; h]) and s · W h.

Many projects write it from the formula. Few names of parameters are in use, but the layer that
projects the state, the order and shapes of arguments, the mask and the results differ. Calls of a
class's own code with random numbers show its form; the comparison then checks it, as for any other
adapter.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnfast.integrations.adapter import Adapter, UnsupportedCall, arguments
from attnfast.integrations.helpers import (
    attend_to_source,
    batch_first,
    is_plain,
    keep_in_graph,
    project,
    project_both,
    promote_dtype,
)

SETTINGS = ("method", "attn_type", "attention_type")  # which score a class computes
LAYERS = 4
#: Shapes [B, D], [B, 1, D], [L, B, D], [1, B, D] of a state: a further dimension and its size. If L
#: layers are supported, of which the last is used, so is any other number.
STATES = ((None, 1), (1, 1), (0, LAYERS), (0, 1))


class Form(NamedTuple):
    """The arguments, the formula and the results of a module."""

    names: tuple[str, ...]  # of its arguments
    state: str
    source: str
    mask: str  # "" without one
    hides: bool  # the mask is True at hidden keys
    time_first: bool
    of_state: str  # the layer that projects it, or ""
    of_source: str  # the same layer if it projects both, concatenated
    source_first: bool  # in the concatenation
    vector: str  # of the score, "" for a dot product
    states: tuple[tuple[int | None, int], ...] = ()  # of STATES
    results: tuple[tuple[str, int | None, bool], ...] = ()  # name, dimension of size 1, promoted
    is_tuple: bool = True


def parts(attention, form):
    """Return the layers of the state and of the source, None where there is none."""
    return getattr(attention, form.of_state, None), getattr(attention, form.of_source, None)


def score_vector(attention, form):
    """Return the vector of the score and its bias, None where there is none."""
    vector = getattr(attention, form.vector, None)
    return getattr(vector, "weight", vector), getattr(vector, "bias", None)


def terms(attention, form, state, source):
    """Return the query and the key that the score adds, or multiplies if it has no vector."""
    of_state, of_source = parts(attention, form)
    if of_state is not of_source:
        query = of_state(state) if of_state else state
        return query, project(attention, "key", of_source, source) if of_source else source
    if not is_plain(of_state):
        raise UnsupportedCall("its attention layer has hooks or is no plain nn.Linear")
    return project_both(attention, of_state, state, source, states_first=form.source_first)


def last_state(form, state):
    """Return a state as [B, D], or None if it has a shape that the module does not take."""
    for axis, layers in form.states:
        if axis is None and state.dim() == 2:
            return state
        if axis is not None and state.dim() == 3 and (layers > 1 or state.shape[axis] == 1):
            return state.select(axis, -1)
    return None


class Textbook:
    """e = v · tanh(W s + U h), v · tanh(W [s; h] + b) or s · W h."""

    def forward(self, *args, **kwargs):
        form = form_of(self)
        given = {**dict(zip(form.names, args)), **kwargs}
        complete = len(given) == len(args) + len(kwargs)
        state, source, mask = (given.pop(x, None) for x in (form.state, form.source, form.mask))
        if given or not (complete and isinstance(state, Tensor) and isinstance(source, Tensor)):
            raise UnsupportedCall("it is called with other arguments")
        state = last_state(form, state)
        if (
            state is None
            or source.dim() != 3
            or not (mask is None or (isinstance(mask, Tensor) and mask.dim() == 2))
        ):
            raise UnsupportedCall("its state, source or mask has another shape")
        source = batch_first(self, source) if form.time_first else source
        query, key = terms(self, form, state, source)
        vector, bias = score_vector(self, form)
        mask = None if mask is None else mask == 0 if form.hides else mask != 0
        asked = [name for name, *_ in form.results]
        value = source if "context" in asked else None
        context, weights = attend_to_source(self, query, key, value, vector, mask=mask)
        results = []
        for name, axis, is_promoted in form.results:
            x, factors = context, [weights, source]
            if name == "weights":
                x, factors = weights, [state, source] if vector is None else [vector]
            x = promote_dtype(x, *factors) if is_promoted else x
            x = keep_in_graph(x, bias) if name == "context" or asked == ["weights"] else x
            results.append(x if axis is None else x.unsqueeze(axis))
        return tuple(results) if form.is_tuple else results[0]


# ---- the form of a class -------------------------------------------------------------------------

FORMS: dict[tuple[Any, ...], Form] = {}  # by class and settings


def own_class(attention):
    """Return a module's class, without the replacement."""
    return getattr(type(attention), "_attnfast_own", type(attention))


def key_of(attention):
    """Return the key of a module's form."""
    return own_class(attention), *(vars(attention).get(name) for name in SETTINGS)


def form_of(attention):
    """Return the form of a module's class."""
    key = key_of(attention)
    known = key in FORMS  # not for a copy in another process, or after a setting was changed
    if not known and (torch.compiler.is_compiling() or attention_skip_reason(attention)):
        raise UnsupportedCall("its form is not known")
    return FORMS[key]


def attention_skip_reason(attention):
    """Find the form of a module's class; return why there is none, or None."""
    form = find_form(attention)
    if form is None:
        return "its own code does not compute a textbook's formula, as far as calls of it show"
    if FORMS.setdefault(key_of(attention), form) != form:
        return "another module of its class is called in another way"
    return None


@torch.no_grad()
def find_form(attention):
    """Return the first form in which a module's own code computes the formula, or None."""
    own = own_class(attention)
    twin = own.__new__(own)
    copied = {name: copy.deepcopy(vars(attention)[name]) for name in ("_modules", "_parameters")}
    vars(twin).update({**vars(attention), **copied})
    random = torch.Generator().manual_seed(0)
    for p in twin.to("cpu", torch.float64).eval().parameters():
        p.copy_(normal(random, *p.shape) * max(p.shape[-1:], default=1) ** -0.5)
    with torch.random.fork_rng([]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for form in forms(twin):
            found = []
            for state in STATES:
                with contextlib.suppress(Exception):  # its own code does not take such arguments
                    found.append(with_results(twin, form._replace(states=(state,)), random))
            if found:
                like = [x for x in found if x._replace(states=()) == found[0]._replace(states=())]
                return found[0]._replace(states=sum((x.states for x in like), ()))
    return None


def normal(random, *shape):
    return torch.randn(*shape, generator=random, dtype=torch.float64, device="cpu")


def forms(attention) -> Iterator[Form]:
    """Yield the forms that a module's parameters and the names of its arguments admit."""
    taken = arguments(attention)
    masks = [name for name in taken if "mask" in name]
    needed = [n for n, p in taken.items() if p.default is p.empty and n not in masks]
    roots = dict.fromkeys(name.partition(".")[0] for name, _ in attention.named_parameters())
    vectors = [n for n in roots if getattr(getattr(attention, n), "out_features", 1) == 1]
    layers = [n for n in roots if n not in vectors]
    if len(needed) != 2 or max(len(masks), len(vectors)) > 1 or len(layers) not in (1, 2):
        return
    pair = layers if len(layers) == 2 else [*layers, "" if not vectors else layers[0]]
    masked: list[tuple[str, bool]] = [(mask, hides) for mask in masks for hides in (False, True)]
    if not masks or taken[masks[0]].default is None:
        masked.append(("", False))
    for time_first, (state, source), (of_state, of_source), source_first, (mask, hides) in product(
        [False, True][: len(layers)],  # bentrevett's adapters know those with one layer
        (needed, needed[::-1]),
        (pair, pair[::-1]),
        [False, True][: 2 if pair[0] == pair[1] else 1],
        masked,
    ):
        yield Form(
            tuple(taken), state, source, mask, hides, time_first, of_state, of_source,
            source_first, "".join(vectors),
        )  # fmt: skip


def sizes(attention, form):
    """Return the features of the state and of the source."""
    of_state, of_source = parts(attention, form)
    if of_state is of_source:  # the state usually has the features of the score
        both, D = of_state.in_features, of_state.out_features
        D = both // 2 if both <= D else D
        return D, both - D
    D = of_state.in_features if of_state else of_source.out_features
    return D, of_source.in_features if of_source else of_state.out_features


def call(function, form, states, source, seen=None, *, shape=0):
    """Call a function in a form with states ``[L, B, D]``, of which it uses the last."""
    given = {form.source: source.transpose(0, 1) if form.time_first else source}
    axis, layers = form.states[shape]
    given[form.state] = states[-1] if axis is None else states[-layers:].transpose(0, axis)
    if seen is not None and form.mask:
        given[form.mask] = seen != form.hides
    return function(**given)


def with_results(attention, form, random):
    """Return the form with the results of a module's own code; raise if it computes others."""
    D, E = sizes(attention, form)
    states, source = normal(random, LAYERS, 2, D), normal(random, 2, 3, E)
    seen = torch.tensor([[True, True, True], [True, True, False]], device="cpu")
    own, (vector, _) = own_class(attention).forward, score_vector(attention, form)

    def forward(**given):
        results = own(attention, **given)
        return results if isinstance(results, tuple) else [results]

    attention.double()
    with torch.autocast("cpu", enabled=False):
        results = call(forward, form, states, source, seen)
        query, key = terms(attention, form, states[-1], source)
    query = query.unsqueeze(1)
    scores = (query * key).sum(2) if vector is None else (query + key).tanh() @ vector.flatten()
    weights = (scores.masked_fill(~seen, -torch.inf) if form.mask else scores).softmax(1)
    known = {"context": (weights.unsqueeze(1) @ source).squeeze(1), "weights": weights}
    views = [
        (name, axis, x if axis is None else x.unsqueeze(axis))
        for name, x in known.items()
        for axis in (None, 0, 1, 2)
    ]
    found = [next((name, axis) for name, axis, view in views if is_same(x, view)) for x in results]
    attention.float()
    with torch.autocast("cpu", torch.bfloat16):
        cast = call(forward, form, states.float(), source.float(), seen)
    return form._replace(
        results=tuple((*x, y.dtype == torch.float32) for x, y in zip(found, cast)),
        is_tuple=isinstance(results, tuple),
    )


def is_same(x, y):
    return x.shape == y.shape and torch.allclose(x, y)


def example(attention, draw):
    form = form_of(attention)
    D, E = sizes(attention, form)
    for lengths in draw.sources((5, 2, 4), (3, 1)):
        B, Tk = len(lengths), max(lengths)
        source, seen = draw(B, Tk, E), draw.seen(lengths, Tk)
        for shape in (0, 0, *range(len(form.states))):
            yield call(attention, form, draw(LAYERS, B, D), source, seen, shape=shape)
        if not form.mask or arguments(attention)[form.mask].default is None:
            yield call(attention, form, draw(LAYERS, B, D), source)


# ---- spellings -----------------------------------------------------------------------------------

VECTORS = ("v", "V", "v_a", "V_a", "Va", "full_att")
SPELLINGS = ("attn", "W", "W_a", "W_a U_a", "Wa Ua", "W U", "W1 W2", "w1 w2", "W_h W_s", "w_h w_s",
             "W_h W_q", "W_h W_k", "W_q W_k", "Wq Wk", "W_enc W_dec", "W_encoder W_decoder",
             "encoder_proj decoder_proj", "encoder_att decoder_att")  # fmt: skip

ADAPTERS = [
    Adapter(
        name=f"a textbook's attention with {' and '.join(layers)}",
        implementation=Textbook,
        classes=["Attention", "BahdanauAttention", "AdditiveAttention", "LuongAttention", "Attn"],
        parameters=[f"{layer}.weight" for layer in layers],
        optional=[
            *(f"{layer}.bias" for layer in layers),
            *(f"{vector}{part}" for vector in VECTORS for part in ("", ".weight", ".bias")),
        ],
        known_attributes=[*SETTINGS, "hidden_size", "hidden_dim"],
        example=example,
        skip_reason=attention_skip_reason,
        note="a source without words has weights 0",
    )
    for layers in map(str.split, SPELLINGS)
]
