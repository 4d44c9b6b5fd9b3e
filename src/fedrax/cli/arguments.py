"""Arguments by tyro: errors in one sentence, and flags for every setting of an experiment."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import io
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro import constructors

from fedrax.config.annotations import Field, fields_of, hints_of
from fedrax.errors import FedraxError
from fedrax.experiments import experiment, serialization, user_code
from fedrax.experiments.experiment import Experiment
from fedrax.experiments.serialization import FROM_PYTHON, ClassChoice, TomlTable, fits_a_file, says_whole

T = TypeVar("T")
PARTS = ("data", "partition", "model", "task", "algorithm", "run")
_CONFIG = (
    tyro.conf.AvoidSubcommands,
    tyro.conf.SuppressFixed,
    tyro.conf.HelptextFromCommentsOff,
    tyro.conf.FlagCreatePairsOff,
)
_registry = constructors.ConstructorRegistry()


@_registry.struct_rule
def _what_a_file_holds(info: constructors.StructTypeInfo) -> constructors.StructConstructorSpec | None:
    """Flags for a user's own class with fields that hold functions, into which tyro would look and fail."""
    cls, value = info.type, info.default
    if type(value) is not cls or not dataclasses.is_dataclass(cls) or says_whole(cls):
        return None
    hints, names = hints_of(cls), [name for name, field in fields_of(cls).items() if fits_a_file(field)]
    flags = tuple(constructors.StructFieldSpec(name, hints[name], getattr(value, name)) for name in names)
    return constructors.StructConstructorSpec(partial(dataclasses.replace, value), flags)


def parse(cls: type[T], args: list[str], prog: str, description: str) -> T:
    """``args`` as a ``cls``; prints help and leaves where asked for, raises FedraxError for anything unfit."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), _registry:
            return tyro.cli(cls, args=args, prog=prog, description=description, config=_CONFIG)
    except SystemExit as end:
        if end.code in (0, None):
            raise
        raise FedraxError(_sentence(errors.getvalue(), prog)) from end


def _sentence(box: str, prog: str) -> str:
    """tyro's explanation without its box: what is wrong, and the nearest option if it names one."""
    lines = [re.sub(r"^[ │|]+|[ │|]+$", "", line) for line in box.splitlines()[1:]]  # the first is a title
    rule = re.compile("[─╰╯-]*")
    started = itertools.dropwhile(rule.fullmatch, lines)
    said = " ".join(itertools.takewhile(lambda line: not rule.fullmatch(line), started))
    said = re.sub(r"^Unrecognized options: ([^,]+),? ?.*", r"unknown option \1", said)
    near = re.search(r"Perhaps you meant.*?(--[\w.-]+)", " ".join(lines))
    asked = re.fullmatch(r"unknown option (--[\w.-]+)", said)
    if near and (not asked or _is_near(*(flag[2:].split(".")[-1] for flag in (asked[1], near[1])))):
        closing = f"; did you mean {near[1]}?"
    else:
        closing = f"; see `{prog} --help`."
    return (said or "the arguments cannot be understood").rstrip(".") + closing


def _is_near(asked: str, known: str) -> bool:
    """Whether one word may be meant by the other: it is much the same, or short for it, as ``lr`` for learning."""
    letters = iter(asked)
    return difflib.SequenceMatcher(None, asked, known).ratio() >= 0.6 or all(letter in letters for letter in known)


@dataclass(frozen=True)
class ChosenClass:
    """A place of an experiment where a class is chosen by name."""

    path: str
    choice: ClassChoice
    value: Any

    @property
    def name(self) -> str:
        """The name in force."""
        return "none" if self.value is None else self.choice.name_of(self.value)


def choices_in(value: Any, path: str = "") -> Iterator[ChosenClass]:
    """Every such place, outer ones first."""
    for name, field in fields_of(type(value)).items():
        item, where = getattr(value, name), f"{path}.{name}" if path else name
        choice = serialization.choice_of(field)
        if choice is not None:
            yield ChosenClass(where, choice, item)
        if dataclasses.is_dataclass(item):
            yield from choices_in(item, where)


