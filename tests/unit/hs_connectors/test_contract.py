from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from hs_connectors import CaptureSettings, Handle, kv_transfer_config, safe_key, speculative_config
from hs_connectors.contract import check_key
from hs_connectors.errors import SettingsError
from hs_connectors.testing import HOSTILE_KEYS

SETTINGS = CaptureSettings("file", {"root": "/states"}, (2, 15, 30), "sha256:abc")


def test_flags_are_json_and_settings_survive_them() -> None:
    transfer = json.loads(json.dumps(kv_transfer_config(SETTINGS)))
    assert transfer["kv_role"] == "kv_producer"
    assert CaptureSettings.from_json(transfer["kv_connector_extra_config"]["draftsmith"]) == SETTINGS


def test_engine_and_connector_are_told_the_same_layers() -> None:
    asked = json.loads(json.dumps(speculative_config(SETTINGS)))
    assert asked["method"] == "extract_hidden_states" and asked["num_speculative_tokens"] == 1
    assert asked["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 15, 30]


@pytest.mark.parametrize("ids", [(), (3, 3), (5, 2), (-1, 4)])
def test_layer_ids_that_vllm_would_relabel_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(SettingsError, match="distinct, ascending"):
        replace(SETTINGS, layer_ids=ids)


@pytest.mark.parametrize("field", ["writer_threads", "queue_bytes"])
def test_bounds_must_bound(field: str) -> None:
    with pytest.raises(SettingsError):
        replace(SETTINGS, **{field: 0})


def test_unknown_and_missing_settings_are_named() -> None:
    with pytest.raises(SettingsError, match="colour"):
        CaptureSettings.from_json(SETTINGS.to_json() | {"colour": 1})
    with pytest.raises(SettingsError, match="backend_config"):
        CaptureSettings.from_json({k: v for k, v in SETTINGS.to_json().items() if k != "backend_config"})
    with pytest.raises(SettingsError, match="object"):
        CaptureSettings.from_json(None)


@pytest.mark.parametrize(
    "value", [None, "key", {}, {"backend": "file"}, {"backend": "file", "key": 3}, {"backend": "f", "key": "../x"}]
)
def test_what_is_no_handle_is_refused(value: object) -> None:
    with pytest.raises(SettingsError):
        Handle.from_json(value)


def test_keys_from_hostile_request_ids_are_valid_and_distinct() -> None:
    ids = [*HOSTILE_KEYS, "../../etc/passwd", ".._.._etc_passwd", "\ud800", "a" * 5000, "a" * 4999, "cmpl-1"]
    keys = [safe_key(request_id) for request_id in ids]
    assert all(check_key(key) for key in keys)
    assert len(set(keys)) == len(ids)


def test_settings_are_importable_without_torch_and_vllm() -> None:
    code = "import sys, hs_connectors; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
