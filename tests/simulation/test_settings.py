"""Settings of a run are keyword arguments that editors and type checkers know."""

from typing import get_type_hints

import pytest

import fedrax
from fedrax import FedraxError, Settings
from fedrax.simulation.settings import FederationOptions, SettingsOptions
from fedrax.simulation.validate import changed_settings


def test_keyword_arguments_are_the_fields_of_settings():
    fields = get_type_hints(Settings, include_extras=True)
    options = get_type_hints(SettingsOptions, include_extras=True)
    assert options == fields
    assert get_type_hints(FederationOptions, include_extras=True).items() <= fields.items()


def test_an_unknown_setting_is_rejected_with_the_nearest_name():
    assert changed_settings(None, {"rounds": 3}) == Settings(rounds=3)
    with pytest.raises(FedraxError, match="unknown setting 'cohort'; did you mean 'cohort_size'"):
        changed_settings(Settings(), {"cohort": 3})


@pytest.mark.parametrize("function", [fedrax.simulate, fedrax.sweep, fedrax.tune])
def test_running_functions_accept_all_settings(function):
    assert str(function.__annotations__["options"]) == "Unpack[SettingsOptions]"
