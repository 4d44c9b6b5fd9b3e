"""``fedrax privacy``, ``fedrax audit``, and what other commands report about a private run."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from fedrax.errors import FedraxWarning
from fedrax.privacy import ClientDP
from fedrax.report.privacy_forecast import noise_fields
from fedrax.report.runs import read_run

PRIVATE = """
[partition]
name = "shards"
clients = 8
[model]
name = "logistic"
[algorithm]
name = "outputperturbation"
sigma = 0.5
inner = { name = "fedavg", local = { lr = 0.5, steps = 3 } }
[run]
rounds = 4
cohort_size = 3
eval_every = 2
"""


@pytest.fixture
def private_file(tmp_path: Path) -> Path:
    """File of an experiment with a short private run."""
    path = tmp_path / "private.toml"
    path.write_text(PRIVATE)
    return path


def test_privacy_prints_the_guarantee_of_the_run(fedrax: Any, private_file: Path, tmp_path: Path):
    printed = json.loads(fedrax("privacy", private_file, "--json", "--epsilons", "20", "60").out)
    assert fedrax("run", private_file, "--out", "kept", "--quiet").status == 0
    events = [json.loads(line) for line in (tmp_path / "kept" / "events.jsonl").read_text().splitlines()]
    for event, foretold in zip(events, printed["events"], strict=True):
        assert foretold.items() <= event.items()
    assert [Path(path).suffix for path in printed["pictures"]] == [".png", ".svg"] and (
        tmp_path / "privacy.svg"
    ).exists()
    assert printed["noise_fields"] == {"sigma": 0.5}
    first = printed["answers"][0]
    louder = [f"--algorithm.sigma={0.5 * first['factor']}", "--picture", "None", "--json"]
    assert json.loads(fedrax("privacy", private_file, *louder).out)["spent"]["epsilon"] == pytest.approx(20, rel=4e-3)
    for answer in printed["answers"]:
        for event in printed["events"]:
            assert (event["epsilon"] <= answer["epsilon"]) == (event["round"] <= answer["rounds"])


def test_privacy_prints_releases_and_the_noise_for_a_target(fedrax: Any, private_file: Path):
    shown = fedrax("privacy", private_file)
    assert shown.status == 0
    for text in ("replacement of a client", "composed", "epsilon by the paper", "--algorithm.sigma for epsilon 0.5: "):
        assert text in shown.out
    amplified = fedrax("privacy", private_file, "--algorithm", "clientdp", "--picture", "None")
    assert "amplified by sampling of cohorts" in amplified.out and "picture" not in amplified.out
    flags = ["--algorithm", "clientdp", "--run.participation", "poisson", "--picture", "None", "--json"]
    independent = json.loads(fedrax("privacy", private_file, *flags).out)
    assert (
        f"participation poisson, which amplifies more: epsilon {independent['spent']['epsilon']:.4g}" in amplified.out
    )
    assert independent["by_poisson"] is None


def test_a_run_that_its_budget_ended_continues_with_another(fedrax: Any, private_file: Path, tmp_path: Path):
    flags = ["--algorithm", "clientdp", "--algorithm.noise", "2", "--run.epsilon-budget"]
    with pytest.warns(FedraxWarning, match="one more would exceed"):
        ended = fedrax("run", private_file, *flags, "4", "--out", "kept")
    assert ended.status == 0
    assert "against all but the server" in ended.out and "not covered: metrics" in ended.out
    read = lambda: read_run(tmp_path / "kept")  # noqa: E731
    assert read().spent and 0 < read().rounds_done < 4
    assert fedrax("resume", "kept", "--run.epsilon-budget", "50", "--quiet").status == 0
    assert not read().spent and read().rounds_done == 4
    refused = fedrax("resume", "kept", "--run.epsilon-budget", "3.5")
    assert refused.status == 2 and "is spent: 4 rounds have cost" in refused.err


def test_the_printed_noise_is_enough(fedrax: Any, private_file: Path):
    """It is rounded up: the nearest number of four digits would miss some of these."""
    flags = ["--algorithm", "clientdp", "--picture", "None"]
    printed = fedrax("privacy", private_file, *flags, "--epsilons", *map(str, range(1, 9))).out
    found = re.search("--algorithm.noise for epsilon (.*)", printed)
    assert found is not None
    for pair in found[1].split(", "):
        epsilon, noise = pair.split(": ")
        spent = json.loads(fedrax("privacy", private_file, *flags, "--algorithm.noise", noise, "--json").out)["spent"]
        assert spent["epsilon"] <= float(epsilon)


@pytest.mark.parametrize("standardize", ["all", "client", "none"])
def test_private_runs_warn_of_statistics(fedrax: Any, tmp_path: Path, standardize: str):
    rows = [f"{name},{row},{row % 2}" for name in "abc" for row in range(10)]
    (tmp_path / "own.csv").write_text("\n".join(["who,x,label", *rows]))
    flags = f"run --data csv --data.path own.csv --data.client who --data.standardize {standardize} --partition natural"
    flags += " --model logistic --algorithm clientdp --run.rounds 1 --run.cohort-size 3 --run.delta 0.1 --quiet"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert fedrax(*flags.split()).status == 0
        assert fedrax(*flags.replace("clientdp", "fedavg").split()).status == 0
        local = ("--algorithm.inner.local.steps", "1")
        assert fedrax(*flags.replace("clientdp", "sampledp --run.samples resident").split(), *local).status == 0
    found = [str(w.message) for w in caught if "mean and standard deviation" in str(w.message)]
    assert sum("no epsilon covers" in text for text in found) == 2 * (standardize == "all")
    assert sum("epsilon of a sample does not cover" in text for text in found) == (standardize == "client")
    assert len(found) == {"all": 2, "client": 1, "none": 0}[standardize]


def test_privacy_names_releases_without_a_guarantee(fedrax: Any, private_file: Path):
    silent = fedrax("privacy", private_file, "--algorithm.sigma", "0", "--picture", "None")
    assert silent.status == 0 and "there is no finite epsilon, and no budget" in silent.out
    leaks = PRIVATE.replace('"fedavg", local = { lr = 0.5, steps = 3 }', '"qfedavg", local = { steps = 3 }')
    private_file.write_text(leaks)
    rejected = fedrax("privacy", private_file, "--picture", "None")
    assert rejected.status == 2 and "QFedAvg also sends upload/params/output/bias, computed from data" in rejected.err


def test_errors_are_printed_after_warnings(fedrax: Any, private_file: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []
    show = lambda w: seen.append(warnings.formatwarning(w.message, w.category, w.filename, w.lineno))  # noqa: E731
    monkeypatch.setattr(warnings, "_showwarnmsg_impl", show)  # pytest's own handler has no format
    before = warnings.formatwarning
    assert fedrax("privacy", private_file, "--run.delta", "0.3", "--picture", "None").status == 0
    assert warnings.formatwarning is before
    assert seen == [
        "fedrax: delta = 0.3 is not below 1/8: a method that publishes the data of one client of 8 would satisfy"
        " this guarantee; set a smaller delta\n"
    ]


def test_run_that_ends_with_its_budget_says_so(fedrax: Any, private_file: Path, tmp_path: Path):
    budget = json.loads(fedrax("privacy", private_file, "--json").out)["events"][1]["epsilon"]
    options = ["--run.epsilon-budget", budget + 1e-6, "--run.rounds", 12]
    with pytest.warns(FedraxWarning, match="after 2 of 12 rounds: one more would exceed the budget of"):
        assert fedrax("run", private_file, "--out", "kept", *options).status == 0
    run = read_run(tmp_path / "kept")
    assert run.finished and run.state.startswith("budget spent in round ")
    shown = fedrax("show", "kept").out
    assert "epsilon by the paper" in shown and "budget spent" in shown
    with pytest.warns(FedraxWarning, match="one more would exceed the budget of"):
        assert fedrax("resume", "kept").status == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["privacy", "--algorithm", "fedavg"], "FedAvg adds no noise: there is no epsilon to compute"),
        (["privacy", "--epsilons", "0"], "--epsilons must be greater than 0"),
        (["privacy", "--algorithm", "clientdp", "--run.amplification", "poisson"], "'poisson' does not hold"),
        (["audit", "--algorithm", "fedavg"], "FedAvg adds no noise: there is no claim to audit"),
        (
            ["audit", "--algorithm", "clientdp", "--drawn", "--run.participation", "round_robin"],
            "--drawn is for cohorts of",
        ),
        (["audit", "--algorithm", "clientdp", "--rounds", "0"], "--rounds must be 1 or more"),
        (["audit", "--algorithm", "clientdp", "--runs", "10"], "needs 40 to 1,000,000 runs per hypothesis, not 10"),
        (["audit", "--algorithm", "clientdp", "--runs", "2000000"], "needs 40 to 1,000,000 runs per hypothesis"),
        (["audit", "--algorithm", "clientdp", "--runs", "1000000"], "use fewer runs"),
        (["audit", "--algorithm", "clientdp", "--rounds", "2147483647"], "rounds must be 1 to 1000"),
        (["run", "--algorithm", "fedavg", "--run.epsilon-budget", "3"], "FedAvg adds no noise"),
    ],
)
def test_invalid_input_raises_a_clear_error(fedrax: Any, arguments: list[str], message: str):
    printed = fedrax(*arguments)
    assert printed.status == 2 and message in printed.err and printed.err.count("\n") == 1


def test_audit_prints_lower_bound_and_claim(fedrax: Any, private_file: Path):
    audited = fedrax("audit", private_file, "--runs", "200", "--canaries", "8", "--json")
    assert audited.status == 0
    watched, guessed = json.loads(audited.out)
    assert 0 < watched["proven"] <= watched["claimed"] and watched["claimed_paper"] is None  # of one sample
    assert guessed["unit"] == "client" and guessed["rounds"] == 4 and not guessed["refuted"]
    assert "replacement of a client" in fedrax("audit", private_file, "--runs", "40").out
    drawn = ["--algorithm", "clientdp", "--run.participation", "poisson", "--runs", "40", "--drawn"]
    assert "presence of a client" in fedrax("audit", private_file, *drawn).out


def test_integer_noise_is_accepted():
    assert noise_fields(ClientDP(noise=2, clip=1)) == {"noise": 2}
