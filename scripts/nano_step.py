"""One step of training the nano model: the model's own forward over packed lines, its loss, and the update of all parameters."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float
from nano_data import Batch
from nano_model import initial_value, rate_of, trained_by_decay

from inkling_jax.cache.paged import keep_nothing
from inkling_jax.cache.ragged import Ragged
from inkling_jax.config import ModelConfig
from inkling_jax.inputs.images import PADDING, SIDE, SLOTS, ImageConfig
from inkling_jax.kernels.expert_matmul.nvfp4 import quantize_activations
from inkling_jax.layers.experts import SparseMLP
from inkling_jax.layers.mtp import DraftHead
from inkling_jax.model import Inkling, MediaRows, flat_parameters
from inkling_jax.random_weights import packed_experts
from inkling_jax.towers import Towers

jax.tree_util.register_dataclass(Batch)

Parameters = dict[str, Array]  # by path, in float32

CONTEXT_WEIGHT = 0.05  # of a token that the model is to read, beside 1 for one that it is to write
DRAFT_WEIGHT = 0.15  # of each draft depth's loss
BIAS_STEP = 1e-3  # by which the router's bias moves towards an even load, at the full learning rate
NORM_LIMIT = 1.0
WEIGHT_DECAY = 0.1
# Trying Triton's products against each other would take longer than they save in a run of minutes.
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


class Result(NamedTuple):
    """What the model makes of a batch: logits [L, S, V] of the next token, and by depth of those after it; experts chosen."""

    logits: Float[Array, "L S V"]
    drafts: list[Float[Array, "L S V"]]
    experts: list[Array]  # of each sparse layer, [L, S, A]


class Modules:
    """Decoder, towers and draft head, each a module of its own, merged anew with arrays where a program is traced."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        decoder = Inkling(config.text, frozenset(), dtype)
        for layer in decoder.layers:
            if isinstance(layer.mlp, SparseMLP):
                layer.mlp.every_expert = True
        draft = DraftHead.of(config, dtype)
        assert draft is not None
        self.config, self.dtype = config, dtype
        self._parts = [decoder, Towers.of(config, ("vision", "audio"), dtype), draft]
        self.declared: dict[str, jax.ShapeDtypeStruct] = {
            path: leaf.get_value() for part in self._parts for path, leaf in flat_parameters(part).items()
        }
        packed = packed_experts(config.text)
        self.packed = frozenset(f"layers.{layer}.mlp.experts.{name}" for layer, name in packed)
        self.routers = [path for path in self.declared if path.endswith("router.bias")]

    def initial(self, seed: int) -> Parameters:
        """Parameters before training."""
        rng = np.random.default_rng(seed)
        return {p: jnp.asarray(initial_value(p, leaf.shape, self.config, rng)) for p, leaf in self.declared.items()}

    def merged(self, parameters: Parameters, quantized: Array) -> tuple[Inkling, Towers, DraftHead]:
        """The modules with these parameters, each in its declared dtype. Where `quantized` is 1 and not 0, experts are what NVFP4
        rounds them to, with gradients as if they were not.
        """

        def cast(path: str) -> Array:
            value = parameters[path]
            if path in self.packed:
                value = value + quantized * jax.lax.stop_gradient(as_nvfp4(value) - value)
            return value.astype(self.declared[path].dtype)

        made: list[Any] = []
        for part in self._parts:
            graph, abstract = nnx.split(part)
            leaves = [cast(path) for path in flat_parameters(part)]
            made.append(nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(abstract), leaves)))
        return made[0], made[1], made[2]

    def forward(self, parameters: Parameters, batch: Batch, quantized: Array) -> Result:
        """Teacher forced, whole lines at once."""
        decoder, towers, draft = self.merged(parameters, quantized)
        lines, length = batch.ids.shape
        media, present = media_rows(towers, batch, self.dtype)
        depths = len(draft.draft)

        def line(ids: Array, example: Array, offset: Array, rows: Array, present: Array) -> Result:
            ragged, stands = as_ragged(example, offset), MediaRows(rows, present)
            tape: dict[str, Array] = {}
            z, _ = decoder(ids, keep_nothing(len(decoder.layers)), ragged, length, tape, stands)
            embedded = decoder.embeddings(ids, stands)
            later = [jnp.roll(embedded, -1 - depth, axis=0) for depth in range(depths)]
            states, _ = draft(z, later, keep_nothing(depths), ragged, length)
            experts = [tape[name] for name in tape if name.endswith("experts")]
            return Result(decoder.logits(z), [decoder.logits(state) for state in states], experts)

        ids, example, offset = (a.astype(jnp.int32) for a in (batch.ids, batch.example, batch.offset))
        return jax.vmap(line)(ids, example, offset, media, present)


