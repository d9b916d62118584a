"""attnfast inspect: its numbers, its table, and its page in a real browser, if there is one."""

import html.parser
import json
import math
import re
import shutil
import subprocess

import pytest
import torch

from attnfast.analysis import diagnostics as diag
from attnfast.models import Config, build
from attnfast.translate import checkpoint, inspect_report
from attnfast.translate.cli import main
from attnfast.translate.data import Links, WordTokenizer
from attnfast.translate.evaluate import alignment
from attnfast.translate.toy_grammar import aligned_corpus

SENTENCES = aligned_corpus(5, 70, 12)
PAIRS = [x.pair for x in SENTENCES]
LINKS = [Links(x.links, set()) for x in SENTENCES]


def small(**config):
    torch.manual_seed(0)
    tokenizer = WordTokenizer.train(text for pair in PAIRS for text in pair)
    shape = {"attention": "general", "embed_dim": 12, "hidden_dim": 10, **config}
    model = build(Config(tokenizer.vocab_size, **shape))
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(2)  # sharper attention
    return model, tokenizer


def test_numbers_are_those_of_the_sentence_alone():
    model, tokenizer = small()
    found = inspect_report.inspect(model.train(), tokenizer, PAIRS, LINKS, batch_size=16)
    assert model.training and len(found) == 70
    assert [x.suspicion for x in found] == sorted((x.suspicion for x in found), reverse=True)
    for x in found[::7]:
        pair, links = PAIRS[x.number - 1], LINKS[x.number - 1].sure
        weights = alignment(model.eval(), tokenizer, *pair)
        torch.testing.assert_close(x.weights, weights)
        inner = weights[:-1].unsqueeze(0)
        n, m = (torch.tensor([len(text.split())]) for text in pair)
        rows = diag.row_statistics(inner, n)
        assert x.numbers["entropy"] == pytest.approx(float(rows.entropy.mean()), abs=1e-5)
        assert x.numbers["largest"] == pytest.approx(float(rows.max_weight.mean()), abs=1e-5)
        near = float(diag.diagonality(inner, n, m).share)
        assert x.numbers["diagonality"] == pytest.approx(near, abs=1e-5)
        words = diag.extract_alignment(inner, n + 1, null=-1)
        assert x.error_rate == diag.alignment_score(words, [links]).error_rate
        assert x.links == links
        assert x.source == [*pair[0].split(), "(end)"]
        flags = diag.failures(inner, n, m).sentences
        assert x.failures == [name for name in inspect_report.PATTERNS if flags[name]]


def test_pairs_that_cannot_be_used_are_left_out():
    model, tokenizer = small()
    pairs = [("", "die"), ("the", ""), PAIRS[0], (" ".join(["the"] * 9), "die")]
    found = inspect_report.inspect(
        model, tokenizer, pairs, max_length=len(PAIRS[0][0].split()) + 20
    )
    assert sorted(x.number for x in found) == [3, 4]
    assert inspect_report.inspect(model, tokenizer, pairs[:2]) == []


def made(**changes):
    """A sentence with everything that a page must escape."""
    weights = torch.tensor([[0.6, 0.4], [0.25, 0.75]])
    numbers = dict.fromkeys(inspect_report.NUMBERS, 0.5)
    values = {
        "number": 3, "source": ["</script><b>", "(end)"], "target": ["a&b", "(end)"],
        "weights": weights, "numbers": numbers, "failures": ["stuck"], "links": {(0, 0)},
        "error_rate": 0.25,
    }  # fmt: skip
    return inspect_report.Sentence(**{**values, **changes})


