"""The diagrams are well-formed, fit their width, and show the contract and the bytes as they are."""

from __future__ import annotations

import inspect
import re
from xml.etree import ElementTree

import pytest

from docs import diagrams
from fedrax import Algorithm


def texts(drawing: str, kind: str | None = None) -> list[tuple[float, str, str]]:
    """Position, alignment and text of each line."""
    svg = ElementTree.fromstring(drawing)[0]
    lines = [one for one in svg if one.tag.endswith("text") and kind in (None, one.get("class"))]
    return [(float(one.get("x", "nan")), one.get("text-anchor", ""), "".join(one.itertext())) for one in lines]


@pytest.mark.parametrize("draw", [diagrams.communication_round, diagrams.hooks])
def test_text_fits_the_width_of_a_telephone(draw):
    drawing = draw()
    assert f'viewBox="0 0 {diagrams.WIDTH} ' in drawing and "<title>" in drawing and "<desc>" in drawing
    for x, anchor, text in texts(drawing):
        width = 5.5 * len(text)  # of a letter of 12 pixels on average
        left = x - width / 2 if anchor == "middle" else x
        assert left >= 0 and left + width <= diagrams.WIDTH, text


def test_the_functions_of_the_contract_are_shown_with_their_arguments():
    code = "".join(text for _, _, text in texts(diagrams.hooks(), "code"))
    shown = dict(re.findall(r"(\w+)\(([^)]*)\)", re.sub(r"\s", "", code)))
    assert shown.keys() == {"init", "init_client", "broadcast", "client", "receive", "server", "params", "personal"}
    for name, arguments in shown.items():
        assert arguments.split(",") == [*inspect.signature(getattr(Algorithm, name)).parameters][1:]


@pytest.mark.slow
def test_bytes_are_those_of_runs():
    sizes = [text for _, _, text in texts(diagrams.traffic()) if text.endswith(" kB") and ": " in text]
    fedavg, scaffold, personal, adapters = (float(text.split()[-2]) for text in sizes[::2])
    layers = [64 * 32 + 32, 32 * 10 + 10]
    assert fedavg == pytest.approx(4 * sum(layers) / 1000, rel=1e-2)
    assert scaffold == pytest.approx(2 * fedavg, rel=1e-2)
    assert personal == pytest.approx(4 * layers[0] / 1000, rel=1e-2)
    assert adapters == pytest.approx(4 * 4 * (64 + 32 + 32 + 10) / 1000, rel=1e-2)  # A and B of two matrices, rank 4
