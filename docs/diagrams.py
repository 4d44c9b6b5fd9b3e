"""Diagrams of the documentation, as SVG that is part of the page, so that its colors follow the theme.

All are 360 units wide and run from top to bottom, so that their text can be read on a telephone. The sizes in
:func:`traffic` are those of runs that the build makes.
"""

from __future__ import annotations

import re
from html import escape
from math import atan2, cos, pi, sin
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedrax import Algorithm, FedAvg, Federation, LocalSGD, Scaffold, Task, classification, simulate, tree
from fedrax.data import Shards, load
from fedrax.models import MLP, lora
from fedrax.personalization import Personalized

WIDTH = 360


class Drawing:
    """Shapes in order; classes of ``_static/pages.css`` give their colors and fonts."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.bottom = 0.0

    def box(self, x: float, y: float, width: float, height: float, kind: str = "") -> None:
        """A rectangle."""
        self.parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="{min(5, width / 5):g}"/>'
        )
        self.bottom = max(self.bottom, y + height)

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """One line, whose baseline is at ``y``; ``_i`` is a subscript, except in code."""
        shown = escape(text)
        if kind != "code":
            shown = re.sub(r"_(\w)", r'<tspan dy="3" font-size="75%">\1</tspan><tspan dy="-3">&#8203;</tspan>', shown)
        self.parts.append(f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{shown}</text>')
        self.bottom = max(self.bottom, y + 4)

    def line(self, *points: tuple[float, float], kind: str = "") -> None:
        """A line through points."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path class="{kind}" d="{path}"/>')

    def arrow(self, *points: tuple[float, float], kind: str = "") -> None:
        """A line through points that ends in an arrowhead."""
        self.line(*points, kind=f"arrow {kind}")
        (x0, y0), (x, y) = points[-2:]
        angle = atan2(y - y0, x - x0)
        sides = [(x - 8 * cos(angle + turn), y - 8 * sin(angle + turn)) for turn in (pi / 8, -pi / 8)]
        self.line((x, y), *sides, kind="head")

    def step(self, x: float, y: float, number: int) -> None:
        """A number in a circle."""
        self.parts.append(f'<circle class="step" cx="{x}" cy="{y}" r="8"/>')
        self.text(x, y + 4, str(number), "number", "middle")

    def svg(self, title: str, description: str) -> str:
        """The diagram, with a title and a description for readers that cannot see it."""
        return (
            f'<div class="diagram"><svg viewBox="0 0 {WIDTH} {self.bottom + 2:g}" role="img" xmlns="http://www.w3.org/'
            f'2000/svg"><title>{escape(title)}</title><desc>{escape(description)}</desc>{"".join(self.parts)}</svg></div>'
        )


def communication_round() -> str:
    """One round of federated averaging: server, cohort and the clients that are not sampled."""
    drawing = Drawing()
    drawing.box(40, 4, 280, 66, "server")
    drawing.text(180, 22, "server: global parameters x", "title", "middle")
    drawing.step(58, 38, 1)
    drawing.text(72, 42, "sample the cohort")
    drawing.step(58, 58, 5)
    drawing.text(72, 62, "server step: x ← x + η_g Σ p_i Δ_i")
    width, top = 62, 150
    labels = ((26, 8, 3, 4), (5, 20, 9, 3), (3, 4, 26, 12), (10, 2, 3, 24), (8, 16, 14, 2))
    for client, heights in enumerate(labels):
        left = 5 + client * (width + 10)
        sampled = client in (0, 2, 3)
        drawing.box(left, top, width, 128, "client" if sampled else "idle")
        drawing.text(left + width / 2, top + 16, f"client {client + 1}", "" if sampled else "note", "middle")
        if sampled:
            start = 66 + 57 * (0, 2, 3).index(client) * 1.55
            drawing.arrow((start, 72), (left + 20, top - 3))
            drawing.arrow((left + 42, top - 3), (start + 24, 72))
            points = [(left + 10, top + 40), (left + 22, top + 30), (left + 34, top + 48), (left + 50, top + 36)]
            drawing.arrow(*points)
            drawing.text(left + width / 2, top + 66, "x → x_i", "", "middle")
        for label, height in enumerate(heights):
            foot = top + 108
            drawing.box(left + 9 + 12 * label, foot - height, 8, height, "solid" if sampled else "")
        drawing.text(left + width / 2, top + 122, "data", "note", "middle")
    drawing.step(14, 112, 2)
    drawing.text(26, 116, "x")
    drawing.step(310, 112, 4)
    drawing.text(322, 116, "Δ_i")
    drawing.step(14, 294, 3)
    drawing.text(28, 298, "T local steps x_i ← x_i − η g_i(x_i; ξ), then Δ_i = x_i − x")
    return drawing.svg(
        "One communication round",
        "The server samples three of five clients, broadcasts the parameters x, the sampled clients train on their own"
        " data, which differ between clients, and upload updates, from which the server computes the next x.",
    )


