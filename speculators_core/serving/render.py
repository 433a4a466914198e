"""A version as others start it: a command line, a compose service, a Kubernetes manifest.

Paths inside a container are those outside: a draft names its verifier by path, and both are mounted where they lie.
What is rendered pins a version; it does not follow the alias.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from pathlib import Path
from typing import Any, Literal

import yaml

from speculators_core.engine.config import build_arguments
from speculators_core.errors import ConfigError
from speculators_core.evaluation.served import SPECULATION, served_directory
from speculators_core.serving.config import ServeConfig
from speculators_core.serving.version import ServedVersion, server_spec

Form = Literal["command", "compose", "kubernetes"]

_INSIDE = 8000
_OTHER_DEVICE = """\
# The runtime at hand is a CPU build; this image is the GPU build of {vllm}, on which nothing is proven yet:
# there, `draftsmith matrix MODEL --test VERSION --recipe RECIPE` measures it first.
"""


def settled_directory(version: ServedVersion, directory: Path) -> Path:
    """The draft as an engine is given it, in a place that stays: its files, and a config.json with the verifier's path.

    Raises: ConfigError where such a draft is stitched into its verifier, which is a directory of its own to make.
    """
    with served_directory(version.draft, version.verifier, directory) as served:
        if served == version.draft:
            return served
        if (served / SPECULATION).is_file():
            raise ConfigError(
                "such a draft is served inside its verifier, which no command line does",
                mend="make that model with `draftsmith stitch`, and serve its directory",
            )
        target = directory / f"{version.model}-{version.version}"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for path in served.iterdir():
            if path.is_symlink():
                _share(path.resolve(), target / path.name)
            else:
                shutil.copy2(path, target / path.name)
    return target


def _share(source: Path, target: Path) -> None:
    """Another name of the same bytes, or a copy where the store lies on another file system."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copy2(source, target)


def render(
    form: Form, version: ServedVersion, config: ServeConfig, model: Path, *, python: str, vllm: str, device: str
) -> str:
    """The version in one of the forms.

    Args:
        model: the draft's directory as `settled_directory` gives it.
        python: interpreter of the runtime, for the command · vllm: its version, for the image · device: what it runs
            on, since the image is the GPU build.
    """
    # sampling writes where only an engine of `serve` is sure to be allowed to
    spec = server_spec(version, config.engine.model_copy(update={"sample": None}), model)
    if form == "command":
        return shlex.join([python, *build_arguments(spec, config.port, host=config.host)]) + "\n"
    # `python -m vllm…` is what the image's own command runs
    arguments = ["python3", *build_arguments(spec, _INSIDE, host="0.0.0.0")]
    image = f"vllm/vllm-openai:v{vllm.partition('+')[0]}"
    mounted = sorted({str(version.verifier), spec.model})
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    document = (
        _compose(version, config, image, arguments, mounted, offline)
        if form == "compose"
        else _kubernetes(version, config, image, arguments, mounted, offline)
    )
    head = f"# {version.model} version {version.version}: verifier {version.verifier_fingerprint[:12]}, vLLM {vllm}\n"
    if device == "cpu":
        head += _OTHER_DEVICE.format(vllm=vllm)
    return head + yaml.dump_all(document, Dumper=_WrittenOut, sort_keys=False, width=1000)


class _WrittenOut(yaml.SafeDumper):
    """What stands twice is written twice: a reader of a manifest expects no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _compose(
    version: ServedVersion,
    config: ServeConfig,
    image: str,
    arguments: list[str],
    mounted: list[str],
    env: dict[str, str],
) -> list[dict[str, Any]]:
    service = {
        "image": image,
        "entrypoint": arguments,
        "environment": env,
        "volumes": [f"{path}:{path}:ro" for path in mounted],
        "ports": [f"{config.host}:{config.port}:{_INSIDE}"],
        "ipc": "host",
        "stop_grace_period": f"{config.drain_timeout_s:g}s",
        "healthcheck": {"test": ["CMD", "curl", "-fs", f"http://127.0.0.1:{_INSIDE}/health"], "start_period": "600s"},
        "labels": _labels(version),
        "restart": "unless-stopped",
        "deploy": {"resources": {"reservations": {"devices": [{"capabilities": ["gpu"], "count": 1}]}}},
    }
    return [{"services": {version.model: service}}]


def _kubernetes(
    version: ServedVersion,
    config: ServeConfig,
    image: str,
    arguments: list[str],
    mounted: list[str],
    env: dict[str, str],
) -> list[dict[str, Any]]:
    name, labels = version.model, {"app": version.model}
    probe = {"httpGet": {"path": "/health", "port": _INSIDE}, "periodSeconds": 5}
    container = {
        "name": "vllm",
        "image": image,
        "command": arguments,
        "env": [{"name": key, "value": value} for key, value in env.items()],
        "ports": [{"containerPort": _INSIDE}],
        "readinessProbe": probe,
        "startupProbe": {**probe, "failureThreshold": 120},
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "volumeMounts": [{"name": f"model-{n}", "mountPath": path, "readOnly": True} for n, path in enumerate(mounted)],
    }
    pod = {
        "terminationGracePeriodSeconds": round(config.drain_timeout_s),
        "containers": [container],
        # a claim with the same content does as well: the paths are what counts
        "volumes": [
            {"name": f"model-{n}", "hostPath": {"path": path, "type": "Directory"}} for n, path in enumerate(mounted)
        ],
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "annotations": _labels(version)},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            # the new pod is ready before the old one goes
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {"metadata": {"labels": labels, "annotations": _labels(version)}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": labels, "ports": [{"port": _INSIDE, "targetPort": _INSIDE}]},
    }
    return [deployment, service]


def _labels(version: ServedVersion) -> dict[str, str]:
    return {
        "draftsmith/version": version.version,
        "draftsmith/verifier-fingerprint": version.verifier_fingerprint,
    }
