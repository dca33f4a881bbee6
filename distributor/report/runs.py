"""The runs of this user: which there are, and the page of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distributor.core.files import write_atomically
from distributor.core.text import duration, escaped
from distributor.core.versions import require_jinja
from distributor.errors import LogError
from distributor.report.event_log import (
    SUFFIX,
    is_being_written,
    logs_in,
    read_ends,
    runs_folder,
)
from distributor.report.summary import read_summary
from distributor.report.verdict import Verdict


def save_page(
    run: str | os.PathLike[str] | None = None, path: str | os.PathLike[str] | None = None
) -> Page:
    """Save the page of a run: an HTML file that explains it, and needs no network.

    Parameters
    ----------
    run : str or path, optional
        The run's id, a unique beginning of it, or the path of its event log. By default it is this
        user's latest run.
    path : str or path, optional
        The file, which is replaced if it exists. By default it is ``report-<run id>.html`` in the
        working folder.

    Returns
    -------
    Page
        The page, which a notebook shows.

    Raises
    ------
    LogError
        If there is no such run or more than one, or its event log cannot be read.
    OSError
        If the page cannot be written.

    Examples
    --------
    >>> TorchDistributor(2).run(train)  # doctest: +SKIP
    >>> distributor.save_page(path="report.html")  # doctest: +SKIP
    """
    require_jinja("The page of a run")
    from distributor.report.page import render

    summary = read_summary(find_log(run))
    target = Path(path or f"report-{summary['run']}.html").absolute()
    if not target.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {target.parent} for {target.name}.")
    html = render(summary)
    write_atomically(target, html.encode(errors="backslashreplace"))
    return Page(target, summary, html)


class Page:
    """The page of a run, as `save_page` returns it. A notebook shows it.

    Parameters
    ----------
    path : Path
        The file.
    summary : dict
        What it shows, as plain data.
    html : str
        Its text.
    """

    def __init__(self, path: Path, summary: dict[str, Any], html: str) -> None:
        self.path = path
        self.summary = summary
        self._html = html

    def __repr__(self) -> str:
        return f"<Page of {self.summary['run']}: {self.path}>"

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 720px; border: 0"
        return f'<iframe sandbox srcdoc="{escaped(self._html)}" style="{style}"></iframe>'


def find_log(run: str | os.PathLike[str] | None = None) -> Path:
    """Return the event log of a run.

    Parameters
    ----------
    run : str or path, optional
        As in `save_page`.

    Raises
    ------
    LogError
        If there is no such run, or more than one.
    """
    folder = runs_folder()
    if run is not None and (os.sep in os.fspath(run) or os.path.isfile(run)):
        path = Path(run).absolute()
        return path / f"events{SUFFIX}" if os.path.isdir(path) else path
    logs = logs_in(folder)
    if not logs:
        raise LogError(
            f"There is no run in {folder} yet. Runs of this user on this machine leave their event "
            "logs there, unless event_log is off."
        )
    if run is None:
        return logs[0]
    found = [log for log in logs if log.stem.startswith(os.fspath(run))]
    if len(found) == 1 or (found and found[-1].stem == run):
        return found[-1]
    if found:
        names = [*(log.stem for log in found[:3]), *(["..."] if len(found) > 3 else [])]
        raise LogError(
            f"{os.fspath(run)!r} is the beginning of {len(found)} runs: {', '.join(names)}."
        )
    raise LogError(
        f"There is no run {os.fspath(run)!r} in {folder}. The latest are "
        f"{', '.join(log.stem for log in logs[:3])}; distributor report --list lists all."
    )


def list_runs() -> Iterator[dict[str, Any]]:
    """Yield the run, name, state, duration, goodput and size of this user's runs, latest first.

    A log that cannot be read has its error as the state.
    """
    for path in logs_in(runs_folder()):
        try:
            first, last = read_ends(path)
        except LogError as error:
            yield {"run": path.stem, "name": "", "state": str(error)} | dict.fromkeys(
                ("seconds", "goodput", "bytes")
            )
            continue
        is_lost = last["event"] != "end" and not is_being_written(path)
        yield {
            "run": path.stem,
            "name": first["name"],
            "state": last["state"] if last["event"] == "end" else "lost" if is_lost else "running",
            "seconds": round(last["at"] - first["at"], 3),
            "goodput": last.get("goodput"),
            "bytes": path.stat().st_size,
        }


def as_text(summary: dict[str, Any]) -> str:
    """Return a run's state, and the verdict, as a few lines."""
    goodput = summary["goodput"]
    facts = [f"Run {summary['run']} of {summary['name']}: {summary['state']}"]
    facts.append(duration(summary["seconds"]))
    if goodput is not None:
        facts.append(f"goodput {100 * goodput:.0f} %")
    recent = summary["recent"] and Verdict(**summary["recent"])
    return f"{', '.join(facts)}\n{Verdict(**summary['verdict']).with_recent(recent)}"
