"""The installation's file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prefect.exceptions import ParameterTypeError

from flows.watch import watch
from speculators_core.errors import ConfigError
from tasks.deploying import compared
from tasks.site import read_site


def test_an_address_in_the_place_of_its_variable_is_refused_and_not_shown(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    notify = [{"url_variable": "https://hooks.slack.com/services/T0/B0/hunter2"}]
    site.write_text(json.dumps({"watch": {"recipes": ["x"]}, "notify": notify}))
    with pytest.raises(ConfigError, match="must be the name of an environment variable") as caught:
        read_site(site)
    assert "hunter2" not in str(caught.value)
    site.write_text(site.read_text().replace(notify[0]["url_variable"], "ONCALL_URL"))
    assert read_site(site).notify[0].url_variable == "ONCALL_URL"


@pytest.mark.parametrize("address", ["http://me:hunter2@gpu/metrics", "http://gpu/metrics?key=hunter2"])
def test_an_address_of_counters_holds_no_secret(tmp_path: Path, address: str) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(json.dumps({"watch": {"recipes": ["x"], "metrics": {"chat": address}}}))
    with pytest.raises(ConfigError, match="address of chat may hold no secret: put it into an environment") as caught:
        read_site(site)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ParameterTypeError, match="address of chat may hold no secret"):
        watch.validate_parameters({"recipes": ["x"], "metrics": {"chat": address}})
    site.write_text(site.read_text().replace(address, "CHAT_METRICS"))
    assert read_site(site).watch.metrics == {"chat": "CHAT_METRICS"}


def test_what_deploy_tells_of_an_older_deployment_holds_no_secret() -> None:
    before, after = ({"metrics": {"chat": where}} for where in ("http://me:hunter2@gpu/metrics", "CHAT_METRICS"))
    found = compared("deployment", "watch/draftsmith", before, after)
    assert found.fields == ('metrics.chat: "http://[redacted]@gpu/metrics" → "CHAT_METRICS"',)
