"""A version as it is served: an immutable pair of verifier and draft, and an engine that runs it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from speculators_core.engine.client import EngineClient
from speculators_core.engine.config import ServerSpec
from speculators_core.engine.runtime import Runtime
from speculators_core.engine.server import Engine, serve
from speculators_core.errors import RegistryError, VerifierError
from speculators_core.evaluation.served import served_directory, speculation
from speculators_core.serving.config import EngineConfig
from speculators_core.serving.traffic import Traffic
from speculators_core.store.manifest import sha256_file
from speculators_core.types import Json, StrictModel
from speculators_core.verifier.fingerprint import describe_location

_COUNTERS_S = 30.0
SAMPLE_VARIABLE = "DRAFTSMITH_SAMPLE"
_SAMPLER = ("--middleware", "hs_connectors.vllm.sampler.Sampler")


class ServedVersion(StrictModel):
    """What a registered version pins, checked against what lies on disk."""

    model: str = Field(description="registered model; the name by which clients ask for it")
    version: str
    verifier: Path = Field(description="its verifier's directory")
    verifier_fingerprint: str
    template_kwargs: dict[str, Json] = Field(default_factory=dict, description="of the chat template, as fingerprinted")
    draft: Path = Field(description="its draft's directory")
    draft_files: dict[str, str] = Field(description="its files and their sha256, as registered")
    al: float | None = Field(None, description="acceptance length that it was registered with")
    forced_by: str | None = Field(None, description="who promoted it against the gate")
    trust_remote_code: bool = False

    def require_unchanged(self, home: Path) -> None:
        """See that verifier and draft on disk are those that were admitted; the registry is not asked.

        Raises: VerifierError, RegistryError: they are not.
        """
        found = describe_location(self.verifier, home=home, template_kwargs=self.template_kwargs).fingerprint.digest
        if found != self.verifier_fingerprint:
            raise VerifierError(
                f"the verifier at {self.verifier} is not the one of {self.model} version {self.version} "
                f"({found[:12]} instead of {self.verifier_fingerprint[:12]})",
                mend="put it back, or retrain for the new one (`draftsmith plan RECIPE`)",
            )
        for name, digest in self.draft_files.items():
            path = self.draft / name
            if not path.is_file() or sha256_file(path) != digest:
                raise RegistryError(
                    f"{path} of {self.model} version {self.version} was changed since it was registered",
                    mend=f"delete {self.draft}: it is fetched anew from the registry",
                )

    def weights_bytes(self) -> int:
        """Size of both models' weights on disk."""
        return sum(file.stat().st_size for d in (self.verifier, self.draft) for file in d.glob("*.safetensors"))


def server_spec(version: ServedVersion, config: EngineConfig, model: Path, *, speculate: bool = True) -> ServerSpec:
    """The engine of a version; `model` is its draft as the engine is given it, or without speculation its verifier."""
    sample = config.sample
    return ServerSpec(
        model=str(model.resolve()),
        names=(version.model,),
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_cache_gib=config.kv_cache_gib,
        speculative=speculation(model, config.k) if speculate else None,
        enforce_eager=config.enforce_eager,
        extra_args=(*config.extra_args, *(_SAMPLER if sample else ())),
        env={SAMPLE_VARIABLE: sample.model_dump_json()} if sample else {},
        per_request_metrics=sample is not None and sample.acceptance_below is not None,
        trust_remote_code=version.trust_remote_code,
    )


@dataclass
class Replica:
    """A running engine of a version and what is known of its traffic.

    client: for its counters and its health · slot: its place in the proxy · begun: totals when it took over · now: at
    the last look.
    """

    version: ServedVersion
    speculates: bool
    engine: Engine
    client: EngineClient
    _open: ExitStack
    slot: str = ""
    begun: Traffic = field(default_factory=Traffic)
    now: Traffic = field(default_factory=Traffic)

    @property
    def traffic(self) -> Traffic:
        """What it served since it took over."""
        return self.now - self.begun

    def running(self) -> bool:
        """Whether its process lives."""
        assert self.engine.process is not None
        return self.engine.process.poll() is None

    def healthy(self) -> bool:
        """Whether its process lives and answers."""
        return self.running() and self.client.health()

    def stop(self) -> None:
        """End its engine, whatever is in flight."""
        self._open.close()


def start_replica(
    version: ServedVersion, config: EngineConfig, runtime: Runtime, home: Path, *, speculate: bool = True
) -> Replica:
    """Start an engine of the version and wait until it is ready.

    Raises:
        VerifierError, RegistryError: its files are not those that were admitted.
        EngineError: it does not start. EngineTimeout: not in time.
    """
    version.require_unchanged(home)
    with ExitStack() as stack:
        model = version.verifier
        if speculate:
            model = stack.enter_context(served_directory(version.draft, version.verifier, home / "scratch"))
        spec = server_spec(version, config, model, speculate=speculate)
        engine = stack.enter_context(serve(runtime, spec, home=home, startup_timeout_s=config.startup_timeout_s))
        client = stack.enter_context(engine.client(timeout_s=_COUNTERS_S))
        return Replica(version, speculate, engine, client, stack.pop_all())
