"""Whatever is passed in the place of an argument: it works, or one sentence names the argument."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from calls import TK, TQ, A, B, kinds, made
from calls_of_models import calls
from test_api import MODULES
from wrong_values import attempt, tries

from attnfast._utils.checks import LONGEST, describe, raise_value_error

#: Public callables that the table lacks: patterns, by the reason.
ABSENT = {
    "tuples and protocols, which take whatever they hold": (
        ".*Output.*|RowStatistics|.*Memory|.*State|.*index_select|Failures|KeyCoverage"
        "|AlignmentScore|Diagonality|HeadRoles|OverUnderTranslation|Adversarial|AttentionModel"
        "|Decision|EncodedSpeech|SpanPrediction|EncodedImage|EncodedSource|Scorer.*|WordErrors"
        "|Report.*|Explanation|InputError"
    ),
    "of no kind: their kinds are in the table": "HistoryAttention.*",
    "parts that their own module calls, with what it has checked": (
        "Span.(locate|stop|columns_of)|LocalAttention.*|StridedAttention.*"
        "|NeuralTuringMachine.(address|step)|.*.parts|.*reset_parameters"
    ),
    "for those who write adapters, with what they read from another project's module": (
        "Adapter.*|ProbeInputs.*|UnsupportedCall|attend_to_source|batch_first|cached_per_source|keep_in_graph|promote_dtype|project.*"
    ),
    "for another project's modules, which answer in tests/integrations/test_search_model.py": (
        "SearchModel.*|make_search_model"
    ),
    "files of recordings, which answer in tests/test_speech.py": "read_wav|read_recordings",
    "checks of the package's own": "check_memory",
    "it runs what it is given, and answers in tests/test_explain.py": "explain",
    "without arguments": "SinusoidalPositions|CTCPrefixScorer",
}  # fmt: skip
CALLS = calls()


def public() -> Iterator[str]:
    """Yield the names of public functions, classes and methods that take arguments."""
    for part in MODULES:
        module = importlib.import_module(f"attnfast{part}")
        own = [x for x, y in vars(module).items() if inspect.getmodule(y) is module and x[0] != "_"]
        for name in getattr(module, "__all__", own):
            thing = getattr(module, name)
            if inspect.isfunction(thing) or inspect.isclass(thing):
                yield name
            methods: dict[str, Any] = vars(thing) if inspect.isclass(thing) else {}
            for method, function in methods.items():
                takes = inspect.isfunction(function) and inspect.signature(function).parameters
                if takes and len(takes) > 1 and method[0] != "_":
                    yield f"{name}.{method}"


def test_no_public_callable_is_missing():
    tried = {name.partition(",")[0] for name in CALLS}
    absent = "|".join(ABSENT.values())
    assert [x for x in public() if x not in tried and not re.fullmatch(absent, x)] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_one_sentence(name):
    if name.startswith("draw"):
        pytest.importorskip("matplotlib")
    call = CALLS[name]
    call.function(**call.arguments)
    answers = [attempt(name, call, *one) for one in tries(name, call)]
    assert [str(x) for x in answers if x.answer] == []


@pytest.mark.parametrize("name", kinds())
def test_states_in_the_place_of_a_memory(name):
    module, states = made(name), torch.randn(B, TK, A)
    for state in (torch.randn(B, A), torch.randn(B, TQ, A)):
        with pytest.raises(TypeError) as error:
            module(state, states)
        assert str(error.value) == (
            "memory must be a result of prepare(...), got a Tensor of torch.float32 [2, 5, 4]"
        )


def test_descriptions_are_short():
    assert describe(torch.ones(2, 3)) == "a Tensor of torch.float32 [2, 3]"
    assert describe(np.ones(4)) == "an ndarray of float64 [4]"
    assert describe("a" * 500).startswith("'aaa")
    assert max(len(describe(x)) for x in ("a" * 500, [torch.ones(50)] * 50, {1: "b" * 500})) <= 80
    with pytest.raises(ValueError, match="name must be") as error:
        raise_value_error("name", "expected " * 90, "got")
    assert len(str(error.value)) == LONGEST
