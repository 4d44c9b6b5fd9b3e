"""The commands on short runs."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from fedrax.cli import COMMANDS, GROUPS, usage
from fedrax.cli.compare_command import next_step, read_arguments
from fedrax.experiments import experiment
from tests.blocks import ROOT
from tests.cli.conftest import TINY, Outcome

COMPARE = (
    "seeds = [0, 1]\n"
    + TINY
    + """
[[compare]]
name = "fedavg"
label = "FedAvg"
[[compare]]
name = "losac"
label = "LoSAC"
local = { blocks = 2, lr = 0.01 }
"""
)


def events(folder: Path) -> list[dict]:
    """Events of a run without durations."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("seconds")} for line in lines]


def test_help_imports_few_modules() -> None:
    """No third-party library, few modules of the standard library, and almost none of fedrax."""
    code = "import sys; before = set(sys.modules); from fedrax.cli import main; main(['--help'])\n"
    code += "print(*set(sys.modules) - before, file=sys.stderr)"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1800)
    assert completed.returncode == 0 and "compare" in completed.stdout, completed.stderr
    modules = completed.stderr.split()
    ours = [name for name in modules if name.split(".")[0] == "fedrax"]
    others = {name.split(".")[0] for name in modules} - {"fedrax"} - sys.stdlib_module_names
    assert not others and 1 < len(ours) < 10 and len(modules) < 150, modules


