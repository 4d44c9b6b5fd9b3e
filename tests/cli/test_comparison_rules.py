"""What the files of a comparison must have in common, and settings that a comparison rejects."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedrax import FedAvg, FedraxError, compare
from fedrax.cli.arguments import parse_experiment
from fedrax.cli.compare_command import read_arguments
from fedrax.cli.profile_command import ProfileOptions
from fedrax.experiments import comparison, experiment
from fedrax.experiments.comparison import Comparison
from fedrax.experiments.experiment import Experiment
from fedrax.experiments.output_dir import choose_output
from fedrax.experiments.search import grid
from fedrax.optim.server import SGD, Adagrad, Adam
from tests.cli.conftest import TINY, Outcome, events_by_run


@pytest.mark.parametrize("name", ["normalize = false", "validation = 0.3", "seeds = [5, 6]", "target = 0.9"])
def test_files_that_differ_in_shared_settings_are_rejected(
    name: str, fedrax: Callable[..., Outcome], tmp_path: Path
) -> None:
    """One file's setting would be used for all runs, while each run directory names its own."""
    (tmp_path / "x.toml").write_text(TINY)
    (tmp_path / "y.toml").write_text(f"{name}\n{TINY}")
    rejected = fedrax("compare", "x.toml", "y.toml")
    assert rejected.status == 2 and f"differ in {name.split()[0]}: a comparison needs the same for all" in rejected.err


