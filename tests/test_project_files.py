"""Files for contributors: what they name exists, and hosted CI covers the versions of setup.cfg."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.project_files import load_yaml, requirements, setup_cfg

from distributor.version import __version__

ROOT = Path(__file__).parents[1]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"

pytestmark = [
    pytest.mark.repository,
    pytest.mark.skipif(not CONTRIBUTING.exists(), reason="not in a checkout"),
]


def jobs_of_ci() -> list[dict[str, str]]:
    jobs = load_yaml(ROOT / ".github/workflows/ci.yml")["jobs"]
    return list(jobs["test"]["strategy"]["matrix"]["include"])


def requirement(name: str) -> Any:
    """Return the versions of a package that setup.cfg accepts."""
    specifiers: Any = pytest.importorskip("packaging.specifiers")
    return specifiers.SpecifierSet(requirements("spark")[name])


def test_hosted_ci_covers_the_versions_of_setup_cfg() -> None:
    jobs = jobs_of_ci()
    claimed = set(
        re.findall(r"Python :: (3\.\d+)$", setup_cfg()["metadata"]["classifiers"], re.MULTILINE)
    )
    assert {job["python"] for job in jobs} == claimed
    pyspark = requirement("pyspark")
    assert all(f"{job['pyspark']}.0" in pyspark for job in jobs)
    assert {"3.5", "4.0", "4.3"} == {job["pyspark"] for job in jobs}, "the ends, and the first of 4"
    torch = requirement("torch")
    assert {job["torch"] for job in jobs} == {"2.4", "newest"}
    assert "2.4.0" in torch
    assert "2.3.1" not in torch, "2.4 is the oldest"


def test_hosted_ci_has_no_versions_that_exclude_each_other() -> None:
    for job in jobs_of_ci():
        python, pyspark = int(job["python"].partition(".")[2]), job["pyspark"]
        assert not (pyspark == "3.5" and python > 11), job
        assert not (pyspark == "4.3" and python < 11), job
        assert not (job["torch"] == "2.4" and python > 12), job


def test_the_hooks_are_the_checks_of_make_lint() -> None:
    [repository] = load_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local", "nothing is downloaded"
    hooks = repository["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    recipe = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    checks = [
        line.strip().replace("$(VENV)", ".venv").replace(" --check", "")
        for line in recipe.splitlines()[1:]
    ]
    assert [hook["entry"].replace(" --force-exclude", "") for hook in hooks] == checks


@pytest.mark.parametrize(
    ("made", "used", "installed"),
    [((), ".venv-lint", ["-e .[lint]"]), ((".venv/.installed",), ".venv", [])],
)
def test_the_checks_need_no_environment_with_all_frameworks(
    tmp_path: Path, made: tuple[str, ...], used: str, installed: list[str]
) -> None:
    for name in ("Makefile", "setup.cfg", "setup.py", "conf/constraints-cpu.txt", *made):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((ROOT / name).read_bytes() if name not in made else b"")
    commands = subprocess.run(
        ["make", "-n", "lint"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"-e '?.\[\w+\]", commands.replace("'", "")) == installed
    assert f"\n{used}/bin/mypy\n" in commands
    assert {"mypy", "lightning"} <= requirements("lint").keys()
    assert not {"ray", "deepspeed", "mlflow"} & requirements("lint").keys()


def test_contributing_names_targets_and_files_that_exist() -> None:
    text = CONTRIBUTING.read_text()
    targets = set(re.findall(r"`?make ([a-z0-9-]+)", text))
    assert {"venv", "lint", "test", "test-all"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in targets if f"\n{name}:" not in makefile] == []
    paths = re.findall(r"(?:distributor|tests|conf|launch)/[\w./-]*\w", text)
    assert len(paths) > 10
    roots = (ROOT, ROOT / "distributor")
    assert [path for path in paths if not any((root / path).exists() for root in roots)] == []


def test_the_layout_has_every_folder_of_the_package() -> None:
    layout = (ROOT / "ARCHITECTURE.md").read_text().partition("\n## Layout\n")[2].split("```")[1]
    folders = {path.parent.name for path in (ROOT / "distributor").glob("*/__init__.py")}
    assert len(folders) > 10
    assert folders - set(re.findall(r"(\w+)/", layout)) == set()


def test_the_recipe_for_a_setting_names_all_its_files() -> None:
    recipe = CONTRIBUTING.read_text().partition("\n## How to add a setting\n")[2]
    recipe = recipe.partition("\n## ")[0]
    files = [*(ROOT / "distributor").rglob("*.py"), ROOT / "tests/test_cli.py"]
    names = {
        str(path.relative_to(ROOT))
        for path in files
        if re.search(r"\bnuma_binding\b", path.read_text())  # it reaches a rank
    }
    assert {"distributor/run/settings.py", "distributor/cli.py"} < names
    assert [name for name in sorted(names) if f"`{name}`" not in recipe] == []


def test_the_changelog_has_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[Unreleased\]\n(?s:.*){re.escape(__version__)}", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["bug_report", "feature_request"])
def test_issue_forms_are_complete(name: str) -> None:
    form = load_yaml(ROOT / f".github/ISSUE_TEMPLATE/{name}.yml")
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids)) >= 3
    assert all(field["attributes"]["label"] for field in form["body"])
