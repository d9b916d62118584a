"""Operators are compared before their first use: kernels that are broken on purpose."""

import json
import os
import subprocess
import sys
import time
import warnings

import pytest
import torch

import attnfast
from attnfast._utils.checks import InputError
from attnfast.ops import backends, self_check
from attnfast.ops.attention import ATTENTION
from attnfast.ops.backends import DispatchKey
from attnfast.translate.cli import main

CPU = torch.device("cpu")
REQUEST = DispatchKey(CPU, torch.float32)
NAME = "cpu attention of float32, tanh"
pytestmark = pytest.mark.skipif(
    backends.unsupported_reason("cpu", CPU, torch.float32) is not None, reason="no _C_cpu"
)


def forget() -> None:
    """Let the next call choose its backend as the first one of a process does."""
    backends.forget_choices()
    self_check._outcome_file.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Compare operators of the CPU too, and keep what is found in a folder."""
    monkeypatch.setenv("ATTNFAST_SELF_CHECK", "all")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(backends, "_has_warned", True)
    compiled = {k: v for k, v in backends.BACKENDS.items() if k != "triton"}
    monkeypatch.setattr(self_check, "BACKENDS", compiled)  # or its interpreter takes seconds
    forget()
    yield tmp_path / "attnfast"
    forget()


def inputs():
    g = torch.Generator().manual_seed(3)
    query, key, value, weight = (
        torch.randn(*x, generator=g) for x in ((2, 3, 8), (2, 5, 8), (2, 5, 8), (8,))
    )
    return query.requires_grad_(), key, value, weight


def attend(**options):
    return attnfast.additive_attention(*inputs(), **options).context


def changed(place, change):
    """Return an operator of which one result is changed."""

    def make(run):
        def broken(*args):
            results = list(run(*args))
            results[place] = change(results[place])
            return tuple(results)

        return broken

    return make


def fail(run):
    def broken(*_):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    return broken


def changed_without_weights(run):
    """Return attention that is wrong unless it returns weights."""
    return lambda *args: run(*args) if args[-1] else changed(0, torch.neg)(run)(*args)


def hang(run):
    return lambda *_: time.sleep(30)


def not_a_number(x):
    x.view(-1)[-1] = torch.nan
    return x


BROKEN = {
    "wrong context": ("forwards", changed(0, lambda x: x * 1.01), "context differs by 0.0"),
    "wrong weights of a key": (
        "forwards",
        changed(1, lambda x: x.index_fill(-1, torch.tensor(7), 1) if x.numel() else x),
        "weights differs by 1, allowed is 0.0002",
    ),
    "wrong without gradients": (
        "forwards", changed_without_weights, "context without gradients differs by "
    ),
    "NaN": ("forwards", changed(0, not_a_number), "context differs by nan"),
    "wrong gradient": ("backwards", changed(1, torch.neg), "the gradient of key differs by "),
    "no gradient": ("backwards", changed(2, torch.zeros_like), "the gradient of value differs by "),
    "an exception": ("forwards", fail, "RuntimeError: CUDA error: no kernel image is available"),
    "a hang": ("forwards", hang, "it did not end within 0 seconds"),
}  # fmt: skip


@pytest.fixture(params=BROKEN)
def broken(request, monkeypatch):
    """Break the CPU's attention; return what is said of it."""
    direction, make, said = BROKEN[request.param]
    operators = getattr(ATTENTION, direction)
    monkeypatch.setitem(operators, "cpu", make(operators["cpu"]))
    if request.param == "a hang":
        monkeypatch.setattr(self_check, "LIMIT", 0.2)
    return said


def test_a_broken_kernel_is_left_out(folder, broken):
    wanted = attend(backend="reference")
    with pytest.warns(UserWarning, match="attnfast does not use") as said:
        found = attend()
    (warning,) = said
    assert f"{NAME}: {broken}" in str(warning.message) and self_check.REPORT in str(warning.message)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    reasons = attnfast.explain(attend).choices[0].reasons
    assert any(x.startswith(f"not cpu: its self-check has failed: {broken}") for x in reasons)
    with pytest.raises(RuntimeError, match="backend 'cpu' cannot run this call: its self-check"):
        attend(backend="cpu")
    (file,) = folder.iterdir()
    assert broken in json.loads(file.read_text())[NAME]["failure"]


