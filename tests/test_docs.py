"""What the pages show runs: Python and its output as they stand, commands by their options."""

import contextlib
import io
import re
import shlex
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch
from integrations import doubles
from torch import nn

from attnfast.integrations import ADAPTERS
from attnfast.translate import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def model() -> nn.Module:
    """Return what the pages call yours."""
    return nn.ModuleDict({"decoder": nn.ModuleDict({"attention": doubles.BahdanauAttention(8)})})


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@mock.patch.dict(ADAPTERS)
def test_python_runs(page):
    """In order, in one namespace; text after Python is what it printed."""
    torch.manual_seed(0)
    names, printed = {"model": model(), "__name__": "page"}, ""
    for kind, code in blocks(page):
        if kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, str(page), "exec"), names)
            printed = out.getvalue()
        elif kind == "text":
            assert printed == code


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
    words = {3: "three", 18: "eighteen"}
    readme, page = PAGES[0].read_text(), (ROOT / "docs" / "replace.md").read_text()
    parts = [name.partition("'s ") for name in ADAPTERS]
    decoders = [x for x in ADAPTERS.values() if x.attention]
    assert f"[{words[len({project for project, *_ in parts})]} projects]" in readme
    assert f"{words[len(decoders)]} [whole decoders]" in readme
    for project, _, kind in parts:
        if project in ("ESPnet", "SpeechBrain", "joeynmt", "Keras", "d2l"):
            assert f"`{kind}`" in page


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