def hooks() -> str:
    """The functions of an algorithm in a round: where each runs, what it reads and what it returns."""
    drawing = Drawing()
    lane, right = 168, 192

    def function(side: int, y: float, *lines: str, note: str = "") -> float:
        """A function in the lane of the server (0) or of the client (1); returns its lower end."""
        height = 8 + 15 * (len(lines) + bool(note))
        left = (14, right)[side]
        drawing.box(left, y, lane - 14, height, ("server", "client")[side])
        for number, line in enumerate(lines):
            drawing.text(left + 6, y + 16 + 15 * number, line, "code")
        if note:
            drawing.text(left + 6, y + 16 + 15 * len(lines), note, "note")
        return y + height

    drawing.text(14 + (lane - 14) / 2, 14, "server", "title", "middle")
    drawing.text(right + (lane - 14) / 2, 14, "client i of the cohort", "title", "middle")
    drawing.text(14, 36, "before the first round", "note")
    function(0, 42, "init(params,", "\u00a0\u00a0num_clients)", note="→ server state")
    function(1, 42, "init_client(params)", note="→ client state")
    drawing.text(14, 122, "each phase of a round", "note")
    drawing.box(2, 106, WIDTH - 4, 288, "idle")
    drawing.arrow((150, 95), (150, 130))
    drawing.arrow((269, 80), (269, 163))
    drawing.arrow((14, 350), (7, 350), (7, 151), (14, 151))
    drawing.arrow((346, 208), (353, 208), (353, 178), (346, 178))
    function(0, 132, "broadcast(server)", note="→ message")
    drawing.arrow((168, 152), (180, 152), (180, 188), (right, 188))
    bottom = function(1, 165, "client(message,", "\u00a0\u00a0state, data)", note="→ upload, state, info")
    drawing.text(right, bottom + 16, "state: input of the client's", "note")
    drawing.text(right, bottom + 30, "next phase or round", "note")
    drawing.arrow((right, 208), (180, 208), (180, 244), (168, 244))
    function(0, 224, "receive(upload)", note="decodes each upload")
    drawing.arrow((91, 262), (91, 280))
    drawing.text(14, 293, "aggregation by the simulator:", "note")
    drawing.text(14, 308, "mean, total, each → cohort", "note")
    drawing.arrow((91, 314), (91, 326))
    function(0, 328, "server(server,", "\u00a0\u00a0cohort)", note="→ server state, info")
    drawing.text(right, 350, "state: input of the next", "note")
    drawing.text(right, 364, "phase or round", "note")
    drawing.text(14, 412, "evaluation", "note")
    function(0, 418, "params(server)", note="→ global model")
    function(1, 418, "personal(params,", "\u00a0\u00a0state)", note="→ personal model")
    return drawing.svg(
        "Functions of an algorithm in a round",
        "init and init_client make the states. In each phase broadcast runs on the server, client on each client of the"
        " cohort, receive on the server for each upload, and server after the aggregation.",
    )


class Family(NamedTuple):
    """A method and what its messages and states consist of."""

    title: str
    algorithm: Algorithm
    down: str
    up: str
    client: str
    frozen: bool = False


def traffic() -> str:
    """What four families of methods send in a round, and what stays where, with the bytes of a run of each."""
    digits = load("digits")
    federation = Federation.from_dataset(digits, Shards(clients=20, per_client=1), seed=0)
    network = MLP(hidden=(32,)).build((8, 8, 1), 10)
    pretrained = network.init(jax.random.key(0))
    adapted = lora(network, pretrained, digits.train.x[:1], rank=4)
    averaging = FedAvg(local=LocalSGD(lr=0.05, steps=10))
    families = (
        Family("FedAvg", averaging, "x", "Δ_i", ""),
        Family("SCAFFOLD", Scaffold(local=averaging.local), "x, c", "Δ_i, Δc_i", "c_i"),
        Family(
            "Personal output layer",
            Personalized(averaging, personal_params=("output/*",)),
            "shared layers",
            "their Δ_i",
            "output layer",
        ),
        Family("Adapters (LoRA, rank 4)", averaging, "A, B", "ΔA_i, ΔB_i", "", frozen=True),
    )
    drawing = Drawing()
    for row, family in enumerate(families):
        task = classification(adapted if family.frozen else network)
        add_family(drawing, 112 * row, family, task, federation, tree.num_bytes(pretrained))
    return drawing.svg(
        "What is sent and what stays",
        "For four families of methods: the broadcast message and the upload of one client in a round, the client state,"
        " frozen parameters and samples, with their sizes.",
    )


def add_family(
    drawing: Drawing, top: float, family: Family, task: Task, federation: Federation, pretrained: int
) -> None:
    """One method of :func:`traffic`, measured in a run of one round."""
    clients = 5
    result = simulate(family.algorithm, task, federation, rounds=1, cohort_size=clients, progress=False)
    event: dict[str, Any] = result.events[-1]
    state = jax.eval_shape(family.algorithm.init_client, result.params)
    samples = tree.num_bytes((federation.train.x, federation.train.y)) / federation.num_clients
    drawing.text(2, top + 16, family.title, "title")
    drawing.box(2, top + 22, 92, 76, "server")
    drawing.text(8, top + 38, "server")
    drawing.text(8, top + 55, f"state {size(tree.num_bytes(result.server))}", "note")
    drawing.box(244, top + 22, 114, 76, "client")
    drawing.text(250, top + 38, "client")
    drawing.text(250, top + 55, f"samples {size(samples)}", "note")
    if family.client:
        drawing.text(250, top + 72, f"{family.client} {size(tree.num_bytes(state))}", "note")
    if family.frozen:
        for left in (8, 250):
            drawing.text(left, top + 72, f"frozen {size(pretrained)}", "note")
    for y, ends, name, key in ((44, (98, 240), family.down, "bytes_down"), (80, (240, 98), family.up, "bytes_up")):
        drawing.arrow((ends[0], top + y), (ends[1], top + y))
        drawing.text(169, top + y - 5, f"{name}: {size(event[key] / clients)}", "note", "middle")


def size(number: float) -> str:
    """Bytes as kilobytes of 1,000 bytes."""
    return f"{number / 1000:.3g} kB"


DRAWINGS = {"round": communication_round, "hooks": hooks, "traffic": traffic}


def write(folder: Path) -> None:
    """Write each diagram to a file in ``folder``, which pages include."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (folder / f"{name}.html").write_text(draw() + "\n", encoding="utf-8")
