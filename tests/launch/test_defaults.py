"""Administrators' defaults: their order of precedence, and errors for malformed values."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.settings_table import ADMIN_DEFAULTS, defaults_table, settings_tables

from distributor import TorchDistributor
from distributor.run_spec import Settings
from distributor.settings import admin_defaults

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
VALUES = {  # three texts of a variable or Spark property for each, with the setting's value
    "warm": [("0", False), ("TRUE", True), ("false", False)],
    "hub_port": [("7078", 7078), ("7079", 7079), ("7080", 7080)],
    "rank_ports": [("1-2", "1-2"), ("3-4", "3-4"), ("29500", "29500")],
    "event_log": [("0", False), ("TRUE", True), ("false", False)],
    "log_dir": [("{0}/a", "{0}/a"), ("{0}/b", "{0}/b"), ("{0}/c", "{0}/c")],
}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ADMIN_DEFAULTS.values():
        monkeypatch.delenv(each.variable, raising=False)


@pytest.fixture
def conf(spark: Any) -> Iterator[Any]:
    yield spark.conf
    for each in ADMIN_DEFAULTS.values():
        spark.conf.unset(each.key)


def values(name: str, folder: Path) -> list[tuple[str, Any]]:
    def filled(value: Any) -> Any:
        return value.format(folder) if isinstance(value, str) else value

    return [(filled(text), filled(value)) for text, value in VALUES[name]]


def test_an_argument_takes_precedence_over_a_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, default in admin_defaults(Settings).items():
        (text, value), (_, other), _ = values(name, tmp_path)
        assert getattr(Settings(), name) == default.value
        monkeypatch.setenv(default.variable, "")
        assert getattr(Settings(), name) == default.value, "an empty variable is not set"
        monkeypatch.setenv(default.variable, text)
        assert getattr(Settings(), name) == value
        assert getattr(Settings(**{name: other}), name) == other


@pytest.mark.spark
def test_a_variable_takes_precedence_over_sparks_conf(
    conf: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, default in admin_defaults(Settings).items():
        (text, value), (other_text, other), (_, argument) = values(name, tmp_path)

        def shown(name: str = name, **settings: Any) -> Any:
            runner = TorchDistributor(1, local_mode=True, use_gpu=False, **settings)
            return getattr(runner, name)

        conf.set(default.key, text)
        assert shown() == value
        monkeypatch.setenv(default.variable, other_text)
        assert shown() == other
        assert shown(**{name: argument}) == argument


@pytest.mark.spark
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("warm", "maybe", "must be one of 1, true, 0, false, but is 'maybe'"),
        ("hub_port", "65536", "is a port from 1 to 65535, .* not 65536"),
    ],
)
def test_the_error_for_a_malformed_default_names_its_source(
    name: str, text: str, message: str, conf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = ADMIN_DEFAULTS[name]
    conf.set(default.key, text)
    with pytest.raises(ValueError, match=f"^{default.key} in Spark's conf {message}"):
        TorchDistributor(1, local_mode=True, use_gpu=False)
    monkeypatch.setenv(default.variable, text)
    with pytest.raises(ValueError, match=f"^the environment variable {default.variable} {message}"):
        TorchDistributor(1, local_mode=True, use_gpu=False)


def test_a_local_run_without_a_session_does_not_import_pyspark() -> None:
    program = """
import sys
from distributor import TorchDistributor

assert TorchDistributor(1, use_gpu=False).warm is False
assert not {"pyspark", "torch", "mlflow"} & set(sys.modules)
"""
    env = {**os.environ, "DISTRIBUTOR_WARM": "0"}
    subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=60)


def test_the_page_has_the_tables_of_settings_and_defaults() -> None:
    text = PAGE.read_text()
    assert settings_tables() in text, "run: PYTHONPATH=tests python -m support.settings_table"
    assert defaults_table() in text
