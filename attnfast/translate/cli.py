"""The command line: ``attnfast train``, ``translate``, ``score``, ``inspect`` and others.

An option of ``train`` is a field ``setting(…)`` of ``models.Config`` if the model depends on it, or
else of ``translate.trainer.Options``. An option of ``translate`` or ``score`` is a field of
``translate.evaluate.SearchOptions``. ``_parser`` adds the options for files.

For invalid input a command prints one sentence on the standard error and exits with status 2. After
Ctrl-C or SIGTERM it prints one sentence and exits with 128 plus the signal's number: 130 or 143.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import attnfast
from attnfast import __version__
from attnfast._utils import config_file, progress
from attnfast._utils.checks import InputError, argument_message, describe, optional, reason
from attnfast._utils.command_line import Flag, Parser, run
from attnfast._utils.progress import Progress, log
from attnfast._utils.settings import kind_of
from attnfast._utils.signals import Interrupted
from attnfast.ops.backends import BACKENDS, unsupported_reason

if TYPE_CHECKING:
    from attnfast.models import Config, Seq2Seq
    from attnfast.translate.data import Links, Tokenizer
    from attnfast.translate.evaluate import SearchOptions, Translation
    from attnfast.translate.processes import Processes
    from attnfast.translate.trainer import Options

T = TypeVar("T")


def _device(name: str | None, backend: str | None) -> torch.device:
    """Return the named device, or the best one; raise if the backend cannot run on it."""
    try:
        if name and name.partition(":")[0] not in ("cpu", "cuda"):
            raise RuntimeError("only cpu and cuda are supported")
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
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
    from attnfast.models.config import NO_ATTENTION
    from attnfast.translate.checkpoint import lock, make_folder
    from attnfast.translate.data import read_alignments, read_pairs
    from attnfast.translate.processes import join_processes
    from attnfast.translate.trainer import Options

    is_word = args.tokenizer == "word"
    for package in ("sacrebleu",) if is_word else ("sentencepiece", "sacrebleu"):
        optional(package, "attnfast train")
    if is_word and args.normalisation is not None:
        raise InputError("--normalisation: expected --tokenizer subword, got word")
    device = _device(args.device, args.backend)
    options, config = _read_settings(Options, args), _read_settings(Config, args)
    if not args.resume:
        options.check(config)
    for option in ("alignment_loss", "alignment_until", "alignment_kind"):
        if args.alignments is None and getattr(options, option) != getattr(Options, option):
            name = option.replace("_", "-")
            raise InputError(f"--{name}: expected alignments to learn from in --alignments")
    pairs = read_pairs(args.source, args.target)
    valid_pairs = read_pairs(args.valid_source, args.valid_target)
    links = None
    if args.alignments is not None:
        if config.attention in NO_ATTENTION:
            raise InputError("--alignments: expected an attention to supervise, got none")
        links = read_alignments(args.alignments, pairs)

    directory = Path(args.model_dir)
    with join_processes(device) as processes, contextlib.ExitStack() as stack:
        if not processes.rank:
            make_folder(directory)  # raise before the first epoch
            stack.enter_context(lock(directory))
        _train(args, config, options, processes, pairs, valid_pairs, links)


def _no_log(sentence: str) -> None:
    """Log nothing; used in all processes but the first."""


def _write_config(path: Path, options: dict[str, Any]) -> None:
    """Write a file of options, unless a file name among them is not UTF-8."""
    from attnfast.translate.checkpoint import write_atomically

    try:
        content = config_file.dumps(options).encode()
    except UnicodeEncodeError:
        log(f"{path} is not written: a file name among the options is not UTF-8")
        return
    write_atomically(path, content)


def _log_unknown(
    tokenizer: Tokenizer,
    name: str,
    pairs: Sequence[tuple[str, str]],
    log: Callable[[str], None],
) -> None:
    """Report the characters or words of the pairs that are not in the vocabulary, if any."""
    unknown = tokenizer.lacking(text for pair in pairs for text in pair)
    if unknown:
        examples = ", ".join(repr(part) for part, _ in unknown.most_common(5))
        log(
            f"{name}: {tokenizer.parts} not in the vocabulary: "
            f"{unknown.total()}, {len(unknown)} different, such as {examples}"
        )


def _train(
    args: argparse.Namespace,
    config: Config,
    options: Options,
    processes: Processes,
    pairs: list[tuple[str, str]],
    valid_pairs: list[tuple[str, str]],
    links: list[Links] | None,
) -> None:
    """Begin or resume a training in the folder ``args.model_dir``."""
    log = _no_log if processes.rank else progress.log
    from attnfast.models import build
    from attnfast.ops.backends import multiplies_bfloat16
    from attnfast.translate import checkpoint
    from attnfast.translate.data import SubwordTokenizer, WordTokenizer, encode_pairs
    from attnfast.translate.trainer import Trainer, rank

    directory = Path(args.model_dir)
    last = directory / "last.pt"
    torch.manual_seed(options.seed)
    tokenizer: Tokenizer
    if args.resume:
        state = checkpoint.load(last)
        saved, model, tokenizer = checkpoint.restore(state, args.backend, last)
        kind, _, form = tokenizer.kind.partition(" ")
        for option, value in (("tokenizer", kind), ("normalisation", form or None)):
            if getattr(args, option) != value:
                raise InputError(
                    f"{option} must be {value}, as when the training of {last} began, "
                    f"got {getattr(args, option)}"
                )
        if kind == "word":  # the size of the saved vocabulary
            config = dataclasses.replace(config, vocab_size=saved.vocab_size)
    elif last.exists():
        raise InputError(
            f"{last} holds an earlier training: add --resume to continue it, "
            "or choose another folder with --model-dir"
        )
    else:
        lines = (line for pair in pairs for line in pair)
        if args.tokenizer == "word":
            tokenizer = WordTokenizer.train(lines, config.vocab_size)
            config = dataclasses.replace(config, vocab_size=tokenizer.vocab_size)
        else:
            log(f"learning {config.vocab_size} subwords from {len(pairs)} pairs")
            tokenizer = SubwordTokenizer.train(lines, config.vocab_size, form=args.normalisation)
        model = build(config, args.backend)

    copying, limit = config.pointer_generator, options.max_length
    if not copying:
        _log_unknown(tokenizer, f"{args.source}, {args.target}", pairs, log)
        _log_unknown(tokenizer, f"{args.valid_source}, {args.valid_target}", valid_pairs, log)
    examples, skipped = encode_pairs(tokenizer, pairs, limit, copying, links)
    if links is not None:
        known = sum(x.alignment is not None for x in examples)
        log(f"{args.alignments}: alignments of {known} of {len(examples)} pairs")
    valid, valid_skipped = encode_pairs(tokenizer, valid_pairs, limit, copying)
    for path, sentence in ((args.source, skipped), (args.valid_source, valid_skipped)):
        if sentence:
            log(f"{path}: {sentence}")
    trainer = Trainer(
        config, model.to(processes.device), tokenizer, options, examples, valid, valid_pairs,
        directory, processes,
    )  # fmt: skip
    if args.resume:
        trainer.resume(state, str(last))
        before = state["training"]["options"]["epochs"]
        if options.epochs > before:
            log(
                f"continuing to epoch {options.epochs} instead of {before}, with the learning "
                f"rates and alignment weights of a training of {options.epochs} epochs"
            )
    if not processes.rank:
        given = {name: x for name, x in vars(args).items() if name in args.kept}
        _write_config(directory / "config.toml", given)
    size = sum(p.numel() for p in model.parameters())
    several = f", in {processes.count} processes" if processes.count > 1 else ""
    log(
        f"{size / 1e6:.1f} million parameters, {trainer.steps} steps an epoch, "
        f"on {processes.device}{several}"
    )
    on_cpu = processes.device.type == "cpu"
    if options.precision == "bfloat16" and on_cpu and not multiplies_bfloat16():
        log("--precision bfloat16 is no faster here: this processor has no products of bfloat16")
    try:
        trainer.run(log)
    except Interrupted as stop:
        again = f"{stop}; the same command with --resume continues from there"
        raise Interrupted(stop.number, again) from None
    best = max(trainer.history, key=rank)
    log(f"best BLEU {best['bleu']:.2f} after epoch {best['epoch']}: {directory / 'best.pt'}")


def _load(args: argparse.Namespace, path: str | None = None) -> tuple[Seq2Seq, Tokenizer]:
    """Load a checkpoint: that of the arguments unless a path is given."""
    from attnfast.translate import checkpoint

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = _device(args.device, args.backend)
    path = args.checkpoint if path is None else path
    state = checkpoint.load(path)
    _, model, tokenizer = checkpoint.restore(state, args.backend, path)
    return model.to(device), tokenizer


def _translate(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    options: SearchOptions,
    lines: Sequence[str],
    name: str,
    prefixes: Sequence[str] | None = None,
) -> list[Translation]:
    """Translate all lines of a text, with a progress bar."""
    from attnfast.translate.evaluate import translate as translate_lines

    with Progress("translating", sum(map(bool, lines)), "sentence") as progress:
        return translate_lines(
            model, tokenizer, lines, options, prefixes, name=name, warn=log, progress=progress
        )


def _translate_stream(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    options: SearchOptions,
    to_text: Callable[[str, Translation], str],
) -> None:
    """Translate the lines of the standard input as they arrive, and write results at once."""
    from attnfast.decoding import sharing_packed_parameters
    from attnfast.translate.data import stream_lines
    from attnfast.translate.evaluate import translate as translate_lines

    name, done = "standard input", 0
    try:
        with sharing_packed_parameters(model):
            for lines in stream_lines(_read_input, name, options.batch_size):
                found = translate_lines(
                    model, tokenizer, lines, options, name=name, first=done + 1, warn=log
                )
                sys.stdout.buffer.write("".join(map(to_text, lines, found)).encode())
                sys.stdout.buffer.flush()
                done += len(lines)
    except Interrupted as stop:
        text = f"interrupted; the translations of {done} lines are written"
        raise Interrupted(stop.number, text) from None


def _read_input() -> bytes:
    """Wait for bytes of the standard input; return those available, or none at its end."""
    try:
        if sys.stdin is not None:
            return sys.stdin.buffer.read1(2**16)  # type: ignore[union-attr]
        detail = "it is closed"
    except OSError as error:
        detail = reason(error)
    raise InputError(f"cannot read the standard input: {detail}")


def _check_output() -> None:
    if sys.stdout is None:
        raise InputError("cannot write the standard output: it is closed")


def _to_text(n_best: int, line: str, translation: Translation) -> str:
    """Return ``n_best`` lines, empty ones if there are fewer translations."""
    texts = [x.text for x in translation.hypotheses]
    return "".join(f"{x}\n" for x in [*texts, *[""] * (n_best - len(texts))])


def _to_json(line: str, translation: Translation) -> str:
    """Return an object in one line, with scores of six decimals."""

    def rounded(x: float) -> float | None:
        return round(x, 6) if math.isfinite(x) else None

    hypotheses = [
        {name: x for name, x in each._asdict().items() if x is not None}
        | {"score": rounded(each.score), "token_scores": list(map(rounded, each.token_scores))}
        for each in translation.hypotheses
    ]
    found = {"source": line, "source_tokens": translation.source_tokens, "hypotheses": hypotheses}
    return json.dumps(found, ensure_ascii=False, allow_nan=False) + "\n"


def translate(args: argparse.Namespace) -> None:
    """Translate a file, or the standard input line by line."""
    from attnfast.translate.checkpoint import check_file, write_atomically
    from attnfast.translate.data import decode_lines, read_lines
    from attnfast.translate.evaluate import SearchOptions

    options = _read_settings(SearchOptions, args)
    if options.alignments and args.format != "json":
        raise InputError(f"--alignments: expected --format json, got {args.format}")
    to_text = _to_json if args.format == "json" else partial(_to_text, options.n_best)
    if args.output is not None and args.input is not None:
        paths = Path(args.input), Path(args.output)
        if all(x.exists() for x in paths) and paths[0].samefile(paths[1]):
            raise InputError(f"--output: expected another file than --input, got {args.output}")
    if args.output is None:
        _check_output()
    else:
        check_file(Path(args.output))  # raise before the translation
    if args.input is args.output is args.prefix is None:
        _translate_stream(*_load(args), options, to_text)
        return
    prefixes = None if args.prefix is None else read_lines(args.prefix)
    if args.input is None:
        name = "standard input"
        lines = decode_lines(b"".join(iter(_read_input, b"")), name)
    else:
        name, lines = args.input, read_lines(args.input)
    if prefixes is not None and len(prefixes) != len(lines):
        raise InputError(
            f"{args.prefix}: expected {len(lines)} lines, as in {name}, got {len(prefixes)}"
        )
    found = _translate(*_load(args), options, lines, name, prefixes)
    text = "".join(map(to_text, lines, found)).encode()
    if args.output is not None:
        write_atomically(Path(args.output), text)
    else:
        sys.stdout.buffer.write(text)


def score(args: argparse.Namespace) -> None:
    """Translate a file and print scores, overall, by length of the source and word frequency."""
    from attnfast.translate import scores
    from attnfast.translate.checkpoint import check_file, write_atomically
    from attnfast.translate.data import read_lines, read_pairs
    from attnfast.translate.evaluate import SearchOptions

    optional("sacrebleu", "attnfast score")
    _check_output()
    edges = _read_edges(args.length_bins)
    training = None if args.frequencies is None else read_lines(args.frequencies)
    if training == []:
        raise InputError(f"{args.frequencies}: expected at least one line, got an empty file")
    if args.plot is not None:
        optional("matplotlib.figure", "--plot")
        check_file(Path(args.plot))
    if args.rouge:
        optional("rouge_score", "--rouge", "rouge")
    sources, references = zip(*read_pairs(args.source, args.target))
    options = _read_settings(SearchOptions, args)
    for name in args.checkpoint:
        if args.checkpoint.count(name) > 1:
            raise InputError(f"checkpoint: expected different files to compare, got {name} twice")
    systems = {}
    for name in args.checkpoint:
        model = _load(args, name)
        systems[name] = [x.text for x in _translate(*model, options, sources, args.source)]
    several = scores.compare(systems, references) if len(systems) > 1 else {}
    for name, outputs in systems.items():
        corpus = scores.corpus_scores(outputs, references)
        values = ", ".join(f"{x.name} {x.score:.2f}" for x in corpus)
        about = f"{name}: " if several else ""
        print(f"{about}{values} on {len(sources)} sentences, beam {args.beam}")
        if args.rouge:
            found = scores.rouge(outputs, references)
            print(about + ", ".join(f"{x} {value:.2f}" for x, value in found.items()))
        differs = {x: p for x, (_, p) in several.get(name, {}).items() if p is not None}
        if differs:
            print(f"{about}" + ", ".join(f"p = {p:.3f} for {x}" for x, p in differs.items()))
    for x in corpus:
        print(x.signature)
    rows = {
        name: scores.scores_by_length(sources, outputs, references, edges)
        for name, outputs in systems.items()
    }
    for name, of_system in rows.items():
        print(f"\n{name}" * bool(several))
        print(
            f"{'source words':>12}  {'sentences':>9}  {'BLEU':>6}  {'length':>6}  {'repeated':>8}"
        )
        for row in of_system:
            share = f"{100 * row.repeated:.1f} %"
            print(
                f"{row.name:>12}  {row.sentences:>9}  {row.bleu:>6.2f}  {row.ratio:>6.2f}  "
                f"{share:>8}"
            )
    if training is not None:
        for name, outputs in systems.items():
            print(f"\n{name}, by the frequency of words in {args.frequencies}")
            print(f"{'frequency':>12}  {'words':>9}  {'F1':>6}  {'rarest in':>9}  {'BLEU':>6}")
            for label, words, f1, count, value in scores.score_by_frequency(
                outputs, references, training
            ):
                shown = "" if value is None else f"{value:.2f}"
                print(f"{label:>12}  {words:>9}  {f1:>6.2f}  {count:>9}  {shown:>6}")
    if args.plot is not None:
        write_atomically(Path(args.plot), scores.plot_bleu_by_length(rows))


def _read_edges(text: str | None) -> list[int] | None:
    """Read numbers such as 10,20,30."""
    if text is None:
        return None
    try:
        edges = [int(x) for x in text.split(",")]
    except ValueError:
        edges = []
    if not edges or edges[0] < 1 or edges != sorted(set(edges)):
        raise InputError(f"--length-bins: expected rising numbers such as 10,20,30, got {text}")
    return edges


def inspect(args: argparse.Namespace) -> None:
    """Print a table of measurements of attention; write a page with a map of each sentence."""
    from attnfast.models import FixedContext
    from attnfast.translate import inspect_report
    from attnfast.translate.checkpoint import check_file, write_atomically
    from attnfast.translate.data import read_alignments, read_lines, read_pairs
    from attnfast.translate.evaluate import SearchOptions

    _check_output()
    check_file(Path(args.html))
    for option in ("max_sentences", "max_length"):
        if getattr(args, option) < 1:
            raise InputError(f"{option} must be at least 1, got {getattr(args, option)}")
    if args.alignments is not None and args.target is None:
        raise InputError("--alignments: expected the aligned translations in --target")
    model, tokenizer = _load(args)
    if isinstance(model.decoder.attention, FixedContext):
        raise InputError(f"{args.checkpoint}: expected a model that attends, got one without")
    positions = getattr(model.encoder, "max_length", None)  # of which the end takes one
    if positions is not None and args.max_length >= positions:
        expected = f"below {positions} with learned positions"
        raise InputError(argument_message("max_length", expected, args.max_length))
    if args.target is None:
        sources = read_lines(args.source)
        options = SearchOptions(beam=1, max_length=args.max_length)
        targets = _translate(model, tokenizer, options, sources, args.source)
        pairs = [(source, x.text) for source, x in zip(sources, targets)]
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
    text = inspect_report.page(found, Path(args.checkpoint).name, args.max_sentences)
    write_atomically(Path(args.html), text.encode())
    print(inspect_report.table(found))
    log(f"a map of each sentence: {args.html}")


def info(args: argparse.Namespace) -> None:
    """Print versions, the number of threads, and for each backend whether it is on, or why not."""
    cuda = _print_versions()
    print()
    for name in BACKENDS:
        device = torch.device("cuda" if name in ("cuda", "triton") and cuda else "cpu")
        refusal = unsupported_reason(name, device, torch.float32)
        if name == "cpu" and refusal is None:
            refusal = _cpu_setting_error()
        print(f"{name:<10} {'on' if refusal is None else f'off: {refusal}'}")


def _cpu_setting_error() -> str | None:
    """Return why a call on the CPU fails, as with an unknown ATTNFAST_CPU_ISA, or None."""
    x = torch.zeros(1, 1, 1)
    try:
        attnfast.dot_attention(x, x, x, backend="cpu")
    except RuntimeError as error:
        return str(error)
    return None


def _print_versions() -> bool:
    """Print versions and devices; return whether there is a GPU."""
    print(f"attnfast {__version__}")
    print(f"python   {platform.python_version()}")
    print(f"torch    {torch.__version__}")
    try:
        print(f"triton   {importlib.metadata.version('triton')}")
    except importlib.metadata.PackageNotFoundError:
        print("triton   not installed")
    print(f"threads  {torch.get_num_threads()}")
    cuda = torch.cuda.is_available()
    print(f"gpu      {torch.cuda.get_device_name() if cuda else 'none'}")
    return cuda


def check(args: argparse.Namespace) -> int:
    """Compare the operators of all backends with the reference; exit with 1 if one is wrong."""
    from attnfast.ops import self_check

    device = _device(args.device, None)
    _print_versions()
    comparisons = list(self_check.comparisons(device, args.all))
    if not comparisons:
        print("\nno backend to compare with the reference")
        for name in BACKENDS:
            if refusal := unsupported_reason(name, device, torch.float32):
                print(f"{name}: {refusal}")
        return 1
    print(f"\n{'operator':<64} {'error, % of allowed':>20} {'seconds':>8}")
    failures = []
    for backend, request in comparisons:
        name = self_check.name_of(backend, request)
        found = self_check.compare(backend, request)
        share = f"{100 * found.error:.1f}" if math.isfinite(found.error) else "–"
        print(f"{name:<64} {share:>20} {found.seconds:>8.2f}", flush=True)
        self_check.store_outcome(backend, request, found)
        if found.failure is not None:
            failures.append(f"{name}: {found.failure}")
    print("", *(failures or ["all as the reference"]), sep="\n")
    return bool(failures)


def corpus(args: argparse.Namespace) -> None:
    """Write the demo's made-up language: sentences, their translations and word alignments."""
    from attnfast.translate.checkpoint import make_folder, write_atomically
    from attnfast.translate.toy_grammar import aligned_corpus

    sizes = {"train": args.pairs, "valid": args.held_out, "test": args.held_out}
    directory = Path(args.directory)
    make_folder(directory)
    drawn = iter(aligned_corpus(args.seed, sum(sizes.values())))
    for part, count in sizes.items():
        sentences = [next(drawn) for _ in range(count)]
        english, german = zip(*(x.pair for x in sentences))
        links = (" ".join(f"{i}-{j}" for i, j in sorted(x.links)) for x in sentences)
        for ending, lines in (("en", english), ("de", german), ("links", links)):
            text = "".join(f"{line}\n" for line in lines)
            write_atomically(directory / f"{part}.{ending}", text.encode())
    log(f"{directory}: {', '.join(f'{x}.en, .de and .links' for x in sizes)}")


