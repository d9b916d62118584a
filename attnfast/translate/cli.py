"""The command line: ``attnfast train``, ``translate``, ``score``, ``inspect``, ``demo``, ``info``.

Bad input ends in one sentence on the standard error and exit status 2; Ctrl-C and SIGTERM in one
sentence and 128 more than the signal's number: 130 and 143.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import io
import os
import platform
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from attnfast import __version__
from attnfast._utils.checks import InputError, optional, out_of_memory, reason
from attnfast._utils.progress import Progress, log
from attnfast._utils.signals import Interrupted, raise_on_signal
from attnfast.ops.backends import BACKENDS, unsupported_reason

if TYPE_CHECKING:
    from attnfast.models import Config
    from attnfast.translate.data import Links, Tokenizer
    from attnfast.translate.trainer import Options


def _device(name: str | None, backend: str | None) -> torch.device:
    """Return the named device, or the best one; raise if the backend cannot run on it."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("only cpu and cuda are served")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        detail = str(error).splitlines()[0][:80]
        raise InputError(
            f"--device: expected a device of this machine, got {name}: {detail}"
        ) from error
    refusal = backend and unsupported_reason(backend, device, torch.float32)
    if refusal:
        raise InputError(f"--backend {backend} cannot run on {device}: {refusal}")
    return device


def train(args: argparse.Namespace) -> None:
    """Train a translator; write best.pt, last.pt and log.csv."""
    from attnfast.models import Config
    from attnfast.translate.checkpoint import lock, make_folder
    from attnfast.translate.data import read_alignments, read_pairs
    from attnfast.translate.trainer import Options

    for package in ("sacrebleu",) if args.words else ("sentencepiece", "sacrebleu"):
        optional(package, "attnfast train")
    if args.words and args.normalisation is not None:
        raise InputError("--normalisation: expected subwords, got --words")
    device = _device(args.device, args.backend)
    shape = {f.name for f in dataclasses.fields(Config)} & set(vars(args))
    plan = {f.name for f in dataclasses.fields(Options)} & set(vars(args))
    options = Options(**{name: getattr(args, name) for name in plan})
    config = Config(**{name: getattr(args, name) for name in shape})
    if not args.resume:
        options.check(config)
    for option in ("alignment_loss", "alignment_until"):
        if args.alignments is None and getattr(options, option) != getattr(Options, option):
            name = option.replace("_", "-")
            raise InputError(f"--{name}: expected alignments to learn from in --alignments")
    pairs = read_pairs(args.source, args.target)
    valid_pairs = read_pairs(args.valid_source, args.valid_target)
    links = None
    if args.alignments is not None:
        if config.attention == "none":
            raise InputError("--alignments: expected an attention to supervise, got none")
        links = read_alignments(args.alignments, pairs)

    directory = Path(args.out)
    make_folder(directory)  # fail now instead of an epoch later
    with lock(directory):
        _train(args, config, options, device, pairs, valid_pairs, links)


