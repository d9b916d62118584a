"""What the pages show runs: Python and its output as they stand, commands by their options."""

import contextlib
import functools
import io
import re
import shlex
import subprocess
from pathlib import Path
from unittest import mock

import attention_cases
import pytest
import report
import torch
from integrations import reference_projects
from integrations.reference_projects import bentrevett_model
from torch import nn

from attnfast._utils.torch_private import has_kernel
from attnfast.integrations import ADAPTERS
from attnfast.ops import backends, operators
from attnfast.translate import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COURSE = ROOT / "docs" / "course"
PNG = b"\x89PNG\r\n\x1a\n"


def model() -> nn.Module:
    """Return what the pages call yours."""
    return nn.ModuleDict(
        {"decoder": nn.ModuleDict({"attention": reference_projects.BahdanauAttention(8)})}
    )


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@mock.patch.dict(ADAPTERS)
def test_python_runs(page, tmp_path, monkeypatch):
    """In order, in one namespace; text after Python is what it printed.

    Pages of the course write the pictures that they show.
    """
    shown = set()
    if page.parent == COURSE:
        shown = set(re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text()))
    if shown:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"model": model(), "their_model": bentrevett_model(), "__name__": "page"}
    printed = ""
    for kind, code in blocks(page):
        if kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, str(page), "exec"), names)
            printed = out.getvalue()
        elif kind == "text":
            assert printed == code
    if page.parent == COURSE:
        assert {x.name for x in tmp_path.iterdir()} == shown
        assert all((tmp_path / x).read_bytes().startswith(PNG) for x in shown)
        assert all((COURSE / x).read_bytes().startswith(PNG) for x in shown)


def commands() -> list[str]:
    found = []
    for page in PAGES:
        for kind, code in blocks(page):
            lines = code.replace("\\\n", " ").splitlines() if kind in ("", "console") else []
            if kind == "console":
                lines = [x[2:] for x in lines if x.startswith("$ ")]
            found += [x.rpartition("| ")[2].partition("#")[0].strip() for x in lines]
    return sorted(set(found))


@pytest.mark.parametrize("command", [x for x in commands() if x.startswith("attnfast ")])
def test_commands_are_known(command):
    cli._parser().parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize("command", [x for x in commands() if x.startswith("make ")])
def test_targets_are_known(command):
    rules = (ROOT / "Makefile").read_text()
    assert re.search(rf"^[\w -]*\b{command.split()[1]}\b[\w -]*:", rules, re.MULTILINE)


def test_projects_are_counted_and_named():
    words = {16: "sixteen", 35: "thirty-five"}
    readme, page = (
        " ".join(PAGES[0].read_text().split()),
        (ROOT / "docs" / "replace.md").read_text(),
    )
    parts = [name.partition("'s ") for name in ADAPTERS]
    only_search = ("predict_step",)  # of models whose decoder is counted
    decoders = {
        tuple(x.classes)
        for x in ADAPTERS.values()
        if x.attention and not vars(x.implementation).keys() & only_search
    }
    assert f"[{words[len({project for project, *_ in parts})]} projects]" in readme
    assert f"{words[len(decoders)]} [whole decoders]" in readme
    for project, _, kind in parts:
        if project in ("ESPnet", "SpeechBrain", "joeynmt", "Keras", "d2l"):
            assert f"`{kind.partition(' with ')[0]}`" in page


