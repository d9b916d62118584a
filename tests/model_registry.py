"""Models and modules by name, each with a ragged batch: see tests/test_model_contracts.py."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import test_local
import test_models
import test_nn
import test_ntm
import test_pointer
import test_show_attend_tell as captions
import test_speech
import test_stateful
import torch
from torch import Tensor, nn

from attnfast import models
from attnfast import nn as modules

Inputs = dict[str, Tensor]
#: Tensors with a row for each step, ``[B, T, ...]``, and those after the last, ``[B, ...]``.
Results = tuple[list[Tensor], list[Tensor]]


class Model(NamedTuple):
    """A model in float64, its inputs and its calls; ``steps`` yields the results of each step.

    The batch is in another order from the second step on.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    run: Callable[[Any, Inputs], Results]
    steps: Callable[[Any, Inputs, Tensor], Iterator[Results]] | None = None
    #: By the name of an input: its first padded axis, the name of its lengths, what padding holds.
    padded: Mapping[str, tuple[int, str, float]] = MappingProxyType({})
    #: The inputs of a search, if the model has an output to search for.
    sought: tuple[str, ...] = ()
    #: Whether it chooses some keys, and so others in half precision.
    chooses: bool = False
    #: Whether it is another but for its cell, and so only asked for what a cell may break.
    alike: bool = False
    #: Whether ragged targets leave it in several phases, in which it cannot go on.
    phases: bool = False


def tensors(*of: Any) -> list[Tensor]:
    """Return the real numbers among these and in tuples of them."""
    parts = [y for x in of for y in (x if isinstance(x, tuple) else [x])]
    return [x for x in parts if isinstance(x, Tensor) and x.is_floating_point()]


# ---- attention: prepare(source, lengths), then a state, or many rows of them --------------------


def form(module: Any) -> Any:
    return "dense" if hasattr(module, "span") else True


def prepare_with_mask(module: Any, x: Inputs) -> Any:
    """Return a memory with a mask that says the same as the lengths, unless these are needed."""
    if isinstance(module, modules.LocalAttention | modules.LocalPredictiveAttention):
        return module.prepare(x["source"], x["lengths"])
    mask = torch.arange(x["source"].shape[1]) < x["lengths"][:, None]
    return module.prepare(x["source"], mask=mask)


def attend(module: Any, x: Inputs) -> Results:
    memory = module.prepare(x["source"], x["lengths"])
    context, weights, *history = module(x["state"], memory, need_weights=form(module))
    return [context, weights if weights.dim() < 4 else weights.transpose(1, 2)], tensors(*history)


def attend_in_steps(module: Any, x: Inputs, order: Tensor) -> Iterator[Results]:
    memory, states = prepare_with_mask(module, x), x["state"]
    history: list[Any] = []
    for t in range(states.shape[1]):
        if t == 1:
            memory, states = memory.index_select(order), states[order]
            history = [h.index_select(order) for h in history]
        context, weights, *history = module(
            states[:, t], memory, *history, need_weights=form(module)
        )
        yield [context, weights], tensors(*history)


def attention(make: Callable[[], nn.Module], states: Callable, lengths: Tensor) -> Model:
    def inputs() -> Inputs:
        state, source = (x.detach().double() for x in states())
        return {"state": state, "source": source, "lengths": lengths}

    takes_steps = getattr(make(), "slope", 1) is not None
    # NaN in padding reaches the gradient of the projection of keys
    padded = {"source": (1, "lengths", 1e4)}
    steps = attend_in_steps if takes_steps else None
    phases = getattr(getattr(make(), "span", None), "phases", 1) > 1
    return Model(make, inputs, attend, steps, padded, phases=phases)


def attentions() -> dict[str, Model]:
    table = {}
    for name in test_nn.modules():
        make = lambda name=name: test_nn.modules()[name]  # noqa: E731
        table[name] = attention(make, partial(test_nn.states, make()), test_nn.LENGTHS)
    for name in test_stateful.modules():
        make = lambda name=name: test_stateful.modules()[name]  # noqa: E731
        table[name] = attention(make, test_stateful.states, test_stateful.LENGTHS)
    spans = {
        f"{name}, {score}": partial(make, score=score)
        for name, (make, _) in zip(test_local.IDS, test_local.KINDS)
        for score in ("general", "concat")
    }
    spans["gated"] = lambda: modules.GatedAttention(modules.CoverageAttention(8, 8, 8), 8)
    spans["top k"] = lambda: modules.TopKAttention(modules.BahdanauAttention(8, 8, 8), 3)
    for name, make in spans.items():
        table[name] = attention(make, test_local.states, test_local.LENGTHS)
    return table