def as_ragged(example: Array, offset: Array) -> Ragged:
    """A line's tokens: each knows its example and its place there, which is all that is asked where nothing is kept."""
    nothing = jnp.zeros(1, jnp.int32)
    size = jnp.full(1, example.shape[0], jnp.int32)
    return Ragged(nothing, nothing, size, size, example, offset, offset, example >= 0, longest=example.shape[0])


def media_rows(towers: Towers, batch: Batch, dtype: jnp.dtype) -> tuple[Float[Array, "L S D"], Array]:
    """The towers' rows in the places of their tokens, and where there are any."""
    assert towers.vision is not None and towers.audio is not None
    lines, length = batch.ids.shape
    rows = [towers.vision(patches_of(batch)), towers.audio(batch.bins.astype(jnp.int32))]
    places = [batch.tile_place, batch.bin_place]
    out = jnp.zeros((lines * length, rows[0].shape[1]), dtype)
    present = jnp.zeros(lines * length, bool)
    for made, place in zip(rows, places, strict=True):
        out = out.at[place].set(made.astype(dtype), mode="drop", unique_indices=True)
        present = present.at[place].set(True, mode="drop", unique_indices=True)
    return out.reshape(lines, length, -1), present.reshape(lines, length)


def patches_of(batch: Batch) -> Float[Array, "N 2 40 40 3"]:
    """Pixels as `inputs.images.tile` normalises them, both time slots alike."""
    config, places = ImageConfig(), jnp.arange(SIDE)
    rows, columns = (places < batch.tile_extent[:, axis, None] for axis in range(2))
    inside = rows[:, :, None, None] & columns[:, None, :, None]
    pixels = jnp.where(inside, batch.tiles.astype(jnp.float32), PADDING)
    tiles = (pixels / 255 - jnp.array(config.mean)) / jnp.array(config.std)
    return jnp.broadcast_to(tiles[:, None], (len(tiles), SLOTS, *tiles.shape[1:]))


def as_nvfp4(weight: Float[Array, "E ... I"]) -> Float[Array, "E ... I"]:
    """Experts' weights as NVFP4 stores them, one scale an expert and block scales from the largest of each block."""
    largest = jnp.abs(weight).max(tuple(range(1, weight.ndim)), keepdims=True)[..., 0]
    codes, scale = quantize_activations(weight, jnp.broadcast_to(largest, weight.shape[:-1]))
    return codes * scale[..., None]


