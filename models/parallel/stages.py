"""The way of a step's tokens through the stages of a pipeline, and back to the first.

    stage 0   embed, its layers -> |                            | -> final norm, logits, tokens
    stage 1                        | its layers -> |            |
    stage 2                                        | its layers |

The first stage has both ends of the model, so rank 0 samples. What it begins and what it ends are
two parts of a step, between which other steps go. No call is part of a captured graph.
"""

from __future__ import annotations

import torch

from asyncllm.models.decoder import DenseDecoder
from asyncllm.models.parallel.mesh import Mesh


class Stages:
    """The neighbours of this rank's stage. A step's calls, in this order: `receive`, the model's
    `forward`, `send`; and on the first stage, of a step that returns, `take_back`, `last_norm`."""

    def __init__(self, model: DenseDecoder, mesh: Mesh, max_tokens: int) -> None:
        """max_tokens: that a step may have, padding included."""
        model.make_room(max_tokens)
        self.model = model
        self._mesh = mesh
        self.is_first = mesh.config.stage == 0
        self._is_last = mesh.config.stage == mesh.config.pp - 1

    def receive(self, num_tokens: int) -> None:
        """Have for `forward` what the stage before has made of so many tokens."""
        if not self.is_first:
            self._mesh.receive(self.model.received[:num_tokens])

    def send(self, residual: torch.Tensor, *, returns: bool) -> None:
        """Tell the next stage what `forward` has made; from the last one, if it `returns`, tell the
        first. It may be overwritten then."""
        if returns or not self._is_last:
            self._mesh.send(residual)

    def take_back(self, num_tokens: int) -> None:
        """Have for `last_norm` what the last stage has made of so many tokens."""
        self._mesh.receive(self.model.received[:num_tokens])