def take_choices(table: TomlTable, args: list[str], reader: serialization.Reader) -> tuple[TomlTable, list[str]]:
    """``table`` with the names that ``args`` choose (``--algorithm losac``), and the other arguments."""
    table = copy.deepcopy(table)
    tokens = [part for arg in args for part in (arg.split("=", 1) if re.match(r"--[\w.-]+=", arg) else [arg])]
    flags = {i: t[2:].replace("-", "_") for i, t in enumerate(tokens) if t.startswith("--") and i + 1 < len(tokens)}
    taken: set[int] = set()
    for place, path in sorted(flags.items(), key=lambda item: item[1].count(".")):
        made = reader.fields(Experiment, table, "", Experiment())
        chosen = next((chosen for chosen in choices_in(made) if chosen.path == path), None)
        if chosen is not None:
            _choose(table, chosen, tokens[place + 1])
            taken |= {place, place + 1}
    return table, [token for i, token in enumerate(tokens) if i not in taken]


def _of_one_method(table: TomlTable, args: list[str], parts: tuple[str, ...]) -> TomlTable:
    """Complete the table of a comparison whose [algorithm] holds settings shared by methods, without a name.

    The name is taken from ``args`` if that algorithm has all of the keys. A command without an algorithm drops the
    table.
    """
    shared = table.get("algorithm", {})
    if not isinstance(shared, Mapping) or "name" in shared:
        return table
    if "algorithm" not in parts:
        return {key: value for key, value in table.items() if key != "algorithm"}
    tokens = [part for arg in args for part in (arg.split("=", 1) if arg.startswith("--algorithm=") else [arg])]
    for name in [value for flag, value in itertools.pairwise(tokens) if flag == "--algorithm"]:
        cls = serialization.ALGORITHM.find(name, Path.cwd(), "typed")
        if shared.keys() <= fields_of(cls).keys():
            return table | {"algorithm": {"name": serialization.own_name(cls) or name, **shared}}
    return table


def _choose(table: TomlTable, chosen: ChosenClass, name: str) -> None:
    """Put the class called ``name`` into ``table``."""
    *parents, last = chosen.path.split(".")
    for parent in parents:
        if isinstance(table.get(parent), str):
            table[parent] = {"name": table[parent]}
        table = table.setdefault(parent, {})
    if name.lower() == "none":
        table[last] = "none"
        return
    cls, old = chosen.choice.find(name, Path.cwd(), "typed"), table.get(last, {})
    known = {field.name for field in dataclasses.fields(cls)}
    keeps = isinstance(old, Mapping) and (chosen.choice.keep or cls is type(chosen.value))
    kept = {key: value for key, value in old.items() if key in known and key != "name"} if keeps else {}
    table[last] = {"name": serialization.own_name(cls) or name, **kept}


def _as_flagged(made: Experiment, args: list[str]) -> Experiment:
    """``made`` without the values in whose stead ``args`` give others: ``--algorithm.local.steps`` replaces epochs."""
    flags = {arg[2:].split("=")[0].replace("-", "_") for arg in args if arg.startswith("--")}

    def without(value: Any, first: str, *inside: str) -> Any:
        return dataclasses.replace(value, **{first: without(getattr(value, first), *inside) if inside else None})

    for flag in flags:
        other = serialization.replaced_by(flag, made)
        if other is not None and other not in flags:
            made = without(made, *other.split("."))
    return made


def _field_of(made: Experiment, flag: str) -> Field | None:
    """The field that a flag is about; None where there is none."""
    value, (*parents, last) = made, flag.removeprefix("--").split("=")[0].replace("-", "_").split(".")
    for parent in parents:
        value = getattr(value, parent, None)
    return fields_of(type(value)).get(last) if dataclasses.is_dataclass(value) else None


def _refuse_beyond_files(made: Experiment, tokens: list[str]) -> None:
    """Refuse flags for what only Python can say, of which no flag is offered."""
    for flag in (token for token in tokens if token.startswith("--")):
        field = _field_of(made, flag)
        if field is None or not field.classes or serialization.choice_of(field) is not None:
            continue
        if not says_whole(cls := field.classes[0]):
            raise FedraxError(f"{flag.split('=')[0]}: no flag can say what {cls.__name__} holds: {FROM_PYTHON}")