def test_commits_are_there():
    """Those that a page names, where the history is."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"]
    shallow = subprocess.run(git, capture_output=True, text=True)
    if shallow.stdout.strip() != "false":
        pytest.skip("this is no whole clone")
    named = {x for page in PAGES for x in re.findall(r"\b[0-9a-f]{7}\b", page.read_text())}
    named = {x for x in named if not x.isdigit()}
    found = subprocess.run(
        ["git", "-C", str(ROOT), "cat-file", "--batch-check"], input="\n".join(sorted(named)),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert len(named) > 9
    assert [x for x in found.stdout.splitlines() if x.split()[1] != "commit"] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_headings_are_there(page):
    for target, heading in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text()):
        if not target.startswith("https://"):
            text = (page.parent / target if target else page).read_text()
            known = [re.sub(r"[^\w -]", "", x.lower()).replace(" ", "-")
                     for x in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]  # fmt: skip
            assert heading in known, (target, heading)


#: Folders whose paths the pages name; what is built is not among them.
FOLDERS = ("attnfast", "bench", "csrc", "docs", "examples", "kernels", "tests")
#: The pages about the source code, whose names in code font are the code's.
ABOUT_CODE = [
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs" / f"{x}.md" for x in ("architecture", "testing")),
]
#: Names in code font that Python and PyTorch define.
FOREIGN = {"ImportError", "return_aux", "return_lse"}


def sources() -> list[Path]:
    return [ROOT / "setup.py", *(x for folder in FOLDERS for x in (ROOT / folder).rglob("*.*"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_exist(page):
    """Paths from the root, with patterns; and names of source files, which some folder has."""
    text = re.sub(r"https?://\S+", "", page.read_text())
    for path in re.findall(rf"(?<![\w./-])(?:\.\./)*((?:{'|'.join(FOLDERS)})/[\w./*<>-]*)", text):
        pattern = re.sub(r"<\w+>", "*", path.rstrip("./"))
        assert any(ROOT.glob(pattern)), path
    known = "\n".join(f"/{x.relative_to(ROOT)}" for x in sources())
    for name in re.findall(r"(?<![\w./*<>-])[\w/]+\.(?:py|h|cpp|cuh?|sh)\b", text):
        assert re.search(rf"/{re.escape(name)}$", known, re.MULTILINE), name


@pytest.mark.parametrize("page", ABOUT_CODE, ids=lambda page: page.stem)
def test_names_are_defined(page):
    code = "\n".join(x.read_text() for x in sources() if x.suffix in (".py", ".h", ".cuh", ".cpp"))
    spans = re.findall(
        r"`(\w+)(?:\(\))?`", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    )
    for name in {x for x in spans if re.search(r"[A-Z_]", x)} - FOREIGN:
        defined = rf"(?:class|struct|define|def|\w)\s+{name}\b"
        value = rf"\b{name}\b(?::[^=\n]+)?\s*=|[\"']{name}[\"']"
        assert re.search(f"{defined}|{value}", code), name


def test_counts_are_those_of_the_code():
    testing = (ROOT / "docs" / "testing.md").read_text()
    words = {2: "twice", 4: "four"}
    orders, sets = (
        len(attention_cases.in_orders(None)) - 1,
        len(list(attention_cases.nearby({}, lambda args: {}))),
    )
    assert f"{words[orders]} other summation orders" in testing
    assert f"on {sets} sets of inputs" in " ".join(testing.split())
    assert f"{words[attention_cases.FACTOR]} the error of eager code" in " ".join(testing.split())
    floors = [f"{attention_cases.FLOOR[x]:.0e}" for x in (torch.float32, torch.float64)]
    assert f"a floor of {floors[0]} ({floors[1]} in float64)".replace("e-0", "e-") in testing
    assert f"{attention_cases.FLOOR_ULPS[torch.float32]:.0f} units in the last place" in testing
    assert f"at most {100 * attention_cases.RMS} % of" in testing
    assert {attention_cases.FLOOR_ULPS[x] for x in (torch.float16, torch.bfloat16)} == {
        1
    }  # "one unit"
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    steps = re.findall(
        r"^\d\. `([^`]+)`", contributing.split("## Adding an argument")[0], re.MULTILINE
    )
    words = {5: "five", 6: "six", 7: "seven"}
    assert f"changes {words[len(set(steps))]} files" in contributing
    assert f"| {len(set(steps))} files |" in (ROOT / "docs" / "architecture.md").read_text()


@functools.cache
def kernels() -> set[tuple[str, str]]:
    """Return the pairs of a backend and an operator that its sources implement."""
    found = {("triton", name) for name in operators.ARGUMENTS
             if has_kernel(f"attnfast_triton::{name}", "CompositeExplicitAutograd")}  # fmt: skip
    code = "\n".join(x.read_text() for x in (ROOT / "csrc").rglob("*.*"))
    lists = dict(re.findall(r"using (\w+) =\s+(Operators<[^>]+>);", code))
    for backend in ("cpu", "cuda"):
        for source in (ROOT / "csrc" / backend).glob("*.c*"):
            for name in re.findall(
                r"\b(\w*Operators(?:<\w+>)?)::implement\(m\)", source.read_text()
            ):
                members = lists.get(name, name).removeprefix("Operators<").removesuffix(">")
                found |= {(backend, x) for x in members.split(", ")}
    return found


def supported(operator: str, kernel: str, backend: str) -> str:
    """Return the dtypes for which a backend has a kernel, on a device of its own."""
    if backend != "reference" and (backend, kernel) not in kernels():
        return ""
    device = torch.device("cpu")
    with (
        mock.patch.object(backends, "has_kernel", return_value=True),
        mock.patch.object(backends, "_query_cpu_library", return_value=True),
        mock.patch.object(backends.BACKENDS[backend], "_unsupported_reason", return_value=None),
    ):
        reason = backends.BACKENDS[backend].unsupported_reason
        able = [x for x in backends.FLOATS if not reason(backends.DispatchKey(device, x, operator))]
    return "all" if len(able) == 4 else ", ".join(str(x).removeprefix("torch.") for x in able)


def test_backends_are_those_of_the_code():
    """The page lists operators, directions, dtypes, backends and ranks as the code has them."""
    page, rows = (ROOT / "docs" / "backends.md").read_text(), []
    for name in sorted(operators.ARGUMENTS):
        if name.partition("_backward")[1]:
            continue
        assert f"| `{name}` |" in page
        backward = "attention_backward" if name == "scores" else f"{name}_backward"
        for direction, kernel in (("forward", name), ("backward", backward)):
            if kernel in operators.ARGUMENTS:
                cells = [supported(name, kernel, x) for x in ("cpu", "triton", "cuda", "reference")]
                rows.append(" | ".join([f"| `{name}`", direction, *cells]) + " |")
    assert "\n".join(rows).replace("|  |", "| |").replace("|  |", "| |") in page
    for backend in backends.BACKENDS.values():
        request = backends.DispatchKey(torch.device("cpu"), torch.float32)
        with mock.patch.object(backends, "triton_interpreted", return_value=False):
            assert f"| `{backend.name}` | {backend.rank(request)}" in page


def test_no_line_is_longer_than_100_characters():
    """But for tables, blocks, pictures and links."""
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        prose = re.sub(r"(?ms)^```.*?^```", "", path.read_text())
        lines = [
            x
            for x in prose.splitlines()
            if len(x) > 100 and not x.startswith(("|", "![", "[", "    "))
        ]
        assert not lines, f"{path.name}: {lines[0]}"


def test_environment_is_that_of_the_sources():
    """All variables of attnfast's own: macros of C++ are none."""
    page = (ROOT / "docs" / "environment.md").read_text()
    python = [ROOT / "setup.py", ROOT / "tests" / "integrations" / "judges.py"]
    python += [x for folder in ("attnfast", "bench") for x in (ROOT / folder).rglob("*.py")]
    text = "\n".join(x.read_text() for x in python)
    names = set(re.findall(r"\bATTNFAST_[A-Z_]*[A-Z]\b", text))
    for source in (ROOT / "csrc").rglob("*.*"):
        names |= set(re.findall(r'getenv\("(\w+)"\)', source.read_text()))
    assert set(re.findall(r"ATTNFAST_[A-Z_]*[A-Z]\b", page)) == names
    read = set(re.findall(r'environ(?:\.get\(|\[)"([A-Z_]+)"', text))
    assert read - {"PYTHONPATH"} <= set(re.findall(r"`([A-Z_]+)`", page))