def test_validation_rows_outside_of_search_are_rejected_with_a_grid(
    fedrax: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Trials of the search and final runs would use the same rows."""
    (tmp_path / "x.toml").write_text(f"validation = 0.2\n{TINY}")
    rejected = fedrax("compare", "x.toml", "--grid", "algorithm.local.lr=0.1,0.2")
    assert rejected.status == 2 and "leave validation out here, and set it in [search]" in rejected.err


def test_methods_added_by_a_flag_use_the_data_settings_of_the_file(
    fedrax: Callable[..., Outcome], tmp_path: Path
) -> None:
    (tmp_path / "x.toml").write_text(f"normalize = false\nvalidation = 0.2\nseeds = [0]\n{TINY}")
    outcome = fedrax("compare", "x.toml", "--algorithms", "fedprox", "--out", "c")
    assert outcome.status == 0, outcome.err
    tables = [file.read_text() for file in sorted((tmp_path / "c").rglob("experiment.toml"))]
    assert len(tables) == 2
    assert all("normalize = false" in table and "validation = 0.2" in table for table in tables)


@pytest.mark.parametrize("grid", ["", "grid = { algorithm.local.lr = [0.1, 0.2] }"])
def test_all_methods_are_checked_against_the_data_before_the_first_run(
    grid: str, fedrax: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Otherwise hours of other runs or of a search come before the error."""
    blocks = '[[compare]]\nname = "losac"\nlabel = "too many"\nlocal = { steps = 2, blocks = 5000 }\n'
    (tmp_path / "x.toml").write_text(f'{TINY}\n[[compare]]\nname = "fedprox"\n{grid}\n{blocks}')
    rejected = fedrax("compare", "x.toml", "--out", "c")
    assert rejected.status == 2 and rejected.err.splitlines()[-1].startswith("fedrax: too many: local.blocks = 5000")
    assert not list(tmp_path.rglob("events.jsonl"))


SHARED = "seeds = [0]\n" + TINY.replace('name = "fedavg"\n', "")
METHODS = '[[compare]]\nname = "fedavg"\n[[compare]]\nname = "fedprox"\n'


def read(folder: Path, comparison_text: str) -> Comparison:
    (folder / "c.toml").write_text(comparison_text)
    return comparison.read([folder / "c.toml"])


def on_other_partition(method: Experiment) -> Experiment:
    """The method under another name on another partition."""
    partition = dataclasses.replace(method.partition, clients=5)
    return dataclasses.replace(method, name=f"{method.name} elsewhere", partition=partition)


def test_methods_on_different_data_are_rejected(tmp_path: Path) -> None:
    """All of them would run on the data of the first one."""
    spec = read(tmp_path, SHARED + METHODS)
    spec.check()
    first, second = spec.methods
    others = {r"\[partition\]": on_other_partition(second), "normalize": dataclasses.replace(second, normalize=False)}
    for name, changed in others.items():
        with pytest.raises(FedraxError, match=f"differ in {name}: a comparison needs the same for all"):
            compare(dataclasses.replace(spec, methods=(first, changed)), directory=tmp_path / "c")


def test_comparison_on_other_data_has_another_default_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their runs have different directories, but each comparison would overwrite the other's table."""
    monkeypatch.chdir(tmp_path)
    spec, place = read(tmp_path, SHARED + METHODS), Path("runs/tiny")
    for job in spec.runs({}):
        experiment.write(job.spec, job.directory_in(place) / "experiment.toml")
    other = dataclasses.replace(spec, methods=tuple(map(on_other_partition, spec.methods)))
    assert choose_output(spec).directory == place and choose_output(other).directory == Path("runs/tiny-2")
    with pytest.raises(FedraxError, match=r"of another comparison \(partition.clients 8 there, 5 here\)"):
        compare(other, directory=place)


def comparison_text(methods: str, top: str = "seeds = [0]") -> str:
    """A comparison of FedAvg and FedProx, whose table ends with ``methods``, which may begin further tables."""
    return f"{top}\n" + SHARED.removeprefix("seeds = [0]\n") + METHODS + methods


def write_experiments(spec: Comparison, out: Path) -> None:
    """Write the files that the runs of a comparison write at their start."""
    chosen = {label: {"algorithm.mu": 0.1} for label in spec.grids}
    trials = [job for label, point in chosen.items() for job in spec.search_runs_at(label, [point])]
    for job in (*spec.runs(chosen), *trials):
        experiment.write(job.spec, job.directory_in(out) / "experiment.toml")


GRID, RANGE = "grid = { algorithm.mu = [0.1, 0.2] }\n", 'grid = { algorithm.mu = "0.01..1:log" }\n'
NAMED = '[[compare]]\nname = "scaffold"\nlabel = "FedProx-2"\n'
BOTH = {"fedprox": "fedprox-2", "search/fedprox": "search/fedprox-2"}
CHANGES: dict[str, tuple[str, str, dict[str, str], str]] = {
    "nothing": (comparison_text(""), comparison_text(""), {}, ""),
    "seeds": (comparison_text(""), comparison_text("", "seeds = [0, 1]"), {}, ""),
    "a method": (comparison_text(""), comparison_text(NAMED), {}, ""),
    "values of a grid": (comparison_text(GRID), comparison_text(GRID.replace("0.2]", "0.2, 0.3]")), {}, ""),
    "a setting": (
        comparison_text(""),
        comparison_text("mu = 0.5"),
        {"fedprox": "fedprox-2"},
        "(algorithm.mu 0.1 there, 0.5 here)",
    ),
    "a class": (
        comparison_text(""),
        comparison_text('server_optimizer = "adam"'),
        {"fedprox": "fedprox-2"},
        "(algorithm.server_optimizer.name sgd there, adam here;",
    ),
    "rounds": (
        comparison_text(""),
        comparison_text("run = { rounds = 7 }"),
        {"fedprox": "fedprox-2"},
        "(run.rounds 4 there, 7 here)",
    ),
    "a setting and seeds": (
        comparison_text(""),
        comparison_text("mu = 0.5", "seeds = [5, 6]"),
        {"fedprox": "fedprox-2"},
        "(algorithm.mu 0.1 there, 0.5 here)",
    ),
    "a setting and a method of that name": (
        comparison_text(NAMED),
        comparison_text(f"mu = 0.5\n{NAMED}"),
        {"fedprox": "fedprox-3"},
        "(algorithm.mu 0.1 there, 0.5 here)",
    ),
    "a setting and a grid": (
        comparison_text(GRID),
        comparison_text(f"{GRID}local = {{ lr = 0.7 }}"),
        BOTH,
        "(algorithm.local.lr 0.1 there, 0.7 here)",
    ),
    "a setting and a range": (
        comparison_text(RANGE, "seeds = [0]\nsearch = { trials = 2 }"),
        comparison_text(f"{RANGE}local = {{ lr = 0.7 }}", "seeds = [0]\nsearch = { trials = 2 }"),
        BOTH,
        "(algorithm.local.lr 0.1 there, 0.7 here)",
    ),
    "validation data": (
        comparison_text(GRID),
        comparison_text(GRID, "seeds = [0]\nsearch = { validation = 0.3 }"),
        {"search/fedprox": "search/fedprox-2"},
        "(validation 0.2 there, 0.3 here)",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_runs_of_a_changed_method_have_another_directory(name: str, tmp_path: Path) -> None:
    before, after, moved, message = CHANGES[name]
    first, second, out = read(tmp_path, before), read(tmp_path, after), tmp_path / "out"
    write_experiments(first, out)
    found = choose_output(second, out)
    assert {key.as_posix(): value.as_posix() for key, value in found.comparison.directories.items()} == moved
    assert len(found.notes) == len(moved) and all(message in note for note in found.notes)
    write_experiments(found.comparison, out)
    assert choose_output(second, out) == found._replace(notes=())
    assert choose_output(first, out).comparison.directories == {}  # the first runs remain


def test_directory_with_other_settings_only_belongs_to_another_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (
        read(tmp_path, comparison_text("").replace("rounds = 4", f"rounds = {rounds}")) for rounds in (4, 5)
    )
    write_experiments(first, Path("runs/tiny"))
    problem = "runs/tiny/fedavg/seed-0 holds a run with other settings (run.rounds 4 there, 5 here)"
    found = choose_output(second)
    assert (found.directory, found.notes) == (Path("runs/tiny-2"), (f"{problem}: the results are in runs/tiny-2",))
    write_experiments(second, found.directory)
    assert choose_output(second).notes == ()
    with pytest.raises(FedraxError, match=re.escape(f"{problem}: choose another --out.")):
        choose_output(second, Path("runs/tiny"))


def test_only_runs_of_a_changed_method_are_repeated(fedrax: Callable[..., Outcome], tmp_path: Path) -> None:
    def compare_and_list_runs(methods: str) -> tuple[str, list[str]]:
        """Output of the command, and the directories of the runs that it created."""
        before = set(tmp_path.rglob("events.jsonl"))
        (tmp_path / "c.toml").write_text(comparison_text(methods).replace("rounds = 4", "rounds = 1"))
        outcome = fedrax("compare", "c.toml")
        assert outcome.status == 0, outcome.err
        made = set(tmp_path.rglob("events.jsonl")) - before
        return outcome.out + outcome.err, sorted(path.parent.relative_to(tmp_path).as_posix() for path in made)

    def shown() -> dict[str, float]:
        """Losses by method in the output of ``show``."""
        table = json.loads(fedrax("show", "runs/tiny", "--json").out)["methods"]
        return {row["label"]: row["loss"]["mean"] for row in table}

    def losses(**places: str) -> dict[str, float]:
        found = events_by_run(tmp_path)
        return {label: found[f"runs/tiny/{place}/seed-0"][-1]["test_loss"] for label, place in places.items()}

    other = "local = { lr = 1.5 }"
    assert compare_and_list_runs("")[1] == ["runs/tiny/fedavg/seed-0", "runs/tiny/fedprox/seed-0"]
    kept = events_by_run(tmp_path)
    printed, made = compare_and_list_runs(other)
    assert made == ["runs/tiny/fedprox-2/seed-0"] and events_by_run(tmp_path).items() >= kept.items()
    assert "(algorithm.local.lr 0.1 there, 1.5 here): the new runs of fedprox are in runs/tiny/fedprox-2" in printed
    assert shown() == losses(fedavg="fedavg", fedprox="fedprox-2") != losses(fedavg="fedavg", fedprox="fedprox")
    assert compare_and_list_runs(other)[1] == []
    assert compare_and_list_runs("")[1] == [] and shown() == losses(fedavg="fedavg", fedprox="fedprox")


def test_runs_of_an_earlier_label_are_noted(fedrax: Callable[..., Outcome], tmp_path: Path) -> None:
    text = comparison_text("").replace("rounds = 4", "rounds = 1")
    (tmp_path / "c.toml").write_text(text)
    note = "runs/tiny also has runs of fedprox, which fedrax show"
    for _ in range(2):
        outcome = fedrax("compare", "c.toml")
        assert outcome.status == 0 and note not in outcome.out + outcome.err
    (tmp_path / "c.toml").write_text(f'{text}label = "proximal"\n')
    outcome = fedrax("compare", "c.toml")
    assert outcome.status == 0 and note in outcome.out + outcome.err, outcome


def test_unreadable_directory_is_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = read(tmp_path, SHARED + METHODS)
    run = spec.runs({})[0]
    experiment.write(run.spec, run.directory_in(Path("runs/tiny")) / "experiment.toml")
    (run.directory_in(Path("runs/tiny")) / "events.jsonl").write_text("nonsense\n")
    with pytest.raises(FedraxError, match="is not an event"):
        choose_output(spec)
    (tmp_path / "runs/tiny").rename(tmp_path / "away")
    (tmp_path / "runs/tiny").mkdir()
    (tmp_path / "runs/tiny/fedavg").symlink_to(tmp_path / "away")
    with pytest.raises(FedraxError, match="is a link"):
        choose_output(spec)


WITHOUT_EFFECT = {
    "flag": (
        "grid = { algorithm.local.lr = [0.1, 0.2] }\n" + TINY,
        "--algorithm.local.lr 0.05",
        "is ignored, because the grid",
    ),
    "rounds": ("grid = { run.rounds = [1, 2] }\n" + TINY, "--run.rounds=3", "--run.rounds is ignored"),
    "instead": (
        "grid = { algorithm.local.epochs = [1, 2] }\n" + TINY,
        "--algorithm.local.steps 3",
        "is ignored, because the grid",
    ),
    "two flags": (TINY, "--grid algorithm.local.lr=0.1,0.2 --algorithm.local.lr 0.3", "give another --grid"),
    "seed": ((SHARED + METHODS).replace("[run]\n", "[run]\nseed = 7\n"), "", "write seeds = [7]"),
    "seed of a method": (SHARED + METHODS + "run = { seed = 7 }\n", "", "[[compare]] 2: run.seed is for a single run"),
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_settings_without_effect_are_rejected(name: str, fedrax: Callable[..., Outcome], tmp_path: Path) -> None:
    comparison_text, flags, message = WITHOUT_EFFECT[name]
    (tmp_path / "c.toml").write_text(comparison_text)
    rejected = fedrax("compare", "c.toml", *flags.split(), "--out", "c", "--quiet")
    assert rejected.status == 2 and message in rejected.err and len(rejected.err.splitlines()) == 1, rejected
    assert not (tmp_path / "c").exists()


def test_flags_may_affect_a_subset_of_the_methods(fedrax: Callable[..., Outcome], tmp_path: Path) -> None:
    """The grid of the other method contains the setting."""
    comparison_text = SHARED + METHODS + "grid = { algorithm.local.lr = [0.1, 0.2] }\n"
    (tmp_path / "c.toml").write_text(comparison_text)
    outcome = fedrax("compare", "c.toml", "--algorithm.local.lr", "0.05", "--out", "c", "--quiet")
    assert outcome.status == 0, outcome.err


def test_compare_ignores_the_seed_of_a_single_run(tmp_path: Path) -> None:
    spec = read(tmp_path, TINY.replace("[run]\n", "[run]\nseed = 7\n"))
    assert spec.seeds == (0, 1, 2) and [job.spec.run.seed for job in spec.runs({})] == [0, 1, 2]


def test_table_with_another_name_does_not_inherit_shared_keys(tmp_path: Path) -> None:
    base = SHARED.replace("[algorithm]\n", '[algorithm]\nserver_optimizer = { name = "adam", lr = 0.01 }\n')
    methods = ('{ name = "sgd" }', "{ tau = 0.5 }", '{ name = "Adam", tau = 0.5 }')
    for i, table in enumerate(methods):
        base += f'[[compare]]\nname = "fedavg"\nlabel = "{i}"\nserver_optimizer = {table}\n'
    made = [method.algorithm.server_optimizer for method in read(tmp_path, base).methods]  # type: ignore[attr-defined]
    assert made == [SGD(), Adam(lr=0.01, tau=0.5), Adam(lr=0.01, tau=0.5)]


def test_inner_methods_inherit_shared_settings_of_the_inner_method(tmp_path: Path) -> None:
    comparison_text = TINY.replace('name = "fedavg"\nlocal = {', 'inner = { name = "fedavg", local = {')
    comparison_text = comparison_text.replace("steps = 2 }", "steps = 3 } }")
    (method,) = read(
        tmp_path, comparison_text + '[[compare]]\nname = "upcycled"\ninner = { name = "scaffold" }\n'
    ).methods
    assert type(method.algorithm.inner).__name__ == "Scaffold"  # type: ignore[attr-defined]
    assert method.algorithm.inner.local.steps == 3  # type: ignore[attr-defined]


def test_grid_of_names_uses_the_defaults_of_each_class() -> None:
    spec, path = Experiment(algorithm=FedAvg(server_optimizer=Adam(lr=0.5))), "algorithm.server_optimizer"
    for name, made in (("adagrad", Adagrad(lr=0.3)), ("Adam", Adam(lr=0.3))):
        at = grid.with_settings(spec, {f"{path}.lr": 0.3, f"{path}.name": name}, "x").algorithm
        assert at.server_optimizer == made  # type: ignore[attr-defined]
    at = grid.with_settings(spec, {f"{path}.name": "adagrad"}, "x").algorithm
    assert at.server_optimizer == Adagrad()  # type: ignore[attr-defined]


def test_shared_settings_need_not_exist_in_fedavg(tmp_path: Path) -> None:
    comparison_text = SHARED.replace("[algorithm]\n", "[algorithm]\nmu = 0.25\n")
    file = tmp_path / "c.toml"
    file.write_text(
        comparison_text + '[[compare]]\nname = "fedprox"\n[[compare]]\nname = "fedprox"\nlabel = "two"\nmu = 0.5\n'
    )
    spec, _ = read_arguments([str(file), "--seeds", "0"])
    assert [method.algorithm.mu for method in spec.methods] == [0.25, 0.5]  # type: ignore[attr-defined]

    def profiled(*flags: str) -> Any:
        return parse_experiment(ProfileOptions, [str(file), *flags], "fedrax profile", "", comparisons=True).experiment

    for flags in (("--model", "linear", "--algorithm", "fedprox"), ("--algorithm=fedprox",)):
        assert profiled(*flags).algorithm.mu == 0.25 and profiled(*flags).algorithm.local.steps == 2
    with pytest.raises(FedraxError, match="unknown key 'mu'"):
        profiled("--algorithm", "scaffold")


def test_no_flags_switch_settings_off(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(TINY + "per_client = true\n")
    for flags, expected in (((), True), (("--run.no-per-client",), False)):
        spec, _ = read_arguments([str(tmp_path / "c.toml"), *flags])
        assert [method.run.per_client for method in spec.methods] == [expected] and spec.run.per_client is expected


def test_all_listed_values_of_a_search_are_checked_before_it_starts(tmp_path: Path) -> None:
    listed = 'algorithm.server_optimizer = ["sgd", "{}", "adam"], algorithm.local.steps = [1, 2, 3, 4]'
    head = 'search = {{ trials = 2 }}\ngrid = {{ algorithm.local.lr = "0.01..1:log", ' + listed + " }}\n"
    sound = read(tmp_path, head.format("adagrad") + TINY)
    sound.check()
    assert "; 2 trials" in repr(sound)
    points = sound.grids["fedavg"].ends()
    assert {point["algorithm.local.lr"] for point in points} == {0.01, 1}
    assert {point["algorithm.local.steps"] for point in points} == {1, 2, 3, 4} and len(points) < 20
    with pytest.raises(FedraxError, match="did you mean 'adam'"):
        read(tmp_path, head.format("adma") + TINY).check()


def test_numpy_grids_become_plain_numbers() -> None:
    made = grid.from_table({"run.rounds": list(np.arange(1, 4)), "algorithm.local.lr": [np.float64(0.1)]}, "x")
    assert made.axes == (("run.rounds", (1, 2, 3)), ("algorithm.local.lr", (0.1,)))
    assert {type(value) for _, values in made.axes for value in values} == {int, float}  # type: ignore[union-attr]


def test_compare_in_python_writes_table_and_pictures(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("seeds = [0]\n" + TINY.replace("rounds = 4", "rounds = 1"))
    comparison_result = compare(
        tmp_path / "c.toml", grid={"algorithm.local.lr": np.array([0.25, 0.5])}, directory=tmp_path / "c"
    )
    kept = {path.name for path in (tmp_path / "c").iterdir()}
    assert {"table.md", "comparison.json", "curves.png", "curves.svg", "grid.png", "grid.svg"} <= kept
    assert [path.name for path in comparison_result.pictures] == ["curves.png", "grid.png"]
    assert type(comparison_result.search_results["fedavg"].best.point["algorithm.local.lr"]) is float
    assert (tmp_path / "c/search/fedavg/local.lr=0.25/seed-0/events.jsonl").exists()


def test_shared_settings_apply_to_methods_inside_wrappers(tmp_path: Path) -> None:
    inner = '[[compare]]\nname = "quantized"\nbits = 4\ninner = "ditto"\n[[compare]]\nname = "upcycled"\n'
    own = '[[compare]]\nname = "topk"\ninner = { name = "fedprox", local = { lr = 0.75 } }\n'
    head = "grid = { algorithm.local.momentum = [0.5] }\n" + SHARED
    spec = read(tmp_path, head + METHODS + inner + own)
    fedavg, _, quantized, upcycled, topk = (
        spec.experiment_at(m, {"algorithm.local.momentum": 0.5}) for m in spec.methods
    )
    found: Any = [fedavg.algorithm, quantized.algorithm.inner.inner, upcycled.algorithm.inner, topk.algorithm.inner]
    assert [type(method).__name__ for method in found] == ["FedAvg", "FedAvg", "FedAvg", "FedProx"]
    assert [method.local.lr for method in found] == [0.1, 0.1, 0.1, 0.75]
    assert [method.local.momentum for method in found] == [0.5] * 4
    assert [method.local.steps for method in found] == [2] * 4
    with pytest.raises(FedraxError, match=r"\[algorithm\]: unknown key 'lokal'"):
        read(tmp_path, SHARED.replace("local", "lokal") + inner)
    for none, message in (
        ("3", "algorithm.inner: a table with a name is needed"),
        ('"fedav"', "did you mean 'fedavg'"),
    ):
        with pytest.raises(FedraxError, match=message):
            read(tmp_path, SHARED + f'[[compare]]\nname = "ditto"\ninner = {none}\n')
