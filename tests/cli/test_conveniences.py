"""Names of user-defined methods, additional rounds, trackers, files read in Python, tasks and tables from flags."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import fedrax as fedrax_package
from fedrax.cli.arguments import choices_in, parse_experiment
from fedrax.cli.run_command import RunOptions
from fedrax.experiments import experiment
from fedrax.experiments.comparison import Comparison
from fedrax.experiments.experiment import Experiment
from fedrax.experiments.serialization import ALGORITHM
from fedrax.simulation import read_events
from tests.cli.conftest import TINY, Outcome

OWN = (
    "from fedrax import FedAvg, hyperparameters\n"
    "@hyperparameters\n"
    "class Mine(FedAvg):\n    pass\n"
    "def halved(model, scale: float = 0.5):\n"
    "    import fedrax, dataclasses\n"
    "    task = fedrax.classification(model)\n"
    "    return dataclasses.replace(task, loss=lambda p, b, k: scale * task.loss(p, b, k))\n"
)


@pytest.mark.slow
def test_user_defined_methods_appear_by_their_names(fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    flags = ("--algorithms", "own.py:Mine", "--run.rounds", 2, "--seeds", 0, "--out", "c")
    outcome = fedrax("compare", tiny, *flags, "--tensorboard")
    if outcome.status == 2:
        assert "tensorboardX" in outcome.err  # not installed here
        outcome = fedrax("compare", tiny, *flags)
    else:
        assert list((tmp_path / "c/Mine/seed-0").glob("tensorboard/*"))
    assert outcome.status == 0, outcome.err
    assert [row["label"] for row in json.loads((tmp_path / "c/comparison.json").read_text())["methods"]] == [
        "fedavg",
        "Mine",
    ]
    assert "own.py" not in outcome.out.replace("try next", "\n").splitlines()[1]
    assert "target" in outcome.out and "95 % of the best" in outcome.out and "best accuracy (round)" in outcome.out


def test_finished_run_continues_with_more_rounds(fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    """The events are those of a longer run, also with more frequent evaluations."""
    assert fedrax("run", tiny, "--run.rounds", 2, "--out", "short", "--quiet").status == 0
    more = ("--run.rounds", 4, "--run.eval-every", 1, "--quiet")
    assert fedrax("resume", "short", *more) == Outcome(0, "", "")
    assert fedrax("run", tiny, "--out", "long", *more).status == 0
    short, long = (
        {event["round"]: event["test_loss"] for event in read_events(tmp_path / name) if "test_loss" in event}
        for name in ("short", "long")
    )
    assert list(long) == [1, 2, 3, 4] and short == {round: long[round] for round in (2, 3, 4)}
    assert experiment.read(tmp_path / "short/experiment.toml").run.rounds == 4
    outcome = fedrax("resume", "short", "--run.rounds", 3)
    assert outcome.status == 2 and "must be larger" in outcome.err


def test_target_of_the_runs_is_the_target_of_the_table(fedrax: Callable[..., Outcome], tiny: Path) -> None:
    flags = ("--algorithms", "scaffold", "--run.target", 0.15, "--seeds", 0, "--out", "c")
    outcome = fedrax("compare", tiny, *flags)
    assert outcome.status == 0 and "target 0.15: as given" in outcome.out, outcome
    assert json.loads(fedrax("show", "c", "--json").out)["target"] == 0.15
    assert "target 0.2: as given" in fedrax("show", "c", "--target", 0.2).out


def test_default_partition_warns_if_it_ignores_natural_clients(fedrax: Callable[..., Outcome]) -> None:
    flags = ("run", "--data", "synthetic", "--data.devices", 12, "--run.rounds", 1, "--model", "linear", "--json")
    printed = "warning: the data have 12 clients, and the partition shards assigns their rows to other clients"
    assert printed in fedrax(*flags).err
    assert "12 clients" not in fedrax(*flags, "--partition", "natural").err
    assert "12 clients" not in fedrax(*flags, "--partition", "iid").err


def test_suggested_command_has_the_number_of_natural_clients(fedrax: Callable[..., Outcome]) -> None:
    flags = ("--data", "synthetic", "--data.devices", 7, "--model", "logistic", "--run.rounds", 1, "--seeds", 0)
    flags += ("--run.cohort-size", 2, "--grid", "algorithm.local.weight-decay=none,0.01", "--algorithms", "fedavg")
    outcome = fedrax("compare", *flags, "--partition", "natural", "--out", "c")
    assert "--partition iid --partition.clients 7    (" in outcome.out.splitlines()[-1], outcome


def test_run_warns_of_ignored_comparison_settings(fedrax: Callable[..., Outcome], tiny: Path) -> None:
    tiny.write_text("seeds = [3, 4]\ntarget = 0.5\n" + TINY)
    outcome = fedrax("run", tiny, "--out", "r")
    message = "seeds and target in the file are for fedrax compare; this is one run, with seed 0\n"
    assert outcome.status == 0 and message in outcome.err
    assert message not in fedrax("run", tiny, "--out", "q", "--quiet").err


@pytest.mark.parametrize("given", ["file", "flag", "comparison"])
def test_local_steps_and_epochs_replace_each_other(
    given: str, fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path
) -> None:
    """A given one replaces the default of the other, and a flag replaces either one in the file."""
    out, flags = ("--out", "r", "--run.rounds", 1, "--quiet"), ("--algorithm.local.epochs", 2)
    if given == "file":
        tiny.write_text(TINY.replace('"fedavg"', '"fedsgd"').replace("steps = 2", "epochs = 2"))
        assert fedrax("run", tiny, *out).status == 0
    else:
        command = ("run",) if given == "flag" else ("compare", "--seeds", 0)
        assert fedrax(command[0], tiny, *command[1:], *flags, *out).status == 0
    (kept,) = (tmp_path / "r").rglob("experiment.toml")
    local = experiment.read(kept).algorithm.local  # type: ignore[attr-defined]
    assert (local.epochs, local.steps) == (2, None)


def test_file_may_begin_with_a_byte_order_mark(fedrax: Callable[..., Outcome], tiny: Path) -> None:
    tiny.write_text("\ufeff" + TINY, encoding="utf-8")
    assert fedrax("run", tiny, "--run.rounds", 1, "--quiet") == Outcome(0, "", "")


@pytest.mark.slow
def test_tasks_and_tables_from_flags(fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    """A table with text, missing values, two classes and one logit; the conversion of columns is reported."""
    rows = [
        f"{i},{'' if i % 5 == 0 else i % 7},{'uv'[i % 2]},{'no' if i < 20 else 'yes'},{'ABCD'[i % 4]}"
        for i in range(48)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["age,dose,sex,ill,clinic", *rows]))
    data = "--data csv --data.path t.csv --data.label ill --data.client clinic --data.missing mean"
    data += " --partition natural --partition.clients 4"
    flags = [*data.split(), "--run.cohort-size", 2, "--run.rounds", 2]
    outcome = fedrax("run", tiny, *flags, "--task", "binary", "--task.metrics", "auc", "f1", "--out", "r")
    assert outcome.status == 0, outcome.err
    assert "test auc " in outcome.out and "test f1 " in outcome.out
    assert "f1: of the class 'yes'; positive=" in outcome.err
    assert "'sex' is 2 features" in outcome.err and "standardized" in outcome.err
    last = json.loads((tmp_path / "r/events.jsonl").read_text().splitlines()[-1])
    assert {"test_auc", "test_f1", "test_accuracy"} <= last.keys()
    assert experiment.read(tmp_path / "r/experiment.toml").task.metrics == ("auc", "f1")
    shown = fedrax("partition", *data.split(), "--model", "logistic", "--picture", "p")
    assert shown.status == 0 and "'dose' are the mean" in shown.out and (tmp_path / "p.png").exists()
    words = [line.split() for line in shown.out.splitlines()]
    assert [found[0] for found in words if found and found[0] in ("A", "B", "C", "D")] == ["A", "B", "C", "D"]
    (tmp_path / "own.py").write_text(OWN)
    assert (
        fedrax("run", tiny, *flags, "--task", "own.py:halved", "--task.scale", 0.25, "--out", "s", "--quiet").status
        == 0
    )
    first = [json.loads((tmp_path / d / "events.jsonl").open().readline())["train_loss"] for d in ("r", "s")]
    assert first[1] < 0.6 * first[0]
    assert fedrax("resume", "s", "--quiet").status == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--task binary", "needs two classes: the labels of 'digits' are 10 classes"),
        ("--task regression", "labels are classes|are classes"),
        ("--task.metrics acc", "auc"),
        ("--task clasification", "did you mean 'classification'"),
    ],
)
def test_tasks_that_do_not_fit_the_data_are_rejected(
    fedrax: Callable[..., Outcome], tiny: Path, flags: str, words: str
) -> None:
    outcome = fedrax("run", tiny, *flags.split())
    assert outcome.status == 2 and re.search(words, outcome.err), outcome.err


def test_comparison_file_in_python(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(TINY + '[[compare]]\nname = "fedavg"\n')
    with pytest.raises(Exception, match=r"fedrax\.experiments\.read_file reads it"):
        experiment.read(tmp_path / "c.toml")
    (tmp_path / "e.toml").write_text(TINY)
    compared, single = (
        fedrax_package.experiments.read_file(tmp_path / "c.toml"),
        fedrax_package.experiments.read_file(tmp_path / "e.toml"),
    )
    assert isinstance(compared, Comparison) and [method.name for method in compared.methods] == ["fedavg"]
    assert isinstance(single, Experiment) and single == experiment.read(tmp_path / "e.toml")
    assert all(len(repr(found).splitlines()) < 6 for found in (compared, single))
    result = fedrax_package.simulate(*experiment.build(compared.methods[0]), compared.methods[0].run)
    assert len(result.events) == 4


def test_methods_may_be_given_by_name(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('compare = ["fedavg", "scaffold"]\n' + TINY.replace('name = "fedavg"\n', ""))
    compared = fedrax_package.experiments.read_file(tmp_path / "c.toml")
    assert isinstance(compared, Comparison) and [method.name for method in compared.methods] == ["fedavg", "scaffold"]
    assert isinstance(compared.methods[1].algorithm, fedrax_package.Scaffold)
    assert compared.methods[1].algorithm.local.steps == 2


@pytest.mark.slow
def test_personal_metrics_are_in_the_table_and_the_curves(fedrax: Callable[..., Outcome], tmp_path: Path) -> None:
    """Personal and fine-tuned models, and the worst clients; the best value of each column is bold."""
    lazy = 'label = "lazy"\ninner = { local = { lr = 1e-6 } }\n'
    methods = f'[[compare]]\nname = "ditto"\n[[compare]]\nname = "ditto"\n{lazy}'
    text = TINY.replace('name = "fedavg"\nlocal = { lr = 0.1, steps = 2 }', "")
    (tmp_path / "c.toml").write_text("seeds = [0]\n" + text.replace("[algorithm]\n", "") + methods)
    outcome = fedrax("compare", "c.toml", "--out", "c", "--run.per-client", "--run.finetune", 1)
    assert outcome.status == 0, outcome.err
    behind = [
        json.loads(path.read_text().splitlines()[-1])["train_personal_accuracy_worst_client_samples"]
        for path in sorted((tmp_path / "c").glob("*/seed-0/events.jsonl"))
    ]
    assert f"worst client: of {min(behind)}" in outcome.out
    for heading in (
        "train personal accuracy",
        "train finetuned accuracy, worst client",
        "train accuracy, 10th percentile of clients",
        "train personal loss",
    ):
        assert heading in outcome.out, heading
    table = (tmp_path / "c/table.md").read_text().splitlines()
    place = [cell.strip() for cell in table[0].split("|")].index("train personal accuracy")
    cells = [line.split("|")[place].strip() for line in table[2:]]
    values = [float(cell.strip("*")) for cell in cells]
    assert values[0] > values[1] and cells[0].startswith("**") and not cells[1].startswith("**")
    drawn = (tmp_path / "c/curves.svg").read_text()
    assert "training accuracy, personal models" in drawn and "training accuracy, fine-tuned" in drawn


@pytest.mark.parametrize("flag", ["--algorithm.local.momentum none", "--algorithm.local.momentum=none"])
def test_flags_accept_none(fedrax: Callable[..., Outcome], tiny: Path, tmp_path: Path, flag: str) -> None:
    tiny.write_text(TINY.replace("lr = 0.1", "lr = 0.1, momentum = 0.9"))
    assert "momentum = 0.9" in tiny.read_text()
    assert fedrax("run", tiny, *flag.split(), "--out", "a", "--quiet").status == 0
    assert experiment.read(tmp_path / "a/experiment.toml").algorithm.local.momentum is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--algorithm.local.lr -1", "command line: algorithm.local.lr must be greater than 0"),
        ("--algorithm.local.epochs 1 --algorithm.local.steps 2", "tiny.toml with the flags given: give local steps"),
        ("--algorithm losac --algorithm.local.epochs 1", "(local.blocks = 5; a default of LoSAC and FedSaga)"),
    ],
)
def test_errors_of_flags_name_the_command_line(
    fedrax: Callable[..., Outcome], tiny: Path, flags: str, message: str
) -> None:
    outcome = fedrax("run", tiny, *flags.split())
    assert outcome.status == 2 and message in outcome.err


def test_errors_of_the_file_do_not_name_unrelated_flags(fedrax: Callable[..., Outcome], tiny: Path) -> None:
    tiny.write_text(TINY.replace("lr = 0.1", "lr = 0.1, epochs = 1"))
    for flags in ("--out there", "--out=there --quiet", "--data-dir ."):
        assert f"{tiny.name}: give local steps" in fedrax("run", tiny, *flags.split()).err
    for flags in ("--name mine", "--run.rounds=3", "--out there --data digits"):
        assert f"{tiny.name} with the flags given: give local" in fedrax("run", tiny, *flags.split()).err


def test_wrong_key_for_the_class_suggests_name(fedrax: Callable[..., Outcome], tiny: Path) -> None:
    for key, value in (("kind", "dirichlet"), ("partitioner", "iid")):
        tiny.write_text(TINY.replace('name = "shards"', f'{key} = "{value}"'))
        assert f"[partition]: the key that chooses the partition is 'name', not '{key}'." in fedrax("run", tiny).err


def test_table_of_a_single_possible_class_needs_no_name() -> None:
    inside = {"name": "personalized", "personal_params": ["output/*"], "inner": {"name": "fedavg"}}
    tables = [{"epochs": 2, "lr": 0.05}, {"name": "local_sgd", "epochs": 2, "lr": 0.05}]
    made = [experiment.from_table({"algorithm": inside | {"alternate": table}}, "x", Path()) for table in tables]
    assert made[0] == made[1] and made[0].algorithm.alternate == fedrax_package.LocalSGD(lr=0.05, epochs=2)


@pytest.mark.parametrize("part", ["data", "partition", "model", "finetuning", "task", "run.participation"])
def test_help_has_a_text_for_every_option(capsys: pytest.CaptureFixture[str], part: str) -> None:
    chosen = next(chosen for chosen in choices_in(Experiment()) if chosen.path == part)
    for name in chosen.choice.classes():
        _check_help([f"--{part}", name], capsys)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", sorted(ALGORITHM.classes()))
def test_help_has_a_text_for_every_option_of_a_method(capsys: pytest.CaptureFixture[str], name: str) -> None:
    _check_help(["--algorithm", name], capsys)


def _check_help(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Assert that every option in the help of ``fedrax run`` has a text besides its default."""
    with pytest.raises(SystemExit):
        parse_experiment(RunOptions, [*args, "--help"], "fedrax run", "")
    lines = [line.strip(" │|") for line in capsys.readouterr().out.splitlines()]
    text = "\n".join("" if re.match("[╭╰─]|-{3}", line) else line for line in lines)
    options = re.split(r"^--(?=[a-z])", text, flags=re.M)[1:]
    assert len(options) > 20
    for option in options:
        flag, _, words = option.partition("\n")
        words = re.sub(r"\((default:[^)]*|required)\)", "", words.partition("\n\n")[0])
        assert words.strip(), f"{' '.join(args)}: --{flag} has no text"
