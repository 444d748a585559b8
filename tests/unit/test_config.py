"""Settings: recipes in and out, what is refused, who wins; nothing heavy is imported for it."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest
import yaml

from slipstream.config import (
    AT_LEAST,
    AT_MOST,
    POSITIVE,
    REQUIRED,
    SHARES,
    CacheConfig,
    DataConfig,
    DoctorConfig,
    EvalConfig,
    ExportConfig,
    PrepareConfig,
    RegenerateConfig,
    TrainConfig,
    UserError,
    check_ranges,
    check_required,
    default_gamma,
    from_dict,
    nearest,
    read_yaml,
    to_yaml,
)

CONFIGS = (
    PrepareConfig, DataConfig, RegenerateConfig, TrainConfig, CacheConfig, EvalConfig, ExportConfig,
    DoctorConfig,
)  # fmt: skip
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def other_value(field: dataclasses.Field, hint: object) -> object:
    """A value that is not the default, of the field's type."""
    text = str(hint)
    if text.startswith("typing.Literal"):
        return next(v for v in typing.get_args(hint) if v != field.default)
    if "tuple[str" in text:
        return ("a b", "c")
    if "tuple[int" in text:
        return (1, 3)
    if "tuple[float" in text:
        return (0.5, 0.25)
    if "bool" in text:
        return not field.default
    if "float" in text:
        return 0.125
    return 77 if "int" in text else "some: 'text'"


@pytest.mark.parametrize("cls", CONFIGS)
def test_yaml_written_and_read_gives_the_same_settings_defaults_and_others(cls):
    hints = typing.get_type_hints(cls)
    other = cls(**{f.name: other_value(f, hints[f.name]) for f in dataclasses.fields(cls)})
    assert all(a != b for a, b in zip(vars(other).values(), vars(cls()).values(), strict=True))
    for config in (cls(), other):
        back = from_dict(cls, yaml.safe_load(to_yaml(config)), "recipe.yaml")
        assert back == config
        assert [type(v) for v in vars(back).values()] == [type(v) for v in vars(config).values()]


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_every_recipe_that_ships_loads_and_is_in_range(path):
    config = from_dict(TrainConfig, read_yaml(path), str(path))
    check_ranges(config)
    assert config != TrainConfig()


def test_there_are_recipes():
    assert RECIPES


def test_numbers_come_as_yaml_writes_them():
    config = from_dict(TrainConfig, yaml.safe_load("lr: 6e-4\nepochs: 3\ngamma: null\nmax-anchors: 7"), "r")
    assert (config.lr, config.epochs, config.gamma, config.max_anchors) == (6e-4, 3.0, None, 7)
    assert type(config.epochs) is float
    assert from_dict(TrainConfig, {"target_layer_ids": 3}, "r").target_layer_ids == (3,)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"max_ancors": 1}, r"r\.yaml: unknown setting 'max_ancors' \(did you mean 'max_anchors'\?\)"),
        ({"zzz": 1}, r"r\.yaml: unknown setting 'zzz'$"),
        ({1: 2}, r"r\.yaml: unknown setting 1"),
        ({"layers": "two"}, r"r\.yaml: layers: expected int, found 'two'"),
        ({"layers": 2.5}, r"r\.yaml: layers: expected int, found 2\.5"),
        ({"layers": None}, r"r\.yaml: layers: expected int, found None"),
        ({"plan": 1}, r"r\.yaml: plan: expected bool, found 1"),
        ({"lr": True}, r"r\.yaml: lr: expected float, found True"),
        ({"lr": "quick"}, r"r\.yaml: lr: 'quick' is not a number"),
        ({"dtype": "fp8"}, r"r\.yaml: dtype: 'fp8' is not one of auto, float32, bfloat16"),
        ({"target_layer_ids": [1, "x"]}, r"r\.yaml: target_layer_ids: expected int, found 'x'"),
        ({"betas": [0.9, 0.9, 0.9]}, r"r\.yaml: betas: expected 2 values, found 3"),
    ],
)
def test_a_wrong_key_or_value_is_told_by_recipe_and_key(values, told):
    with pytest.raises(UserError, match=told):
        from_dict(TrainConfig, values, "r.yaml")


def test_nearest_names_a_near_one_or_none():
    assert nearest("exprot", ["eval", "export"]) == " (did you mean 'export'?)"
    assert nearest("qqqqq", ["eval", "export"]) == ""


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_an_empty_recipe_is_no_settings(tmp_path, text):
    (tmp_path / "r.yaml").write_text(text)
    assert read_yaml(tmp_path / "r.yaml") == {}


@pytest.mark.parametrize("cls", [cls for cls in CONFIGS if cls is not DoctorConfig])  # it needs nothing
def test_a_missing_required_setting_is_named_as_flag_and_as_key(cls):
    assert REQUIRED[cls]
    given = cls(
        **{name: ("x",) if "tuple" in str(cls.__annotations__[name]) else "x" for name in REQUIRED[cls]}
    )
    check_required(given, "slipstream verb")
    for name in REQUIRED[cls]:
        flag = "--" + name.replace("_", "-")
        with pytest.raises(UserError, match=f"slipstream verb: {flag} is missing: give it, or {name} in"):
            check_required(dataclasses.replace(given, **{name: type(vars(given)[name])()}), "slipstream verb")


def test_ranges_are_of_settings_that_exist_and_hold_the_defaults():
    names = {f.name for cls in CONFIGS for f in dataclasses.fields(cls)}
    assert {*AT_LEAST, *POSITIVE, *SHARES} <= names
    for cls in CONFIGS:
        check_ranges(cls())


@pytest.mark.parametrize("name", [*AT_LEAST, *POSITIVE, *SHARES])
def test_a_number_out_of_its_range_is_refused_by_its_flag_and_the_bound_itself_is_not(name):
    def check(cls: type, value: float) -> None:
        check_ranges(cls(**{name: (0.5, value) if name == "betas" else value}))

    low = AT_LEAST.get(name, 0)
    inside, outside = (low, low - 1) if name not in POSITIVE else (1e-9, 0)
    for cls in CONFIGS:
        if name not in {f.name for f in dataclasses.fields(cls)}:
            continue
        check(cls, inside)
        for wrong in (outside, float("nan"), float("inf"), *([1] if name in SHARES else [])):
            with pytest.raises(UserError, match=f"^--{name.replace('_', '-')} .*: must be "):
                check(cls, wrong)


@pytest.mark.parametrize("name", AT_MOST)
def test_a_number_above_its_bound_is_refused_by_its_flag(name):
    for cls in (c for c in CONFIGS if name in {f.name for f in dataclasses.fields(c)}):
        check_ranges(cls(**{name: AT_MOST[name]}))
        with pytest.raises(UserError, match=f"^--{name.replace('_', '-')} .*: must be at most "):
            check_ranges(cls(**{name: AT_MOST[name] + 1}))


def test_gamma_follows_the_paper_and_is_never_below_one():
    assert [default_gamma(b) for b in (16, 10, 8)] == [7, 5, 4]
    assert default_gamma(12) == 5
    assert default_gamma(2) == default_gamma(4) == 1