def loss_of(modules: Modules, parameters: Parameters, batch: Batch, quantized: Array) -> tuple[Array, dict[str, Any]]:
    """The weighted mean of all losses, and numbers to print: among them the tokens that each expert gets."""
    result = modules.forward(parameters, batch, quantized)
    weights = jnp.array([0.0, CONTEXT_WEIGHT, 1.0])[batch.target.astype(jnp.int32)]
    ids, example = batch.ids.astype(jnp.int32), batch.example
    total, numbers = jnp.zeros(()), {}
    for ahead, logits in enumerate((result.logits, *result.drafts), start=1):
        label = jnp.roll(ids, -ahead, axis=1)
        inside = follows(example, ahead)
        weight = jnp.where(inside, jnp.roll(weights, -ahead, axis=1), 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        mean = (losses * weight).sum() / jnp.maximum(weight.sum(), 1)
        total += mean * (1 if ahead == 1 else DRAFT_WEIGHT)
        written = weight == 1
        right = (jnp.argmax(logits, -1) == label) & written
        name = "" if ahead == 1 else f"draft{ahead - 1}_"
        numbers[f"{name}loss"] = (losses * written).sum() / jnp.maximum(written.sum(), 1)
        numbers[f"{name}accuracy"] = right.sum() / jnp.maximum(written.sum(), 1)
    count = modules.config.text.num_experts
    valid = (example >= 0)[..., None, None]
    numbers["load"] = [((e[..., None] == jnp.arange(count)) & valid).sum((0, 1, 2)) for e in result.experts]
    return total, numbers


def follows(example: Array, ahead: int) -> Array:
    """Whether the token so many places on is of the same example."""
    within = jnp.arange(example.shape[1]) < example.shape[1] - ahead
    return within & (example >= 0) & (jnp.roll(example, -ahead, axis=1) == example)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """All that a step changes."""

    parameters: Parameters
    moments: Any  # of the optimizer


class Trainer:
    """The compiled programs."""

    def __init__(self, modules: Modules):
        self.modules = modules
        self.optimizer: Any = optax.chain(
            optax.clip_by_global_norm(NORM_LIMIT),
            optax.scale_by_adam(b1=0.9, b2=0.98),
            optax.add_decayed_weights(WEIGHT_DECAY, mask={p: trained_by_decay(p, a) for p, a in modules.declared.items()}),
        )
        self.mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("tensor", "expert"))
        self.step = jax.jit(self._step, donate_argnums=0, compiler_options=COMPILER_OPTIONS)
        self.correct = jax.jit(self._correct, compiler_options=COMPILER_OPTIONS)

    def start(self, parameters: Parameters) -> State:
        """A state whose optimizer has seen nothing."""
        return State(parameters, self.optimizer.init(parameters))

    def on_mesh(self, function: Any, *arguments: Any) -> Any:
        """A call under the axis names that the layers' collectives speak of."""
        whole = PartitionSpec()
        with jax.default_matmul_precision("highest" if self.modules.dtype == jnp.float32 else "default"):
            return jax.shard_map(function, mesh=self.mesh, in_specs=whole, out_specs=whole, check_vma=False)(*arguments)

    def _step(self, state: State, batch: Batch, rate: Array, pace: Array, quantized: Array) -> tuple[State, dict[str, Array]]:
        """`rate`: the learning rate; `pace`: what part it is of the highest."""
        gradient = jax.value_and_grad(functools.partial(loss_of, self.modules), has_aux=True)
        (_, numbers), slope = self.on_mesh(gradient, state.parameters, batch, quantized)
        updates, moments = self.optimizer.update(slope, state.moments, state.parameters)
        parameters = {path: value - rate * rate_of(path, value.shape) * updates[path] for path, value in state.parameters.items()}
        loads = numbers.pop("load")
        for path, load in zip(self.modules.routers, loads, strict=True):
            parameters[path] += pace * BIAS_STEP * jnp.sign(load.mean() - load)
        numbers["norm"] = jnp.sqrt(sum(jnp.vdot(part, part) for part in slope.values()))
        numbers["crowding"] = jnp.stack([load.max() / load.mean() for load in loads]).max()
        return State(parameters, moments), numbers

    def _correct(self, parameters: Parameters, batch: Batch, quantized: Array) -> list[Array]:
        """For the next token and each depth: whether the token at each place is the likeliest, as seen from before. [L, S]."""
        result = self.on_mesh(self.modules.forward, parameters, batch, quantized)
        return [
            jnp.roll(jnp.argmax(logits, -1), ahead, axis=1) == batch.ids
            for ahead, logits in enumerate((result.logits, *result.drafts), start=1)
        ]