def test_the_list_of_commands_fits_a_screen_and_is_that_of_the_page() -> None:
    lines = usage().splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    page = (ROOT / "docs" / "command-line.md").read_text("utf-8")
    assert re.findall(r"^\| \*\*(.+)\*\* \| \|$|^\| `fedrax (\w+)` \|", page, re.MULTILINE) == [
        item for title, commands in GROUPS.items() for item in [(title, ""), *(("", name) for name in commands)]
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(command: str, fedrax: Callable[..., Outcome]) -> None:
    outcome = fedrax(command, "--help")
    assert outcome.status == 0
    assert f"`fedrax {command}" in outcome.out


def test_run_directory_contains_the_experiment(fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    outcome = fedrax("run", tiny, "--algorithm", "scaffold", "--algorithm.local.lr", "0.2", "--out", "a", "--quiet")
    assert outcome == Outcome(0, "", "")
    written = tomllib.loads((tmp_path / "a" / "experiment.toml").read_text())
    assert written["algorithm"]["name"] == "scaffold"
    assert written["algorithm"]["local"]["lr"] == 0.2
    assert written["algorithm"]["local"]["steps"] == 2  # the name in the file, although --out has another one
    assert fedrax("run", "a/experiment.toml", "--out", "b", "--quiet").status == 0
    assert events(tmp_path / "a") == events(tmp_path / "b")
    assert len(events(tmp_path / "a")) == 4


def test_run_prints_events_as_json(fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    outcome = fedrax("run", tiny, "--out", "r", "--json")
    *lines, last = map(json.loads, outcome.out.splitlines())
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert last["directory"] == "r"
    assert last["rounds"] == 4
    assert outcome.err == ""


def test_data_warnings_go_to_standard_error_with_json(fedrax: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("a,label\n" + "".join(f"{i % 7},{('yes', 'NA')[i % 2]}\n" for i in range(60)))
    flags = ("--data", "csv", "--data.path", "d.csv", "--partition", "iid", "--partition.clients", 3)
    for command in (("run", "--run.cohort-size", "2", "--run.rounds", "1", "--model", "logistic"), ("partition",)):
        outcome = fedrax(*command, *flags, "--json")
        assert outcome.err.startswith("warning: 'NA', in 30 rows of 'label', is read as a class")
        json.loads(outcome.out.splitlines()[-1])


def test_default_output_directories_are_unique(fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert fedrax("run", tiny, "--run.rounds", "1").status == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["tiny-fedavg-seed0", "tiny-fedavg-seed0-2"]


def test_flags_of_nested_parts(fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    flags = "--algorithm upcycled --algorithm.inner losac --algorithm.inner.local.prox l1"
    flags += " --algorithm.inner.local.prox.weight 0.01"
    assert fedrax("run", tiny, *flags.split(), "--out", "r", "--quiet").status == 0
    spec = experiment.read(tmp_path / "r" / "experiment.toml")
    assert type(spec.algorithm).__name__ == "Upcycled"
    assert spec.algorithm.inner.local.prox.weight == 0.01  # type: ignore[attr-defined]


@pytest.mark.parametrize("part", ["local", "server_optimizer"])
def test_schedules_of_optax_by_flags_and_in_a_file(
    fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path, part: str
) -> None:
    """Their classes are generated on first use, and are not among those of any annotation."""
    flags = ["--algorithm", "fedavg", "--algorithm.server-optimizer", "adam"]
    prefix = f"--algorithm.{part.replace('_', '-')}.schedule"
    flags += [prefix, "linear_schedule", f"{prefix}.init-value", "1", f"{prefix}.end-value", "0"]
    outcome = fedrax("run", tiny, *flags, f"{prefix}.transition-steps", "2", "--out", "flags", "--quiet")
    assert outcome.status == 0, outcome.err
    file = tmp_path / "flags" / "experiment.toml"
    written = tomllib.loads(file.read_text("utf-8"))["algorithm"][part]["schedule"]
    assert written["name"] == "linear_schedule" and written["transition_steps"] == 2 and written["end_value"] == 0
    assert fedrax("run", file, "--out", "file", "--quiet").status == 0
    assert events(tmp_path / "file") == events(tmp_path / "flags")
    shown = fedrax("run", file, "--help").out
    assert f"{prefix}.transition-steps" in shown and "Learning rate eta." in shown


@pytest.mark.slow
def test_user_defined_algorithm_model_and_data(fedrax: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import jax, numpy as np\n"
        "from collections.abc import Callable\n"
        "from fedrax.algorithms.fedavg import FedAvg\n"
        "from fedrax.data import Dataset, Samples\n"
        "from fedrax.config.hyperparameters import Positive, hyperparameters\n"
        "from fedrax.models import MLP\n"
        "@hyperparameters\n"
        "class Mine(FedAvg):\n    strength: Positive = 1.0\n    shape: Callable = jax.numpy.abs\n"
        "def model(input_shape, num_outputs, width: int = 4):\n"
        "    return MLP(hidden=(width,)).build(input_shape, num_outputs)\n"
        "def data(rows: int = 30):\n"
        "    x, y = np.random.default_rng(0).random((rows, 3), np.float32), np.arange(rows, dtype=np.int32) % 3\n"
        "    return Dataset('mine', Samples(x, y), Samples(x[:9], y[:9]), 3)\n"
    )
    flags = "--algorithm own.py:Mine --algorithm.strength 2 --model own.py:model --model.width 5 --data own.py:data"
    flags += " --data.rows 33 --partition iid --partition.clients 3 --run.cohort-size 2 --run.rounds 2 --out r --json"
    outcome = fedrax("run", *flags.split())
    assert outcome.status == 0, outcome.err
    written = tomllib.loads((tmp_path / "r" / "experiment.toml").read_text())
    assert written["algorithm"]["name"] == f"{(tmp_path / 'own.py').resolve()}:Mine"
    assert written["model"]["width"] == 5
    assert written["data"]["rows"] == 33
    assert json.loads(outcome.out.splitlines()[0])["bytes_up"] == 2 * 4 * (3 * 5 + 5 + 5 * 3 + 3)
    assert fedrax("resume", "r", "--quiet").status == 0


OPTIONS = (
    "import jax.numpy as jnp\n"
    "from fedrax.models import MLP\n"
    "def model(input_shape, num_outputs, rate, rank=4, wide=False, kind='relu', sizes=(3, 4),\n"
    "          more=[], top=None, act=jnp.tanh, *rest, **others):\n"
    "    assert act is jnp.tanh\n"
    "    made = [rate, rank, wide, kind, sizes, more, top]\n"
    "    assert made == [(1, 'a'), 8, True, 'tanh', (5,), [0.5], 2.5], made\n"
    "    return MLP(hidden=(rank,), activation=kind).build(input_shape, num_outputs)\n"
)


def test_options_without_annotations_have_the_type_of_their_default(
    fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path
) -> None:
    """Without a default any value is accepted. Written values are read back."""
    (tmp_path / "own.py").write_text(OPTIONS)
    keys = 'rate = [1, "a"]\nwide = true\nsizes = [5]\nmore = [0.5]\ntop = 2.5\nkind = "tanh"'
    tiny.write_text(TINY.replace('name = "logistic"', f'name = "own.py:model"\nrank = 8\n{keys}'))
    assert fedrax("run", tiny, "--out", "r", "--quiet") == Outcome(0, "", "")
    assert fedrax("resume", "r", "--quiet") == Outcome(0, "", "")


TRACE = "round,client\n" + "".join(f"{round},{client}\n" for round in (0, 1) for client in range(5))
AVAILABILITY = 'checkpoint_every = 1\n[run.participation]\nname = "availability"\ntrace = "trace.csv"\n'


@pytest.mark.parametrize("given", ["file", "flags"])
def test_relative_paths_are_resolved_once(
    given: str, fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to the file, or to the working directory for a flag; later commands may run anywhere."""
    (tmp_path / "trace.csv").write_text(TRACE)
    flags = "--run.participation availability --run.participation.trace ../elsewhere/../trace.csv"
    if given == "file":
        tiny.write_text(TINY + AVAILABILITY)
        flags = ""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert fedrax("run", "../tiny.toml", *flags.split(), "--out", "r", "--quiet") == Outcome(0, "", "")
    monkeypatch.chdir(tmp_path)
    assert fedrax("resume", "elsewhere/r", "--quiet") == Outcome(0, "", "")
    again = fedrax("run", "tiny.toml", *flags.replace("../", "", 1).split(), "--out", "again", "--quiet")
    assert again == Outcome(0, "", "")
    written = [(tmp_path / run / "experiment.toml").read_text() for run in ("again", "elsewhere/r")]
    assert written[0] == written[1]
    assert str(tmp_path / "trace.csv") in written[0]


@pytest.mark.slow
def test_compare_resumes_from_another_directory(
    fedrax: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "cmp.toml").write_text(TINY + AVAILABILITY + '[[compare]]\nname = "fedavg"\n')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = ("compare", "../cmp.toml", "--seeds", "0", "--out", "c", "--quiet")
    assert fedrax(*again) == Outcome(0, "", "")
    run = tmp_path / "elsewhere" / "c" / "fedavg" / "seed-0"
    uninterrupted = (run / "events.jsonl").read_text().splitlines()
    assert fedrax("resume", run, "--quiet") == Outcome(0, "", "")
    monkeypatch.chdir(tmp_path)
    assert fedrax("compare", "cmp.toml", "--seeds", "0", "--out", "elsewhere/c", "--quiet") == Outcome(0, "", "")
    assert (run / "events.jsonl").read_text().splitlines() == uninterrupted


def test_resume_after_ctrl_c_gives_the_events_of_the_uninterrupted_run(
    fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    from fedrax.report import sinks

    assert fedrax("run", tiny, "--run.checkpoint-every", "1", "--out", "whole", "--quiet").status == 0
    say = sinks.JsonSink.event

    def interrupt(self: sinks.JsonSink, event: dict) -> None:
        say(self, event)
        if event["round"] == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sinks.JsonSink, "event", interrupt)
    outcome = fedrax("run", tiny, "--run.checkpoint-every", "1", "--out", "r", "--json")
    assert outcome.status == 130
    assert "fedrax resume r" in outcome.err
    assert len(events(tmp_path / "r")) < 4
    shown = json.loads(fedrax("show", "r", "--json").out)
    assert shown["methods"][0]["state"] == "round 2 of 4"
    monkeypatch.setattr(sinks.JsonSink, "event", say)
    assert fedrax("resume", "r", "--quiet") == Outcome(0, "", "")
    assert events(tmp_path / "r") == events(tmp_path / "whole")


def test_compare_writes_table_and_pictures(fedrax: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(COMPARE)
    outcome = fedrax("compare", "c.toml", "--out", "c", "--target", "0.11")
    assert outcome.status == 0, outcome.err
    assert "FedAvg" in outcome.out
    assert "*" in outcome.out
    assert outcome.out.splitlines()[-1].startswith("try next")
    summary = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert [row["label"] for row in summary["methods"]] == ["FedAvg", "LoSAC"]
    for row, label in zip(summary["methods"], ("FedAvg", "LoSAC"), strict=True):
        finals = [events(tmp_path / "c" / label / f"seed-{seed}")[-1]["test_accuracy"] for seed in (0, 1)]
        assert row["accuracy"]["mean"] == pytest.approx(sum(finals) / 2)
        assert row["accuracy"]["std"] == pytest.approx(abs(finals[0] - finals[1]) / 2**0.5)
    for name in ("curves.png", "curves.svg", "table.md"):
        assert (tmp_path / "c" / name).stat().st_size > 100
    assert "| **" in (tmp_path / "c" / "table.md").read_text()


@pytest.mark.slow
def test_repeated_compare_runs_only_missing_seeds(
    fedrax: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedrax.experiments import jobs

    (tmp_path / "c.toml").write_text(COMPARE)
    assert fedrax("compare", "c.toml", "--quiet").status == 0
    first = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("events.jsonl")}
    assert len(first) == 4
    simulate, seeds = jobs.simulate, []

    def counting_simulate(*args: object, **options: object) -> object:
        seeds.append(args[3].seed)  # type: ignore[attr-defined]
        return simulate(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(jobs, "simulate", counting_simulate)
    outcome = fedrax("compare", "c.toml", "--seeds", "0", "1", "2", "--json")
    assert outcome.status == 0, outcome.err
    assert json.loads(outcome.out)["methods"][0]["seeds"] == 3
    assert seeds == [2, 2]
    assert all(path.stat().st_mtime_ns == then for path, then in first.items())


@pytest.mark.slow
def test_compare_continues_after_divergence(fedrax: Callable[..., Outcome], tmp_path: Path) -> None:
    """The two methods share a compiled program."""
    diverging = '[[compare]]\nlabel = "far"\nlocal = { lr = 1e38 }\n'
    (tmp_path / "c.toml").write_text(f'{TINY}[[compare]]\nname = "fedavg"\n{diverging}')
    outcome = fedrax("compare", "c.toml", "--out", "c", "--seeds", "0", "--json")
    assert outcome.status == 1
    good, bad = json.loads(outcome.out)["methods"]
    assert good["state"] == "finished"
    assert bad["state"].startswith("diverged in round")
    assert fedrax("compare", "c.toml", "--out", "c", "--seeds", "0", "--quiet") == Outcome(1, "", "")


def test_compare_of_several_files(fedrax: Callable[..., Outcome], tmp_path: Path) -> None:
    for name in ("fedavg", "scaffold"):
        (tmp_path / f"{name}.toml").write_text(TINY.replace("fedavg", name))
    outcome = fedrax("compare", "fedavg.toml", "scaffold.toml", "--seeds", "0", "--json", "--out", "c")
    assert [row["label"] for row in json.loads(outcome.out)["methods"]] == ["fedavg", "scaffold"]


def test_show_prints_a_run(fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        assert fedrax("run", tiny, "--run.seed", seed, "--out", f"a{seed}", "--quiet").status == 0
    fedrax("run", tiny, "--algorithm", "fedprox", "--out", "b", "--quiet")
    outcome = fedrax("show", "a0", "a1", "b", "--curves", "pictures/both.png")
    assert outcome.status == 0, outcome.err
    assert "fedavg" in outcome.out
    assert "±" in outcome.out
    assert (tmp_path / "pictures" / "both.png").exists()
    assert (tmp_path / "pictures" / "both.svg").exists()
    rows = json.loads(fedrax("show", "a0", "a1", "b", "--json").out)["methods"]
    assert [(row["label"], row["seeds"]) for row in rows] == [("fedavg", 2), ("fedprox", 1)]
    assert fedrax("show", ".", "--markdown").out.startswith("| method |")


def test_list_prints_descriptions(fedrax: Callable[..., Outcome]) -> None:
    everything = json.loads(fedrax("list", "--json").out)
    assert {"algorithms", "datasets", "models", "partitions", "tasks", "optimizers", "schedules"} <= set(everything)
    assert {"adam", "sgd"} <= {entry["name"] for entry in everything["optimizers"]}
    assert all(entry["description"] for entries in everything.values() for entry in entries)
    losac = next(entry for entry in everything["algorithms"] if entry["name"] == "losac")
    assert losac["settings"]["local"]["blocks"] == 5
    assert "scaffold" in fedrax("list", "algorithms").out
    assert "scaffold" not in fedrax("list", "models").out
    assert not re.search(r"`|:\w+:", fedrax("list", "algorithms").out)  # markup of docstrings is removed


@pytest.mark.parametrize("name", ["csv", "leaf", "image_folder", "huggingface"])
def test_help_says_that_test_rows_are_drawn_one_by_one(name: str, fedrax: Callable[..., Outcome]) -> None:
    """Rows that are near copies of each other, such as overlapping windows, would leak into the test part."""
    shown = " ".join(fedrax("run", "--data", name, "--help").out.replace("│", " ").split())
    assert "for independent" in shown and ("overlapping windows" in shown or "frames of one video" in shown)


def test_partition_prints_and_draws(fedrax: Callable[..., Outcome], tmp_path: Path) -> None:
    flags = "partition --partition shards --partition.clients 10 --partition.per-client 1 --picture p/labels"
    outcome = fedrax(*flags.split())
    assert outcome.status == 0, outcome.err
    assert (tmp_path / "p" / "labels.svg").exists()
    sorted_by_label = json.loads(fedrax(*flags.split(), "--json").out)
    assert sum(map(sum, sorted_by_label["counts"])) == sum(sorted_by_label["sizes"]) == 1442
    iid = json.loads(fedrax("partition", "--partition", "iid", "--partition.clients", "10", "--json").out)
    measures = [entry["measures"]["gradient_dissimilarity"] for entry in (iid, sorted_by_label)]
    assert 1 < measures[0] < 2 < measures[1]
    shuffled = sorted_by_label["measures"]["gradient_dissimilarity_shuffled"]
    assert shuffled == pytest.approx(measures[0], rel=0.2)  # the samples of one class each, mixed
    assert f"that distance is {(shuffled**2 - 1) ** 0.5:.2g} with these samples shuffled" in outcome.out
    assert f"B = {measures[1]:.3g} for the untrained model 2nn" in outcome.out and "large (0.3 or more)" in outcome.out


@pytest.mark.slow
def test_partition_and_diagnose_print_the_same_dissimilarity(fedrax: Callable[..., Outcome], tmp_path: Path) -> None:
    """Of clients with different numbers of samples, by the weights of the run."""
    (tmp_path / "e.toml").write_text(
        '[partition]\nname = "dirichlet_clients"\nclients = 6\n[model]\nname = "logistic"\n'
        '[run]\nrounds = 1\ncohort_size = 2\nweights = "samples"\n'
    )
    partition, diagnosis = (
        fedrax(command, "e.toml", "--picture", "None", *more).out
        for command, more in (("partition", ()), ("diagnose", ("--tune", "never")))
    )
    line = next(line for line in partition.splitlines() if line.startswith("dissimilarity"))
    assert line in diagnosis and "untrained model logistic" in line


@pytest.mark.slow
def test_profile_prints_and_writes_no_files(fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    outcome = fedrax("profile", tiny, "--rounds", 2)
    assert outcome.status == 0 and outcome.err == ""
    for part in ("gather batches", "gradients", "aggregate", "evaluate", "host", "GFLOP/s", "GB/s", "compile"):
        assert part in outcome.out
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.toml"]


@pytest.mark.slow
def test_profile_writes_json_and_a_directory(fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    tiny.write_text(tiny.read_text() + '[[compare]]\nname = "fedavg"\n')
    flags = ("--algorithm", "episode", "--rounds", 2, "--json", "--out", "kept", "--trace", "raw")
    outcome = fedrax("profile", tiny, *flags)
    assert outcome.status == 0
    made = json.loads(outcome.out)
    assert made["algorithm"] == "Episode" and {1, 2} <= {part["phase"] for part in made["parts"]}
    assert made == json.loads((tmp_path / "kept/profile.json").read_text())
    assert {"profile.json", "experiment.toml"} <= {path.name for path in (tmp_path / "kept").iterdir()}
    assert list((tmp_path / "raw").glob("**/*.xplane.pb"))


@pytest.mark.parametrize("kind", ["column", "folder", "selected", "own", "shards", "iid"])
def test_suggested_comparison_has_as_many_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The arguments that a comparison suggests are valid for every kind of clients, and keep their number."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{client},{i},{i % 2}" for client in range(12) for i in range(10)]
    Path("t.csv").write_text("client,x,label\n" + "\n".join(rows))
    Path("t").mkdir()
    for client in range(12):
        lines = "\n".join(row.split(",", 1)[1] for row in rows if row.startswith(f"{client},"))
        Path("t", f"{client}.csv").write_text("x,label\n" + lines)
    Path("own.py").write_text(
        "from dataclasses import dataclass\nfrom fedrax.data import Iid\n@dataclass(frozen=True)\nclass Twelve:\n"
        "    def assign(self, dataset, seed):\n        return Iid(12).assign(dataset, seed)\n"
    )
    data = {"folder": 'path = "t"'}.get(kind, 'path = "t.csv"\nclient = "client"')
    partition = {
        "selected": 'name = "natural"\nclients = 11',
        "own": 'name = "own.py:Twelve"',
        "shards": 'name = "shards"\nclients = 12',
        "iid": 'name = "iid"\nclients = 12',
    }.get(kind, 'name = "natural"')
    Path("c.toml").write_text(
        f'[data]\nname = "csv"\n{data}\n[partition]\n{partition}\n[run]\ncohort_size = 11\n'
        '[[compare]]\nname = "fedavg"\n'
    )
    args = ["c.toml", "--grid", "algorithm.local.lr=0.1,0.2", "--partition.seed", "1"]
    spec, _ = read_arguments(args)
    federation = experiment.build(spec.methods[0], None)[2]
    suggested = next_step(spec, args, federation.num_clients)
    words = shlex.split(suggested.removeprefix("try next: fedrax compare ").partition("    (")[0])
    again, _ = read_arguments(words)
    assert type(again.methods[0].partition).__name__ == ("Shards" if kind == "iid" else "Iid")
    assert experiment.build(again.methods[0], None)[2].num_clients == federation.num_clients >= 11
