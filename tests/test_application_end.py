"""A run whose Spark application ends says so at once, wherever the run is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import facts_in, needs_java
from support.cluster import cluster_on
from support.machines import machines_on_loopback
from support.pages import texts_of_error
from support.waiting import until

PROGRAM = """
    import json, os, signal, sys, threading, time

    from pyspark.sql import SparkSession

    from distributor import TorchDistributor


    def session():
        builder = SparkSession.builder.master("local-cluster[2,1,1024]")
        builder = builder.config("spark.ui.enabled", "false").config("spark.log.level", "OFF")
        return builder.getOrCreate()


    def train(path=None):
        import threading

        if path:
            open(path, "w").close()
            threading.Event().wait()
        return "done"


    def outcome(*args):
        began = time.monotonic()
        try:
            return {"value": runner.run(train, *args)}
        except Exception as error:
            seconds = time.monotonic() - began
            return {"error": type(error).__name__, "message": str(error), "seconds": seconds}


    STARTED = os.path.abspath("started")


    def end_once_it_runs(end):
        def wait():
            open(STARTED).read()
            end()

        os.mkfifo(STARTED)
        thread = threading.Thread(target=wait)
        thread.start()
        ending = outcome(STARTED)
        thread.join()  # Spark makes no new context before it has stopped the old one
        return ending


    def stop():
        spark.sparkContext._jsc.sc().stop()  # as Spark does when the cluster manager ends it


    def stop_here():
        spark.stop()


    def kill():
        os.kill(spark.sparkContext._gateway.proc.pid, signal.SIGKILL)


    end, max_failures = globals()[sys.argv[1]], int(sys.argv[2])
    spark = session()
    runner = TorchDistributor(1, local_mode=False, use_gpu=False, max_failures=max_failures)
    facts = {"first": outcome()}
    facts["running"] = end_once_it_runs(end)
    facts["after"] = outcome()
    if end is not kill:  # PySpark starts no second JVM
        spark.stop()
        spark = session()
        facts["again"] = outcome()
    print("FACTS " + json.dumps(facts))
"""


@needs_java
@pytest.mark.spark
@pytest.mark.parametrize(
    ("end", "max_failures"),
    [
        pytest.param("stop", "0", marks=pytest.mark.slow),
        pytest.param("stop", "2", marks=pytest.mark.slow),
        pytest.param("kill", "0", marks=pytest.mark.slow),
    ],
)
def test_the_end_of_the_application_is_the_error(
    run_driver: Any, end: str, max_failures: str
) -> None:
    facts = facts_in(run_driver(PROGRAM, end, max_failures))

    assert facts["first"] == {"value": "done"}
    assert facts.get("again", facts["first"]) == {"value": "done"}
    for ending in (facts["running"], facts["after"]):
        assert ending["error"] == "ApplicationEnded", ending
        texts = texts_of_error("ApplicationEnded")
        assert any(text.search(ending["message"]) for text in texts), ending
        assert {"stop": "spark.stop()", "kill": "a new process"}[end] in ending["message"]
    assert facts["after"]["seconds"] < 5


@needs_java
@pytest.mark.slow
@pytest.mark.spark
def test_a_session_that_this_process_has_stopped_is_named(run_driver: Any) -> None:
    facts = facts_in(run_driver(PROGRAM, "stop_here", "2"))

    assert facts["running"]["error"] == "ApplicationEnded"
    assert "stop it (spark.stop()) if it is not, and make a new one" in facts["running"]["message"]
    assert facts["after"]["error"] == "RuntimeError"
    assert "there is none: its session has been stopped. Make one" in facts["after"]["message"]
    assert facts["again"] == {"value": "done"}


WAITING = """
    import threading

    def stop_when_told():
        _channel.makefile().readline()
        spark.sparkContext._jsc.sc().stop()

    threading.Thread(target=stop_when_told).start()
    runner = TorchDistributor(1, local_mode=False, use_gpu=False, start_timeout=300)
    try:
        runner.run(lambda: 1)
    except Exception as error:
        send(error=type(error).__name__)
"""


@needs_java
@pytest.mark.slow
@pytest.mark.spark
def test_a_run_that_waits_for_executors_notices_the_end(tmp_path: Path) -> None:
    with (
        machines_on_loopback(2) as machines,  # no worker is among them
        cluster_on(machines, tmp_path) as cluster,
        cluster.driver(WAITING) as driver,
    ):
        until(lambda: "Waiting: " in driver.log.read_text(), "it waits", 90)
        driver.send("stop")
        assert driver.receive("error", 30)["error"] == "ApplicationEnded"