def _say_lacking(tokenizer: Tokenizer, name: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Report the characters or words of the pairs that the vocabulary lacks, if any."""
    lacking = tokenizer.lacking(text for pair in pairs for text in pair)
    if lacking:
        examples = ", ".join(repr(part) for part, _ in lacking.most_common(5))
        log(
            f"{name}: {tokenizer.parts} that the vocabulary lacks and cannot write: "
            f"{lacking.total()}, {len(lacking)} different, such as {examples}"
        )


def _train(
    args: argparse.Namespace,
    config: Config,
    options: Options,
    device: torch.device,
    pairs: list[tuple[str, str]],
    valid_pairs: list[tuple[str, str]],
    links: list[Links] | None,
) -> None:
    """Begin or resume a training in the folder ``args.out``."""
    from attnfast.models import build
    from attnfast.translate import checkpoint
    from attnfast.translate.data import SubwordTokenizer, WordTokenizer, encode_pairs
    from attnfast.translate.trainer import Trainer, rank

    directory = Path(args.out)
    last = directory / "last.pt"
    torch.manual_seed(options.seed)
    tokenizer: Tokenizer
    if args.resume:
        state = checkpoint.load(last)
        saved, model, tokenizer = checkpoint.restore(state, args.backend, last)
        if args.words != (tokenizer.kind == WordTokenizer.kind):
            wanted = "left out" if args.words else "given"
            raise InputError(f"words must be {wanted}, as when the training of {last} began")
        form = getattr(tokenizer, "form", None)
        if args.normalisation != form:
            raise InputError(
                f"normalisation must be {form}, as when the training of {last} began, "
                f"got {args.normalisation}"
            )
        if args.words:  # as many as there were
            config = dataclasses.replace(config, vocab_size=saved.vocab_size)
    elif last.exists():
        raise InputError(
            f"{last} holds an earlier training: add --resume to go on with it, "
            "or choose another folder with --out"
        )
    else:
        lines = (line for pair in pairs for line in pair)
        if args.words:
            tokenizer = WordTokenizer.train(lines, config.vocab_size)
            config = dataclasses.replace(config, vocab_size=tokenizer.vocab_size)
        else:
            log(f"learning {config.vocab_size} subwords from {len(pairs)} pairs")
            tokenizer = SubwordTokenizer.train(lines, config.vocab_size, form=args.normalisation)
        model = build(config, args.backend)

    if not config.copying:
        _say_lacking(tokenizer, f"{args.source}, {args.target}", pairs)
        _say_lacking(tokenizer, f"{args.valid_source}, {args.valid_target}", valid_pairs)
    examples, left_out = encode_pairs(tokenizer, pairs, options.max_length, config.copying, links)
    if links is not None:
        known = sum(x.alignment is not None for x in examples)
        log(f"{args.alignments}: alignments of {known} of {len(examples)} pairs")
    valid, valid_left_out = encode_pairs(tokenizer, valid_pairs, options.max_length, config.copying)
    for path, sentence in ((args.source, left_out), (args.valid_source, valid_left_out)):
        if sentence:
            log(f"{path}: {sentence}")
    trainer = Trainer(
        config, model.to(device), tokenizer, options, examples, valid, valid_pairs, directory
    )
    if args.resume:
        trainer.resume(state, str(last))
        before = state["training"]["options"]["epochs"]
        if options.epochs > before:
            log(
                f"going on to epoch {options.epochs} in place of {before}, at the learning rates "
                f"and weights of alignments of a training of {options.epochs}"
            )
    size = sum(p.numel() for p in model.parameters())
    log(f"{size / 1e6:.1f} million parameters, {trainer.steps} steps an epoch, on {device}")
    try:
        trainer.run(log)
    except Interrupted as stop:
        again = f"{stop}; the same command with --resume goes on from there"
        raise Interrupted(stop.number, again) from None
    best = max(trainer.history, key=rank)
    log(f"best BLEU {best['bleu']:.2f} after epoch {best['epoch']}: {directory / 'best.pt'}")


def _load(args: argparse.Namespace):
    from attnfast.translate import checkpoint

    device = _device(args.device, args.backend)
    state = checkpoint.load(args.checkpoint)
    _, model, tokenizer = checkpoint.restore(state, args.backend, args.checkpoint)
    return model.to(device), tokenizer


def _translate(args: argparse.Namespace, lines: Sequence[str], name: str) -> list[str]:
    from attnfast.translate.evaluate import translate as translate_lines

    model, tokenizer = _load(args)
    with Progress("translating", sum(map(bool, lines)), "sentence") as progress:
        return translate_lines(
            model,
            tokenizer,
            lines,
            args.beam,
            args.max_length,
            max_output_length=args.max_output_length,
            name=name,
            warn=log,
            progress=progress,
        )


def _read_input() -> bytes:
    try:
        if sys.stdin is not None:
            return sys.stdin.buffer.read()
        detail = "it is closed"
    except OSError as error:
        detail = reason(error)
    raise InputError(f"cannot read the standard input: {detail}")


def _check_output() -> None:
    if sys.stdout is None:
        raise InputError("cannot write the standard output: it is closed")


def translate(args: argparse.Namespace) -> None:
    """Translate a file or the standard input, line by line."""
    from attnfast.translate.checkpoint import check_file, write_atomically
    from attnfast.translate.data import decode_lines, read_lines

    if args.output is None:
        _check_output()
    else:
        check_file(Path(args.output))  # fail now instead of later
    if args.input is None:
        name, lines = "standard input", decode_lines(_read_input(), "standard input")
    else:
        name, lines = args.input, read_lines(args.input)
    text = "".join(line + "\n" for line in _translate(args, lines, name)).encode()
    if args.output is not None:
        write_atomically(Path(args.output), text)
    else:
        sys.stdout.buffer.write(text)


def score(args: argparse.Namespace) -> None:
    """Translate a file and print its BLEU, overall and by length of the source."""
    from attnfast.translate.data import read_pairs
    from attnfast.translate.evaluate import bleu, bleu_by_length

    optional("sacrebleu", "attnfast score")
    _check_output()
    sources, references = zip(*read_pairs(args.source, args.target))
    outputs = _translate(args, sources, args.source)
    total, signature = bleu(outputs, references)
    print(f"BLEU {total:.2f} on {len(sources)} sentences, beam {args.beam}")
    print(signature)
    print(f"\n{'source words':>12}  {'sentences':>9}  {'BLEU':>6}")
    for name, count, value in bleu_by_length(sources, outputs, references):
        print(f"{name:>12}  {count:>9}  {value:>6.2f}")


def inspect(args: argparse.Namespace) -> None:
    """Say what attention does, sentence by sentence: a table, and a page to look at."""
    from attnfast.models import FixedContext
    from attnfast.translate import inspect_report
    from attnfast.translate.checkpoint import check_file, write_atomically
    from attnfast.translate.data import read_alignments, read_lines, read_pairs
    from attnfast.translate.evaluate import translate as translate_lines

    _check_output()
    check_file(Path(args.page))
    for option in ("most", "max_length"):
        if getattr(args, option) < 1:
            raise InputError(f"{option} must be at least 1, got {getattr(args, option)}")
    if args.alignments is not None and args.target is None:
        raise InputError("--alignments: expected the translations that they are of in --target")
    model, tokenizer = _load(args)
    if isinstance(model.decoder.attention, FixedContext):
        raise InputError(f"{args.checkpoint}: expected a model that attends, got one without")
    if args.target is None:
        sources = read_lines(args.source)
        with Progress("translating", sum(map(bool, sources)), "sentence") as progress:
            targets = translate_lines(
                model, tokenizer, sources, 1, args.max_length, name=args.source, warn=log,
                progress=progress,
            )  # fmt: skip
        pairs = list(zip(sources, targets))
    else:
        pairs = read_pairs(args.source, args.target)
    links = None if args.alignments is None else read_alignments(args.alignments, pairs)
    with Progress("inspecting", len(pairs), "sentence") as progress:
        found = inspect_report.inspect(
            model, tokenizer, pairs, links, max_length=args.max_length, progress=progress
        )
    if not found:
        raise InputError(f"{args.source}: expected sentences that can be used, got none")
    if len(found) < len(pairs):
        log(
            f"left out {len(pairs) - len(found)} of {len(pairs)} pairs: empty or longer than "
            f"{args.max_length} tokens"
        )
    text = inspect_report.page(found, Path(args.checkpoint).name, args.most)
    write_atomically(Path(args.page), text.encode())
    print(inspect_report.table(found))
    log(f"a map of each sentence: {args.page}")


def info(args: argparse.Namespace) -> None:
    """Print versions, threads, and each backend, on or off and why."""
    print(f"attnfast {__version__}")
    print(f"python   {platform.python_version()}")
    print(f"torch    {torch.__version__}")
    try:
        print(f"triton   {importlib.metadata.version('triton')}")
    except importlib.metadata.PackageNotFoundError:
        print("triton   not installed")
    print(f"threads  {torch.get_num_threads()}")
    cuda = torch.cuda.is_available()
    print(f"gpu      {torch.cuda.get_device_name() if cuda else 'none'}\n")
    for name in BACKENDS:
        device = torch.device("cuda" if name in ("cuda", "triton") and cuda else "cpu")
        refusal = unsupported_reason(name, device, torch.float32)
        print(f"{name:<10} {'on' if refusal is None else f'off: {refusal}'}")


def demo(args: argparse.Namespace) -> None:
    """Train on a made-up language with no, eager and fused attention; print, draw and compare."""
    from attnfast.translate.demo import run

    run(Path(args.out), log)


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one sentence and prints the usage only for --help."""

    def error(self, message: str) -> NoReturn:
        what, among, choices = message.removeprefix("argument ").partition(" (choose from ")
        option = what + among + choices.replace("'", "")
        more = f": {self.prog} --help says more" if option == message else ""
        raise InputError(option + more)


def whole(text: str) -> int:
    """Read an integer within the limits of every part of PyTorch."""
    try:
        number = int(text)
    except ValueError:
        number = 2**31
    if abs(number) >= 2**31:
        raise argparse.ArgumentTypeError(f"expected a whole number below 2**31, got {text!r}")
    return number


def _parser() -> Parser:
    from attnfast.models import ATTENTIONS, ENCODERS, Config
    from attnfast.translate.data import FORMS
    from attnfast.translate.trainer import Options

    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = Parser(prog="attnfast", description="Fused attention for RNN seq2seq")
    parser.add_argument("--version", action="version", version=f"attnfast {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(function: Callable[[argparse.Namespace], None]):
        sub = commands.add_parser(
            function.__name__,
            help=function.__doc__,
            description=function.__doc__,
            formatter_class=formatter,
        )
        sub.set_defaults(function=function)
        return sub

    def placement(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--backend", choices=list(BACKENDS), help="None takes the fastest")
        sub.add_argument("--device", help="None takes a GPU if there is one")

    def search(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--beam", type=whole, default=5, help="width of the search, 1 is greedy")
        sub.add_argument(
            "--max-length", type=whole, help="cut longer sources, tokens; None reads them whole"
        )
        sub.add_argument(
            "--max-output-length",
            type=whole,
            help="the most tokens of a translation; None follows the training data",
        )

    sub = command(train)
    for side in ("source", "target", "valid-source", "valid-target"):
        sub.add_argument(f"--{side}", required=True, metavar="FILE", help="one sentence per line")
    sub.add_argument("--out", required=True, metavar="DIR", help="folder of the checkpoints")
    sub.add_argument("--resume", action="store_true", help="go on with the training in --out")
    sub.add_argument("--attention", choices=ATTENTIONS, default=Config.attention, help="mechanism")
    sub.add_argument("--input-feeding", action="store_true", help="Luong: feed the output back")
    sub.add_argument("--copying", action="store_true", help="copy words of the source too")
    sub.add_argument("--window", type=whole, default=Config.window, help="keys to a side, if local")
    sub.add_argument("--sigma", type=float, help="of a Gaussian around the position, if local")
    sub.add_argument("--height", type=float, help="of that Gaussian as a bump")
    sub.add_argument("--stride", type=whole, default=Config.stride, help="of strided attention")
    sub.add_argument("--fixed-stride", action="store_true", help="count from the first key on")
    sub.add_argument("--encoder", choices=ENCODERS, default=Config.encoder, help="of the source")
    sub.add_argument("--layers", type=whole, default=Config.layers, help="of the encoder")
    sub.add_argument("--self-attention", action="store_true", help="of the encoder, sparse")
    sub.add_argument("--words", action="store_true", help="split at blanks, not into subwords")
    sub.add_argument("--vocab-size", type=whole, default=4000, help="of both languages together")
    sub.add_argument(
        "--max-length",
        type=whole,
        default=Options.max_length,
        help="leave out longer pairs, tokens",
    )
    sub.add_argument(
        "--normalisation", choices=FORMS, help="Unicode form of all text; None keeps it as it is"
    )
    kind: Callable[[str], float]
    for name, kind in (("embed_dim", whole), ("hidden_dim", whole), ("dropout", float)):
        default = getattr(Config, name)
        sub.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, help="of the model"
        )
    for name, kind in (
        ("epochs", whole),
        ("batch_size", whole),
        ("learning_rate", float),
        ("warmup", float),
        ("coverage_loss", float),
        ("alignment_loss", float),
        ("attention_lr_scale", float),
        ("seed", int),
    ):
        default = getattr(Options, name)
        sub.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, help="of training"
        )
    sub.add_argument(
        "--alignments", metavar="FILE", help="links such as 0-0 1-2, a line a pair, to learn from"
    )
    sub.add_argument(
        "--alignment-until",
        type=float,
        metavar="SHARE",
        help="of the steps, by which the weight of their loss has fallen to 0; None keeps it",
    )
    sub.add_argument(
        "--save-every",
        type=float,
        default=Options.save_every,
        metavar="MINUTES",
        help="write last.pt in the middle of an epoch too",
    )
    placement(sub)

    sub = command(translate)
    sub.add_argument("checkpoint")
    sub.add_argument("--input", metavar="FILE", help="None reads the standard input")
    sub.add_argument("--output", metavar="FILE", help="None writes the standard output")
    search(sub)
    placement(sub)

    sub = command(score)
    sub.add_argument("checkpoint")
    sub.add_argument("--source", required=True, metavar="FILE", help="one sentence per line")
    sub.add_argument("--target", required=True, metavar="FILE", help="its reference translation")
    search(sub)
    placement(sub)

    sub = command(inspect)
    sub.add_argument("checkpoint")
    sub.add_argument("--source", required=True, metavar="FILE", help="one sentence per line")
    sub.add_argument("--target", metavar="FILE", help="None takes the model's own translations")
    sub.add_argument("--alignments", metavar="FILE", help="the true ones, such as 0-0 1-2")
    sub.add_argument("--page", default="attention.html", metavar="FILE", help="where to write it")
    sub.add_argument("--max-length", type=whole, default=256, help="leave out longer pairs, tokens")
    sub.add_argument("--most", type=whole, default=200, help="sentences on the page")
    placement(sub)

    sub = command(demo)
    sub.add_argument("--out", default="demo", metavar="DIR", help="folder of the pictures")
    command(info)
    return parser


def _with_options(text: str, args: argparse.Namespace) -> str:
    """Replace the name of an argument by the option that the user typed."""
    name, _, rest = text.partition(" ")
    named = rest.startswith("must be") and name in vars(args)
    return f"--{name.replace('_', '-')} {rest}" if named else text


def _prepare_output() -> None:
    """Make the standard output write everything or raise, with ``?`` for missing characters."""
    out = sys.stdout
    if not isinstance(out, io.TextIOWrapper):
        return
    if isinstance(out.buffer, io.RawIOBase):  # PYTHONUNBUFFERED: writes may be partial
        sys.stdout = open(  # noqa: SIM115
            out.fileno(), "w", 1, encoding=out.encoding, errors="replace", closefd=False
        )
    else:
        out.reconfigure(errors="replace")


def run(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Parse a command line, call its ``function``, and return the exit status.

    Errors that a user can correct, and signals, end in one sentence.
    """
    args = argparse.Namespace()
    _prepare_output()
    with warnings.catch_warnings(), raise_on_signal():
        warnings.showwarning = lambda message, *_, **__: log(str(message))
        try:
            try:
                parser.parse_args(argv, args)
                args.function(args)
            except SystemExit:  # --help or --version
                pass
            if sys.stdout is not None:
                sys.stdout.flush()
        except InputError as error:
            log(_with_options(str(error), args))
            return 2
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            sizes = ("batch_size", "max_length", "hidden_dim", "dim", "beam")
            some = " or ".join(f"--{x.replace('_', '-')}" for x in sizes if hasattr(args, x))
            log("too little memory" + (f": a smaller {some} may fit" if some else ""))
            return 2
        except OSError as error:  # files are refused where they are opened: this is a pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                return 0
            log(f"cannot write the standard output: {reason(error)}")
            return 2
        except KeyboardInterrupt as stop:
            log(str(stop) or "interrupted; files that were there are whole")
            return 128 + (stop.number if isinstance(stop, Interrupted) else signal.SIGINT)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    return run(_parser(), argv)
