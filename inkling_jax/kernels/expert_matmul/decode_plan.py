"""How the decode kernel cuts its work: tiles of the products, stages of the rings, rows of a slot."""

from __future__ import annotations

import dataclasses

from inkling_jax.errors import InputError
from inkling_jax.kernels.expert_matmul.pack import BF16_LINES, BLOCK_COLUMNS, BLOCK_ROWS, LINES, Packed

WORKERS = 4  # warpgroups that multiply
SHARED_BYTES = 232448  # of a Hopper processor
MAX_STAGES = 8
SHARED_ROWS = 32  # the most of a slot of the experts that every token takes
SLACK = 1024  # bytes of shared memory that barriers take, and more


@dataclasses.dataclass(frozen=True)
class Product:
    """How weights of `blocks` times 64 rows by `depth` times `unit` columns are cut into tiles and stages."""

    blocks: int
    depth: int
    unit: int  # columns: half a block of bfloat16, so that its bytes are about those of a block of codes
    lines: int  # of the weights of a unit
    split: int  # warpgroups that share the columns of a tile
    step: int  # units that a warpgroup takes in a stage
    factor: float  # beside the scales of the weights
    rows: int  # the most of a slot
    x_rows: int  # that a stage has room for

    @property
    def side(self) -> int:
        return WORKERS // self.split

    @property
    def tiles(self) -> int:
        return self.blocks // self.side

    @property
    def steps(self) -> int:
        return self.depth // (self.split * self.step)

    @property
    def width(self) -> int:
        """Rows of weights."""
        return self.blocks * BLOCK_ROWS

    @property
    def inner(self) -> int:
        """Columns of weights."""
        return self.depth * self.unit

    @property
    def columns(self) -> int:
        """Of a stage, for a warpgroup."""
        return self.step * self.unit

    @property
    def x_columns(self) -> int:
        """Of a stage."""
        return self.split * self.columns

    @property
    def handed(self) -> int:
        """Accumulators that warpgroups hand over at the end of a tile."""
        return (self.split - 1) * self.side

    @property
    def turns(self) -> int:
        """How many tiles' accumulators there is room for: two, so that the next tile need not wait, while they are small."""
        return 2 if self.rows <= 16 else 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that shapes the kernel."""

    up: Product
    down: Product
    shared_up: Product | None  # of the shared experts, which are one as wide as all of them
    shared_down: Product | None
    shared: int  # how many they are
    tokens: int
    choices: int
    slots: int  # of routed experts, the most
    stages: int
    behind: int  # stages that the copying of rows may lag behind before they are waited for
    processors: int

    @property
    def products(self) -> tuple[Product, ...]:
        """In the order in which they are taken. What waits longest for others comes last."""
        found = (self.shared_up, self.up, self.down, self.shared_down)
        return tuple(p for p in found if p is not None)

    @property
    def lines(self) -> int:
        """Of the weights of a stage, for a warpgroup."""
        return max(p.step * p.lines for p in self.products)

    @property
    def x_elements(self) -> int:
        """Of the rows of a stage."""
        return max(p.x_rows * p.x_columns for p in self.products)

    @property
    def handed_elements(self) -> int:
        """Floats that warpgroups hand over."""
        return max(1, *(p.turns * p.handed * BLOCK_ROWS * p.rows for p in self.products))

    @property
    def stage_bytes(self) -> int:
        return WORKERS * self.lines * 128 * 4 + self.x_elements * 2

    @property
    def pairs(self) -> int:
        """Rows of routed experts, the most."""
        return self.tokens * self.choices

    @property
    def y_rows(self) -> int:
        """Of routed experts and, after them, a row a token of the shared."""
        return self.pairs + (self.tokens if self.shared else 0)

    @property
    def width(self) -> int:
        return self.down.width

    @property
    def shared_slots(self) -> int:
        return -(-self.tokens // SHARED_ROWS) if self.shared else 0

    @property
    def counters(self) -> int:
        """For slots, and for every 64 columns of the result."""
        return self.slots + self.shared_slots + self.down.blocks


def plan(
    w13: Packed,
    w2: Packed,
    tokens: int,
    choices: int,
    slots: int,
    rows: int,
    processors: int,
    shared: tuple[Packed, Packed, int] | None = None,
    steps: tuple[int, ...] = (2, 3, 1),
    splits: tuple[int, ...] = (),
    behind: int = 1,
) -> Plan:
    """Tiles for so many tokens, of at most `rows` (8 or 16) to a slot: the fewer experts can be hit, the narrower the tiles, so
    that every processor has some. `shared`: the weights of the shared experts as those of one, and how many they are.
    """
    splits = splits or ((4, 2, 1) if slots <= 12 else (2, 1, 4))
    up, down = (_product(w, splits, steps, rows, tokens) for w in (w13, w2))
    shared_up = shared_down = None
    if shared is not None:
        most = min(SHARED_ROWS, max(8, 1 << (tokens - 1).bit_length()))
        shared_up, shared_down = (_product(w, (4, 2, 1), (1,), most, tokens) for w in shared[:2])
    result = Plan(up, down, shared_up, shared_down, shared[2] if shared else 0, tokens, choices, slots, 1, behind, processors)
    stages = min(MAX_STAGES, (SHARED_BYTES - result.handed_elements * 4 - SLACK) // result.stage_bytes)
    return dataclasses.replace(result, stages=stages, behind=min(behind, stages - 1))


def _product(weight: Packed, splits: tuple[int, ...], steps: tuple[int, ...], rows: int, tokens: int) -> Product:
    """The first of `steps`, and of `splits`, that fits."""
    blocks, depth = weight.words.shape[1:3]
    codes = weight.lines == LINES
    unit, lines = (BLOCK_COLUMNS, LINES) if codes else (BLOCK_COLUMNS // 2, BF16_LINES // 2)
    depth = depth * BLOCK_COLUMNS // unit
    for step in steps if codes else (1,):
        for split in splits:
            if tileable(blocks, depth, step, split):
                x_rows = min(rows, 1 << (tokens - 1).bit_length())
                return Product(blocks, depth, unit, lines, split, step, weight.factor, rows, x_rows)
    raise InputError(f"weights of {blocks * BLOCK_ROWS} x {depth * unit} fit no tile of the decode kernel")


def tileable(blocks: int, depth: int, step: int = 1, split: int | None = None) -> bool:
    """Whether such tiles cover so many blocks exactly; by default whether any do."""
    splits = (1, 2, 4) if split is None else (split,)
    return any(blocks % (WORKERS // s) == 0 and depth % (s * step) == 0 for s in splits)
