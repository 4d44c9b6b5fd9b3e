"""User-defined participation policies: without state, and adaptive ones that observe reports of clients."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedrax
from fedrax import FedAvg, FedraxError, Scaffold, Settings
from fedrax.config.hyperparameters import check
from fedrax.experiments.user_code import _executed
from fedrax.participation import CohortSizes, ParticipationPolicy, Population
from fedrax.privacy import ClientDP
from fedrax.simulation.persistence.run_identity import of_participation
from fedrax.simulation.settings import cohort_sampler
from tests.simulation.problems import FEDERATION, LOCAL, SIZES, TASK, assert_close, assert_identical, run


@dataclass(frozen=True)
class PowerOfChoice(ParticipationPolicy):
    """The clients with the largest last known loss among random candidates (rpow-d of Cho et al. 2022)."""

    candidates: int = 5

    def init(self, population: Population) -> np.ndarray:
        return np.full(population.num_clients, np.inf)

    def sample(self, state: Any, round: int, population: Population, rng: np.random.Generator) -> np.ndarray:
        chances = population.sizes / population.sizes.sum()
        candidates = rng.choice(population.num_clients, self.candidates, replace=False, p=chances)
        return candidates[np.argsort(-state[candidates], kind="stable")[: population.cohort_size]]

    def observe(self, state: Any, round: int, clients: np.ndarray, info: Mapping[str, np.ndarray]) -> np.ndarray:
        losses = state.copy()
        losses[clients] = info["loss"]
        return losses


@dataclass(frozen=True)
class FixedReturn(ParticipationPolicy):
    """Returns a given value."""

    cohort: tuple[int, ...]

    def sample(self, state: Any, round: int, population: Population, rng: np.random.Generator) -> np.ndarray:
        return np.array(self.cohort)


class VaryingCohorts(FixedReturn):
    """Declares varying cohort sizes."""

    def cohort_sizes(self, state: Any, population: Population) -> CohortSizes:
        return CohortSizes(population.cohort_size, varying=True)


SEEN: list[tuple[int, list[int], list[float]]] = []


class Recording(PowerOfChoice):
    """Records what it observes."""

    def observe(self, state: Any, round: int, clients: np.ndarray, info: Mapping[str, np.ndarray]) -> np.ndarray:
        SEEN.append((round, clients.tolist(), info["loss"].tolist()))
        return super().observe(state, round, clients, info)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (FedAvg(local=LOCAL), {"plan": "scan"}),
        (Scaffold(local=LOCAL), {"plan": "vmap", "devices": 2, "chunk": 2}),
        (Scaffold(local=LOCAL), {"plan": "loop"}),
        (Scaffold(local=LOCAL), {"plan": "scan", "samples": "streamed", "states": "spilled"}),
        (Scaffold(local=LOCAL), {"plan": "debug"}),
    ],
)
def test_adaptive_policy_observes_the_loss_of_each_client(algorithm: fedrax.Algorithm, options: dict[str, Any]):
    SEEN.clear()
    result = run(algorithm, cohort_size=3, rounds=6, participation=Recording(), **options)
    assert [r for r, *_ in SEEN] == list(range(6))
    cohorts = [clients for _, clients, _ in SEEN]
    assert all(clients == sorted(clients) for clients in cohorts)
    replayed = run(algorithm, cohort_size=3, rounds=6, script=fedrax.simulation.Script(cohorts=cohorts))
    assert_close(result, replayed)
    for event, (_, _, losses) in zip(result.events, SEEN, strict=True):
        np.testing.assert_allclose(np.mean(losses), event["train_loss"], rtol=1e-5)
    known = np.full(len(SIZES), np.inf)
    for r, clients, losses in SEEN:  # the policy, recomputed from the observations
        sampler = cohort_sampler(Settings(cohort_size=3, rounds=6), np.array(SIZES))
        rng = sampler._generator(1, r)
        assert sorted(PowerOfChoice().sample(known, r, sampler.population, rng)) == sorted(clients)
        known[clients] = np.float32(losses)


def test_adaptive_policy_resumes_from_a_checkpoint(tmp_path: Path):
    options: dict[str, Any] = {
        "cohort_size": 3,
        "eval_every": 1,
        "participation": PowerOfChoice(),
        "directory": tmp_path,
    }
    uninterrupted = run(Scaffold(local=LOCAL), **options | {"directory": None}, rounds=8)
    run(Scaffold(local=LOCAL), **options, rounds=3)
    assert_identical(run(Scaffold(local=LOCAL), **options, rounds=8, resume=True), uninterrupted)


def edited_policy(last: int) -> type[ParticipationPolicy]:
    """A policy with this name, in two versions of its code."""

    @dataclass(frozen=True)
    class Edited(ParticipationPolicy):
        def sample(self, state: Any, round: int, population: Population, rng: np.random.Generator) -> np.ndarray:
            return np.array([0, last])

    return Edited


def test_run_is_not_resumed_with_edited_code_of_a_policy(tmp_path: Path):
    options: dict[str, Any] = {"cohort_size": 2, "directory": tmp_path}
    run(FedAvg(LOCAL), **options, rounds=2, participation=edited_policy(1)())
    run(FedAvg(LOCAL), **options, rounds=3, participation=edited_policy(1)(), resume=True)
    with pytest.raises(FedraxError, match="its participation code differs"):
        run(FedAvg(LOCAL), **options, rounds=4, participation=edited_policy(2)(), resume=True)


def test_misused_policies_are_explained():
    @dataclass(frozen=True)
    class Misspelled(PowerOfChoice):
        def observe(self, state: Any, round: int, clients: np.ndarray, info: Mapping[str, np.ndarray]) -> np.ndarray:
            return state + info["losss"].mean()

    with pytest.raises(FedraxError, match=r"clients do not report info\['losss'\] to the policy, but .*loss"):
        run(FedAvg(LOCAL), cohort_size=2, rounds=2, participation=Misspelled())
    with pytest.raises(FedraxError, match=r"got the class: PowerOfChoice\(\) makes an object of it"):
        run(FedAvg(LOCAL), cohort_size=2, rounds=2, participation=PowerOfChoice)


CHOSEN = """
import numpy as np
from fedrax.participation import ParticipationPolicy

