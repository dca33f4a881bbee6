"""The report of `distributor.doctor`: text, JSON, HTML, and one row for hosts that are alike."""

from __future__ import annotations

import json

from distributor.diagnosis.report import (
    Report,
    Status,
    failure,
    merged,
    not_checked,
    ok,
    warning,
)

REPORT = Report(
    (
        ok("Java", "17.0.15"),
        warning("disk", "a <b> folder", "Free space there.", "10.0.0.3"),
        failure("torch", "There is no torch.", "Install torch.", "10.0.0.4"),
        not_checked("run", "an earlier check failed"),
    )
)


def test_text_json_and_html_have_a_row_for_each_check() -> None:
    rows = [line.split() for line in str(REPORT).splitlines()]
    assert rows[0] == ["ok", "Java", "this", "machine", "17.0.15"]
    assert rows[1][:3] == ["warning", "disk", "10.0.0.3"]
    assert rows[2] == ["fix:", "Free", "space", "there."]
    assert str(REPORT).splitlines()[-1] == "1 failure, 1 warning, 1 ok, 1 not checked"

    report = json.loads(REPORT.to_json())
    assert report["counts"] == {status.value: 1 for status in Status}
    assert report["checks"][2] == {
        "name": "torch",
        "status": "failure",
        "found": "There is no torch.",
        "fix": "Install torch.",
        "where": "10.0.0.4",
    }

    html = REPORT._repr_html_()
    assert html.count("<tr>") == 5, "a head and four checks"
    assert "a &lt;b&gt; folder" in html
    assert "<b>Install torch.</b>" in html


def test_hosts_that_are_alike_share_a_row() -> None:
    checks = [ok("torch", "2.9", "one"), ok("torch", "2.9", "two"), ok("disk", "3 GB", "one")]
    checks += [ok("disk", "4 GB", "two"), failure("storage", "missing", "fix", "two")]

    rows = [(row.name, row.found, row.where) for row in merged(checks)]

    assert rows == [
        ("torch", "2.9", "one, two"),
        ("disk", "3 GB; 4 GB", "one, two"),
        ("storage", "missing", "two"),
    ]
