"""``fedrax completion``: prints a completion script for a shell."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import tyro

from fedrax.cli import COMMANDS
from fedrax.cli.arguments import choices_in, parse
from fedrax.cli.list_command import KINDS
from fedrax.config.annotations import fields_of
from fedrax.data import DATASETS
from fedrax.experiments.experiment import ALGORITHM, Experiment

DESCRIPTION = """Print a completion script: `fedrax completion bash|zsh|fish`.

The script completes commands, their flags, the names of algorithms, data sets, models and other parts, and files. The
shell reads it from a file:

  fedrax completion bash > ~/.local/share/bash-completion/completions/fedrax
  fedrax completion zsh > ~/.zfunc/_fedrax
  fedrax completion fish > ~/.config/fish/completions/fedrax.fish

For zsh, ~/.zshrc needs `fpath+=~/.zfunc` before `compinit`. Write the script again after an update of fedrax."""
WORDS = {
    "list": tuple(KINDS),
    "download": tuple(name for name, entry in DATASETS.items() if entry.sources),
    "completion": ("bash", "zsh", "fish"),
}
"""What follows these commands, instead of files."""


@dataclass
class CompletionOptions:
    """Arguments of ``fedrax completion``."""

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]
    """The shell."""


class Flag(NamedTuple):
    """A flag of a command."""

    name: str
    text: str
    """Its description."""
    takes_value: bool
    values: tuple[str, ...] = ()
    """The values, if they are known."""


def main(args: list[str]) -> int:
    """Print the script."""
    shell = parse(CompletionOptions, args, "fedrax completion", DESCRIPTION).shell
    flags = {command: flags_of(command) for command in COMMANDS}
    print({"bash": bash, "zsh": zsh, "fish": fish}[shell](flags))
    return 0


def flags_of(command: str) -> list[Flag]:
    """The flags of a command: those in its --help, and the settings of all classes that its flags can choose."""
    flags = _flags_in(_help_of(command))
    chosen = {f"--{part.path.replace('_', '-')}": part.choice for part in choices_in(Experiment())}
    for name, choice in (chosen | {"--algorithms": ALGORITHM}).items():
        if name not in flags:
            continue
        flags[name] = flags[name]._replace(values=tuple(choice.classes()))
        if name == "--algorithms":
            continue
        for label, cls in choice.classes().items():
            for field in fields_of(cls):
                flag = f"{name}.{field.replace('_', '-')}"
                if not any(known.startswith(f"{flag}.") for known in flags):  # such as local, which has settings
                    flags.setdefault(flag, Flag(flag, f"Setting of {label}.", True))
    return list(flags.values())


def _help_of(command: str) -> str:
    """The text of a command's --help."""
    text, columns = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "129"  # the widest with one column
    try:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            importlib.import_module(f"fedrax.cli.{command}_command").main(["--help"])
    finally:
        os.environ.pop("COLUMNS")
        os.environ.update({} if columns is None else {"COLUMNS": columns})
    text.seek(0)
    return re.sub(r"\x1b\[[0-9;]*m", "", text.read())


_FLAG = re.compile(r"(?:-h, )?(--[\w.-]+)(?:, --[\w.-]+)* ?")
"""A flag at the start of a line of --help, before its metavar."""


def _flags_in(text: str) -> dict[str, Flag]:
    """The flags that a text of --help describes: each begins a line in a box, and its description follows."""
    flags: dict[str, Flag] = {}
    items: list[str] = []
    for line in text.splitlines():
        inside = re.fullmatch(r"│ (.*?) *│", line)
        if inside is None:
            continue
        if re.match("-h, |--", inside[1]):
            items.append(inside[1])
        elif items:
            items[-1] += f"  {inside[1].strip()}"
    for item in items:
        invocation, _, described = item.partition("  ")
        if (found := _FLAG.match(invocation)) is None:
            continue
        metavar = invocation[found.end() :]
        words = re.findall(r"[\w.-]+", metavar) if re.fullmatch(r"[{},|\w.-]+\}", metavar) else []
        shown = re.sub(r" *\((default|required).*", "", " ".join(described.split()))
        flags[found[1]] = Flag(found[1], shown, bool(metavar), tuple(word for word in words if word != "None"))
    return flags


