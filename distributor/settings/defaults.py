"""Defaults that an administrator sets for all runs, as environment variables or Spark properties.

Order of precedence: the argument, the driver's environment variable, the configuration of the
active Spark session, the built-in default.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path

from distributor.node.environment.cache import CACHE_VARIABLE
from distributor.screen.messages import warn
from distributor.settings.fields import (
    NOT_GIVEN,
    AdminDefault,
    admin_defaults,
    setting_fields,
)
from distributor.spark.session import Session

CONF_TIMEOUT = 10.0
"""Seconds for a Connect server to return its configuration; its client would retry for minutes."""
CACHE_DIR = AdminDefault(
    CACHE_VARIABLE, "spark.distributor.cacheDir", None, "`~/.cache/distributor`"
)
"""The default of a variable in ``env``. Each node reads its own: folders differ by machine."""


def complete(settings: object) -> None:
    """Replace each setting of a frozen dataclass that was not given by its default."""
    wanted = {
        name: default
        for name, default in admin_defaults(settings).items()
        if getattr(settings, name) is NOT_GIVEN
    }
    texts = {
        name: (f"the environment variable {each.variable}", text)
        for name, each in wanted.items()
        if (text := os.environ.get(each.variable))
    }
    unset = {name: each.key for name, each in wanted.items() if name not in texts}
    conf = _conf(Session.active() if unset else None, unset.values())
    texts |= {name: (_source(key), text) for name, key in unset.items() if (text := conf.get(key))}
    types = {field.name: field.metadata["type"] for field in setting_fields(settings)}
    for name, default in wanted.items():
        value = types[name].read(*texts[name]) if name in texts else default.value
        object.__setattr__(settings, name, value)


def conf_cache_dir(session: Session | None) -> str | None:
    """Return the folder of the nodes' cache that a Spark property sets; None if it is not set."""
    path = _conf(session, [CACHE_DIR.key]).get(CACHE_DIR.key)
    if path and not Path(path).is_absolute() and not path.startswith("~"):
        source = _source(CACHE_DIR.key)
        raise ValueError(f"{source} must be the absolute path of a folder, but is {path!r}.")
    return path or None


def _source(key: str) -> str:
    return f"{key} in Spark's conf"


def _conf(session: Session | None, keys: Iterable[str]) -> Mapping[str, str]:
    """Return the properties among `keys` that a session's configuration sets."""
    if session is None:
        return {}
    reading: Future[dict[str, str]] = Future()

    def read() -> None:
        try:
            values = {key: session.conf(key) for key in keys}
            reading.set_result({key: text for key, text in values.items() if text is not None})
        except Exception as error:
            reading.set_exception(error)

    if session.is_connect:
        threading.Thread(target=read, name="distributor-conf", daemon=True).start()
    else:
        read()
    try:
        return reading.result(CONF_TIMEOUT)
    except Exception as error:  # its JVM or its server is gone
        warn(f"Spark's configuration cannot be read; spark.distributor.* is ignored: {error!r}")
        return {}