def test_the_next_backend_serves(folder, monkeypatch):
    """A pretended GPU: what CUDA computes is wrong, what Triton computes is right."""
    run = ATTENTION.forwards["cpu"]
    for name, make in (("cuda", changed(0, torch.neg)), ("triton", lambda run: run)):
        monkeypatch.setitem(ATTENTION.forwards, name, make(run))
        monkeypatch.setitem(ATTENTION.backwards, name, ATTENTION.backwards["cpu"])
        able = type(backends.BACKENDS[name])
        monkeypatch.setattr(able, "unsupported_reason", lambda self, request: None)
        monkeypatch.setattr(able, "rank", lambda self, request: 0 if self.name == "cuda" else 1)
    with pytest.warns(UserWarning, match="does not use cuda attention of float32, tanh: context"):
        done = attnfast.explain(attend)
    assert done.choices[0].ran == "triton" and "not cuda: its self-check" in str(done)
    torch.testing.assert_close(done.output, attend(backend="reference"))


def count_comparisons(monkeypatch) -> list:
    done, compare = [], self_check.compare
    monkeypatch.setattr(self_check, "compare", lambda *x: done.append(x) or compare(*x))
    return done


def test_it_is_done_once(folder, monkeypatch):
    done = count_comparisons(monkeypatch)
    for _ in range(2):
        attend()
        forget()
    assert len(done) == 1
    (file,) = folder.iterdir()
    assert json.loads(file.read_text()) == {NAME: {"failure": None}}
    attnfast.dot_attention(*inputs()[:3])
    assert len(done) == 2 and len(json.loads(file.read_text())) == 2
    versions = self_check.identity(CPU)
    monkeypatch.setattr(self_check, "identity", lambda _: [*versions, "another driver"])
    forget()
    attend()
    assert len(done) == 3 and len([*folder.iterdir()]) == 2


def test_what_did_not_end_is_left_out(folder, monkeypatch):
    """As after a crash; but another process may be at it."""
    done, memory = count_comparisons(monkeypatch), self_check.OutcomeFile(CPU)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    memory.write(NAME, process=os.getpid())
    attend()
    assert len(done) == 1
    memory.write(NAME, process=ended.pid)
    forget()
    with pytest.warns(UserWarning, match="an earlier comparison did not end"):
        attend()
    assert len(done) == 1


def test_ctrl_c_leaves_no_trace(folder, monkeypatch):
    def stop(*_):
        (file,) = folder.iterdir()
        begun.append(json.loads(file.read_text()))
        raise KeyboardInterrupt

    begun: list = []

    monkeypatch.setattr(self_check, "compare", stop)
    with pytest.raises(KeyboardInterrupt):
        attend()
    assert begun == [{NAME: {"process": os.getpid()}}]
    assert json.loads(next(folder.iterdir()).read_text()) == {}


def test_too_little_memory_says_nothing_of_an_operator(folder, monkeypatch):
    def full(run):
        def broken(*_):
            raise torch.OutOfMemoryError("CUDA out of memory")

        return broken

    with monkeypatch.context() as patch:
        patch.setitem(ATTENTION.forwards, "cpu", full(None))
        assert self_check.compare_once("cpu", REQUEST) is None
    assert json.loads(next(folder.iterdir()).read_text()) == {}


def test_an_operator_that_cannot_be_compared_now_is_compared_by_a_later_call(folder, monkeypatch):
    """As within the capture of a graph, or where memory is short."""

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(self_check, "compare", full)
        attend()
    assert json.loads(next(folder.iterdir()).read_text()) == {}
    attend()
    assert json.loads(next(folder.iterdir()).read_text()) == {NAME: {"failure": None}}


def test_every_score_is_compared_by_its_own_name(folder):
    query, key, value, weight = inputs()
    attention = attnfast.nn.LuongAttention(8, 8, "dot")
    attention(query[:, 0], attention.prepare(key))
    attnfast.additive_score(query, key, weight, activation="relu")
    attnfast.coverage_attention(query, key, value, penalty=0.5)
    assert json.loads(next(folder.iterdir()).read_text()).keys() == {
        "cpu attention of float32, dot, a step",
        "cpu scores of float32, relu",
        "cpu coverage_attention of float32, dot",
    }


@pytest.mark.parametrize("content", ["", "[]", '{"cpu attention of float32, tanh": 3}', "{"])
def test_a_damaged_file_is_written_again(folder, content):
    memory = self_check.OutcomeFile(CPU)
    folder.mkdir()
    memory.path.write_text(content)
    attend()
    assert json.loads(memory.path.read_text()) == {NAME: {"failure": None}}


def test_a_folder_that_cannot_be_written_is_no_error(folder):
    folder.write_text("a file")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend()


def test_it_can_be_turned_off(folder, monkeypatch):
    done = count_comparisons(monkeypatch)
    for wanted in ("0", "1"):  # the CPU's operators are compared only with "all"
        monkeypatch.setenv("ATTNFAST_SELF_CHECK", wanted)
        forget()
        attend()
    assert not done and not folder.exists()


