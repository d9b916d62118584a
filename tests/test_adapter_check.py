"""The command ``python -m attnfast.integrations check``; reports on attention without adapters."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from integrations import reference_projects
from integrations.plain import Served, as_plain, example, register
from integrations.reference_projects import Plain
from torch import nn

import attnfast
from attnfast.integrations import ADAPTERS, Adapter, UnsupportedCall
from attnfast.integrations.check import main
from attnfast.integrations.probe import Measurement, ProbeConfig, measure

PAGE = (Path(__file__).parent.parent / "docs" / "adapters.md").read_text()
CODE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(
    r"^```console\n\$ python -m attnfast.integrations (.*?)\n(.*?)^```$",
    PAGE,
    re.DOTALL | re.MULTILINE,
)
WORDS = "my_model:WordAttention --init 6 8 16"
TUTORIAL = "the translation tutorial's BahdanauAttention"


@pytest.fixture(autouse=True)
def adapters():
    with mock.patch.dict(ADAPTERS):
        yield


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command, with the page's modules; it returns the output."""
    (tmp_path / "my_model.py").write_text(CODE[0])
    (tmp_path / "my_adapter.py").write_text(CODE[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(command: str, *more: str, status: int = 0, **files: str) -> str:
        for name, code in files.items():
            (tmp_path / f"{name}.py").write_text(code)
        with mock.patch.dict(sys.modules):
            assert main(["check", *command.split(), *more]) == status
        out, err = capsys.readouterr()
        assert (status == 2) == bool(err) == (not out)
        return out or err.removeprefix("attnfast: ")

    return run


def test_the_page_shows_what_the_command_prints(check):
    """Apart from the rounding errors."""
    assert len(COMMANDS) == 2
    for status, (command, wanted) in zip((1, 0), COMMANDS):
        out = check(command.removeprefix("check "), status=status)
        masked = (re.sub(r"\b\d\.\de-\d\d\b", "#.#e-##", x) for x in (out, wanted))
        assert next(masked) == next(masked)


def test_a_program_of_its_own(tmp_path):
    (tmp_path / "my_model.py").write_text(CODE[0])
    command = [sys.executable, "-m", "attnfast.integrations", "check", *WORDS.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "WordAttention is not known" in done.stdout, done.stderr


FAULTS = {
    "keep_in_graph(context, self.scorer.bias)": (
        "context",
        "gradients differ in scorer.bias by being None instead of a tensor [1]; keep_in_graph ",
        "unlike",
    ),
    "context = promote_dtype(context, weights, source)": (
        "",
        "results differ by dtype: torch.bfloat16 [3, 8] instead of torch.float32 [3, 8] in call "
        "1[0]; promote_dtype gives a result the dtype",
        "in call 1[0], under autocast to bfloat16; promote_dtype",
    ),
    "else ~padding": ("else padding", "results differ by ", "in call 1[0], in float64 with batch"),
    "self.of_state(state), key": (
        "self.of_stat(state), key",
        "its replacement fails on an example: AttributeError: 'WordAttention' object has no ",
        "my_adapter.py:11)\n",
    ),
    "module.of_state.in_features), source": (
        "3), source",
        "its own class fails on an example: RuntimeError: mat1 and mat2 shapes",
        "my_model.py:16)\n",
    ),
    "~padding  #": (
        "~padding[:, None, None]  #",
        "its replacement leaves every call to the module's own code",
        "some calls ran the module's own code: its own code computes queries, keys and masks",
    ),
    "        return keep": (
        "        self.context = context\n        return keep",
        "state differ in context",
        "unlike",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_where_they_show(fault, check):
    """The first difference stands below its line, and with its configuration at the end."""
    replaced, below, also = FAULTS[fault]
    assert CODE[1].count(fault) == 1
    code = CODE[1].replace(fault, replaced)
    out = check(f"{WORDS} --adapters my_adapter", status=1, my_adapter=code)
    lines = out.splitlines()
    assert sum(x.startswith(f"    {below}") for x in lines) == 1 and also in out, out
    assert lines[-2].startswith(f"not served: {below.partition(' in call')[0].partition(';')[0]}")
    assert lines[-1] == "next: docs/adapters.md#reading-the-comparison"


def test_what_a_line_counts(check):
    """Dtypes that differ are counted where they do; the replacement serves all calls."""
    code = CODE[1].replace("context = promote_dtype(context, weights, source)", "")
    out = check(f"{WORDS} --adapters my_adapter", status=1, my_adapter=code)
    cells = {x[:47].strip(): x[47:].split() for x in out.splitlines() if re.match("  (in|un)", x)}
    assert len(cells) == 5 and all(x[5] == x[7] for x in cells.values())
    assert [x[3] for x in cells.values()] == ["0", "0", "0", "0", "6"]
    assert [float(x[4]) for x in cells.values()] == [1e-9, 1e-9, 1e-4, 1e-6, 0.1]
    assert all(float(x[0]) <= float(x[4]) for x in cells.values())


def test_the_known_adapter_of_another_class(check):
    bahdanau = CODE_OF_COPY.format(name="Aligner")
    out = check("copies:Aligner --init 8", status=1, copies=bahdanau)
    assert f"\n  {TUTORIAL}: its parameters; of a class BahdanauAttention\n" in out
    assert f'next: compare it, --as "{TUTORIAL}"; or write an adapter' in out
    out = check("copies:Aligner --init hidden=8", "--as", TUTORIAL)
    assert "gradient 0 instead of rounding errors: Va.bias" in out and "beware" not in out
    lines = out.partition("served once it is registered:\n")[2]
    exec("\n".join(x.strip() for x in lines.splitlines()))
    names: dict = {"__name__": "copies"}
    exec(bahdanau, names)
    assert attnfast.replace(names["Aligner"](8)).replaced
    hot = bahdanau.replace("self.Va(", "1.0 / self.heat * self.Va(") + "        self.heat = 1.0\n"
    out = check("copies:Aligner --init 8", "--as", TUTORIAL, status=1, copies=hot)
    assert "not served: its own code reads heat, which its replacement does not\n" in out
    assert out.endswith("next: docs/adapters.md#what-known_attributes-is-for\n")


CODE_OF_COPY = """
import torch
from torch import nn

class {name}(nn.Module):
    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys)))
        weights = scores.squeeze(2).unsqueeze(1).softmax(-1)
        return torch.bmm(weights, keys), weights

    def __init__(self, hidden):
        super().__init__()
        self.Wa, self.Ua = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.Va = nn.Linear(hidden, 1)
"""


def test_an_adapter_that_names_one_class(check):
    """Its attributes are not examined, so the command says which are read."""
    hot = CODE_OF_COPY.format(name="Aligner").replace("self.Va(torch", "self.heat * self.Va(torch")
    code = CODE[1].partition("adapter = Adapter(")[0] + (
        "import dataclasses\n"
        f'known = attnfast.integrations.ADAPTERS["{TUTORIAL}"]\n'
        'ADAPTERS = [dataclasses.replace(known, name="one", classes=["theirs.Aligner"])]\n'
    )
    hot += "        self.heat = 1.0\n"
    place = "copies:Aligner --init 8 --adapters my_adapter --as one"
    out = check(place, copies=hot, my_adapter=code)
    assert "classes=['copies.Aligner'])" in out
    assert "beware: its own code reads heat, which its replacement does not; the com" in out


def test_a_whole_model(check):
    code = (
        "from my_model import WordAttention\nfrom torch import nn\n"
        "def model(n): return nn.ModuleDict({'a': WordAttention(n, 4, 5), 'b': nn.ModuleList(\n"
        "    [WordAttention(5, 6, 7), nn.MultiheadAttention(4, 2)])})\n"
    )
    out = check("whole:model --init 3 --adapters my_adapter", status=1, whole=code)
    heads = re.findall(r"^(\S+): ([\w.]+)$", out, re.MULTILINE)
    assert heads[0] == ("a", "my_model.WordAttention") and heads[2][0] == "b.1"
    assert out.count("\nserved: attnfast.replace") == 2 and out.count("\nnot served: its cl") == 1


def test_near_adapters_are_listed(check):
    code = CODE[0].replace("WordAttention", "Attention")
    out = check("near:Attention --init 6 8 16", status=1, near=code)
    assert "\n  a textbook's attention with attn: the module has of_source.bias, of_source.w" in out
    assert "… and lacks attn.weight\n" in out
    assert re.search(r"\n  and \d+ more\n\nnot served: only its class's name is like ", out)
    wrong = CODE[1].replace('"WordAttention"]', '"my_model.WordAttn"]')
    out = check(f"{WORDS} --adapters my_adapter", status=1, my_adapter=wrong)
    assert "\n  my WordAttention: its parameters; of a class my_model.WordAttn\n" in out
    wrong = re.sub('"(scorer|of_s)', r'"the_\1', CODE[1])
    out = check(f"{WORDS} --adapters my_adapter", status=1, my_adapter=wrong)
    assert "and lacks the_of_source.bias, the_of_source.weight, the_of_state.weight, …\n" in out


def test_files_in_packages(check, tmp_path):
    folder = tmp_path / "package" / "inner"
    folder.mkdir(parents=True)
    for part in (folder, folder.parent):
        (part / "__init__.py").touch()
    code = "from .parts import nn\nclass Outer:\n    class Inner(nn.Module):\n        pass\n"
    (folder / "parts.py").write_text("from torch import nn\n")
    (folder / "attention.py").write_text(code)
    out = check("package/inner/attention.py:Outer.Inner", status=1)
    assert out.startswith("package.inner.attention.Outer.Inner\n")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("my_model", r"expected module:Class or path/to/file.py:Class, got my_model"),
        ("nothing:A", r"cannot import nothing: ModuleNotFoundError: No module named 'nothing'"),
        ("no.py:A", r"no.py: no such file"),
        ("leaves.py:A", r"cannot import leaves.py: SystemExit: 3"),
        ("my_model:Attention", r"my_model has no Attention; its modules: WordAttention"),
        ("my_model:WordAttention", r"my_model:WordAttention cannot be made without --init: TypeE"),
        ("my_model:WordAttention --init 6", r"my_model:.* made by --init 6: TypeError: .* missing"),
        ("my_model:nn", r"my_model:nn: expected a class or a function, got <module 'torch.nn'"),
        ("math:sqrt --init 4", r"math:sqrt: expected a torch.nn.Module, got float"),
        (f"{WORDS} --as tutorial", r'--as: no adapter is named "tutorial"; near: the chatbot'),
        (f"{WORDS} --adapters no", r"cannot import no: ModuleNotFoundError"),
        (f"{WORDS} --adapters", r"--adapters: expected one argument"),
        ("math.py:A", r"math.py: another module is named math: "),
        ("", r"the following arguments are required: target: python -m attnfast.integrations ch"),
    ],
)
def test_a_wrong_call_ends_in_one_sentence(command, sentence, check):
    said = check(command, status=2, leaves="import sys\nsys.exit(3)\n", math="")
    assert re.match(sentence, said) and said.count("\n") == 1, said


# ---- differences in numbers ----------------------------------------------------------------------


def test_differences_are_measured():
    def outcome(**results):
        return results, {}, {"w": torch.ones(2)}

    old = outcome(a=torch.tensor([1.0, math.nan, math.inf]), b=3.0, c="text", d=torch.ones(2))
    config = ProbeConfig("here", torch.float64, torch.device("cpu"), 1e-9)

    def largest(**changed):
        new = outcome(**{**old[0], **changed})
        return Measurement(config, (old, new), None).largest()["results"]

    assert largest() == 0 == largest(d=torch.ones(2, dtype=torch.float16))
    assert largest(b=3.5) == 0.5 and largest(d=torch.tensor([1.0, 3.0])) == 2.0
    for changed in ({"a": torch.zeros(3)}, {"c": 1}, {"d": torch.ones(3)}, {"d": None}):
        assert largest(**changed) == math.inf
    new = outcome(d=torch.ones(2, dtype=torch.float16), b=None)
    measured = Measurement(config, (old, new), None)
    assert measured.other_dtypes() == 1 and measured.moved() == [{"w"}, {"w"}]


def test_every_configuration_is_measured_after_a_difference():
    class Forgets(Served):
        def forward(self, state, memory, mask=None):
            return super().forward(state, memory)

    register(Forgets)
    reasons = [x.reason for x in measure(Plain(), ADAPTERS["plain"])]
    wanted = ("in float64 with batches of 9 and 17", "in float64 in training mode")
    wanted += ("in the module's own float32", "in float64 with large parameters and 600 keys")
    assert [x.rpartition(", ")[2] for x in reasons] == [*wanted, "under autocast to bfloat16"]


def test_a_class_that_computes_in_float32():
    class Single(Plain):
        def forward(self, state, memory, mask=None):
            return Plain.forward(self, state.float(), memory.float(), mask)

    register(classes=[f"{__name__}.{Single.__qualname__}"])
    assert "Adapter(dtype=torch.float32) compares" in str(attnfast.replace(Single()))
    register(classes=[f"{__name__}.{Single.__qualname__}"], dtype=torch.float32)
    assert attnfast.replace(Single()).replaced


@as_plain
class Keeps(Plain):
    """Writes what it never reads."""

    def forward(self, state, memory, mask=None):
        context, self.weights = super().forward(state, memory, mask)
        return context, self.weights


@as_plain
class KeepsMuch(Plain):
    """Writes what a property reads."""

    heat = 1.0

    @property
    def weights(self):
        return self.last

    @weights.setter
    def weights(self, weights):
        self.last = weights * self.heat

    def forward(self, state, memory, mask=None):
        features = torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))
        self.weights = self.energy(features).squeeze(2).masked_fill(~mask, -1e9).softmax(1)
        return (self.last.unsqueeze(1) @ memory).squeeze(1), self.last


@as_plain
class KeepsOnly(Plain):
    def forward(self, state, memory, mask=None):
        features = torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))
        p = self.energy(features).squeeze(2).masked_fill(~mask, -1e9).softmax(1)
        self.last = self.seen = p
        return (p.unsqueeze(1) @ memory).squeeze(1), p


