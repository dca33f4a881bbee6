"""The files of conf/: their Spark properties exist, and those that can be used here are used."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import facts_in
from support.project_files import load_all_yaml, load_yaml, requirements, setup_cfg
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


def test_the_pod_template() -> None:
    pod = load_yaml(CONF / "executor-pod-template.yaml")
    assert (pod["apiVersion"], pod["kind"]) == ("v1", "Pod")
    spec = pod["spec"]
    [container] = spec["containers"]
    conf = properties(CONF / "spark-defaults-kubernetes.conf")
    assert container["name"] == conf["spark.kubernetes.executor.podTemplateContainerName"]
    template = ROOT / conf["spark.kubernetes.executor.podTemplateFile"]
    assert template == CONF / "executor-pod-template.yaml"

    volumes = {volume["name"]: volume["emptyDir"] for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts == {
        "/dev/shm": {"medium": "Memory", "sizeLimit": "64Gi"},
        "/opt/spark/work-dir": {},
        "/tmp": {},
    }
    assert len(volumes) == len(mounts)

    [sysctl] = spec["securityContext"]["sysctls"]
    first, last = map(int, sysctl["value"].split())
    assert sysctl["name"] == "net.ipv4.ip_local_port_range"
    assert 1024 <= first < last < 65536
    assert f"USER {spec['securityContext']['runAsUser']}\n" in (CONF / "Dockerfile").read_text()


def test_the_drivers_service_has_the_ports_of_the_properties() -> None:
    service = load_yaml(CONF / "driver-service.yaml")
    conf = properties(CONF / "spark-defaults-kubernetes.conf", with_examples=True)
    assert service["spec"]["clusterIP"] == "None", "headless, as text"
    assert {port["name"]: str(port["port"]) for port in service["spec"]["ports"]} == {
        "driver": conf["spark.driver.port"],
        "block-manager": conf["spark.driver.blockManager.port"],
        "hub": conf["spark.distributor.hub.port"],
    }
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    assert namespace == conf["spark.kubernetes.namespace"]
    assert conf["spark.driver.host"].startswith(f"{name}.{namespace}.svc.")


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
        conf: dict[str, str] = load_yaml(path)["spec"]["sparkConf"]
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


def test_the_spark_application_is_the_properties_and_the_pod_template() -> None:
    application = load_yaml(CONF / "kubernetes" / "spark-application.yaml")
    spec, executor = application["spec"], application["spec"]["executor"]
    conf = properties(CONF / "spark-defaults-kubernetes.conf")
    template = load_yaml(ROOT / conf.pop("spark.kubernetes.executor.podTemplateFile"))
    del conf["spark.kubernetes.executor.podTemplateContainerName"]  # the operator has its own
    assert conf == spec["sparkConf"] | {
        "spark.kubernetes.namespace": application["metadata"]["namespace"],
        "spark.kubernetes.container.image": spec["image"],
        "spark.kubernetes.container.image.pullPolicy": spec["imagePullPolicy"],
        "spark.kubernetes.authenticate.driver.serviceAccountName": spec["driver"]["serviceAccount"],
        "spark.executor.instances": str(executor["instances"]),
        "spark.executor.cores": str(executor["cores"]),
        "spark.executor.memory": executor["memory"],
        "spark.executor.memoryOverhead": executor["memoryOverhead"],
    }
    template["spec"]["containers"][0]["name"] = "spark-kubernetes-executor"
    assert executor["template"]["spec"] == template["spec"]
    assert f"ARG SPARK={spec['sparkVersion']}\n" in (CONF / "Dockerfile").read_text()


def test_the_network_policies_open_the_ports_of_the_properties() -> None:
    policies = load_all_yaml(CONF / "kubernetes" / "network-policy.yaml")
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
    [sysctl] = load_yaml(CONF / "executor-pod-template.yaml")["spec"]["securityContext"]["sysctls"]
    local = sysctl["value"].replace(" ", "-")
    assert opened == {
        "driver": {f"{conf[key]}-{conf[key]}" for key in driver},
        "executor": {conf["spark.distributor.rank.ports"], local},
    }
    assert load_all_yaml(CONF / "kubernetes" / "rbac.yaml")


def test_the_image_has_versions_that_the_package_supports() -> None:
    specifiers: Any = pytest.importorskip("packaging.specifiers")
    accepted = requirements("spark", "train")
    text = (CONF / "Dockerfile").read_text()
    versions = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))

    assert versions["TORCH"] in specifiers.SpecifierSet(accepted["torch"])
    assert f"torch=={versions['TORCH']}\n" in (CONF / "constraints-cpu.txt").read_text()
    assert versions["SPARK"] in specifiers.SpecifierSet(accepted["pyspark"])
    assert f"Python :: {versions['PYTHON']}\n" in setup_cfg()["metadata"]["classifiers"] + "\n"
    # Spark is in the image; torch has a version of its own.
    installed = dict(re.findall(r'^ +"([\w-]+)(>=\S+)"', text, re.MULTILINE))
    assert installed == {
        name: version
        for name, version in accepted.items()
        if name not in ("pyspark", "torch", "numpy")  # pandas requires numpy
    }


# No heartbeat falls into the start or the end of Spark, which then warns that it failed.
USES_THE_FILES = """
import json, sys
from pathlib import Path
from pyspark.sql import SparkSession

spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.ui.showConsoleProgress", "false")
    .config("spark.executor.heartbeatInterval", "100s")
    .getOrCreate()
)
from distributor import TorchDistributor

def train():
    import os
    print("printed by the rank")
    return os.environ.get("DISTRIBUTOR_CACHE")

distributor = TorchDistributor(2, local_mode=False, use_gpu=False, timeout=120, pool="reserved")
distributor.run(train)
pool = spark.sparkContext._jsc.sc().getPoolForName("reserved").get()
facts = {
    "warm": distributor.warm,
    "log_dir": str(distributor.log_dir),
    "logs": sorted(path.read_text() for path in Path(distributor.log_dir).rglob("*.stdout")),
    "cache": spark.conf.get("spark.distributor.cacheDir"),
    "weight": pool.weight(),
    "minShare": pool.minShare(),
}
print("FACTS " + json.dumps(facts))
spark.stop()
"""


@pytest.mark.spark
def test_a_run_uses_the_defaults_the_pools_and_the_log_settings(
    run_driver: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "conf"
    folder.mkdir()
    shutil.copy(CONF / "log4j2.properties", folder)
    text = (CONF / "spark-defaults-distributor.conf").read_text()
    wanted = r"spark\.(?:scheduler\.|distributor\.(?:warm|logDir|cacheDir))"
    text = re.sub(rf"^# ({wanted})", r"\1", text, flags=re.MULTILINE)
    text = text.replace("/opt/spark/conf/fairscheduler.xml", str(CONF / "fairscheduler.xml"))
    text = text.replace(" /var/", f" {tmp_path}/")
    (folder / "spark-defaults.conf").write_text(text)

    done = run_driver(USES_THE_FILES, env={"SPARK_CONF_DIR": str(folder)})
    facts = facts_in(done)

    assert facts["warm"] is False
    assert facts["log_dir"] == str(tmp_path / "log" / "distributor")
    assert facts["logs"] == ["printed by the rank\n"] * 2
    assert facts["cache"] == str(tmp_path / "cache" / "distributor")
    [reserved] = ET.parse(CONF / "fairscheduler.xml").findall("pool[@name='reserved']")
    assert str(facts["weight"]) == reserved.findtext("weight")
    assert str(facts["minShare"]) == reserved.findtext("minShare")
    assert [line for line in done.stderr.splitlines() if re.match(r"[\d/: ]+WARN ", line)] == []


@pytest.mark.spark
def test_the_resource_profile_applies_to_a_job(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_pyspark("4."):
        pytest.skip("mapInArrow of PySpark 3.5 has no profile")
    task_profile = runpy.run_path(str(CONF / "resource_profile.py"))["task_profile"]
    # The shared session's executors would run the system's Python.
    monkeypatch.setattr(spark.sparkContext, "pythonExec", sys.executable)
    whole = task_profile(gpus=1, cpus=8)
    assert {name: request.amount for name, request in whole.taskResources.items()} == {
        "cpus": 8.0,
        "gpu": 1.0,
    }

    def cpus(batches: Any) -> Any:
        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"cpus": [context.cpus()]})

    frame = spark.range(1, numPartitions=1)
    rows = frame.mapInArrow(cpus, "cpus long", profile=task_profile(cpus=2)).collect()
    assert [row.cpus for row in rows] == [2]
    assert [row.cpus for row in frame.mapInArrow(cpus, "cpus long").collect()] == [1]
