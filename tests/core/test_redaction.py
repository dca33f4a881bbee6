"""Secrets in the output of ranks are masked, however the stream is cut into chunks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributor.core.text import MASK, Redaction


def shown(env: dict[str, str], parts: list[bytes]) -> bytes:
    """Return the redacted stream when it is read in chunks, with the unshown rest carried over."""
    redaction, rest, whole = Redaction(env), b"", b""
    for number, part in enumerate(parts):
        rest += part
        text, length = redaction.of_stream(rest, last=number == len(parts) - 1)
        whole, rest = whole + text, rest[length:]
    assert rest == b""
    return whole


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "db_password", "AWS_SECRET_ACCESS_KEY", "GOOGLE_CREDENTIALS", "SSH_PRIVATE_KEY"],
)
def test_secrets_are_recognized_by_their_names(name: str) -> None:
    assert Redaction({name: "abcdef"}).of_text("abcdef") == MASK


@pytest.mark.parametrize(
    ("env", "text", "masked"),
    [
        ({"TOKENIZERS_PARALLELISM": "disabled", "MONKEY": "banana"}, "disabled banana", None),
        ({"TOKEN": "1"}, "11", None),
        ({"A_TOKEN": "s3cr3t-value"}, "s3cr3t-valu, s3cr3t-value", f"s3cr3t-valu, {MASK}"),
        ({"PRIVATE_KEY": "line-one\nline-two\n"}, "line-two, line-one", f"{MASK}, {MASK}"),
    ],
)
def test_a_secret_is_masked_and_the_rest_is_unchanged(
    env: dict[str, str], text: str, masked: str | None
) -> None:
    assert Redaction(env).of_text(text) == (masked or text)


SECRETS = st.lists(st.text("ab", min_size=6, max_size=9), min_size=1, max_size=3)


@given(secrets=SECRETS, noise=st.text("abc\n", max_size=30), data=st.data())
def test_the_result_is_independent_of_chunk_boundaries(
    secrets: list[str], noise: str, data: st.DataObject
) -> None:
    env = {f"TOKEN{number}": secret for number, secret in enumerate(secrets)}
    at = data.draw(st.integers(0, len(noise)))
    stream = (noise[:at] + data.draw(st.sampled_from(secrets)) + noise[at:]).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    assert shown(env, parts) == shown(env, [stream])
    assert not any(secret.encode() in shown(env, parts) for secret in secrets)


def test_the_possible_beginning_of_a_secret_is_shown_when_the_stream_ends() -> None:
    assert shown({"TOKEN": "abcdef"}, [b"ends with abc", b""]) == b"ends with abc"


def test_the_cost_of_a_long_secret_is_not_quadratic() -> None:
    secret = "".join(random.Random(1).choices("abcdefgh", k=300_000))
    redaction, data = Redaction({"A_TOKEN": secret}), Searched(secret[:-1].encode())
    assert redaction.of_stream(data, last=False) == (b"", 0)
    rest = Searched(data[1:])
    assert redaction.of_stream(rest, last=False)[1] > len(data) - 100
    assert data.searches + rest.searches < 100, "it is not compared with all beginnings"


class Searched(bytes):
    """Counts how often it is searched, compared or taken apart."""

    searches = 0

    def find(self, *args: Any) -> int:
        self.searches += 1
        return super().find(*args)

    def endswith(self, *args: Any) -> bool:
        self.searches += 1
        return super().endswith(*args)

    def __getitem__(self, key: Any) -> Any:
        self.searches += 1
        return super().__getitem__(key)