def test_attributes_that_are_only_written():
    class Both(Served):
        def forward(self, state, memory, mask=None):
            context, self.seen = super().forward(state, memory, mask)
            return context, self.seen

    register(Both)
    assert attnfast.replace(KeepsOnly()).replaced
    register()
    assert "its own code writes seen, which" in str(attnfast.replace(KeepsOnly()))
    assert "its own code reads weights, which" in str(attnfast.replace(Keeps()))
    assert "its own code reads weights, which" in str(attnfast.replace(KeepsMuch()))


def test_an_adapter_whose_module_is_not_imported():
    """As one defined by code that is executed."""
    names: dict = {"__name__": "nowhere", "Served": Served}
    exec(
        "class Ours(Served):\n    def forward(self, *a, **k): return super().forward(*a, **k)",
        names,
    )
    register(names["Ours"])
    assert attnfast.replace(Plain()).found


# ---- reports on what has no adapter --------------------------------------------------------------


class Luong(nn.Module):
    """Computes attention within its forward."""

    def __init__(self, how="bmm"):
        super().__init__()
        self.how, self.cell, self.out = how, nn.GRUCell(4, 4), nn.Linear(4, 9)

    def forward(self, word, state, source):
        scores = torch.bmm(source, state.unsqueeze(2)).squeeze(2)
        context = (scores.softmax(1).unsqueeze(2) * source).sum(1)
        return self.out(self.cell(word + context, state))


