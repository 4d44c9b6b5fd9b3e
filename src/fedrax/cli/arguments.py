"""Command-line arguments by tyro: one-line errors, and flags for every setting of an experiment."""

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
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import docstring_parser
import tyro
from tyro import constructors

from fedrax.config.annotations import Field, fields_of, type_hints
from fedrax.errors import FedraxError
from fedrax.experiments import experiment, serialization, user_code
from fedrax.experiments.experiment import Experiment
from fedrax.experiments.serialization import FROM_PYTHON, ClassChoice, TomlTable, choice_of, fits_file, is_serializable

T = TypeVar("T")
PARTS = ("data", "partition", "model", "finetuning", "task", "algorithm", "run")
_CONFIG = (
    tyro.conf.AvoidSubcommands,
    tyro.conf.SuppressFixed,
    tyro.conf.HelptextFromCommentsOff,
    tyro.conf.FlagCreatePairsOff,
)
_registry = constructors.ConstructorRegistry()


@_registry.struct_rule
def _flags_of_class(info: constructors.StructTypeInfo) -> constructors.StructConstructorSpec | None:
    """Flags of a part of an experiment: of its fields that a file can hold, and of the classes that were chosen.

    tyro cannot parse the others, such as functions, and looks for the class of a value among those of the annotation,
    where a class that is generated on first use, such as a schedule of optax, is missing.
    """
    cls: type = info.type
    value = info.default
    if type(value) is not cls or not dataclasses.is_dataclass(info.type):
        return None
    hints, fields = type_hints(cls), fields_of(cls)
    chosen = {name for name, field in fields.items() if choice_of(field) is not None}
    if is_serializable(cls) and not chosen:
        return None
    values = {name: getattr(value, name) for name in fields}
    flags = [name for name, field in fields.items() if fits_file(field)]
    made = []
    for name in flags:
        nested = dataclasses.is_dataclass(values[name])
        kind = type(values[name]) if nested and name in chosen else hints[name]
        text = None if nested else partial(_help_text, cls, name)  # the flags of a class have its docstring above them
        made.append(constructors.StructFieldSpec(name, kind, values[name], text))
    others = {name: value for name, value in values.items() if name not in flags}
    return constructors.StructConstructorSpec(partial(cls, **others), tuple(made))


def _help_text(cls: type, name: str) -> str | None:
    """The docstring of a field, without the line breaks inside its paragraphs."""
    text = next((found[name] for part in cls.__mro__[:-1] if name in (found := _docstrings(part))), None)
    return text and "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))


@cache
def _docstrings(cls: type) -> dict[str, str]:
    """The docstrings of the fields that a class itself has."""
    described = docstring_parser.parse_from_object(cls).params
    return {field.arg_name: field.description for field in described if field.description is not None}


def parse(cls: type[T], args: list[str], prog: str, description: str) -> T:
    """Parse ``args`` as a ``cls``; exits after --help and raises FedraxError for invalid arguments."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), _registry:
            return tyro.cli(cls, args=args, prog=prog, description=description, config=_CONFIG)
    except SystemExit as end:
        if end.code in (0, None):
            raise
        raise FedraxError(_error_message(errors.getvalue(), prog)) from end


def _error_message(box: str, prog: str) -> str:
    """tyro's error message without its box, with the nearest option if it names one."""
    lines = [re.sub(r"^[ │|]+|[ │|]+$", "", line) for line in box.splitlines()[1:]]  # the first is a title
    rule = re.compile("[─╰╯-]*")
    started = itertools.dropwhile(rule.fullmatch, lines)
    message = " ".join(itertools.takewhile(lambda line: not rule.fullmatch(line), started))
    message = re.sub(r"^Unrecognized options: ([^,]+),? ?.*", r"unknown option \1", message)
    suggested = re.search(r"Perhaps you meant.*?(--[\w.-]+)", " ".join(lines))
    unknown = re.fullmatch(r"unknown option (--[\w.-]+)", message)
    if suggested and (not unknown or _is_near(*(flag[2:].split(".")[-1] for flag in (unknown[1], suggested[1])))):
        closing = f"; did you mean {suggested[1]}?"
    else:
        closing = f"; see `{prog} --help`."
    return (message or "invalid arguments").rstrip(".") + closing


def _is_near(typed: str, known: str) -> bool:
    """Whether two names are similar, or the second abbreviates the first, as ``lr`` does learning_rate."""
    letters = iter(typed)
    return difflib.SequenceMatcher(None, typed, known).ratio() >= 0.6 or all(letter in letters for letter in known)


@dataclass(frozen=True)
class ChosenClass:
    """A setting of an experiment whose class is chosen by name."""

    path: str
    """The setting, such as ``algorithm.server_optimizer``."""
    choice: ClassChoice
    """The classes to choose from."""
    value: Any
    """An object of the current class, or None."""

    @property
    def name(self) -> str:
        """The current name; "none" for None."""
        return "none" if self.value is None else self.choice.name_of(self.value)


def choices_in(value: Any, path: str = "") -> Iterator[ChosenClass]:
    """All settings of ``value`` whose class is chosen by name, outer ones first."""
    for name, field in fields_of(type(value)).items():
        item, where = getattr(value, name), f"{path}.{name}" if path else name
        choice = choice_of(field)
        if choice is not None:
            yield ChosenClass(where, choice, item)
        if dataclasses.is_dataclass(item):
            yield from choices_in(item, where)


