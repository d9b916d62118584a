"""The public names have types without Any in a user's file under `mypy --strict`."""

import importlib
import inspect
import re
from collections.abc import Iterator

import pytest
from test_api import MODULES, ROOT
from torch import nn

api = pytest.importorskip("mypy.api")

#: Arguments of generic classes.
PARAMETERS = {
    "attnfast.Explanation": "[torch.Tensor]",
    "attnfast.decoding.Scorer": "[attnfast.nn.Memory, attnfast.nn.RecurrentState]",
    "attnfast.nn.GatedAttention": "[[bool], torch.Tensor | None]",
}
#: A module of any class, whose attributes an adapter reads.
ANY_MODULE = {"Adapter", "Adapter.example", "Adapter.skip_reason", "Adapter.search"}

FLOWS = """
from torch import Tensor
from typing_extensions import assert_type
from attnfast.decoding import beam_search
from attnfast.models import Config, CTCPrefixScorer, ListenAttendSpell, Seq2Seq, build
from attnfast.models import Classifier
from attnfast.analysis.faithfulness import erasure

def attend(x: Tensor) -> None:
    context, weights = attnfast.dot_attention(x, x, x)
    assert_type((context, weights), tuple[Tensor, Tensor | None])
    _, weights_of_heads = attnfast.dot_attention(x, x, x, span=[attnfast.Span()])
    assert_type(weights_of_heads, Tensor | list[Tensor] | None)
    attention = attnfast.nn.BahdanauAttention(6, 8, 4)
    context, weights = attention(x, attention.prepare(x), need_weights=True)
    assert_type((context, weights), tuple[Tensor, Tensor | None])
    covering = attnfast.nn.CoverageAttention(6, 8, 4)
    gated = attnfast.nn.GatedAttention(covering, 6)
    assert_type(gated(x, gated.prepare(x))[2], attnfast.nn.CumulativeState)
    layer = attnfast.nn.AttentionGRU(3, 6, 8, attention)
    output, state = layer(x, layer.prepare(x))
    assert_type((output, state), tuple[Tensor, attnfast.nn.RecurrentState])
    attention(x, x)  # E: Argument 2

def translate(model: Seq2Seq, x: Tensor) -> list[list[int]]:
    logits, coverage = model(x, x, x)
    assert_type((logits, coverage), tuple[Tensor, Tensor | None])
    return beam_search(model, x, x).best

def recognise(model: ListenAttendSpell, x: Tensor) -> list[list[int]]:
    beam_search(build(Config()), x, x, scorer=CTCPrefixScorer())  # E: Cannot infer
    return beam_search(model, x, x, scorer=CTCPrefixScorer()).best

def explain(model: Classifier, x: Tensor) -> Tensor:
    assert_type(attnfast.replace(model), attnfast.integrations.Report)
    return erasure(model.read, x, x, x)
"""


def names() -> Iterator[tuple[str, str]]:
    """Yield each public name and member, and an expression that has its type, given an x."""
    for module in (f"attnfast{x}" for x in MODULES):
        found = importlib.import_module(module)
        for name in found.__all__:
            x, path = getattr(found, name), f"{module}.{name}"
            if inspect.ismodule(x):
                continue
            yield path, f"reveal_type({path})"
            if not inspect.isclass(x):
                continue
            own = (base for base in x.__mro__ if base.__module__.startswith("attnfast"))
            members = {k for base in own for k in vars(base) if not k.startswith("_")}
            if issubclass(x, nn.Module) or "__call__" in vars(x):
                members.add("__call__")
            for member in sorted(members):
                given = f"x: {path}{PARAMETERS.get(path, '')}"
                yield f"{path}.{member}", f"def _({given}) -> None: reveal_type(x.{member})"


def check(content: str, tmp_path, monkeypatch, request) -> list[str]:
    """Return what mypy says of each line of a user's file, and check that it says nothing else."""
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    file = tmp_path / "user.py"
    file.write_text(content)
    cache = request.config.cache.mkdir("mypy")
    options = ["--strict", "--follow-imports=silent", "--config-file=", f"--cache-dir={cache}"]
    output, errors, _ = api.run([*options, str(file)])
    assert not errors
    said = [""] * (content.count("\n") + 1)
    for line in output.splitlines()[:-1]:
        number, text = re.fullmatch(r".*user\.py:(\d+): (?:note|error): (.*)", line).groups()
        said[int(number) - 1] += text
    return said


def test_public_names_have_types(tmp_path, monkeypatch, request):
    imports = "".join(f"import attnfast{module}\n" for module in MODULES)
    checked = list(names())
    lines = [line for _, line in checked]
    content = "\n".join([f"{imports}import torch", *lines, FLOWS])
    said = check(content, tmp_path, monkeypatch, request)
    first = imports.count("\n") + 1
    vague = []
    for (name, _), text in zip(checked, said[first:]):
        assert text.startswith("Revealed type is "), f"{name}: {text}"
        known = re.sub(r"\(\*Any, \*\*Any\)", "(...)", text)
        if re.search(r"\bAny\b", known):
            vague.append(name)
    assert [x for x in vague if x.removeprefix("attnfast.integrations.") not in ANY_MODULE] == []
    for line, text in zip(FLOWS.splitlines(), said[first + len(lines) :]):
        expected = line.partition("# E: ")[2]
        assert text.startswith(expected) if expected else not text, f"{line}: {text}"