class At(nn.Module):
    def forward(self, word, state, source):
        return (source @ state.unsqueeze(2)).softmax(1).mul(source).sum(1)


class Layers(nn.Module):
    """An additive score, whose context is a sum."""

    def __init__(self):
        super().__init__()
        self.W, self.v, self.probabilities = nn.Linear(4, 5), nn.Linear(5, 1), nn.Softmax(1)

    def forward(self, state, source):
        weights = self.probabilities(self.v(torch.tanh(self.W(state).unsqueeze(1) + source)))
        return (weights * source).sum(1)


class Vector(Layers):
    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(torch.ones(5))


class Tagger(nn.Module):
    """No attention: a softmax over its outputs."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.hidden(x).tanh()).softmax(-1)


class Scores(nn.Module):
    """No attention: log-probabilities and a product."""

    def forward(self, x):
        return (x @ x.t()).log_softmax(-1)


@pytest.mark.parametrize(
    ("cls", "how"),
    [
        (Luong, "computes a softmax and calls bmm"),
        (At, "computes a softmax and calls @"),
        (Layers, "computes a softmax of an additive score"),
        (Vector, "computes a softmax of an additive score"),
    ],
)
def test_attention_within_a_decoder_is_named(cls, how):
    model = nn.ModuleDict({"decoder": cls(), "encoder": Tagger(), "head": nn.LazyLinear(3)})
    report = attnfast.replace(model)
    command = f"python -m attnfast.integrations check {__name__}:{cls.__name__}"
    what = f"its own code {how}, and its class {__name__}.{cls.__name__} is not known"
    said = str(report)
    assert said.startswith(f"decoder: {cls.__name__} skipped: {what}")
    assert said.endswith(f"; what to do (docs/adapters.md): {command}") and "\n" not in said
    with pytest.raises(
        RuntimeError, match=r"no attention of a supported project; decoder: .* skipped"
    ):
        attnfast.replace(model, strict=True)


@pytest.mark.parametrize("cls", [Tagger, Scores])
def test_what_is_no_attention(cls):
    assert not attnfast.replace(nn.Sequential(cls(), nn.LazyLinear(3))).found


class Outer(Luong):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


def test_only_the_innermost_is_named():
    """A decoder's code may use the weights of the attention that it contains."""
    assert [x.path for x in attnfast.replace(Outer(Layers())).found] == ["inner"]
    known = reference_projects.BahdanauAttention(8)
    assert [x.path for x in attnfast.replace(Outer(known)).found] == ["inner"]
    named = type("MyAttention", (nn.Module,), {})()
    assert [x.path for x in attnfast.replace(Outer(named)).found] == ["inner"]