def take_choices(table: TomlTable, args: list[str], reader: serialization.Reader) -> tuple[TomlTable, list[str]]:
    """Apply the flags that choose classes (``--algorithm losac``) to ``table``; return it and the other arguments."""
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


def _name_algorithm(table: TomlTable, args: list[str], parts: tuple[str, ...]) -> TomlTable:
    """Add the name to the [algorithm] of a comparison that only has settings shared by its methods.

    The name is the one in ``args`` if that algorithm has all of the keys. A command without an algorithm drops the
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
            return table | {"algorithm": {"name": serialization.user_class_name(cls) or name, **shared}}
    return table


def _choose(table: TomlTable, chosen: ChosenClass, name: str) -> None:
    """Set the class of a setting in ``table``, with the old class's keys that it keeps."""
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
    table[last] = {"name": serialization.user_class_name(cls) or name, **kept}


def _without_replaced(made: Experiment, args: list[str]) -> Experiment:
    """Unset the alternatives of settings in ``args``: ``--algorithm.local.steps`` unsets ``local.epochs``."""
    flags = {arg[2:].split("=")[0].replace("-", "_") for arg in args if arg.startswith("--")}

    def without(value: Any, first: str, *inside: str) -> Any:
        return dataclasses.replace(value, **{first: without(getattr(value, first), *inside) if inside else None})

    for flag in flags:
        other = serialization.replaced_by(flag, made)
        if other is not None and other not in flags:
            made = without(made, *other.split("."))
    return made


def _field_of(made: Experiment, flag: str) -> Field | None:
    """The field of an experiment that a flag sets, None for other flags."""
    value, (*parents, last) = made, flag.removeprefix("--").split("=")[0].replace("-", "_").split(".")
    for parent in parents:
        value = getattr(value, parent, None)
    return fields_of(type(value)).get(last) if dataclasses.is_dataclass(value) else None


def _check_settable(made: Experiment, tokens: list[str]) -> None:
    """Raise FedraxError for flags of settings that only Python can give."""
    for flag in (token for token in tokens if token.startswith("--")):
        field = _field_of(made, flag)
        if field is None or not field.classes or choice_of(field) is not None:
            continue
        if not is_serializable(cls := field.classes[0]):
            raise FedraxError(f"{flag.split('=')[0]}: no flag can describe {cls.__name__}: {FROM_PYTHON}")


def _none_for_tyro(made: Experiment, tokens: list[str]) -> list[str]:
    """Replace a file's ``none`` by tyro's ``None`` for optional fields."""

    def may_be_none(flag: str) -> bool:
        field = _field_of(made, flag)
        return field is not None and field.optional

    pairs = zip(["", *tokens], tokens, strict=False)
    return ["None" if token == "none" and may_be_none(flag) else token for flag, token in pairs]


@dataclass(frozen=True)
class ParsedExperiment:
    """The parsed arguments of a command."""

    experiment: Experiment
    options: Any
    """The command's own options."""
    ignored_keys: list[str] = dataclasses.field(default_factory=list)
    """Keys of a comparison in the file, which the command ignores."""


def parse_experiment(
    options: type,
    args: list[str],
    prog: str,
    description: str,
    parts: tuple[str, ...] = PARTS,
    comparisons: bool = False,
) -> ParsedExperiment:
    """Parse ``[FILE.toml] [flags]`` into an experiment and a command's own options.

    Flags are the keys of the file: ``--algorithm.local.lr 0.1``. A user's method, ``file.py:Name``, may be given
    instead of the file.

    Args:
        options: The class of the command's options.
        args: The arguments.
        prog: The command, for messages.
        description: Text of --help.
        parts: Tables of the experiment that have flags.
        comparisons: Whether the file of a comparison is accepted; its [[compare]] tables are ignored.

    Returns:
        The checked experiment and the options.
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
        table = _name_algorithm(table, args, parts)
    ignored = [key for key in table if key in experiment.COMPARISON_KEYS]
    table = {key: value for key, value in table.items() if key not in ignored}
    reader = serialization.Reader(source, folder, tyro.MISSING, trust, experiment.COMPARISON_KEYS)
    table, rest = take_choices(table, args if path is None else args[1:], reader)
    made = _without_replaced(reader.fields(Experiment, table, "", Experiment()), rest)
    _check_settable(made, rest)
    rest = _none_for_tyro(made, rest)
    nested = Annotated[options, tyro.conf.arg(name="")]
    fields: list[Any] = [("options", nested, dataclasses.field(default_factory=options))]
    name = Annotated[str, tyro.conf.arg(help="Name of the experiment.")]
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
        if value is not None and dataclasses.fields(value):
            fields.append((part, type(value), dataclasses.field(default_factory=lambda value=value: value)))
    parsed = parse(dataclasses.make_dataclass(options.__name__, fields), rest, prog, description)
    changed = {part: getattr(parsed, part) for part in parts if hasattr(parsed, part)}
    result = dataclasses.replace(made, name=parsed.name, **changed)
    # read again as the run's experiment.toml will be, so that values of flags get the types of values in a file
    result = serialization.Reader("command line", Path()).fields(
        Experiment, experiment.to_table(result), "", Experiment()
    )
    try:
        result.check()
    except FedraxError as error:
        given = (re.split("[.=]", arg.removeprefix("--"))[0] for arg in args if arg.startswith("--"))
        flagged = " with the flags given" if any(part in ("name", *PARTS) for part in given) else ""
        raise FedraxError(f"{source}{flagged}: {error}" if path else str(error)) from error
    return ParsedExperiment(result, parsed.options, ignored)
