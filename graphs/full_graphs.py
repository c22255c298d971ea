"""Full CUDA graphs of mixed steps, attention included, by the number of tokens.

Attention reads on the device what differs from step to step (`StepAttention`), so nothing breaks
the graph, and a step is one launch: 28 layers in pieces cost the host some 3 ms. A size is captured
for prefills alone, and with decodes before them; both again with adapters where they are served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from asyncllm.attention.base import DecodeRows, PrefillRows, StepAttention
from asyncllm.graphs.pool import GraphPool, Recorded
from asyncllm.graphs.sized_graphs import SizedGraphs
from asyncllm.graphs.token_buffers import Forward, TokenBuffers
from asyncllm.step_plan import StepKind, StepShape


@dataclass(eq=False)
class FullGraphs:
    """For steps of up to as many tokens as `buffers` has. Has the methods of `PiecewiseGraphs`."""

    step_attention: StepAttention
    write_changes: Callable[[], object]  # the step's changes of slots, which its decodes read
    # (rows, the step's tokens) -> rows of the step's decodes, whose tokens are filled with it
    read_decodes: Callable[[int, TokenBuffers], DecodeRows]
    most_decodes: int  # of a step, where attention takes as many
    buffers: TokenBuffers
    forward: Forward
    pool: GraphPool
    adapters: Sequence[bool] = (False,)  # False: for steps that have none; True: that have
    writes_changes = True  # a replay begins with the step's changes of slots

    def __post_init__(self) -> None:
        self.most_decodes = min(self.most_decodes, self.step_attention.max_decodes)
        kinds = product((StepKind.MIXED, StepKind.PREFILL), self.adapters)
        self._graphs: dict[tuple[StepKind, bool], SizedGraphs[Recorded]] = {
            key: SizedGraphs() for key in kinds
        }

    def fitting(self, num_decodes: int, prefills: PrefillRows, adapters: bool) -> StepShape | None:
        """The shape that such a step is padded to; None: it has no graph."""
        attention = self.step_attention
        if (
            num_decodes > self.most_decodes
            or len(prefills.kv_lens) > attention.max_prefills
            or prefills.page_indptr[-1] > attention.max_pages
        ):
            return None
        kind = StepKind.of(num_decodes, prefills.num_tokens)
        size = self._graphs[kind, adapters].fitting(num_decodes + prefills.num_tokens)
        return None if size is None else StepShape(kind, size, adapters)

    def capture(self, size: int) -> None:
        """Capture steps of `size` tokens on the current stream, between two steps; largest first
        saves memory."""
        for key, graphs in self._graphs.items():
            graphs.add(size, self.pool.record(partial(self._run, *key, size)))

    def replay(self, shape: StepShape, decode_positions: np.ndarray, prefills: PrefillRows) -> None:
        """Run the step whose tokens are in the static inputs. decode_positions: int32 [decodes]."""
        self.step_attention.prepare(len(decode_positions), prefills)
        self._graphs[shape.kind, shape.adapters][shape.size].replay()

    def _run(self, kind: StepKind, adapters: bool, size: int) -> tuple[()]:
        self.write_changes()
        tokens = self.buffers.first(size)
        decodes = None
        if kind is StepKind.MIXED:
            decodes = self.read_decodes(min(size, self.most_decodes), tokens)
        attend_rows = self.step_attention.bind(decodes, tokens.q, tokens.out)
        self.forward(tokens, attend_rows, adapters)
        return ()
