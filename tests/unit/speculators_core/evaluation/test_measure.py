"""What can be refused before an engine is asked anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculators_core.engine.runtime import Runtime
from speculators_core.errors import EvaluationError
from speculators_core.evaluation.config import EvaluationConfig
from speculators_core.evaluation.measure import measure_ngram
from speculators_core.evaluation.runs import Conditions


def test_the_training_free_baseline_is_not_asked_of_a_server_that_somebody_else_started(tmp_path: Path) -> None:
    conditions = Conditions(
        verifier_dir=tmp_path,
        verifier_fingerprint="f" * 64,
        prompts=[],
        runtime=Runtime(url="http://127.0.0.1:9"),
        config=EvaluationConfig(),
        home=tmp_path,
    )
    with pytest.raises(EvaluationError, match="n-gram look-up"):
        measure_ngram(conditions, tmp_path)
