from __future__ import annotations

import json
from itertools import pairwise

import pytest

from hs_connectors.contract import CaptureSettings, kv_transfer_config, speculative_config
from speculators_core.engine.config import ServerSpec
from speculators_core.engine.remote import RecordStore
from speculators_core.engine.runtime import Runtime
from speculators_core.errors import ConfigError
from speculators_core.states.config import CaptureConfig
from speculators_core.states.handshake import at_store, server_command

STORE = RecordStore(config={"root": "/shared/records"})
SETTINGS = CaptureSettings("file", {"root": "/shared/records"}, (1, 4), "f" * 64)
SPEC = ServerSpec(model="/v", kv_transfer=kv_transfer_config(SETTINGS), speculative=speculative_config(SETTINGS))


def test_records_of_a_remote_runtime_go_to_its_store() -> None:
    found = at_store(CaptureConfig(), Runtime(url="http://h", store=STORE))
    assert (found.backend, found.backend_config) == ("file", {"root": "/shared/records"})
    ours = CaptureConfig(backend_config={"root": "/r"})
    assert at_store(ours, Runtime(python="/p")) is ours


def test_a_remote_runtime_without_a_store_captures_nothing() -> None:
    with pytest.raises(ConfigError, match=r"evaluation only[\s\S]*runtime flags"):
        at_store(CaptureConfig(), Runtime(url="http://h"))


def test_two_places_for_records_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"both say where records go"):
        at_store(CaptureConfig(backend_config={"root": "/r"}), Runtime(url="http://h", store=STORE))


@pytest.mark.parametrize(
    ("url", "port", "everywhere"),
    [(None, "8000", False), ("http://127.0.0.1:81", "81", False), ("http://gpu:8010/", "8010", True)],
)
def test_the_command_carries_both_configurations_and_listens_where_it_is_reached(
    url: str | None, port: str, everywhere: bool
) -> None:
    command = server_command(SPEC, url)
    after = dict(pairwise(command))
    assert command[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    assert after["--port"] == port and ("0.0.0.0" in command) == everywhere
    assert command.count("--host") == 1
    assert json.loads(after["--kv-transfer-config"]) == SPEC.kv_transfer
    assert json.loads(after["--speculative-config"]) == SPEC.speculative
    assert after["--shutdown-timeout"] == "30"
    assert "--shutdown-timeout" not in server_command(ServerSpec(model="/v"), url)
