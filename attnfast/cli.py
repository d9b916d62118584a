"""The command line: ``attnfast train``, ``translate``, ``score``, ``demo`` and ``info``.

Bad input ends in one sentence on the standard error and exit status 2; Ctrl-C in one sentence and
status 130.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from attnfast.backends import BACKENDS, why_not
from attnfast.errors import InputError, optional, reason


def _say(sentence: str) -> None:
    print(f"attnfast: {sentence}", file=sys.stderr, flush=True)


def _device(name: str | None, backend: str | None) -> torch.device:
    """Return the device of a name, or the best there is; refuse a backend that cannot run on it."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("only cpu and cuda are served")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        detail = str(error).splitlines()[0]
        raise InputError(
            f"--device: expected a device of this machine, got {name}: {detail}"
        ) from error
    refusal = backend and why_not(backend, device, torch.float32)
    if refusal:
        raise InputError(f"--backend {backend} cannot run on {device}: {refusal}")
    return device


@contextlib.contextmanager
def _bar(total: int, name: str) -> Iterator[Callable[[int], object]]:
    """Show progress if tqdm is there and someone is watching."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda done: None
        return
    with tqdm(total=total, desc=name, leave=False, disable=None) as bar:
        yield bar.update


def train(args: argparse.Namespace) -> None:
    """Train a translator; write best.pt, last.pt and log.csv."""
    from attnfast import checkpoint
    from attnfast.data import (
        SubwordTokenizer,
        Tokenizer,
        WordTokenizer,
        encode_pairs,
        read_pairs,
    )
    from attnfast.models import Config, build
    from attnfast.training import Interrupted, Options, Trainer

    for package in ("sentencepiece", "sacrebleu", "tqdm"):
        optional(package, "attnfast train")
    if args.max_length < 1:
        raise InputError(f"--max-length must be at least 1, got {args.max_length}")
    device = _device(args.device, args.backend)
    shape = {f.name for f in dataclasses.fields(Config)} & set(vars(args))
    plan = {f.name for f in dataclasses.fields(Options)} & set(vars(args))
    options = Options(**{name: getattr(args, name) for name in plan})
    config = Config(**{name: getattr(args, name) for name in shape})
    pairs = read_pairs(args.source, args.target)
    valid_pairs = read_pairs(args.valid_source, args.valid_target)

    directory = Path(args.out)
    last = directory / "last.pt"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {directory}: {reason(error)}") from error
    torch.manual_seed(options.seed)
    tokenizer: Tokenizer
    if args.resume:
        state = checkpoint.load(last)
        saved, model, tokenizer = checkpoint.restore(state, args.backend)
        if args.words != (tokenizer.kind == WordTokenizer.kind):
            wanted = "without" if args.words else "with"
            raise InputError(f"{last}: expected a training {wanted} --words, as this one began")
        if args.words:  # as many as there were
            config = dataclasses.replace(config, vocab_size=saved.vocab_size)
        if saved != config:
            name = next(n for n in shape if getattr(saved, n) != getattr(config, n))
            raise InputError(
                f"{last}: expected {name} {getattr(saved, name)}, as this training began, "
                f"got {getattr(config, name)}"
            )
    elif last.exists():
        raise InputError(
            f"{last} holds an earlier training: add --resume to go on with it, "
            "or choose another folder with --out"
        )
    else:
        checkpoint.write_atomically(directory / "log.csv", b"")  # not to find out an epoch later
        lines = (line for pair in pairs for line in pair)
        if args.words:
            tokenizer = WordTokenizer.train(lines, config.vocab_size)
            config = dataclasses.replace(config, vocab_size=tokenizer.vocab_size)
        else:
            _say(f"learning {config.vocab_size} subwords from {len(pairs)} pairs")
            tokenizer = SubwordTokenizer.train(lines, config.vocab_size)
        model = build(config, args.backend)

    examples, left_out = encode_pairs(tokenizer, pairs, args.max_length, config.copying)
    valid, valid_left_out = encode_pairs(tokenizer, valid_pairs, args.max_length, config.copying)
    for path, sentence in ((args.source, left_out), (args.valid_source, valid_left_out)):
        if sentence:
            _say(f"{path}: {sentence}")
    trainer = Trainer(
        config, model.to(device), tokenizer, options, examples, valid, valid_pairs, directory
    )
    if args.resume:
        trainer.resume(state, str(last))
    size = sum(p.numel() for p in model.parameters())
    _say(f"{size / 1e6:.1f} million parameters, {trainer.steps} steps an epoch, on {device}")
    try:
        trainer.run(_say)
    except Interrupted:
        raise KeyboardInterrupt(
            f"stopped after step {trainer.step} of epoch {trainer.epoch + 1}; the same command "
            "with --resume goes on from there"
        ) from None
    best = max(trainer.history, key=lambda entry: entry["bleu"])
    _say(f"best BLEU {best['bleu']:.2f} after epoch {best['epoch']}: {directory / 'best.pt'}")


def _load(args: argparse.Namespace):
    from attnfast import checkpoint

    device = _device(args.device, args.backend)
    _, model, tokenizer = checkpoint.restore(checkpoint.load(args.checkpoint), args.backend)
    return model.to(device), tokenizer


def _translate(args: argparse.Namespace, lines: Sequence[str], name: str) -> list[str]:
    from attnfast.translation import translate as translate_lines

    model, tokenizer = _load(args)
    with _bar(sum(map(bool, lines)), "translating") as progress:
        return translate_lines(
            model,
            tokenizer,
            lines,
            args.beam,
            warn=lambda sentence: _say(f"{name}, {sentence}"),
            progress=progress,
        )


def translate(args: argparse.Namespace) -> None:
    """Translate a file or the standard input, line by line."""
    from attnfast.checkpoint import write_atomically
    from attnfast.data import decode_lines, read_lines

    if args.input is None:
        name, lines = "standard input", decode_lines(sys.stdin.buffer.read(), "standard input")
    else:
        name, lines = args.input, read_lines(args.input)
    if args.output is not None and not Path(args.output).parent.is_dir():
        raise InputError(f"cannot write {args.output}: there is no such folder")  # not found later
    text = "".join(line + "\n" for line in _translate(args, lines, name)).encode()
    if args.output is not None:
        write_atomically(Path(args.output), text)
    else:
        sys.stdout.buffer.write(text)


def score(args: argparse.Namespace) -> None:
    """Translate a file and print its BLEU, overall and by length of the source."""
    from attnfast.data import read_pairs
    from attnfast.translation import bleu, bleu_by_length

    optional("sacrebleu", "attnfast score")
    sources, references = zip(*read_pairs(args.source, args.target))
    outputs = _translate(args, sources, args.source)
    total, signature = bleu(outputs, references)
    print(f"BLEU {total:.2f} on {len(sources)} sentences, beam {args.beam}")
    print(signature)
    print(f"\n{'source words':>12}  {'sentences':>9}  {'BLEU':>6}")
    for name, count, value in bleu_by_length(sources, outputs, references):
        print(f"{name:>12}  {count:>9}  {value:>6.2f}")


def info(args: argparse.Namespace) -> None:
    """Print versions, threads, and each backend, on or off and why."""
    import attnfast

    print(f"attnfast {attnfast.__version__}")
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
        refusal = why_not(name, device, torch.float32)
        print(f"{name:<10} {'on' if refusal is None else f'off: {refusal}'}")


def demo(args: argparse.Namespace) -> None:
    """Train on a made-up language with no, eager and fused attention; print, draw and compare."""
    from attnfast.demo import run

    run(Path(args.out), _say)


def _parser() -> argparse.ArgumentParser:
    from attnfast.models import ATTENTIONS, Config
    from attnfast.training import Options

    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="attnfast", description="Fused attention for RNN seq2seq")
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

    sub = command(train)
    for side in ("source", "target", "valid-source", "valid-target"):
        sub.add_argument(f"--{side}", required=True, metavar="FILE", help="one sentence per line")
    sub.add_argument("--out", required=True, metavar="DIR", help="folder of the checkpoints")
    sub.add_argument("--resume", action="store_true", help="go on with the training in --out")
    sub.add_argument("--attention", choices=ATTENTIONS, default=Config.attention, help="mechanism")
    sub.add_argument("--input-feeding", action="store_true", help="Luong: feed the output back")
    sub.add_argument("--copying", action="store_true", help="copy words of the source too")
    sub.add_argument("--window", type=int, default=Config.window, help="keys to a side, if local")
    sub.add_argument("--stride", type=int, default=Config.stride, help="of strided attention")
    sub.add_argument("--self-attention", action="store_true", help="of the encoder, sparse")
    sub.add_argument("--words", action="store_true", help="split at blanks, not into subwords")
    sub.add_argument("--vocab-size", type=int, default=4000, help="of both languages together")
    sub.add_argument("--max-length", type=int, default=100, help="leave out longer pairs, tokens")
    for name, kind in (("embed_dim", int), ("hidden_dim", int), ("dropout", float)):
        default = getattr(Config, name)
        sub.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, help="of the model"
        )
    for name, kind in (
        ("epochs", int),
        ("batch_size", int),
        ("learning_rate", float),
        ("coverage_loss", float),
        ("seed", int),
    ):
        default = getattr(Options, name)
        sub.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, help="of training"
        )
    placement(sub)

    sub = command(translate)
    sub.add_argument("checkpoint")
    sub.add_argument("--input", metavar="FILE", help="None reads the standard input")
    sub.add_argument("--output", metavar="FILE", help="None writes the standard output")
    sub.add_argument("--beam", type=int, default=5, help="width of the search, 1 is greedy")
    placement(sub)

    sub = command(score)
    sub.add_argument("checkpoint")
    sub.add_argument("--source", required=True, metavar="FILE", help="one sentence per line")
    sub.add_argument("--target", required=True, metavar="FILE", help="its reference translation")
    sub.add_argument("--beam", type=int, default=5, help="width of the search, 1 is greedy")
    placement(sub)

    sub = command(demo)
    sub.add_argument("--out", default="demo", metavar="DIR", help="folder of the pictures")
    command(info)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    args = _parser().parse_args(argv)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _say(str(message))
        try:
            args.function(args)
            if sys.stdout is not None:
                sys.stdout.flush()
        except InputError as error:
            _say(str(error))
            return 2
        except RuntimeError as error:
            if not re.search("out of memory|can't allocate memory", str(error)):
                raise
            _say("too little memory: a smaller --batch-size, --hidden-dim or --beam may fit")
            return 2
        except OSError as error:  # files are refused where they are opened: this is a pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                return 0
            _say(f"cannot write the standard output: {reason(error)}")
            return 2
        except KeyboardInterrupt as interrupt:
            _say(str(interrupt) or "interrupted; files that were there are whole")
            return 130
    return 0