def test_the_table():
    text = inspect_report.table([made(), made(number=9, failures=[], error_rate=None)])
    assert re.search(r"^stuck +1$", text, re.MULTILINE)
    assert re.search(r"^diffuse +0$", text, re.MULTILINE)
    assert re.search(r"^alignment error rate +0.25 +0.25", text, re.MULTILINE)
    assert re.search(r"^ +3 +2.75  stuck +</script><b>$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) < 120


class Reader(html.parser.HTMLParser):
    """Checks that elements close, and keeps what there is."""

    EMPTY = ("meta", "rect")

    def __init__(self):
        super().__init__()
        self.stack, self.seen, self.data = [], [], ""

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag not in self.EMPTY:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.EMPTY:
            assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack[-1:] == ["script"] and not self.data:
            self.data = data


def test_the_page_is_whole_and_asks_nobody():
    text = inspect_report.page(
        [made(), made(number=9, weights=torch.full((2, 2), math.nan))], "<best>"
    )
    reader = Reader()
    reader.feed(text)
    assert not reader.stack
    assert not {"src", "href"} & {name for _, attributes in reader.seen for name in attributes}
    assert "http" not in text and "&lt;best&gt;" in text
    data = json.loads(reader.data)
    assert data[0]["source"] == ["</script><b>", "(end)"] and data[0]["links"] == [[0, 0]]
    assert data[0]["weights"] == [[60, 40], [25, 75]] and data[1]["weights"] == [[0, 0], [0, 0]]
    assert sum(tag == "details" for tag, _ in reader.seen) == 2
    for tag, attributes in reader.seen:  # for a screen reader
        assert tag != "th" or "scope" in attributes
        assert tag != "svg" or attributes["aria-label"].startswith("histogram of")
    text = inspect_report.page([made(), made()], "x", max_sentences=1)
    assert "2 sentences, 1 on this page." in text


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("there is no Chromium (Debian: apt install chromium)")

    def run(*options):
        profile = tmp_path_factory.mktemp("profile")
        command = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", f"--user-data-dir={profile}", "--virtual-time-budget=2000",
            "--window-size=900,1200", *options,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run


def test_in_a_browser(browser, tmp_path):
    """The map is drawn, the arrow keys walk over it, and what they meet is said."""
    page = tmp_path / "page.html"
    page.write_text(inspect_report.page([made(), made(number=9)], "best.pt"))
    drawn = browser("--dump-dom", page.as_uri())
    cells = re.findall(r'<td dir="auto"[^>]*>(\d+)</td>', drawn)
    assert cells == ["60", "40", "25", "75"]  # of the first sentence, which is open
    assert drawn.count('class="true"') == 1
    script = """<script>
      document.querySelectorAll("details")[1].open = true;
      setTimeout(() => {
        const first = document.querySelectorAll(".map")[1].querySelector("tbody td");
        first.focus();
        for (const key of ["ArrowDown", "ArrowRight", "ArrowRight", "ArrowDown"])
          document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      }, 50);
    </script>"""
    page.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    walked = browser("--dump-dom", page.as_uri())
    assert len(re.findall(r'<td dir="auto"[^>]*>(\d+)</td>', walked)) == 8
    said = re.search(r'<div id="said"[^>]*>([^<]*)</div>', walked)[1]
    assert said == "“(end)” looks at “(end)” with 0.75 of its weight"


def test_a_screenshot(browser, tmp_path):
    """Large weights are dark, small ones light."""
    image = pytest.importorskip("matplotlib.image")
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    weights = torch.eye(12)
    words = [f"word{i}" for i in range(12)]
    page.write_text(inspect_report.page([made(source=words, target=words, weights=weights)], "x"))
    browser("--window-size=900,2000", f"--screenshot={picture}", page.as_uri())
    pixels = image.imread(picture)[..., :3]
    deep = torch.tensor([8, 81, 138]) / 255
    share = float(((torch.from_numpy(pixels) - deep).abs().amax(-1) < 0.02).float().mean())
    assert 0.003 < share < 0.03  # twelve cells, and the histograms


def test_the_command(tmp_path, capsys):
    model, tokenizer = small()
    saved = tmp_path / "model.pt"
    checkpoint.save(saved, Config(tokenizer.vocab_size, "general", embed_dim=12, hidden_dim=10),
                    model, tokenizer)  # fmt: skip
    for side, name in enumerate(("source", "target")):
        (tmp_path / name).write_text("".join(pair[side] + "\n" for pair in PAIRS[:9]) + "\n")
    lines = ("".join(f"{i}-{j} " for i, j in x.links) for x in SENTENCES[:9])
    (tmp_path / "links").write_text("\n".join([*lines, ""]) + "\n")
    files = {x: str(tmp_path / x) for x in ("source", "target", "links")}
    page = tmp_path / "page.html"
    command = ["inspect", str(saved), "--source", files["source"], "--html", str(page)]
    given = ["--target", files["target"], "--alignments", files["links"]]
    assert main([*command, *given]) == 0
    out, said = capsys.readouterr()
    assert "alignment error rate" in out and "left out 1 of 10 pairs" in said
    assert "Attention of model.pt" in page.read_text()
    assert main(command) == 0  # its own translations
    assert "alignment error rate" not in capsys.readouterr().out
    for more, words in (
        (
            ["--alignments", files["links"]],
            "expected the aligned translations in --target",
        ),
        (["--max-sentences", "0"], "--max-sentences must be at least 1, got 0"),
        (["--html", str(tmp_path)], "it is a folder"),
    ):
        assert main([*command, *more]) == 2
        assert words in capsys.readouterr().err
    plain = build(Config(tokenizer.vocab_size, "none", embed_dim=12, hidden_dim=10))
    checkpoint.save(saved, Config(tokenizer.vocab_size, "none", embed_dim=12, hidden_dim=10),
                    plain, tokenizer)  # fmt: skip
    assert main(command) == 2
    assert "expected a model that attends, got one without" in capsys.readouterr().err


def test_measurements_by_length():
    """Means of sentences; one score of all their links, not a mean of scores."""
    numbers = {"entropy": 1.0, "largest": 0.5, "diagonality": 0.5}
    short, long = ["word"] * 3 + ["(end)"], ["word"] * 12 + ["(end)"]

    def sentence(source, repetition, words=None):
        own = numbers | {"over": 0.25, "under": 0.5, "repetition": repetition}
        return made(source=source, numbers=own, words=words)

    link, other, more = {(0, 0)}, {(1, 1)}, {(0, 0), (1, 1), (2, 2)}
    text = inspect_report.table([
        sentence(short, 0.1, (link, link, link)), sentence(short, 0.3, (more, other, other)),
        sentence(long, 0.9),
    ])  # fmt: skip
    rows = [line.split() for line in text.splitlines()]
    (start,) = (i for i, row in enumerate(rows) if row[:3] == ["source", "tokens", "sentences"])
    assert rows[start + 1] == ["1–10", "2", "0.25", "0.50", "0.20", "0.67", "0.33"]
    assert rows[start + 2] == ["11–20", "1", "0.25", "0.50", "0.90"]
