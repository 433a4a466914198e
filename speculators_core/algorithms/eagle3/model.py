"""The EAGLE-3 pass: a feature draft unrolled from many rows of a packed row at once."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from speculators_core.algorithms._blocks.feature_draft import FeatureDraft
from speculators_core.algorithms._blocks.layers import DecoderLayer, LayerCache
from speculators_core.algorithms._blocks.unrolled import Drafting, GoOn
from speculators_core.algorithms.eagle3.config import Eagle3Config


class Eagle3Draft(FeatureDraft):
    """A feature draft that continues from its own states."""

    config: Eagle3Config

    def forward(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        aux_TAH: Tensor,
        drafting: Drafting,
        steps: int,
        go_on: GoOn | None = None,
    ) -> list[Tensor]:
        """Unroll from every drafting row at once, fed with the row's real tokens, or with what `go_on` says.

        Step s of row j reads token j + s (0 past the end) at position + s, the state that step s − 1 of the same row
        left, the context's keys up to j, and its own keys of steps 1..s. That is what a served draft computes as
        long as its proposals are accepted. Rows that are not drafted from only lend keys to the others, so the last
        layer, and every later step, is computed for drafting rows alone.

        Returns:
            for each step [R, H]: normalised hidden states, ready for the vocabulary head.
        """
        rows_R = drafting.rows_R
        caches = [LayerCache() for _ in self.layers]
        features_NH = self.join(aux_TAH)
        following_TP = functional.pad(input_ids_T, (0, steps))
        outputs: list[Tensor] = []
        for step in range(steps):
            first = step == 0
            if first:
                tokens_N = input_ids_T
            else:
                tokens_N = following_TP[rows_R + step] if go_on is None else go_on(step - 1, outputs[-1])
            positions_N = position_ids_T if first else position_ids_T[rows_R] + step
            embeds_NH = functional.embedding(tokens_N, self.embed_tokens.weight).to(features_NH.dtype)
            out_RH = self._layers(embeds_NH, features_NH, positions_N, drafting, step, caches)
            normed_RH = self.norm(out_RH)
            outputs.append(normed_RH)
            features_NH = normed_RH if self.config.norm_output else out_RH
        return outputs

    def _layers(
        self,
        embeds_NH: Tensor,
        features_NH: Tensor,
        positions_N: Tensor,
        drafting: Drafting,
        step: int,
        caches: list[LayerCache],
    ) -> Tensor:
        rotation = self.rotary(positions_N)
        last = len(self.layers) - 1
        hidden_NH = features_NH
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            assert isinstance(layer, DecoderLayer)
            narrow = step == 0 and index == last  # only drafting rows go on from here
            rows = drafting.rows_R if narrow else None
            x_NC, residual_NH = self.enter(layer, embeds_NH, hidden_NH)
            query_rotation = rotation
            if rows is not None:
                residual_NH = residual_NH[rows]
                query_rotation = (rotation[0][rows], rotation[1][rows])
            # Served, the window moves with the position of the drafted token; speculators 0.9 leaves it at the row.
            shift = 0 if self.config.compat else step
            plan = drafting.plan(step == 0 and not narrow, self.geometry.window(index), shift)
            attended = layer.self_attn(x_NC, rows, rotation, query_rotation, plan, cache)
            hidden_NH = layer.finish(attended, residual_NH)
        return hidden_NH