@pytest.mark.parametrize("mode", [
    torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16),
    lambda: torch.device("meta"),
])  # fmt: skip
def test_modes_of_the_caller_do_not_reach_it(folder, mode, monkeypatch):
    done = count_comparisons(monkeypatch)
    with mode():
        reason = backends.unsupported_reason("cpu", *REQUEST)
    assert reason is None and len(done) == 1


def test_a_first_call_in_a_graph(folder, monkeypatch):
    done = count_comparisons(monkeypatch)
    compiled = torch.compile(attnfast.additive_attention, fullgraph=True, backend="eager")
    found = compiled(*inputs()).context
    torch.testing.assert_close(found, attend(backend="reference"))
    assert len(done) == 1


def test_all_operators_are_as_the_reference(folder, capsys):
    assert main(["check", "--all", "--device=cpu"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("all as the reference\n")
    for operator in self_check.OPERATORS:
        runs = backends.unsupported_reason("cpu", *REQUEST._replace(operator=operator)) is None
        assert runs is (f"cpu {operator} of " in said)
    assert "cpu recurrent of float64, a history" in said
    (file,) = folder.iterdir()
    assert not any(x["failure"] for x in json.loads(file.read_text()).values())


def test_a_wrong_operator_ends_the_command_with_1(folder, monkeypatch, capsys):
    run = ATTENTION.forwards["cpu"]
    with monkeypatch.context() as patch:
        patch.setitem(ATTENTION.forwards, "cpu", changed(0, torch.neg)(run))
        assert main(["check", "--device=cpu"]) == 1
    assert f"\n{NAME}: context differs by " in capsys.readouterr().out
    with pytest.warns(UserWarning, match="does not use"):
        attend()
    assert main(["check", "--device=cpu"]) == 0  # compares again
    forget()
    assert attnfast.explain(attend).choices[0].ran == "cpu"


def test_a_command_that_compares_nothing_says_so(folder, monkeypatch, capsys):
    monkeypatch.setattr(backends.Cpu, "unsupported_reason", lambda *_: "it was not built")
    forget()
    assert main(["check", "--device=cpu"]) == 1
    said = capsys.readouterr().out
    assert "\nno backend to compare with the reference\n" in said
    assert "\ncpu: it was not built\n" in said


def test_an_unknown_setting_is_refused(folder, monkeypatch):
    monkeypatch.setenv("ATTNFAST_SELF_CHECK", "2")
    with pytest.raises(InputError, match="ATTNFAST_SELF_CHECK must be 0, 1 or all, got"):
        attend()


def test_a_full_disk_keeps_no_part_of_a_file(folder, monkeypatch):
    def full(path, text):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(folder), "write_text", full)
    attend()
    assert list(folder.iterdir()) == []


def test_products_in_tf32_are_as_exact_as_float16():
    exact, half = (self_check.TOLERANCE[x] for x in (torch.float32, torch.float16))
    products, on_gpu = torch.backends.cuda.matmul, REQUEST._replace(device=torch.device("cuda"))
    for allowed, precision in ((exact, "ieee"), (half, "tf32"), (exact, "none")):
        products.fp32_precision = precision
        assert self_check._tolerance(on_gpu) == allowed
        assert self_check._tolerance(REQUEST) == exact


def test_tritons_attention_is_as_the_reference():
    if reason := backends.unsupported_reason("triton", *REQUEST):
        pytest.skip(f"triton: {reason}")
    found = self_check.compare("triton", REQUEST)
    assert found.failure is None and 0 < found.error < 0.1


def test_operators_on_a_gpu_are_compared(folder, monkeypatch):
    """Unless a graph is captured, in which nothing may wait for the device."""
    asked = []

    def compare(backend, request):
        asked.append(request.device.type)
        return self_check.Comparison("context differs by 3", 9.0, 0.1)

    monkeypatch.delenv("ATTNFAST_SELF_CHECK")
    monkeypatch.setattr(self_check, "compare", compare)
    for name, value in (
        ("get_device_name", "a GPU"), ("get_device_capability", (9, 0)),
        ("is_current_stream_capturing", True), ("is_available", True),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    request = REQUEST._replace(device=torch.device("cuda", 0))
    assert self_check.reason_against("cuda", request) is None and not asked
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.warns(UserWarning, match="does not use cuda attention of float32, tanh: context"):
        reason = self_check.reason_against("cuda", request)
    assert reason == "its self-check has failed: context differs by 3" and asked == ["cuda"]
    assert self_check.reason_against("cpu", REQUEST) is None and asked == ["cuda"]