# ---- decoders: encode(...), then decode(...) a word, or many of them ----------------------------


def decode(names: tuple[str, ...], model: Any, x: Inputs) -> Results:
    found = model(*(x[name] for name in names), x["target"], **weights_of(model))
    if isinstance(found, models.LASOutput):
        return tensors(found.logits, found.weights), [found.frame_log_probs]
    if isinstance(found, models.CaptionOutput):  # whose weights are of a grid in one row
        drawn = isinstance(found.history, modules.HardAttentionState)
        return [found.logits], tensors(found.history) if drawn else []
    return tensors(found[0], found.weights), tensors(found[1])


def decode_in_steps(
    names: tuple[str, ...], model: Any, x: Inputs, order: Tensor
) -> Iterator[Results]:
    encoded, state = model.encode(*(x[name] for name in names))
    for t, word in enumerate(x["target"].split(1, 1)):
        if t == 1:
            encoded, state = encoded.index_select(order), state.index_select(order)
        given = word if t == 0 else word[order]
        logits, state, weights = model.decode(given, state, encoded, **weights_of(model))
        shown = [] if isinstance(model, models.ShowAttendTell) else tensors(weights)
        yield [y[:, 0] for y in (logits, *shown)], []


def weights_of(model: Any) -> dict[str, bool]:
    fixed = (models.FixedContext, models.MeanContext)
    return {"need_weights": not any(isinstance(x, fixed) for x in model.modules())}


def decoder(make: Callable[[], nn.Module], inputs: Callable[[], Inputs], **more: Any) -> Model:
    names = tuple(inputs())[:2]
    calls = partial(decode, names), partial(decode_in_steps, names)
    return Model(make, inputs, *calls, **{"sought": names, **more})


def sentences() -> Inputs:
    source, lengths = test_models.make_source()
    return {"source": source, "lengths": lengths, **targets(4, 23)}


def targets(batch: int, vocab_size: int) -> Inputs:
    lengths = torch.tensor([6, 2, 4, 1])[:batch]
    return {"target": torch.randint(4, vocab_size, (batch, 6)), "target_lengths": lengths}


def recordings() -> Inputs:
    frames = test_speech.numbers(3, 23, test_speech.FEATURES, dtype=torch.float64)
    return {"frames": frames, "lengths": test_speech.LENGTHS, **targets(3, 9)}


def images() -> Inputs:
    return {"images": captions.images(), "sizes": captions.SIZES, **targets(3, 11)}


VARIANTS = [
    *itertools.product(("none", "initial", "bahdanau", "dot", "scaled_dot"), ["attend_first"]),
    *itertools.product(("general", "concat"), ["attend_last", "input_feeding", "independent"]),
    *itertools.product(("coverage", "location", "forward"), ["attend_first", "independent"]),
]
SOURCE = {"source": (1, "lengths", 5), "target": (1, "target_lengths", 0)}


def decoders() -> dict[str, Model]:
    table = {}
    for kind, recurrence in VARIANTS:
        for cell in ("gru", "lstm"):
            options = {"recurrence": recurrence, "cell": cell}
            make = partial(test_models.make, kind, seed=3, **options)
            name = f"{kind}, {cell}, {recurrence}"
            table[name] = decoder(make, sentences, padded=SOURCE, alike=cell == "gru")
    for kind in ("general", "coverage", "bahdanau"):
        make = lambda kind=kind: test_models.make_pointer(kind)[0]  # noqa: E731
        table[f"{kind}, copying"] = decoder(make, own_words, padded=SOURCE)
    for sparse in (False, True):
        config = models.Config(
            23, embed_dim=6, hidden_dim=8, layers=2, encoder="transformer", self_attention=sparse,
            window=1, stride=3,
        )  # fmt: skip
        table[f"transformer{', sparse' * sparse}"] = decoder(
            partial(models.build, config), sentences, padded=SOURCE
        )
    for kind in test_speech.ATTENTIONS:
        padded = {"frames": (1, "lengths", math.nan), "target": (1, "target_lengths", 0)}
        table[f"speech, {kind}"] = decoder(
            partial(test_speech.make, kind, seed=3), recordings, padded=padded
        )
    for kind in captions.KINDS:
        padded = {"images": (2, "sizes", math.nan), "target": (1, "target_lengths", 0)}
        table[f"captions, {kind}"] = decoder(
            partial(captions.model, kind),
            images,
            padded=padded,
            chooses="few" in kind or kind == "hard",
        )
    return table


