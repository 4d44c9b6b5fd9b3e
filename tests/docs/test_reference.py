"""The reference: every public name once, and signatures that can be read."""

import collections
import importlib
import inspect
import re

import pytest

from docs import readable

PACKAGES = ("attacks", "data", "diagnosis", "models", "profiling", "simulation")


def public() -> set[str]:
    names = {f"fedrax.{name}" for name in importlib.import_module("fedrax").__all__ if name != "tree"}
    short = {name.rpartition(".")[2]: getattr(importlib.import_module("fedrax"), name[7:]) for name in names}
    for package in PACKAGES:
        module = importlib.import_module(f"fedrax.{package}")
        again = {name for name in module.__all__ if short.get(name) is getattr(module, name)}
        names |= {f"fedrax.{package}.{name}" for name in set(module.__all__) - again}
    return names


def thing(name: str) -> object:
    module, _, short = name.rpartition(".")
    return getattr(importlib.import_module(module), short)


def shown(name: str) -> list[str]:
    """The texts of a name's signature and fields."""
    value = thing(name)
    if not inspect.isclass(value):
        made = readable.signature(None, "function", name, value, {}, "", "")
        return [text for text in made or () if text]
    return [readable.class_text(value), *(field.type for field in readable.fields(value))]


def test_every_public_name_is_documented_once():
    counted = collections.Counter(readable.documented())
    assert [name for name, times in counted.items() if times > 1] == []
    assert public() - counted.keys() == set()


def test_the_reference_shows_no_internals():
    internal = ("Annotated", "Bound(", "<f", "<l", "~", "TypeAlias", " _", "(_")
    known = set(readable.homes().values())
    for name in readable.documented():
        for text in shown(name):
            assert not any(part in text for part in internal), (name, text)
            assert set(re.findall(r"fedrax(?:\.\w+)+", text)) <= known, (name, text)


def test_types_and_defaults_are_those_of_the_source():
    from fedrax import LocalSGD, Result, Scaffold, simulate
    from fedrax.robust.attacked_clients import Attacked

    assert readable.class_text(Scaffold) == "(local=LocalSGD(), server_optimizer=SGD(), option='II')"
    assert readable.class_text(Result) == ""
    fields = {field.name: field for field in readable.fields(LocalSGD)}
    assert fields["lr"].type == "fedrax.contract.Positive" and fields["lr"].text == "Step size eta."
    assert fields["order"].type == "Literal['shuffle', 'stored', 'replacement']"
    attack = next(field for field in readable.fields(Attacked) if field.name == "attack")
    assert attack.type.startswith("fedrax.robust.attacked_clients.Scaling | ")  # not fedrax.attacks.Attack
    text = readable.call_text(simulate, is_method=False)
    assert text is not None and "params: fedrax.tree.Tree | None = None, " in text


@pytest.mark.parametrize("name", ["fedrax.compare"])
def test_parameters_told_in_a_row_become_a_list(name):
    lines = (inspect.getdoc(thing(name)) or "").split("\n")
    readable.docstring(None, "function", name, thing(name), {}, lines)
    told = [line for line in lines if line.startswith(":param ")]
    assert len(told) > 5 and all(len(line.split(": ", 1)[1]) > 5 for line in told)
    assert not any(line.startswith(":param") and ":param" in line[1:] for line in lines)
