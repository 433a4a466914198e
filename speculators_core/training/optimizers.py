"""Optimisers as one object: AdamW alone, or Muon for hidden matrices beside AdamW for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speculators_core.errors import ConfigError, TrainingError
from speculators_core.training.config import OptimizerConfig
from speculators_core.training.weights import vocabulary_tables


@dataclass(frozen=True)
class Optimizers:
    """Optimisers over the trainable parameters, with their state by parameter name.

    peak_rates[i] is the peak learning rate of members[i]; names[i] are its parameters in order.
    """

    members: tuple[torch.optim.Optimizer, ...]
    peak_rates: tuple[float, ...]
    names: tuple[tuple[str, ...], ...]

    def step(self, factor: float) -> None:
        """One update at `factor` of the peak rates, then forget the gradients."""
        for optimizer, peak in zip(self.members, self.peak_rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """All state as `<parameter>.<entry>` → tensor (views, nothing copied): exact, flat, without pickles."""
        flat: dict[str, Tensor] = {}
        for optimizer, names in zip(self.members, self.names, strict=True):
            for name, parameter in zip(names, _parameters(optimizer), strict=True):
                for entry, value in optimizer.state.get(parameter, {}).items():
                    assert isinstance(value, Tensor), f"optimiser state {entry} is not a tensor"
                    flat[f"{name}.{entry}"] = value
        return flat

    def load_state_tensors(self, flat: Mapping[str, Tensor]) -> None:
        """Put back what `state_tensors` gave. TrainingError when it belongs to other parameters or shapes."""
        left = dict(flat)
        for optimizer, names in zip(self.members, self.names, strict=True):
            for name, parameter in zip(names, _parameters(optimizer), strict=True):
                entries = [key for key in left if key.startswith(f"{name}.") and "." not in key[len(name) + 1 :]]
                for key in entries:
                    value = left.pop(key)
                    if value.dim() and value.shape != parameter.shape:
                        raise TrainingError(
                            f"optimiser state {key} is {tuple(value.shape)}, its parameter {tuple(parameter.shape)}",
                            mend="the checkpoint is of another draft: train into a fresh output directory",
                        )
                    optimizer.state[parameter][key[len(name) + 1 :]] = value.to(parameter.device)
        if left:
            raise TrainingError(
                f"the checkpoint holds optimiser state of unknown parameters: {', '.join(sorted(left)[:3])}",
                mend="the checkpoint is of another draft or optimiser: train into a fresh output directory",
            )


def build_optimizers(model: nn.Module, config: OptimizerConfig) -> Optimizers:
    """Optimisers over the parameters of `model` that require a gradient.

    Weight decay reaches matrices only. Muon takes 2-D weights with both sides above 1 that are no `vocabulary_tables`.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise ConfigError("the draft has no trainable parameter", mend="check which parts the algorithm freezes")
    tables = vocabulary_tables(model)
    hidden = [n for n, p in trainable.items() if p.dim() == 2 and min(p.shape) > 1 and n not in tables]
    by_muon = hidden if config.kind == "muon" else []
    decayed = [name for name, p in trainable.items() if name not in by_muon and p.dim() >= 2]
    plain = [name for name, p in trainable.items() if name not in by_muon and p.dim() < 2]

    members: list[torch.optim.Optimizer] = []
    rates: list[float] = []
    names: list[tuple[str, ...]] = []
    if decayed or plain:
        groups = [([trainable[n] for n in decayed], config.weight_decay), ([trainable[n] for n in plain], 0.0)]
        members.append(
            torch.optim.AdamW(
                [{"params": part, "weight_decay": decay} for part, decay in groups if part],
                lr=config.learning_rate,
                betas=config.betas,
                eps=config.eps,
                fused=True,
            )
        )
        rates.append(config.learning_rate)
        names.append((*decayed, *plain))
    if by_muon:
        rate = config.muon_learning_rate or config.learning_rate
        members.append(
            torch.optim.Muon(
                [trainable[n] for n in by_muon],
                lr=rate,
                weight_decay=config.muon_weight_decay,
                momentum=config.muon_momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )
        rates.append(rate)
        names.append(tuple(by_muon))
    return Optimizers(tuple(members), tuple(rates), tuple(names))


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
