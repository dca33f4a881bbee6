"""The files of conf/: their Spark properties exist, and their YAML and scripts can be parsed."""

from __future__ import annotations

import json
import re
import subprocess
import zipfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.settings_table import ADMIN_DEFAULTS

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
PROPERTIES = sorted(CONF.glob("spark-defaults-*.conf"))
COMPOSED = re.compile(
    r"spark\.(driver|executor|task|worker)\.resource\.gpu\.(amount|discoveryScript|vendor)"
    r"|spark\.kubernetes\.authenticate\.driver\.serviceAccountName"
)
"""Keys that Spark composes of constants."""

pytestmark = [
    pytest.mark.repository,
    pytest.mark.skipif(not CONF.is_dir(), reason="not in a checkout"),
]


def load_all(path: Path) -> list[Any]:
    """Return the documents of a file of YAML."""
    return list(yaml.safe_load_all(path.read_text()))


def properties(path: Path, *, with_examples: bool = False) -> dict[str, str]:
    """Read a properties file; examples are properties in comments."""
    start = r"^(?:# )?" if with_examples else "^"
    found = re.findall(rf"{start}(spark\.\S+) +(\S.*)$", path.read_text(), re.MULTILINE)
    return dict(found)


def is_pyspark(*versions: str) -> bool:
    pyspark: Any = pytest.importorskip("pyspark")
    return str(pyspark.__version__).startswith(versions)


@cache
def constants_of_spark() -> frozenset[str]:
    """Return the texts that start with ``spark.`` in the classes of the installed Spark."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    found: set[str] = set()
    for jar in Path(spec.origin).parent.glob("jars/spark-*.jar"):
        if re.match(r"spark-(common|core|kubernetes|yarn|network|launcher)", jar.name):
            with zipfile.ZipFile(jar) as classes:
                for name in classes.namelist():
                    if name.endswith(".class"):
                        found |= _constants(classes.read(name))
    return frozenset(found)


def _constants(content: bytes) -> set[str]:
    """Return the entries of a class's constant pool that are keys: a tag, a length, the text."""
    return {
        match[2].decode()
        for match in re.finditer(rb"\x01(\x00.)(spark\.[\w.\-]+)", content, re.DOTALL)
        if int.from_bytes(match[1], "big") == len(match[2])
    }


def is_known(key: str) -> bool:
    """Return whether Spark has a property, or a prefix for names that users choose."""
    parts = key.split(".")
    prefixes = {".".join(parts[:count]) + "." for count in range(2, len(parts))}
    known = constants_of_spark()
    return key in known or bool(prefixes & known) or COMPOSED.fullmatch(key) is not None


@pytest.mark.parametrize("path", PROPERTIES, ids=lambda path: path.stem)
def test_every_property_exists(path: Path) -> None:
    if not is_pyspark("4."):
        pytest.skip("the files are for Spark 4")
    assert not is_known("spark.executor.coers"), "the test could not fail"
    keys = properties(path, with_examples=True)
    own = {key for key in keys if key.startswith("spark.distributor.")}
    assert own <= {each.key for each in ADMIN_DEFAULTS.values()}
    assert len(keys) > len(own)
    assert {key for key in keys if key not in own and not is_known(key)} == set()


def test_the_defaults_file_has_all_keys_and_sets_none() -> None:
    path = CONF / "spark-defaults-distributor.conf"
    assert properties(path) == {}
    documented = properties(path, with_examples=True)
    assert {each.key for each in ADMIN_DEFAULTS.values()} <= documented.keys()


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: path.name)
def test_yaml_can_be_parsed(path: Path) -> None:
    assert load_all(path)


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_valid(path: Path) -> None:
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def properties_of(file: str) -> dict[str, str]:
    """Return the Spark properties in a platform's file."""
    path = CONF / file
    if path.suffix == ".txt":  # of Dataproc
        lines = path.read_text().split()
        return dict(line.removeprefix("spark:").split("=") for line in lines)
    if path.suffix == ".yaml":
        conf: dict[str, str] = load_all(path)[0]["spec"]["sparkConf"]
        return conf
    found = json.loads(path.read_text())
    if isinstance(found, dict):
        conf = found["spark_conf"]
        return conf
    [conf] = [each["Properties"] for each in found if each["Classification"] == "spark-defaults"]
    return conf


PLATFORMS = (
    "databricks/cluster.json",
    "dataproc/properties.txt",
    "emr/cluster.json",
    "emr/gpu-cluster.json",
    "kubernetes/spark-application.yaml",
)


@pytest.mark.parametrize("file", PLATFORMS)
def test_every_property_of_a_platform_exists(file: str) -> None:
    if not is_pyspark("4."):
        pytest.skip("the files are for Spark 4")
    found = properties_of(file)
    assert all(isinstance(value, str) for value in found.values())
    own = {each.key for each in ADMIN_DEFAULTS.values()}
    assert [key for key in found if key not in own and not is_known(key)] == []


def test_the_network_policies_open_the_ports_of_the_properties() -> None:
    policies = load_all(CONF / "kubernetes" / "network-policy.yaml")
    conf = properties(CONF / "spark-defaults-kubernetes.conf")
    opened = {
        policy["spec"]["podSelector"]["matchLabels"]["spark-role"]: {
            f"{port['port']}-{port.get('endPort', port['port'])}"
            for rule in policy["spec"]["ingress"]
            for port in rule["ports"]
        }
        for policy in policies
    }
    driver = ("spark.driver.port", "spark.driver.blockManager.port", "spark.distributor.hub.port")
    [pod] = load_all(CONF / "executor-pod-template.yaml")
    [sysctl] = pod["spec"]["securityContext"]["sysctls"]
    local = sysctl["value"].replace(" ", "-")
    assert opened == {
        "driver": {f"{conf[key]}-{conf[key]}" for key in driver},
        "executor": {conf["spark.distributor.rank.ports"], local},
    }
