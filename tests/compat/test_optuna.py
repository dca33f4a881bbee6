"""Canaries for what `distributor._compat.optuna` uses of Optuna."""

from __future__ import annotations

from typing import Any

import pytest
from support.canary import relies_on

from distributor._compat import optuna as private

pytestmark = pytest.mark.repository
optuna: Any = pytest.importorskip("optuna")


def test_callbacks_may_stop_a_study_in_the_loop_only() -> None:
    study = optuna.create_study()
    with relies_on("optuna", "how Study.stop knows of a loop", "optuna.optimize_loop"):
        for _ in range(2):
            with private.optimize_loop(study):
                assert not private.is_stopped(study)
                study.stop()
                assert private.is_stopped(study)
        with pytest.raises(RuntimeError):
            study.stop()

    def call(*_: object) -> None:
        private.optimize_loop(study).__enter__()

    with pytest.raises(RuntimeError, match="callback of the same study"):
        study.optimize(lambda _: 0, n_trials=1, callbacks=[call])