def _as_python_says(made: Experiment, tokens: list[str]) -> list[str]:
    """``tokens`` with ``None`` for a file's ``none``, where a flag's field may have no value."""

    def may_be_none(flag: str) -> bool:
        field = _field_of(made, flag)
        return field is not None and field.optional

    pairs = zip(["", *tokens], tokens, strict=False)
    return ["None" if token == "none" and may_be_none(flag) else token for flag, token in pairs]


@dataclass(frozen=True)
class ParsedExperiment:
    """What the flags of a command came to."""

    experiment: Experiment
    options: Any
    left_out: list[str] = dataclasses.field(default_factory=list)
    """Keys of the file that say how methods are compared."""


def parse_experiment(
    options: type,
    args: list[str],
    prog: str,
    description: str,
    parts: tuple[str, ...] = PARTS,
    comparisons: bool = False,
) -> ParsedExperiment:
    """A command's own ``options`` and an experiment, from ``[FILE.toml] [flags]``.

    The file comes first, if there is one. Flags are the keys of the file: ``--algorithm.local.lr 0.1``. Those of
    ``parts`` are offered. comparisons: take the file of a comparison, too, without its [[compare]] tables. A method of
    the user's own, ``file.py:Name``, may stand in place of the file.
    """
    if args and re.fullmatch(r"[^-].*\.py:\w+", args[0]):
        args = ["--algorithm", *args]
    path = Path(args[0]) if args and not args[0].startswith("-") else None
    table = {} if path is None else experiment.read_file(path)
    source, folder = ("command line", Path()) if path is None else (str(path), path.parent)
    trust = "beside" if path is None else user_code.trust_in(path)
    if "compare" in table and not set(args) & {"-h", "--help"} and parts == PARTS and not comparisons:
        experiment.from_table(table, source, folder, trust)  # explains that this is a file for `fedrax compare`
    if "compare" in table:
        table = _of_one_method(table, args, parts)
    left_out = [key for key in table if key in experiment.OF_COMPARISONS]
    table = {key: value for key, value in table.items() if key not in left_out}
    reader = serialization.Reader(source, folder, tyro.MISSING, trust)
    table, rest = take_choices(table, args if path is None else args[1:], reader)
    made = _as_flagged(reader.fields(Experiment, table, "", Experiment()), rest)
    _refuse_beyond_files(made, rest)
    rest = _as_python_says(made, rest)
    nested = Annotated[options, tyro.conf.arg(name="")]
    fields: list[Any] = [("options", nested, dataclasses.field(default_factory=options))]
    name = Annotated[str, tyro.conf.arg(help="What to call it.")]
    fields.append(("name", name, dataclasses.field(default=made.name)))
    for chosen in choices_in(made):
        if chosen.path.split(".")[0] in parts:
            known = ", ".join(chosen.choice.classes())
            own = " or your own file.py:name" if chosen.choice.adapt else ""
            text = f"{chosen.choice.kind.capitalize()}: {known}{own}."
            arg = tyro.conf.arg(name=chosen.path.replace("_", "-"), help=text, metavar="NAME")
            key = "choose_" + chosen.path.replace(".", "_")
            fields.append((key, Annotated[str, arg], dataclasses.field(default=chosen.name)))
    for part in parts:
        value = getattr(made, part)
        if dataclasses.fields(value):
            fields.append((part, type(value), dataclasses.field(default_factory=lambda value=value: value)))
    parsed = parse(dataclasses.make_dataclass(options.__name__, fields), rest, prog, description)
    changed = {part: getattr(parsed, part) for part in parts if hasattr(parsed, part)}
    result = dataclasses.replace(made, name=parsed.name, **changed)
    # read once more, as the file of the run will be: flags take the forms that values of a file have
    # what the file alone says has been read already
    result = serialization.Reader("command line", Path()).fields(
        Experiment, experiment.to_table(result), "", Experiment()
    )
    try:
        result.check()
    except FedraxError as error:
        given = (re.split("[.=]", arg.removeprefix("--"))[0] for arg in args if arg.startswith("--"))
        flagged = " with the flags given" if any(part in ("name", *PARTS) for part in given) else ""
        raise FedraxError(f"{source}{flagged}: {error}" if path else str(error)) from error
    return ParsedExperiment(result, parsed.options, left_out)