def demo(args: argparse.Namespace) -> None:
    """Train on a made-up language with no, eager and fused attention; print, draw and compare."""
    from attnfast.translate.demo import run

    run(Path(args.output_dir), log)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Show defaults, except None and False, which the help texts describe."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def integer(text: str) -> int:
    """Read an integer; its range is checked where it is used."""
    try:
        return int(text)
    except ValueError:
        expected = f"expected an integer, got {describe(text)}"
        raise argparse.ArgumentTypeError(expected) from None


def positive(text: str) -> int:
    """Read an integer of at least 1."""
    if integer(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {describe(integer(text))}")
    return integer(text)


#: How the types of settings are read.
READERS: dict[str, Callable[[str], Any]] = {"int": integer, "float": float, "str": str}


def _add_settings(
    parser: argparse._ActionsContainer, cls: Any, skipped: Sequence[str] = ()
) -> None:
    """Add an option for each field of a dataclass of settings that is not skipped."""
    for field in dataclasses.fields(cls):
        if field.name in skipped:
            continue
        option, text = f"--{field.name.replace('_', '-')}", field.metadata["help"]
        if kind_of(field) == "bool":
            parser.add_argument(option, action=Flag, default=field.default, help=text)
        else:
            parser.add_argument(
                option,
                type=READERS[kind_of(field)],
                choices=field.metadata["choices"] or None,
                default=field.default,
                help=text,
            )


def _read_settings(cls: Callable[..., T], args: argparse.Namespace) -> T:
    """Make a dataclass of the options that :func:`_add_settings` added."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    return cls(**{x.name: getattr(args, x.name) for x in fields if x.name in args})


def _parser() -> Parser:
    from attnfast.models import Config
    from attnfast.translate.data import FORMS
    from attnfast.translate.evaluate import SearchOptions
    from attnfast.translate.trainer import MEASURED, Options

    parser = Parser(prog="attnfast", description="Fused attention for RNN seq2seq")
    parser.add_argument("--version", action="version", version=f"attnfast {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(function: Callable[[argparse.Namespace], int | None]) -> argparse.ArgumentParser:
        text = function.__doc__
        sub = commands.add_parser(
            function.__name__,
            help=text,
            description=text,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        sub.set_defaults(function=function)
        return sub

    def add_file(sub: argparse._ActionsContainer, option: str, text: str, **more: Any) -> None:
        sub.add_argument(option, metavar="FILE", help=text, **more)

    def add_integer(
        sub: argparse.ArgumentParser, option: str, text: str, default: int | None = None
    ) -> None:
        sub.add_argument(option, type=integer, default=default, help=text)

    def add_checkpoint(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("checkpoint", help="best.pt or last.pt of attnfast train")

    def add_threads(sub: argparse.ArgumentParser) -> None:
        text = "threads of the CPU to compute with; unless given, PyTorch's choice"
        sub.add_argument("--threads", type=positive, help=text)

    def add_device(sub: argparse.ArgumentParser) -> None:
        text = "backend that runs the operators; the fastest unless given"
        sub.add_argument("--backend", choices=list(BACKENDS), help=text)
        sub.add_argument("--device", help="cpu or cuda; unless given, a GPU if there is one")

    sub = command(train)
    group = sub.add_argument_group("data")
    for option, text in (
        ("--source", "training sentences of the source language, one per line"),
        ("--target", "their translations, one per line"),
        ("--valid-source", "validation sentences of the source language, one per line"),
        ("--valid-target", "their reference translations, one per line"),
    ):
        add_file(group, option, text, required=True)
    text = "word alignments to supervise attention with, a line such as 0-0 1-2 per pair"
    add_file(group, "--alignments", text)
    text, kinds = "unit of the vocabulary; words end at white space", ("subword", "word")
    group.add_argument("--tokenizer", choices=kinds, default="subword", help=text)
    text = "Unicode form to which text is converted; unchanged unless given"
    group.add_argument("--normalisation", choices=FORMS, help=text)
    _add_settings(sub.add_argument_group("model"), Config, MEASURED)
    group = sub.add_argument_group("training")
    group.add_argument(
        "--model-dir", required=True, metavar="DIR", help="folder of the checkpoints and log.csv"
    )
    group.add_argument("--resume", action="store_true", help="continue the training in that folder")
    _add_settings(group, Options)
    add_device(sub)
    text = "a TOML file of options, of which typed ones take precedence; train writes one"
    add_file(sub, "--config", text)
    free = ("help", "model_dir", "resume", "config", "backend", "device")
    sub.set_defaults(kept=[x.dest for x in sub._actions if x.dest not in free])

    sub = command(translate)
    add_checkpoint(sub)
    add_file(sub, "--input", "sentences, one per line; the standard input unless given")
    add_file(sub, "--output", "translations; the standard output unless given")
    add_file(sub, "--prefix", "beginnings of the translations, one per line; they may be empty")
    text = "lines of text, the n best of a sentence one after another, or an object per line"
    sub.add_argument("--format", choices=("text", "json"), default="text", help=text)
    _add_settings(sub.add_argument_group("search"), SearchOptions)
    add_threads(sub)
    add_device(sub)

    sub = command(score)
    text = "best.pt or last.pt of attnfast train, one or several to compare with the first"
    sub.add_argument("checkpoint", nargs="+", help=text)
    add_file(sub, "--source", "sentences to translate, one per line", required=True)
    add_file(sub, "--target", "their reference translations, one per line", required=True)
    drawing = ("n_best", "sample", "temperature", "top_k", "top_p", "seed")
    text = "largest lengths of the rows of the table, such as 10,20,30; every fifth unless given"
    sub.add_argument("--length-bins", metavar="N,N,...", help=text)
    text = "target sentences of the training, to score words by their frequency in them"
    add_file(sub, "--frequencies", text)
    add_file(sub, "--plot", "picture of BLEU over the length of sources, a PNG")
    sub.add_argument("--rouge", action="store_true", help="print ROUGE-1, ROUGE-2 and ROUGE-L")
    _add_settings(sub.add_argument_group("search"), SearchOptions, (*drawing, "alignments"))
    add_threads(sub)
    add_device(sub)

    sub = command(inspect)
    add_checkpoint(sub)
    add_file(sub, "--source", "sentences of the source language, one per line", required=True)
    add_file(sub, "--target", "their translations, one per line; the model's own unless given")
    add_file(sub, "--alignments", "correct word alignments, a line such as 0-0 1-2 per pair")
    add_file(sub, "--html", "the page to write", default="attention.html")
    text = "tokens of the longest side of a pair; longer pairs are skipped"
    add_integer(sub, "--max-length", text, 256)
    add_integer(sub, "--max-sentences", "sentences on the page, the most suspicious first", 200)
    add_threads(sub)
    add_device(sub)

    sub = command(corpus)
    sub.add_argument("directory", metavar="DIR", help="folder of the files")
    text = "sentences to train on; as many as --held-out are for validation, and for a test"
    sub.add_argument("--pairs", type=positive, default=3000, help=text)
    text = "sentences for validation, and sentences for a test"
    sub.add_argument("--held-out", type=positive, default=300, help=text)
    add_integer(sub, "--seed", "of the random numbers", 1)

    sub = command(demo)
    sub.add_argument(
        "--output-dir", default="demo", metavar="DIR", help="folder of the two pictures"
    )
    command(info)
    sub = command(check)
    sub.add_argument("--all", action="store_true", help="every dtype and score")
    sub.add_argument("--device", help="cpu or cuda; unless given, a GPU if there is one")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    return run(_parser(), argv)
