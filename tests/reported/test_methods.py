"""Reports about the steps of methods, against the equations of the papers in NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedrax import FedAvg, FedProx, Scaffold
from fedrax.algorithms import FedBuff, FedDyn
from fedrax.compression import TopK
from fedrax.optim import Adam, Yogi
from tests.reported.problems import LOCAL, LR, START, STEPS, descend, gradient, run_cohorts


def test_scaffold_adds_differences_of_control_variates():
    cohorts = [[0, 1], [1, 2], [0, 2]]
    x, c, own = START, np.zeros_like(START), [np.zeros_like(START) for _ in range(3)]
    for cohort in cohorts:
        deltas, changes = [], []
        for i in cohort:
            y = x
            for _ in range(STEPS):
                y = y - LR * (gradient(y, i) - own[i] + c)
            after = own[i] - c + (x - y) / (STEPS * LR)
            deltas.append(y - x)
            changes.append(after - own[i])
            own[i] = after
        x, c = x + sum(deltas) / 2, c + sum(changes) / 3
    result = run_cohorts(Scaffold(local=LOCAL), cohorts)
    np.testing.assert_allclose(result.params, x, rtol=1e-10)
    np.testing.assert_allclose(result.server.control, sum(own) / 3, rtol=1e-10)
    np.testing.assert_allclose(c, sum(own) / 3)


def test_feddyn_subtracts_the_model_once_for_each_client():
    cohorts, alpha = [[0, 1], [1, 2]], 0.3
    x, h, dual = START, np.zeros_like(START), [np.zeros_like(START) for _ in range(3)]
    for cohort in cohorts:
        ends = []
        for i in cohort:
            y = x
            for _ in range(STEPS):
                y = y - LR * (gradient(y, i) - dual[i] + alpha * (y - x))
            dual[i] = dual[i] - alpha * (y - x)
            ends.append(y)
        h = h - alpha / 3 * sum(y - x for y in ends)
        x = sum(ends) / 2 - h / alpha
    result = run_cohorts(FedDyn(local=LOCAL, alpha=alpha), cohorts)
    np.testing.assert_allclose(result.params, x, rtol=1e-10)
    np.testing.assert_allclose(result.server.dual, h, rtol=1e-10)


def test_the_proximal_term_pulls_toward_the_broadcast_model():
    mu, y = 0.8, START
    for _ in range(STEPS):
        y = y - LR * (gradient(y, 1) + mu * (y - START))
    result = run_cohorts(FedProx(local=LOCAL, mu=mu), [[1]])
    np.testing.assert_allclose(result.params, y, rtol=1e-10)
    assert np.abs(y - descend(START, 1)).max() > 0.01  # a zero term would be detected


@pytest.mark.parametrize("kind", [Adam, Yogi])
def test_adaptive_servers_step_along_the_first_moment(kind: type):
    rule = kind(lr=0.1, b1=0.9, b2=0.99, tau=1e-2)
    x, m, v = START, 0.0, rule.tau**2
    for i in (0, 1):
        delta = descend(x, i) - x
        m, d2 = 0.9 * m + 0.1 * delta, delta**2
        v = 0.99 * v + 0.01 * d2 if kind is Adam else v - 0.01 * d2 * np.sign(v - d2)
        x = x + 0.1 * m / (np.sqrt(v) + rule.tau)
    result = run_cohorts(FedAvg(local=LOCAL, server_optimizer=rule), [[0], [1]])
    np.testing.assert_allclose(result.params, x, rtol=1e-10)


def test_late_uploads_have_the_weight_of_punctual_ones():
    ends = [descend(START, i) - START for i in (0, 1)]
    first = START + ends[0] / 2
    again = [descend(first, i) - first for i in (0, 2)]
    second = first + (ends[1] + again[0] + again[1]) / 2  # K = 2, and client 1 starts from the first model
    method = FedBuff(local=LOCAL, power=0.0, max_delay=1)
    delays = {"delay": np.array([[0, 1], [0, 0]])}
    result = run_cohorts(method, [[0, 1], [0, 2]], script=delays, trajectory=True)
    np.testing.assert_allclose(result.trajectory, [first, second], rtol=1e-10)


def test_top_k_keeps_the_largest_magnitudes():
    x, error, negative = START, np.zeros_like(START), 0
    for _ in range(2):
        expected = error + descend(x, 0) - x
        sent = np.where(np.abs(expected) >= np.sort(np.abs(expected), axis=None)[-2], expected, 0)
        x, error, negative = x + sent, expected - sent, negative + (sent < 0).sum()
    result = run_cohorts(TopK(FedAvg(local=LOCAL), fraction=1 / 3), [[0], [0]])
    np.testing.assert_allclose(result.params, x, rtol=1e-10)
    assert negative  # and two of six indices


def test_a_schedule_counts_rounds_and_not_the_rounds_of_a_client():
    from fedrax.optim import InverseTimeDecay

    x = START
    for r, i in enumerate((0, 0, 1)):  # client 1 takes part in the third round, with a third of the learning rate
        x = descend(x, i, lr=LR / (1 + r))
    local = replace(LOCAL, schedule=InverseTimeDecay(rate=1.0))
    result = run_cohorts(FedAvg(local=local), [[0], [0], [1]])
    np.testing.assert_allclose(result.params, x, rtol=1e-10)


@pytest.mark.parametrize("carry", [False, True])
def test_the_state_of_a_local_optimizer_between_rounds(carry: bool):
    import optax

    from fedrax.optim import Optax

    x, buffers = START, {0: 0.0, 1: 0.0}
    for i in (0, 1, 0):
        buffer = buffers[i] if carry else 0.0
        for _ in range(STEPS):
            buffer = 0.9 * buffer + gradient(x, i)
            x = x - LR * buffer
        buffers[i] = buffer
    local = replace(LOCAL, optimizer=Optax.of(optax.sgd, momentum=0.9), carry=carry)
    result = run_cohorts(FedAvg(local=local), [[0], [1], [0]])
    np.testing.assert_allclose(result.params, x, rtol=1e-10)


def test_a_batch_larger_than_the_client_has_all_its_rows():
    expected = sum(descend(START, i, steps=3) for i in range(3)) / 3
    local = replace(LOCAL, steps=None, epochs=3, batch_size=32)
    result = run_cohorts(FedAvg(local=local), [[0, 1, 2]])
    np.testing.assert_allclose(result.params, expected, rtol=1e-10)
    assert result.events[-1]["gradients"] == 3 * 10