def own_words() -> Inputs:
    _, source, lengths = test_models.make_pointer()
    return {"source": source, "lengths": lengths, **targets(4, 25)}


# ---- others -------------------------------------------------------------------------------------


def turing(module: Any, x: Inputs) -> Results:
    found = module(x["x"], need_weights=True)
    return [found.output, found.weights], list(found.state)


def turing_steps(module: Any, x: Inputs, order: Tensor) -> Iterator[Results]:
    rows, state = x["x"], None
    for t in range(rows.shape[1]):
        if t == 1:
            rows, state = rows[order], state.index_select(order)
        found = module(rows[:, t : t + 1], state, need_weights=True)
        state = found.state
        yield [found.output[:, 0], found.weights[:, 0]], list(state)


def others() -> dict[str, Model]:
    two = {"text": (1, "text_lengths", math.nan), "question": (1, "question_lengths", math.nan)}
    two_of_words = {name: (*x[:2], 5) for name, x in two.items()}
    lengths = {"text_lengths": torch.tensor([6, 1, 4]), "question_lengths": torch.tensor([2, 4, 1])}
    words = {"text": torch.randint(1, 12, (3, 6)), "question": torch.randint(1, 12, (3, 4))}
    double = partial(torch.randn, dtype=torch.float64)
    stories = torch.randint(1, 12, (3, 4, 5))
    stories[1:, 2:], stories[:, :, 4] = 0, 0
    characters = {
        f"{name}_characters": torch.randint(1, 7, (*x.shape, 5)) for name, x in words.items()
    }
    characters_of_padding = {f"{name}_characters": (*x[:2], 5) for name, x in two.items()}
    items, pointers = double(4, 6, 3), test_pointer.POINTERS
    return {
        "BidirectionalAttention": Model(
            lambda: modules.BidirectionalAttention(5),
            lambda: lengths | {"text": double(3, 6, 5), "question": double(3, 4, 5)},
            lambda m, x: ([], tensors(*m(**x, need_weights=True))), padded=two,
        ),
        "BiDAF": Model(
            lambda: models.BiDAF(modules.BidirectionalAttention(10), 40, 12, 3, 5),
            lambda: lengths | words,
            lambda m, x: ([], tensors(*m(**x, need_weights=True))), padded=two_of_words,
        ),
        "BiDAF, characters, highway": Model(
            lambda: models.BiDAF(
                modules.BidirectionalAttention(10), 40, 12, 3, 5,
                characters=models.CharacterCNN(7, 3, 4), highway_layers=2,
            ),
            lambda: lengths | words | characters,
            lambda m, x: ([], tensors(*m(**x, need_weights=True))),
            padded=two_of_words | characters_of_padding,
        ),
        "CharacterCNN": Model(
            partial(models.CharacterCNN, 7, 3, 4, kernel_size=4),
            lambda: {"characters": characters["text_characters"]},
            lambda m, x: ([], [m(**x)]),
        ),
        "HighwayNetwork": Model(
            partial(models.HighwayNetwork, 5), lambda: {"x": double(3, 6, 5)},
            lambda m, x: ([], [m(**x)]),
        ),
        **{
            f"Classifier, {pooling}": Model(
                partial(models.Classifier, models.Encoder(6, 5), 12, 6, 3, pooling),
                lambda: {"words": words["text"], "lengths": lengths["text_lengths"]},
                lambda m, x: ([], [m(**x)]), padded={"words": (1, "lengths", 5)},
            )
            for pooling in models.POOLINGS
        },
        **{
            f"MemoryNetwork, {tying}": Model(
                partial(models.MemoryNetwork, 12, 6, 2, tying, max_sentences=4),
                lambda: {"stories": stories, "questions": words["question"]},
                lambda m, x: ([], tensors(*m(**x, need_weights=True))),
            )
            for tying in ("adjacent", "layer-wise")
        },
        "PointerNetwork": Model(
            test_pointer.model,
            lambda: {"items": items, "lengths": test_pointer.LENGTHS, "pointers": pointers},
            lambda m, x: ([m(**x)], []), padded={"items": (1, "lengths", 1e30)},
        ),
        "NeuralTuringMachine": Model(
            partial(test_ntm.machine, 2, 2, spread=1.0),
            lambda: {"x": double(3, 6, 4)},
            turing, turing_steps,
        ),
    }  # fmt: skip


MODELS = {**attentions(), **decoders(), **others()}