def first(n):
    return n - {}

class Chosen(ParticipationPolicy):
    def sample(self, state, round, population, rng):
        return np.arange(first(population.cohort_size))
"""


def test_code_of_a_policy_in_a_copied_file_is_the_same(tmp_path: Path):
    """The module of a file is named by its path, and differently in each process."""
    texts = {"a": CHOSEN.format(0), "b": CHOSEN.format(0), "edited": CHOSEN.format(1)}
    identities = {}
    for folder, text in texts.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(text)
        policy = _executed(tmp_path / folder / "mine.py").Chosen
        identities[folder] = of_participation(policy())["participation code"]
    assert identities["a"] == identities["b"] != identities["edited"]


def test_features_that_need_cohorts_in_advance_reject_adaptive_policies():
    sampler = cohort_sampler(Settings(cohort_size=3, participation=PowerOfChoice()), np.array(SIZES))
    sampler.cohort(0)
    with pytest.raises(FedraxError, match="known only during the run"):
        sampler.cohort(1)
    with pytest.raises(FedraxError, match="choose another participation"):
        run(ClientDP(FedAvg(local=LOCAL), noise=1.0), cohort_size=3, participation=PowerOfChoice())
    with pytest.raises(FedraxError, match="choose another participation"):
        fedrax.sweep(
            [FedAvg(local=LOCAL)], TASK, FEDERATION, mode="vectorized", cohort_size=3, participation=PowerOfChoice()
        )
    apart = fedrax.sweep(
        [FedAvg(local=LOCAL)], TASK, FEDERATION, [0], rounds=2, cohort_size=3, participation=PowerOfChoice()
    )
    alone = fedrax.simulate(
        FedAvg(local=LOCAL), TASK, FEDERATION, rounds=2, cohort_size=3, participation=PowerOfChoice()
    )
    jax.tree.map(np.testing.assert_array_equal, apart[0][0].params, alone.params)


def test_return_values_of_policies_are_checked():
    for cohort in ((0, 0), (0, len(SIZES)), (0, 1, 2)):
        with pytest.raises(FedraxError, match=r"FixedReturn.sample must return at most 2 different clients"):
            run(FedAvg(local=LOCAL), cohort_size=2, participation=FixedReturn(cohort))
    with pytest.raises(FedraxError, match="varying=True"):
        run(FedAvg(local=LOCAL), cohort_size=2, participation=FixedReturn((1,)))
    events = run(FedAvg(local=LOCAL), cohort_size=2, participation=VaryingCohorts((1,))).events
    assert {event["clients"] for event in events} == {1}
    for value in (5, "uniform", PowerOfChoice):
        with pytest.raises(FedraxError, match="participation must be"):
            check(Settings(participation=value), "run")  # type: ignore[arg-type]


def test_policy_by_path_in_an_experiment_file(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nfrom fedrax.participation import ParticipationPolicy\n"
        "class Largest(ParticipationPolicy):\n"
        "    def sample(self, state, round, population, rng):\n"
        "        return np.argsort(-population.sizes)[: population.cohort_size]\n"
    )
    (tmp_path / "e.toml").write_text('[run]\nparticipation = {name = "mine.py:Largest"}\n')
    policy = fedrax.experiments.read_file(tmp_path / "e.toml").run.participation
    assert type(policy).__name__ == "Largest"
