"""`fedrax completion`: its scripts in real shells, and the flags that it reads from the help texts."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from fedrax.cli import COMMANDS, completion_command

SHELLS = {"bash": completion_command.bash, "zsh": completion_command.zsh, "fish": completion_command.fish}


@pytest.fixture(scope="module")
def flags() -> dict[str, list[completion_command.Flag]]:
    return {command: completion_command.flags_of(command) for command in COMMANDS}


def test_flags_are_read_from_the_help_of_every_command(flags: dict[str, list[completion_command.Flag]]):
    assert all(known[0].name == "--help" for known in flags.values())
    run = {flag.name: flag for flag in flags["run"]}
    assert {"--algorithm.local.lr", "--run.cohort-size", "--algorithm.mu", "--data.path", "--quiet"} <= run.keys()
    assert {"scaffold", "losac", "quantized"} <= set(run["--algorithm"].values)
    assert {"digits", "csv"} <= set(run["--data"].values) and {"natural", "shards"} <= set(run["--partition"].values)
    assert run["--out"].text.startswith("Run directory; by default runs/NAME")
    assert not run["--quiet"].takes_value and run["--out"].takes_value and run["--algorithm.local.lr"].takes_value
    assert {flag.name: flag for flag in flags["diagnose"]}["--tune"].values == ("auto", "always", "never")
    assert [flag.name for flag in flags["doctor"]] == ["--help", "--repair", "--json"]
    assert "fedavg" in {flag.name: flag for flag in flags["compare"]}["--algorithms"].values


def completions(shell: str, script: Path, line: str) -> list[str]:
    """What a shell offers for the last word of a line."""
    words = line.split(" ")
    if shell == "bash":
        variables = (
            f"COMP_WORDS=({' '.join(f'{chr(39)}{word}{chr(39)}' for word in words)}); COMP_CWORD={len(words) - 1}"
        )
        program = f'source "{script}"; {variables}; _fedrax; printf "%s\\n" "${{COMPREPLY[@]}}"'
        command = ["bash", "--norc", "-c", program]
    elif shell == "fish":
        command = ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"]
    else:  # the functions of zsh that take completions are replaced by ones that print them
        program = f"""
            compdef() {{ }}; compadd() {{ print -l -- ${{(P)2}} }}; _files() {{ print FILES }}
            _describe() {{ [[ $1 == -o ]] && shift; print -l -- ${{${{(P)2}}%%:*}} }}
            source {script}; words=({shlex.join(words)}); CURRENT={len(words)}; _fedrax"""
        command = ["zsh", "--no-rcs", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [word.split("\t")[0] for word in done.stdout.split("\n") if word]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes(shell: str, flags: dict[str, list[completion_command.Flag]], tmp_path: Path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(SHELLS[shell](flags))
    assert set(COMMANDS) <= set(completions(shell, script, "fedrax "))
    assert "--algorithm.local.lr" in completions(shell, script, "fedrax run --algorithm.local.l")
    assert "--algorithm.local.lr" not in completions(shell, script, "fedrax show --")
    assert "scaffold" in completions(shell, script, "fedrax run --algorithm sca")
    assert "partitions" in completions(shell, script, "fedrax list par")
