"""Errors name things as the API does that the user has called."""

from __future__ import annotations

import pickle

import pytest

from distributor.core.spelling import Message, Spelling

CLI = Spelling("distributor run", "--nproc", run_on_cpus="pass --cpu", has_options=True)
TEXT = "{pool} is {value!r}, and {num_processes} is {ranks}. For CPUs {run_on_cpus}."


def refuse() -> None:
    raise RuntimeError(Message(TEXT, value="{num_processes}", ranks=2))


def test_a_message_names_settings_as_torch_distributor_does_by_default() -> None:
    with pytest.raises(RuntimeError, match=r"^pool is '{num_processes}', and num_processes is 2"):
        refuse()


def test_an_error_that_passes_an_api_has_its_names() -> None:
    with pytest.raises(RuntimeError) as caught, CLI.renames():
        refuse()
    assert str(caught.value) == (
        "--pool is '{num_processes}', and --nproc is 2. For CPUs pass --cpu."
    )


def test_other_errors_are_unchanged() -> None:
    with pytest.raises(OSError, match=r"\{pool\}"), CLI.renames():
        raise OSError(2, "{pool}")


def test_a_message_is_pickled_as_text() -> None:
    message = pickle.loads(pickle.dumps(Message("{pool} has braces: {value}", value={1})))
    assert (type(message), message) == (str, "pool has braces: {1}")
