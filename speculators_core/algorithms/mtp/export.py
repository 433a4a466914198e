"""A trained head as a checkpoint of its own, and stitched back into its verifier, which is how vLLM serves it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from speculators_core.algorithms.mtp.build import read_family
from speculators_core.algorithms.mtp.config import MTPConfig
from speculators_core.algorithms.mtp.model import MTPHead
from speculators_core.algorithms.mtp.native import from_checkpoint, to_checkpoint, to_native
from speculators_core.errors import FormatError
from speculators_core.formats.config import GreedyProposal, NativeHeadConfig, SpeculatorsSection, VerifierReference
from speculators_core.formats.directory import read_draft
from speculators_core.formats.servable import check_servable
from speculators_core.store.files import write_directory
from speculators_core.store.manifest import sha256_file
from speculators_core.types import ExportedDraft
from speculators_core.verifier.weights import locate

log = logging.getLogger(__name__)


def export(config: MTPConfig, model: nn.Module, publish: str) -> ExportedDraft:
    """The head's trained tensors in bfloat16, and the verifier's text configuration verbatim.

    Args:
        config: the knobs that the model was built with.
        model: from `build`.
        publish: name of the verifier as the draft shall state it: a hub id, or a local path.

    Raises:
        FormatError: names or values are wrong.
    """
    assert isinstance(model, MTPHead)
    import transformers

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    tensors = {
        to_checkpoint(name): tensor.detach().to(torch.bfloat16)
        for name, tensor in model.head_tensors().items()
        if name in trained
    }
    head_config = NativeHeadConfig(
        architectures=("MTPDraftModel",),
        speculators_model_type=config.kind,
        speculators_config=SpeculatorsSection(
            algorithm=config.kind,
            proposal_methods=(GreedyProposal(speculative_tokens=config.drafted_tokens),),
            verifier=VerifierReference(name_or_path=publish, architectures=model.verifier_architectures),
        ),
        transformer_layer_config=model.text_config,
        transformers_version=transformers.__version__,
    )
    draft = ExportedDraft(head_config.model_dump(mode="json"), tensors)
    check_servable(draft)
    return draft


def stitch(draft_dir: Path, verifier_dir: Path, target: Path, *, link: bool = False) -> int:
    """Write the verifier with the trained head in the place of its own, and prove that nothing else changed.

    Only files that hold tensors of the head are written anew, tensor by tensor; all others are copied, or linked.

    Args:
        draft_dir: an exported head.
        target: a directory that does not exist yet.
        link: symbolic links to the untouched files: for serving here and now.

    Returns:
        Number of replaced tensors.

    Raises:
        FormatError: the head is of another verifier's shape, the target exists, or a file did not come out identical.
    """
    _, family, text = read_family(verifier_dir)
    located = locate(verifier_dir)
    ours = {from_checkpoint(name): tensor for name, tensor in read_draft(draft_dir).tensors.items()}
    native = to_native(ours, family, int(text["num_hidden_layers"]), located)
    unknown = sorted(name for name in native if name not in located)
    if unknown:
        raise FormatError(
            f"{verifier_dir} has no tensor {unknown[0]} that the head could replace",
            mend="stitch a head into the verifier that it was taken from",
        )
    if target.exists():
        raise FormatError(f"{target} exists already", mend="name a directory that does not exist yet")
    touched = {located[name].name for name in native}

    def write(directory: Path) -> None:
        directory.mkdir()
        for path in sorted(verifier_dir.iterdir()):
            if path.is_dir():
                continue
            if path.name in touched:
                _rewrite(path, directory / path.name, native)
            elif link:
                (directory / path.name).symlink_to(path.resolve())
            else:
                shutil.copy2(path, directory / path.name)
                if sha256_file(path) != sha256_file(directory / path.name):
                    raise FormatError(f"{target / path.name} did not come out as {path}", mend="look at the disk")

    write_directory(target, write)
    log.info("stitched tensors=%d files=%d into=%s", len(native), len(touched), target)
    return len(native)


def _rewrite(source: Path, target: Path, native: Mapping[str, Tensor]) -> None:
    """One safetensors file with some tensors replaced, in its own dtypes; then every other one is compared."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(source, framework="pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 — not a mapping
    for name in native.keys() & tensors.keys():
        if native[name].shape != tensors[name].shape:
            raise FormatError(
                f"{name} is {list(tensors[name].shape)} in the verifier and {list(native[name].shape)} in the head",
                mend="stitch a head into the verifier that it was taken from",
            )
    replaced = {name: native[name].to(tensors[name].dtype).contiguous() for name in native.keys() & tensors.keys()}
    save_file(tensors | replaced, target, metadata=metadata)
    with safe_open(source, framework="pt") as before, safe_open(target, framework="pt") as after:
        if set(before.keys()) != set(after.keys()):
            raise FormatError(f"{target} lost tensors", mend="look at the disk")
        for name in before.keys():  # noqa: SIM118 — not a mapping
            wanted, found = replaced.get(name, before.get_tensor(name)), after.get_tensor(name)
            if found.dtype != wanted.dtype or not torch.equal(_bytes(found), _bytes(wanted)):
                raise FormatError(f"{name} did not come out as it should in {target}", mend="look at the disk")


def _bytes(tensor: Tensor) -> Tensor:
    """Bits, so that NaNs and signed zeros compare."""
    return tensor.contiguous().flatten().view(torch.uint8)
