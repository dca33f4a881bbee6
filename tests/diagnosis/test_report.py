"""The report of `distributor.doctor`: text, JSON, HTML, and one row for hosts that are alike."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from distributor.core.spelling import Spelling
from distributor.diagnosis.examination import HUB_FIX
from distributor.diagnosis.report import (
    Report,
    Status,
    failure,
    hosts_text,
    merged,
    not_checked,
    ok,
    warning,
)
from distributor.spark.java import java_major

REPORT = Report(
    (
        ok("Java", "17.0.15"),
        warning("disk", "a <b> folder", "Free space there.", "10.0.0.3"),
        failure("torch", "There is no torch.", "Install torch.", "10.0.0.4"),
        not_checked("run", "an earlier check failed"),
    )
)


def test_failures_and_warnings_are_found() -> None:
    assert [check.name for check in REPORT.failures] == ["torch"]
    assert [check.name for check in REPORT.warnings] == ["disk"]


def test_text_has_a_row_for_each_check_and_its_fix() -> None:
    rows = [line.split() for line in str(REPORT).splitlines()]

    assert rows[0] == ["ok", "Java", "this", "machine", "17.0.15"]
    assert rows[1][:3] == ["warning", "disk", "10.0.0.3"]
    assert rows[2] == ["fix:", "Free", "space", "there."]
    assert rows[3][:2] == ["failure", "torch"]
    assert str(REPORT).splitlines()[-1] == "1 failure, 1 warning, 1 ok, 1 not checked"


def test_long_texts_are_wrapped_and_paths_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = "/a" * 60

    lines = str(Report((ok("disk", "much free space " * 10 + path),))).splitlines()

    assert any(line.strip() == path for line in lines)
    assert all(len(line) <= 80 for line in lines if path not in line)


def test_json_has_all_checks_and_counts() -> None:
    report = json.loads(REPORT.to_json())

    assert report["counts"] == {status.value: 1 for status in Status}
    assert report["checks"][2] == {
        "name": "torch",
        "status": "failure",
        "found": "There is no torch.",
        "fix": "Install torch.",
        "where": "10.0.0.4",
    }


def test_html_is_a_table_with_escaped_texts() -> None:
    text = REPORT._repr_html_()

    assert text.startswith("<table>")
    assert text.count("<tr>") == 5, "a head and four checks"
    assert "a &lt;b&gt; folder" in text
    assert "<b>Install torch.</b>" in text


def test_fixes_name_settings_as_their_api_does() -> None:
    options = Spelling(has_options=True)
    assert " and set hub_port (" in failure("network", "no path", HUB_FIX).fix
    assert " and set --hub-port (" in failure("network", "no path", HUB_FIX).spelled(options).fix


def test_hosts_that_are_alike_share_a_row() -> None:
    checks = [ok("torch", "2.9", "one"), ok("torch", "2.9", "two"), ok("disk", "3 GB", "one")]
    checks += [ok("disk", "4 GB", "two"), failure("storage", "missing", "fix", "two")]

    rows = [(row.name, row.found, row.where) for row in merged(checks)]

    assert rows == [
        ("torch", "2.9", "one, two"),
        ("disk", "3 GB; 4 GB", "one, two"),
        ("storage", "missing", "two"),
    ]


def test_many_hosts_are_counted() -> None:
    assert hosts_text(["b", "a", "a"]) == "a, b"
    assert hosts_text("edcba") == "a, b, c and 2 more"


@pytest.mark.parametrize(
    ("version", "major"), [("17.0.15", 17), ("1.8.0_392", 8), ("21", 21), ("", 0)]
)
def test_the_major_version_of_java(version: str, major: int) -> None:
    assert java_major(version) == major


def test_the_report_is_imported_only_when_it_is_used() -> None:
    source = """
        import sys, distributor
        assert callable(distributor.doctor)
        print([name for name in sys.modules if name.startswith("distributor.diagnosis.")])
    """.replace("\n        ", "\n")
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n", done.stderr
