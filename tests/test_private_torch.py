"""What attnfast takes of PyTorch's private names, and what breaks where PyTorch drops one."""

import inspect
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import attnfast
from attnfast import dot_attention
from attnfast._utils import torch_private
from attnfast.ops.backends import select_backend


def test_all_private_names_stand_in_one_file():
    sources = Path(inspect.getfile(attnfast)).parent.rglob("*.py")
    private = ("torch._C", "_execution_engine", "_dynamo_marked", "forward_ad._")
    using = {x.name for x in sources if any(name in x.read_text() for name in private)}
    assert using == {"torch_private.py"}


def test_below_autograd():
    """A call without gradients takes half as long again."""
    x = torch.ones(2, requires_grad=True)
    with torch_private.below_autograd():
        assert not (x * 2).requires_grad


def test_autocast():
    """Modules under autocast are refused for their types, or are computed in float32."""
    assert not torch_private.is_autocast_on()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch_private.is_autocast_on()


def test_the_backward_that_runs():
    """Gradients of a memory's keys are those of another backward, or never come."""
    seen, ended = [], []

    def look(_):
        seen.append(torch_private.number_of_backward())
        torch_private.at_end_of_backward(lambda: ended.append(len(seen)))

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(look)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert torch_private.number_of_backward() == -1 and ended == [1, 2]
    assert -1 not in seen and seen[0] != seen[1]


def test_saved_tensors_go_elsewhere():
    """A checkpointed replaced model keeps the keys that the checkpoint is to forget."""
    seen = []
    x = torch.ones(2, requires_grad=True)
    checkpoint(
        lambda x: seen.append(torch_private.has_saved_tensor_hooks()) or x * 2,
        x,
        use_reentrant=False,
    )
    assert seen == [True] and not torch_private.has_saved_tensor_hooks()


def test_a_mode_that_records():
    """A graph that make_fx records of a replaced model has the keys of one source as constants."""
    seen = []
    make_fx(lambda x: seen.append(torch_private.has_dispatch_mode()) or x * 2)(torch.ones(2))
    torch.func.vmap(lambda x: seen.append(torch_private.has_dispatch_mode()) or x * 2)(
        torch.ones(2)
    )
    assert seen == [True, True] and not torch_private.has_dispatch_mode()


@pytest.mark.skipif(torch.version.cuda is None, reason="PyTorch is built without CUDA")
def test_the_pool_of_an_invalid_capture():
    """Its memory is not used again."""
    assert hasattr(torch._C, "_cuda_endAllocateToPool")


def test_transforms():
    """A served module fails within torch.func, where its own code would run."""
    seen = []
    torch.func.grad(lambda x: seen.append(torch_private.is_transformed()) or x * 2)(torch.ones(()))
    with forward_ad.dual_level():
        seen.append(torch_private.is_transformed())
    assert seen == [True, True] and not torch_private.is_transformed()


def test_hooks_of_all_modules():
    """A hook of every module is not called with the inner layers of a served one."""
    handles = [
        getattr(torch.nn.modules.module, f"register_module_{name}_hook")(lambda *_: None)
        for name in ("forward", "forward_pre", "full_backward", "full_backward_pre")
    ]
    for handle in handles:
        assert torch_private.has_global_hooks()
        handle.remove()
    assert not torch_private.has_global_hooks()


def test_the_class_of_a_module_with_two_names():
    """The number of a layer's steps becomes a constant of an exported graph."""
    seen = []

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = torch.nn.Linear(1, 1)

        def forward(self, x):
            seen.extend(torch_private.class_of(layer) for layer in (self.a, self.b))
            return self.a(x) + self.b(x)

    torch.export.export(Twice(), (torch.ones(1, 1),), strict=False)
    assert set(seen) == {torch.nn.Linear}


def test_results_in_pytrees():
    """``vmap`` and ``export`` take a result's log-sum-exp and statistics away."""
    x = torch.ones(1, 2, 4)
    for asked in (False, True):
        result = dot_attention(x, x, x, need_weights=True, need_statistics=asked)
        mapped = torch.utils._pytree.tree_map(torch.clone, result)
        assert mapped.log_sum_exp.shape == (1, 2)
        assert (mapped.statistics is not None) == asked


def test_statistics_in_exports(tmp_path):
    class Attend(torch.nn.Module):
        def forward(self, x):
            return dot_attention(x, x, x, need_statistics=True).statistics

    x = torch.randn(1, 2, 4)
    program = torch.export.export(Attend(), (x,))
    torch.export.save(program, tmp_path / "attend.pt2")
    rows = torch.export.load(tmp_path / "attend.pt2").module()(x)
    torch.testing.assert_close(rows.entropy, Attend()(x).entropy)


def test_forward_mode():
    """A derivative in forward mode is 0 without a word."""
    assert not torch_private.has_tangents()
    with forward_ad.dual_level():
        assert torch_private.has_tangents()


def test_kernels_that_are_registered():
    """A backend is chosen that lacks the operator, and the call fails."""
    assert torch_private.has_kernel("aten::add.Tensor", "CPU")
    assert not torch_private.has_kernel("attnfast_triton::attention", "CUDA")


def test_what_is_sure_in_a_graph():
    """A graph is compiled anew for every scale and temperature."""
    assert torch_private.statically_true(True) and not torch_private.statically_true(False)


def test_a_constant_in_graphs():
    """The choice of a backend breaks a graph that is compiled."""

    def run(x):
        return x * len(select_backend(None, x.device, x.dtype))

    assert torch.compile(run, fullgraph=True, backend="eager")(torch.ones(1)).item() == 3
