"""Graphs that other programs run: AOTInductor's packages, ONNX; what ``torch.jit`` supports."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from attnfast import nn as modules

PACKAGE = "aoti.pt2"


class Attend(nn.Module):
    """A source and states in one call, or a step."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, source, lengths, state):
        memory = self.attention.prepare(source, lengths)
        return self.attention(state, memory)[0]


def inputs(B=2, Tk=5, Tq=3, features=6):
    lengths = torch.tensor([Tk, *range(1, B)])
    return torch.randn(B, Tk, 8), lengths, torch.randn(B, Tq, features)


def load(first: str, folder) -> subprocess.CompletedProcess:
    """Load a package in a new process, and compare its results."""
    code = (
        f"{first}; import torch; inputs, wanted = torch.load('io.pt');"
        f"run = torch._inductor.aoti_load_package('{PACKAGE}');"
        "torch.testing.assert_close(run(*inputs), wanted)"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)


#: Options of Inductor that compile a package in less time.
QUICK = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}


@pytest.mark.cpu_library
def test_a_package_of_aotinductor_needs_the_import_alone(tmp_path):
    torch.manual_seed(0)
    model, x = Attend(modules.BahdanauAttention(6, 8, 4)).eval(), inputs()
    with torch.no_grad():
        torch.save((x, model(*x)), tmp_path / "io.pt")
        program = torch.export.export(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's compiler
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / PACKAGE), inductor_configs=QUICK
        )
    done = load("import attnfast", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Could not find schema for attnfast_cpu::" in load("pass", tmp_path).stderr


DECODERS = {
    "bahdanau": lambda: modules.BahdanauAttention(6, 8, 4, backend="reference"),
    "sparsemax": lambda: modules.BahdanauAttention(
        6, 8, 4, normalisation="sparsemax", backend="reference"
    ),
    "heads": lambda: modules.MultiHeadAttention(6, 8, 4, 2, backend="reference"),
    "local": lambda: modules.LocalAttention(6, 8, window=1, backend="reference"),
    "coverage": lambda: modules.CoverageAttention(6, 8, 4, backend="reference"),
    "location": lambda: modules.LocationAwareAttention(6, 8, 4, 3, 5, backend="reference"),
    "gru": lambda: modules.AttentionGRU(
        6, 6, 8, modules.BahdanauAttention(6, 8, 4, backend="reference")
    ),
    "lstm": lambda: modules.AttentionLSTM(
        6, 6, 8, modules.LuongAttention(6, 8, backend="reference"), recurrence="input_feeding"
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "Tq"), [("bahdanau", 1), *((name, 3) for name in DECODERS)])
def test_onnxruntime_computes_the_reference(name, Tq, tmp_path):
    """Batch and source are dynamic; steps that depend on earlier ones have a fixed number."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, dynamic = Attend(DECODERS[name]()).eval(), torch.export.Dim.DYNAMIC
    sizes = {0: dynamic, 1: dynamic}, {0: dynamic}, {0: dynamic}
    program = torch.onnx.export(
        model, inputs(Tq=Tq), dynamo=True, verbose=False, dynamic_shapes=sizes
    )
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for x in (inputs(Tq=Tq), inputs(3, 7, Tq)):
        given = {y.name: z.numpy() for y, z in zip(session.get_inputs(), x)}
        (found,) = session.run(None, given)
        torch.testing.assert_close(torch.from_numpy(found), model(*x).detach())
    assert {node.domain for node in program.model.graph} == {""}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("make", [
    lambda: modules.BahdanauAttention(6, 8, 4),
    lambda: modules.AttentionGRU(6, 6, 8, modules.BahdanauAttention(6, 8, 4)),
    lambda: modules.BidirectionalAttention(8),
    lambda: modules.MultiHopAttention(8),
    lambda: modules.NeuralTuringMachine(6, 8),
    lambda: modules.PointerGenerator(6, 8),
])  # fmt: skip
def test_a_script_is_refused_in_a_sentence(make):
    module = make()
    name = type(module).__name__
    for scripted in (module, nn.Sequential(module)):
        with pytest.raises(TypeError) as error:
            torch.jit.script(scripted)
        wanted = f"torch.jit.script does not support {name}: use torch.export.export"
        assert str(error.value) == wanted


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_trace_computes_the_same_for_other_sizes():
    model = Attend(modules.BahdanauAttention(6, 8, 4)).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, inputs(), check_trace=False)
        x = inputs(3, 7, 4)
        torch.testing.assert_close(traced(*x), model(*x))
