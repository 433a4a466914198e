"""Entry point `vllm.general_plugins`: makes the connector known by name, and refuses a mix-up of packages.

Where DRAFTSMITH_DRAFT_PROBE names a directory, it also turns the draft probe on.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution

from hs_connectors.contract import CONNECTOR_NAME
from hs_connectors.errors import SettingsError
from hs_connectors.probe import ProbeSettings

PROCESSORS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else frozenset[int]()
"""Those that this process may use, noted when vLLM loads its plugins: before it binds its threads to some of them."""


def register() -> None:
    """Register the connector with vLLM; vLLM calls this in every process, some of them twice.

    Raises SettingsError when another distribution that installs the import name `hs_connectors` is present, and for
    wrong settings of the draft probe.
    """
    refuse_shadowing()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.get_connector_class_by_name(CONNECTOR_NAME)
    except ValueError:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "hs_connectors.vllm.connector", "DraftsmithHiddenStates")
    probe = ProbeSettings.from_environment(os.environ)
    if probe is not None:
        from hs_connectors.vllm.draft_probe import install

        install(probe)


def refuse_shadowing() -> None:
    """SettingsError when the distribution `hs-connectors`, which has our import name, is installed as well."""
    try:
        other = distribution("hs-connectors")
    except PackageNotFoundError:
        return
    raise SettingsError(
        f"hs-connectors {other.version} installs the same import name as draftsmith-hs-connectors; "
        "which of the two runs would depend on the search path",
        mend="pip uninstall hs-connectors in this environment, then install draftsmith-hs-connectors again",
    )