def test_the_command_that_a_report_names():
    class Attention(nn.Module):
        pass

    assert str(attnfast.replace(Attention())).endswith("check module:Attention")
    Attention.__module__, Attention.__qualname__ = "__main__", "Attention"
    with mock.patch.object(sys.modules["__main__"], "__file__", "run.py", create=True):
        assert str(attnfast.replace(Attention())).endswith("check run.py:Attention")


def test_the_command_on_a_decoder(check):
    code = CODE_OF_COPY.format(name="Decoder") + "        self.rnn = nn.GRU(8, 8)\n"
    out = check("seq:Decoder --init 8", status=1, seq=code)
    line = "its own code computes a softmax and calls bmm: docs/adapters.md#attention-inside-a-dec"
    assert f"\nnext: {line}" in out


def test_the_source_first_variant_of_the_page():
    names: dict = {"__name__": "page", "attnfast": attnfast}
    for code in CODE[:6]:
        exec(code.replace("print(", "("), names)

    class SourceFirst(names["ConcatAttention"]):
        def forward(self, state, source):
            states = state.unsqueeze(1).expand(-1, source.shape[1], -1)
            hidden = self.layer(torch.cat([source, states], -1)).tanh()
            weights = (hidden @ self.v).softmax(1)
            return torch.bmm(weights.unsqueeze(1), source).squeeze(1), weights

    adapter = Adapter(
        name="source first", classes=[f"{__name__}.{SourceFirst.__qualname__}"],
        implementation=names["FusedSourceFirst"], parameters=["layer.weight", "layer.bias", "v"],
        example=names["concat_example"],
    )  # fmt: skip
    attnfast.register_adapter(adapter)
    attnfast.replace(SourceFirst(8, 8, 16), strict=True)


def test_calls_that_the_replacement_leaves():
    class Leaves(Served):
        def forward(self, state, memory, mask=None):
            raise UnsupportedCall("it is a Tuesday")

    register(Leaves, example=example)
    module = attnfast.replace(Plain()).found[0].module
    found = attnfast.explain(module, torch.ones(2, 6), torch.ones(2, 3, 6))
    assert found.choices[0].reasons == ("it is a Tuesday",)
