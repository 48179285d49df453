"""The tokens of a step, laid end to end, and the sequences (rows) that they belong to."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ragged:
    """T query tokens of B rows. Row b owns tokens start[b] .. start[b] + count[b]; tokens that no row owns are padding.

    A row with count 0 is idle. Decode is the case of one token a row: T = B, start = 0..B-1, `longest` = 1.
    """

    slot: Int[Array, " B"]  # where the row's state lives; the reserved slot for an idle row
    start: Int[Array, " B"]  # first token
    count: Int[Array, " B"]  # query tokens
    length: Int[Array, " B"]  # tokens of the sequence once this step's are appended
    row: Int[Array, " T"]  # owner of a token
    offset: Int[Array, " T"]  # index of a token among its row's tokens of this step
    position: Int[Array, " T"]  # absolute position in the sequence
    valid: Bool[Array, " T"]  # False: padding
    longest: int = dataclasses.field(metadata={"static": True})  # no row has more query tokens than this

    @property
    def one_each(self) -> bool:
        """Whether token b is all that row b has, if it has any: a step of decode."""
        return self.longest == 1 and self.row.shape == self.slot.shape