def bash(flags: dict[str, list[Flag]]) -> str:
    """The script for bash. Where no word fits, readline completes a file name."""
    lines = [
        "# bash completion of fedrax, written by: fedrax completion bash",
        "_fedrax() {",
        "    local cur=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}",
        "    local command=${COMP_WORDS[1]} words=",
        "    if ((COMP_CWORD == 1)); then",
        f"        words={_quoted(COMMANDS)}",
        "    elif [[ $cur == -* ]]; then",
        "        case $command in",
        *(f"            {name}) words={_quoted(flag.name for flag in known)} ;;" for name, known in flags.items()),
        "        esac",
        "    else",
        '        case "$command $previous" in',
        *(f'            "{name} {flag.name}") words={_quoted(flag.values)} ;;' for name, flag in _with_values(flags)),
        *(f'            "{name} {name}") words={_quoted(words)} ;;' for name, words in WORDS.items()),
        "        esac",
        "    fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$cur"))',
        "}",
        "complete -o default -F _fedrax fedrax",
    ]
    return "\n".join(lines)


def zsh(flags: dict[str, list[Flag]]) -> str:
    """The script for zsh, to be autoloaded as ``_fedrax`` or sourced after ``compinit``."""

    def described(items: dict[str, str]) -> str:
        return " ".join(shlex.quote(f"{name.replace(':', chr(92) + ':')}:{text}") for name, text in items.items())

    lines = [
        "#compdef fedrax",
        "# zsh completion of fedrax, written by: fedrax completion zsh",
        "_fedrax() {",
        "    local -a found",
        "    if ((CURRENT == 2)); then",
        f"        found=({described(COMMANDS)})",
        "        _describe command found",
        "    elif [[ $words[CURRENT] == -* ]]; then",
        "        case $words[2] in",
        *(
            f"            {name}) found=({described({f.name: f.text for f in known})}) ;;"
            for name, known in flags.items()
        ),
        "        esac",
        "        _describe -o flag found",
        "    else",
        '        case "$words[2] $words[CURRENT-1]" in',
        *(f'            "{name} {flag.name}") found=({_words(flag.values)}) ;;' for name, flag in _with_values(flags)),
        *(f'            "{name} {name}") found=({_words(words)}) ;;' for name, words in WORDS.items()),
        "            *) _files; return ;;",
        "        esac",
        "        compadd -a found",
        "    fi",
        "}",
        'if [[ $funcstack[1] == _fedrax ]]; then _fedrax "$@"; else compdef _fedrax fedrax; fi',
    ]
    return "\n".join(lines)


def fish(flags: dict[str, list[Flag]]) -> str:
    """The script for fish."""
    lines = ["# fish completion of fedrax, written by: fedrax completion fish"]
    for name, text in COMMANDS.items():
        lines.append(f"complete -c fedrax -n __fish_use_subcommand -f -a {name} -d {_fish_quoted(text)}")
    for name, known in flags.items():
        here = f"complete -c fedrax -n '__fish_seen_subcommand_from {name}'"
        if name in WORDS:
            lines.append(f"{here} -f -a {_fish_quoted(' '.join(WORDS[name]))}")
        for flag in known:
            values = f" -x -a {_fish_quoted(' '.join(flag.values))}" if flag.values else " -r" * flag.takes_value
            lines.append(f"{here} -l {flag.name[2:]}{values} -d {_fish_quoted(flag.text)}")
    return "\n".join(lines)


def _with_values(flags: dict[str, list[Flag]]) -> list[tuple[str, Flag]]:
    """The flags whose values are known, with their commands."""
    return [(name, flag) for name, known in flags.items() for flag in known if flag.values]


def _words(words: Iterable[str]) -> str:
    """Words of a shell."""
    return " ".join(map(shlex.quote, words))


def _quoted(words: Iterable[str]) -> str:
    """One word of a shell that contains all of these, of which none has a space."""
    return shlex.quote(" ".join(words))


def _fish_quoted(text: str) -> str:
    """A word of fish, which knows two escapes within single quotes."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
