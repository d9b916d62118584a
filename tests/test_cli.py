"""The command line apart from what it computes: options, packages, streams and signals."""

import dataclasses
import errno
import gzip
import io
import os
import re
import resource
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from attnfast._utils import command_line
from attnfast.models import EOS, Config, build
from attnfast.translate import checkpoint, cli, evaluate
from attnfast.translate.cli import main
from attnfast.translate.data import WordTokenizer
from attnfast.translate.trainer import MEASURED, Options

TRAIN = [
    "train",
    *(f"--{x}=x" for x in ("source", "target", "valid-source", "valid-target", "model-dir")),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a checkpoint ``model.pt`` and two lines of ``text``."""
    folder = tmp_path_factory.mktemp("files")
    tokenizer = WordTokenizer(["eins", "zwei", "drei"])
    config = Config(tokenizer.vocab_size, embed_dim=8, hidden_dim=8)
    checkpoint.save(folder / "model.pt", config, build(config, "reference"), tokenizer)
    (folder / "text").write_text("eins zwei\ndrei\n")
    return folder


def refused(arguments, capsys, status=2):
    """Return the one sentence with which a command ends, without its beginning."""
    assert main(arguments) == status
    out, said = capsys.readouterr()
    assert out == "" and said.startswith("attnfast: ") and said.count("\n") == 1
    assert len(said.removeprefix("attnfast: ").strip()) <= 200
    return said.removeprefix("attnfast: ").strip()


# Options


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"attnfast {version('attnfast')}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: command: attnfast --help says more"),
        (["train"], "the following arguments are required: --source, .*: attnfast train --help"),
        (["sing"], "command: invalid choice: 'sing'"),
        ([*TRAIN, "--attention=magic"], "--attention: invalid choice: 'magic'"),
        ([*TRAIN, "--epochs=1.5"], "--epochs: expected an integer, got '1.5'"),
        (
            [*TRAIN, f"--hidden-dim={10**9 * 2}"],
            "--hidden-dim must be an .* below 2..30, got 2000000000",
        ),
        ([*TRAIN, "--dropout=some"], "--dropout: invalid float value: 'some'"),
        (
            [*TRAIN, "--batch-size=0"],
            "--batch-size must be an integer of at least 1 and below 2..31, ",
        ),
        ([*TRAIN, "--save-every=nan"], "--save-every must be a number of at least 0, got nan"),
        (
            [*TRAIN, "--coverage-loss=-1"],
            "--coverage-loss must be a number of at least 0, got -1.0",
        ),
        ([*TRAIN, "--coverage-loss=0.5"], "--coverage-loss must be 1.0 for attention 'bahdanau', "),
        ([*TRAIN, "--alignment-loss=2"], "--alignment-loss: expected alignments to learn from"),
        ([*TRAIN, "--alignment-until=1"], "--alignment-until: expected alignments to learn from"),
        ([*TRAIN, "--window=5"], "--window must be 10 for attention 'bahdanau', got 5"),
        ([*TRAIN, "--stride=2", "--attention=local"], "--stride must be 4 for attention 'local'"),
        (
            [*TRAIN, "--tokenizer=word", "--normalisation=NFC"],
            "--normalisation: expected --tokenizer subword, got word",
        ),
        (
            [*TRAIN, "--pointer-generator", "--attention=none"],
            "--pointer-generator must be False for attention 'none'",
        ),
        (
            [*TRAIN, "--pointer-generator", "--label-smoothing=0.2"],
            "--label-smoothing must be 0.1 with a pointer-generator, got 0.2",
        ),
        ([*TRAIN, "--label-smoothing=1.5"], "--label-smoothing must be a number of at least 0 and"),
        ([*TRAIN, "--clip=0"], "--clip must be a number above 0 and at most inf, got 0.0"),
        ([*TRAIN, "--cell=rnn"], r"--cell: invalid choice: 'rnn' .*choose from gru, lstm"),
        ([*TRAIN, "--input-feeding"], "--input-feeding must be False for attention 'bahdanau'"),
        ([*TRAIN, "--device=abacus"], "--device: expected a device of this machine, got abacus"),
    ],
)
def test_errors_name_what_was_typed(arguments, message, capsys):
    assert re.match(message, refused(arguments, capsys))


@pytest.mark.parametrize("option", ["--beam", "--max-length", "--max-output-length"])
def test_options_of_a_search_are_named_as_they_were_typed(option, files, capsys):
    arguments = ["translate", str(files / "model.pt"), "--input", str(files / "text")]
    assert refused([*arguments, f"{option}=0"], capsys) == f"{option} must be at least 1, got 0"


def options_of(command):
    """Return the options of a command by the names of their values, without --help."""
    (commands,) = (x for x in cli._parser()._actions if hasattr(x, "choices") and x.choices)
    return {x.dest: x for x in commands.choices[command]._actions if x.dest != "help"}


@pytest.mark.parametrize("settings", [Config, Options])
def test_every_setting_is_an_option_with_its_default(settings):
    options = options_of("train")
    for field in dataclasses.fields(settings):
        if field.name in MEASURED:  # a trainer sets them: see test_trainer.py
            assert field.name not in options
            continue
        option = options[field.name]
        assert option.option_strings == [f"--{field.name.replace('_', '-')}"]
        assert option.default == field.default and type(option.default) is type(field.default)
        assert f"\n    {field.name}: {option.help}.\n" in settings.__doc__ + "\n"


@pytest.mark.parametrize("settings", [Config, Options])
def test_every_option_reaches_its_setting(settings, monkeypatch):
    monkeypatch.setattr(settings, "__post_init__", lambda self: None)  # some need each other
    options = options_of("train")
    for field in dataclasses.fields(settings):
        if field.name not in options:
            continue
        if field.type == "bool":
            value, typed = True, []
        else:
            typed = [(options[field.name].choices or ["7"])[-1]]
            value = {"int": int, "str": str}.get(field.type, float)(typed[0])
        args = cli._parser().parse_args([*TRAIN, *options[field.name].option_strings, *typed])
        read = cli._read_settings(settings, args)
        assert getattr(read, field.name) == value != field.default
        assert read == dataclasses.replace(settings(), **{field.name: value})


@pytest.mark.parametrize("command", ["train", "translate", "score", "inspect", "demo", "info"])
def test_every_option_has_its_own_help(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "999")
    options = options_of(command).values()
    texts = [x.help for x in options]
    assert all(texts) and len(set(texts)) == len(texts)
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    for option in options:
        assert not re.search(r"of training|of the model|None|\.$", option.help)
        default = "" if option.default in (None, False) else f" (default: {option.default})"
        assert f" {option.help}{default}\n" in shown


# Packages


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("sentencepiece", TRAIN),
        ("sacrebleu", TRAIN),
        ("sacrebleu", ["score", "x", "--source=x", "--target=x"]),
        ("sacrebleu", ["demo"]),
        ("matplotlib", ["demo"]),
    ],
)
def test_a_missing_package_is_named_with_its_extra(package, arguments, monkeypatch, capsys):
    for name in ("sentencepiece", "sacrebleu", "matplotlib"):  # what others lack does not count
        monkeypatch.setitem(sys.modules, name, io)
    monkeypatch.setitem(sys.modules, package, None)
    said = refused(arguments, capsys)
    assert f"{arguments[0]} needs the package {package} of the extra attnfast[translate]" in said
    assert said.endswith(f": pip install {package}")


def test_a_missing_package_is_not_blamed_on_the_checkpoint(files, monkeypatch, capsys):
    pytest.importorskip("sentencepiece")
    from attnfast.translate.data import SubwordTokenizer

    tokenizer = SubwordTokenizer.train(["eins zwei drei vier"] * 9, 30)
    config = Config(tokenizer.vocab_size, embed_dim=8, hidden_dim=8)
    path = files / "subwords.pt"
    checkpoint.save(path, config, build(config, "reference"), tokenizer)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    said = refused(["translate", str(path), "--input", str(files / "text")], capsys)
    assert said.startswith("subword tokenization needs the package sentencepiece of the extra")


def test_no_optional_package_is_needed_to_translate(files, tmp_path):
    """Nor NumPy, which torch itself looks for when it is imported."""
    for name in ("numpy", "sentencepiece", "sacrebleu", "tqdm", "matplotlib", "triton"):
        missing = f"raise ModuleNotFoundError('No module named {name}', name={name!r})\n"
        (tmp_path / f"{name}.py").write_text(missing)
    program = (
        "import sys\n"
        "from attnfast.translate.cli import main\n"
        "code = main(['info'])\n"
        "sys.exit(code or main(['translate', *sys.argv[1:]]) or main(['demo']))\n"
    )
    arguments = [str(files / "model.pt"), "--input", str(files / "text")]
    arguments += ["--output", str(tmp_path / "out"), "--backend", "reference", "--device", "cpu"]
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 2
    for name in ("attnfast", "python", "torch", "triton", "threads", "cuda", "cpu", "reference"):
        assert any(line.startswith(name) for line in done.stdout.splitlines()), name
    assert "reference  on" in done.stdout
    assert (tmp_path / "out").read_text().count("\n") == 2
    assert done.stderr.startswith("attnfast: attnfast demo needs the package matplotlib of the ")


# Streams


def test_a_full_output_is_said_and_a_broken_pipe_is_not():
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}

    def write_to(output, command):
        program = [sys.executable, "-m", "attnfast", command]
        streams = {"stdout": output, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(program, env=environment, **streams)
        return done.returncode, done.stderr

    with open("/dev/full", "w") as full:
        expected = "attnfast: cannot write the standard output: No space left on device\n"
        assert write_to(full, "--version") == (2, expected)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert write_to(writer, "info") == (0, "")
    finally:
        os.close(writer)


def test_an_unbuffered_output_is_written_whole_or_refused(tmp_path, monkeypatch, capsys):
    """PYTHONUNBUFFERED=1 lets a write end early on a full disk without an error."""

    def function(args):
        sys.stdout.buffer.write(b"x" * 5000)

    parser = command_line.Parser()
    parser.set_defaults(function=function)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit, status in ((1000, 2), (9000, 0)):
        raw = open(tmp_path / "out", "wb", buffering=0)  # noqa: SIM115
        with monkeypatch.context() as patch, io.TextIOWrapper(raw, write_through=True) as out:
            patch.setattr(sys, "stdout", out)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            try:
                assert command_line.run(parser, []) == status
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
        said = capsys.readouterr().err
        full = "attnfast: cannot write the standard output: File too large\n"
        assert said == (full if status else "")
    assert (tmp_path / "out").stat().st_size == 5000


def test_the_standard_input_may_be_gzipped(files, tmp_path, monkeypatch):
    outputs = []
    for content in (gzip.compress(b"eins zwei\n"), b"eins zwei\n"):
        stream = type("Stream", (), {"buffer": io.BytesIO(content)})
        monkeypatch.setattr(sys, "stdin", stream)
        assert main(["translate", str(files / "model.pt"), "--output", str(tmp_path / "out")]) == 0
        outputs.append((tmp_path / "out").read_text())
    assert outputs[0] == outputs[1] and outputs[0].count("\n") == 1


def test_closed_streams_are_said(files, monkeypatch, capsys):
    translate = ["translate", str(files / "model.pt")]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", None)
        assert refused(translate, capsys) == "cannot read the standard input: it is closed"
    monkeypatch.setattr(sys, "stdout", None)
    texts = ["--source", str(files / "text"), "--target", str(files / "text")]
    for arguments in (
        [*translate, "--input", str(files / "text")],
        ["score", *translate[1:], *texts],
    ):
        assert refused(arguments, capsys) == "cannot write the standard output: it is closed"


def test_an_unreadable_input_is_not_blamed_on_the_output(files, monkeypatch, capsys):
    class Broken:
        class buffer:
            @staticmethod
            def read():
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(sys, "stdin", Broken)
    said = refused(["translate", str(files / "model.pt")], capsys)
    assert said == "cannot read the standard input: Input/output error"


def test_an_output_that_cannot_be_written_is_refused_before_the_work(files, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "translate", None)
    arguments = ["translate", str(files / "model.pt"), "--input", str(files / "text"), "--output"]
    assert refused([*arguments, str(files)], capsys) == f"cannot write {files}: it is a folder"
    nowhere = files / "nowhere" / "x"
    assert refused([*arguments, str(nowhere)], capsys) == (
        f"cannot write {nowhere}: there is no such folder"
    )

    def read_only(**options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checkpoint.tempfile, "TemporaryFile", read_only)
    said = refused([*arguments, str(files / "new")], capsys)
    assert said == f"cannot write to the folder {files}: Read-only file system"


# Limits


def test_a_translation_as_long_as_allowed_is_said(files):
    _, model, tokenizer = checkpoint.restore(checkpoint.load(files / "model.pt"), "reference")
    lines = ["eins zwei drei eins", "", "zwei"]
    for beam in (1, 3):
        with torch.no_grad():
            model.bias[EOS] = -1e4
        said = []
        options = {"max_length": 3, "max_output_length": 6, "name": "x", "warn": said.append}
        outputs = evaluate.translate(model, tokenizer, lines, beam, **options)
        assert [len(x.split()) for x in outputs] == [6, 0, 6] and outputs.limited == [1, 3]
        assert said == [
            "x, line 1: cut from 4 tokens to the limit of 3",
            "x, line 3: its translation reached the limit of 6 tokens and may lack its end",
            "x, line 1: its translation reached the limit of 6 tokens and may lack its end",
        ]
        outputs = evaluate.translate(model, tokenizer, lines, beam)
        assert [len(x.split()) for x in outputs] == [2 * 5 + 9, 0, 2 * 2 + 9]
        with torch.no_grad():
            model.bias[EOS] = 1e4
        assert evaluate.translate(model, tokenizer, lines, beam).limited == []


def test_long_lines_make_small_batches():
    lengths = [1, 0, 300, 20_000, 7, 0, 9000, 8000, 2, 300]
    found = list(evaluate._batches(lengths, 3))
    assert found == [[0, 8, 4], [2, 9], [7], [6], [3]]


def test_a_line_too_long_for_the_memory_is_named(files, monkeypatch, capsys):
    def full(*args, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    monkeypatch.setattr(evaluate, "beam_search", full)
    arguments = ["translate", str(files / "model.pt"), "--input", str(files / "text")]
    said = refused(arguments, capsys)
    assert said.startswith(
        f"{files / 'text'}, line 1: too little memory to translate 2 tokens with"
    )
    assert said.endswith("shorter lines or a smaller beam may fit")


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_translation_in_one_sentence(files, tmp_path, number, monkeypatch, capsys):
    def stopped(*args, **options):
        signal.raise_signal(number)

    (tmp_path / "out").write_text("before")
    monkeypatch.setattr(evaluate, "translate", stopped)
    arguments = ["translate", str(files / "model.pt"), "--input", str(files / "text"), "--output"]
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    said = refused([*arguments, str(tmp_path / "out")], capsys, status=128 + number)
    assert said == "interrupted; existing files are intact"
    assert [x.name for x in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_text() == "before"
    after = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert before == after


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), ""),
        (("--beam", "--hidden-dim"), ": a smaller --hidden-dim or --beam may fit"),
        (("--batch-size", "--max-length"), ": a smaller --batch-size or --max-length may fit"),
    ],
)
def test_too_little_memory(options, said, capsys):
    def function(args):
        raise MemoryError

    parser = command_line.Parser()
    parser.set_defaults(function=function)
    for option in options:
        parser.add_argument(option)
    assert command_line.run(parser, []) == 2
    assert capsys.readouterr().err == f"attnfast: too little memory{said}\n"
