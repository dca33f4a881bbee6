"""Errors name things as the API does that the user has called."""

from __future__ import annotations

import pickle

import pytest

from distributor.core.spelling import Message, Spelling

CLI = Spelling("distributor run", "--nproc", run_on_cpus="pass --cpu", has_options=True)
TEXT = "{pool} is {value!r}, and {num_processes} is {ranks}. For CPUs {run_on_cpus}."


def refuse() -> None:
    raise RuntimeError(Message(TEXT, value="{num_processes}", ranks=2))


def test_a_message_has_the_names_of_torch_distributor_or_of_the_api_that_it_passes() -> None:
    with pytest.raises(RuntimeError, match=r"^pool is '{num_processes}', and num_processes is 2"):
        refuse()
    with pytest.raises(RuntimeError) as caught, CLI.renames():
        refuse()
    assert str(caught.value) == (
        "--pool is '{num_processes}', and --nproc is 2. For CPUs pass --cpu."
    )
    message = pickle.loads(pickle.dumps(Message("{pool} has braces: {value}", value={1})))
    assert (type(message), message) == (str, "pool has braces: {1}")