def test_the_rule_is_that_of_the_tests():
    page = (ROOT / "docs" / "numerics.md").read_text()
    for dtype, floor in attention_cases.FLOOR.items():
        row = f"{floor:.0e} | {attention_cases.FLOOR_ULPS[dtype]:.0f} |".replace("e-0", "e-")
        assert f"| {str(dtype).removeprefix('torch.')} | {row}" in page
    assert f"max(floor, {attention_cases.FACTOR:.0f} |p − w|)" in page
    assert f"max({attention_cases.RMS} rms(w) + floor, rms(p − w))" in page


def row_of(path: Path) -> str:
    """Return a report's row: its commit, the number of tables, their means, the worst shape."""
    text, means, ratios = path.read_text(), [], []
    for peers in report.ratios_of(text).values():
        if found := next((peers[x] for x in report.EAGER if x in peers), None):
            means.append(found[-1])
            ratios += found[:-1]
    cells = ["", "", ""]
    if means:
        worst, least, most = (
            f(x, key=lambda y: float(y[:-1]))
            for f, x in ((min, ratios), (min, means), (max, means))
        )
        cells = [str(len(means)), least if least == most else f"{least} to {most}", worst]
    commit = re.search(r"commit (\w{7})", text)[1]
    cells = [f"[{path.stem}](../bench/results/{path.name})", commit, *cells]
    return "".join(f"| {x} " if x else "| " for x in cells) + "|"


def test_reports_are_listed_with_their_means():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    results = sorted((ROOT / "bench" / "results").glob("*.md"))
    reports = [path for path in results if path.stem != "gpu-model"]  # which times nothing
    assert "\n".join(map(row_of, reports)) in page


def test_the_table_of_speed_is_that_of_the_reports():
    """Of one processor, one run and one commit, whose mean README quotes."""
    page = (ROOT / "docs" / "speed.md").read_text()
    reports = sorted((ROOT / "bench" / "results").glob("cpu-*.md"))
    table = report.summary(reports)
    assert table in page
    commits = {re.search(r"commit (\w{7})", x.read_text())[1] for x in reports}
    (commit,) = commits
    assert f"ommit {commit}" in page
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"commit {commit}" in readme
    for title in ("additive, forward + backward", "GRU, attend_first, forward + backward"):
        row = re.search(rf"\| {re.escape(title)} \| \d+ \| [^|]+ \| ([\d.]+)×", table)
        assert f"{row[1]} times" in readme
