"""Before Triton is imported: on a machine without a GPU its kernels run in the interpreter."""

import contextlib
import functools
import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with contextlib.suppress(ImportError):  # a machine without Triton
        import quick_interpreter  # noqa: F401

from attnfast.ops.backends import BACKENDS, not_installed, unsupported_reason

if reason := not_installed():
    pytest.exit(reason, returncode=1)  # what is skipped with a reason would look green
torch.backends.cudnn.allow_tf32 = False  # eager code is what kernels are measured by


HAS_CPU_LIBRARY = unsupported_reason("cpu", torch.device("cpu"), torch.float32) is None


def pytest_configure(config: pytest.Config) -> None:
    """Let calls run on the reference, without a warning that is an error, without a compiler."""
    if not HAS_CPU_LIBRARY:
        config.addinivalue_line("filterwarnings", "ignore:attnfast runs on its reference")


#: Files of whose tables Triton's interpreter runs a quarter; the oldest Triton runs all. Of tests
#: of searches, the interpreter runs a fifth: every option, not with every kind of layer.
TABLES = ("test_attention", "test_coverage", "test_statistics")
#: The files that take longest, for two workers to begin with: neither waits for them at the end.
LONGEST = (
    "test_triton_compile", "test_cuda_build", "test_attention", "test_compile", "test_package",
    "test_pretend_gpu", "test_cuda_on_host",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))
    if torch.cuda.is_available() or config.pluginmanager.hasplugin("rough_math"):
        return
    slow = [x for x in items if x.path.stem in TABLES and x.name.startswith("test_table[triton")]
    left_out = [x for i, x in enumerate(slow) if i % 4]
    slow = [x for x in items if x.path.stem == "test_search" and "triton-" in x.name]
    left_out += [x for i, x in enumerate(slow) if i % 5]
    config.hook.pytest_deselected(items=left_out)
    for item in left_out:
        items.remove(item)


@functools.cache
def lacks_bfloat16_lstm() -> bool:
    """Return whether PyTorch's LSTM fails under autocast to bfloat16: on a CPU without AVX-512."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(1, 1)(torch.zeros(1, 1, 1))
    except RuntimeError:
        return True
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    except RuntimeError as error:
        if "for the LSTM forward propagation primitive" in str(error) and lacks_bfloat16_lstm():
            pytest.skip("PyTorch's LSTM does not run under autocast to bfloat16 here")
        raise


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("cpu_library") and not HAS_CPU_LIBRARY:
        pytest.skip("needs the CPU library")


@pytest.fixture(params=[name for name in BACKENDS])
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend; those that cannot run float32 on this machine are skipped with the reason."""
    from attention_cases import DEVICE

    reason = unsupported_reason(request.param, DEVICE[request.param], torch.float32)
    if reason:
        pytest.skip(f"{request.param}: {reason}")
    return request.param
