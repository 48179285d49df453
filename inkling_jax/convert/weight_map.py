"""Which parameter of the model is made from which tensors of a checkpoint, decided from headers before any weight is read."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from inkling_jax.config import AttentionConfig, AudioConfig, ModelConfig, TextConfig, VisionConfig
from inkling_jax.config_vision import vision_folds
from inkling_jax.convert import assemble, nvfp4
from inkling_jax.convert.accounting import Ledger, Source, Wanted, place
from inkling_jax.convert.assemble import Check
from inkling_jax.convert.header import show
from inkling_jax.convert.safetensors_reader import Checkpoint
from inkling_jax.convert.view import View
from inkling_jax.errors import CheckpointError

_F32 = np.dtype(np.float32)
_U8 = np.dtype(np.uint8)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_Shape = tuple[int, ...]

TOWERS = {"vision": "model.visual.", "audio": "model.audio."}  # what the names of a tower's tensors begin with
DRAFT = "model.mtp."  # and those of the draft head; its parameters begin with "draft"


@dataclasses.dataclass(frozen=True)
class WeightPlan:
    """A checkpoint matched with a configuration.

    `packed` holds (layer, "w13" | "w2") of each expert stack in NVFP4; `towers` says which of "vision" and "audio" are there,
    `draft` whether the draft head is read; `deferred` are the tensors of a draft head that is not, and of towers that the
    configuration has not, `unused` those that are known and deliberately not read.
    """

    checkpoint: Checkpoint
    parameters: dict[str, Source]  # those of a tower begin with its name
    packed: frozenset[tuple[int, str]]
    towers: frozenset[str]
    deferred: tuple[str, ...]
    unused: tuple[str, ...]
    draft: bool = False

    @classmethod
    def build(cls, config: ModelConfig, checkpoint: Checkpoint, *, input_scales: bool = False, draft: bool = False) -> WeightPlan:
        """Match every tensor; CheckpointError names those that are missing, unexpected, of a wrong shape or dtype.

        `input_scales`: packed experts need the calibration of their inputs as well. `draft`: the draft head is to be read, if
        configuration and checkpoint have one.
        """
        planner = _Planner(config, checkpoint, input_scales)
        planner.plan_ends()
        for layer in range(config.text.num_layers):
            planner.plan_layer(layer)
        planner.plan_towers()
        drafted = draft and planner.plan_draft_head()
        waiting = [TOWERS[name] for name in TOWERS.keys() - planner.towers] + ([] if drafted else [DRAFT])
        deferred, unused = planner.ledger.settle(tuple(waiting))
        packed, towers = frozenset(planner.packed), frozenset(planner.towers)
        return cls(checkpoint, planner.ledger.parameters, packed, towers, deferred, unused, drafted)

    @property
    def total_bytes(self) -> int:
        """Bytes that reading all parameters takes from the files."""
        return sum(source.nbytes for source in self.parameters.values())

    def assemble(self, path: str) -> np.ndarray:
        """One parameter, read now, whole; in its fixed dtype, or as stored where the model's dtype applies."""
        source = self.parameters[path]
        out = np.empty(source.shape, source.dtype or source.content.stored)
        source.content.read(tuple(slice(0, size) for size in source.shape), out)
        return out

    def abstract(self, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each parameter when the model's dtype is `dtype`."""
        model_dtype = jnp.dtype(dtype)
        return {path: jax.ShapeDtypeStruct(s.shape, s.dtype or model_dtype) for path, s in self.parameters.items()}


class _Planner:
    """Walks the model in the order of the configuration and claims the tensors of each parameter (spec 7.1, 7.2)."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, input_scales: bool):
        self.config, self.text = config, config.text
        self.input_scales = input_scales
        self.tensors = checkpoint.tensors
        self.ledger = Ledger(checkpoint)
        self.packed: set[tuple[int, str]] = set()
        self.towers: set[str] = set()

    def plan_ends(self) -> None:
        """Embedding, its norm, the final norm and the head."""
        text = self.text
        table = (text.vocab_size, text.hidden_size)
        embed, unembed = Wanted("model.llm.embed.weight", (table,)), "model.llm.unembed.weight"
        self._plain("embed", embed)
        if text.use_embed_norm:
            self._vector("embed_norm.weight", "model.llm.embed_norm.weight", text.hidden_size)
        self._vector("norm.weight", "model.llm.norm.weight", text.hidden_size)
        # Releases never tie, but a checkpoint without a head can mean nothing else (spec 2.1).
        untied = Wanted(unembed, (table, (text.usable_vocab_size, text.hidden_size)))
        head = untied if unembed in self.tensors else embed
        self.ledger.add("unembed", table, lambda info: View.of(info, info.shape), head)  # rows that are not there are zeros

    def plan_layer(self, layer: int) -> None:
        """One layer of the decoder."""
        self._plan_layer(self.text, layer, f"layers.{layer}.", f"model.llm.layers.{layer}.")

    def _plan_layer(self, text: TextConfig, layer: int, path: str, name: str) -> None:
        """Layer `layer` of `text`, a decoder or the draft head as one: norms, attention, convolutions, feed-forward."""
        for norm in ("attn_norm.weight", "mlp_norm.weight"):
            self._vector(path + norm, name + norm, text.hidden_size)
        self._plan_attention(text.attention(layer), path + "attn.", name + "attn.")
        for stream in ("attn", "mlp"):
            self._conv(f"{path}{stream}_conv.weight", f"{name}{stream}_sconv.weight", (text.hidden_size,))
        if text.dense_layers[layer]:
            self._plan_dense(path + "mlp.", name + "mlp.")
        else:
            self._plan_sparse(layer, path + "mlp.", name + "mlp.")

    def plan_towers(self) -> None:
        """The towers that the configuration has, unless the checkpoint holds not one tensor of theirs: then it is text alone."""
        present = {tower for tower, name in TOWERS.items() if any(tensor.startswith(name) for tensor in self.tensors)}
        if self.config.vision is not None and "vision" in present:
            self.towers.add("vision")
            self._plan_vision(self.config.vision, "vision.", TOWERS["vision"])
        if self.config.audio is not None and "audio" in present:
            self.towers.add("audio")
            self._plan_audio(self.config.audio, "audio.", TOWERS["audio"])

    def plan_draft_head(self) -> bool:
        """The draft head, if the configuration has one and the checkpoint any tensor of it; whether that is so."""
        layers = self.config.draft_layers
        if layers is None or self.config.mtp is None or not any(tensor.startswith(DRAFT) for tensor in self.tensors):
            return False
        width = layers.hidden_size
        for depth in range(layers.num_layers):
            path, name = f"draft.{depth}.", f"{DRAFT}layers.{depth}."
            for norm in ("hidden_norm.weight", "embed_norm.weight"):
                self._vector(path + norm, name + norm, width)
            self._plain(path + "input_proj", Wanted(name + "input_proj.weight", ((width, 2 * width),)))
            self._plan_layer(layers, depth, path + "block.", name + "transformer_block.")
        if self.config.mtp.chain_norm:
            self._vector("draft_norm.weight", DRAFT + "chain_norm.weight", width)
        return True

    def _plan_vision(self, vision: VisionConfig, path: str, name: str) -> None:
        folds = vision_folds(vision)
        for i, fold in enumerate(folds):
            self._plain(f"{path}layers.{i}.proj", Wanted(f"{name}layers.linear_{i}.weight", ((fold.outputs, fold.inputs),)))
            if i < len(folds) - 1:
                self._vector(f"{path}layers.{i}.norm.weight", f"{name}layers.norm_{i}.weight", fold.outputs)
        if vision.use_norm:
            self._vector(path + "final_norm.weight", name + "final_norm.weight", vision.hidden_size)

    def _plan_audio(self, audio: AudioConfig, path: str, name: str) -> None:
        rows = f"n_mel_bins {audio.num_mel_bins} x mel_vocab_size {audio.mel_vocab_size}"
        table = (audio.num_mel_bins * audio.mel_vocab_size, audio.hidden_size)
        self._plain(path + "embed", Wanted(name + "encoder.weight", (table,), leading=rows))
        if audio.use_norm:
            self._vector(path + "norm.weight", name + "final_norm.weight", audio.hidden_size)

    def _plan_attention(self, attention: AttentionConfig, path: str, name: str) -> None:
        text = self.text
        heads, kv_heads, head = attention.num_heads, attention.num_kv_heads, attention.head_dim
        width, extent = text.hidden_size, attention.rel_extent
        rows = {"wq_du": heads * head, "wk_dv": kv_heads * head, "wv_dv": kv_heads * head, "wr_du": heads * text.rel_dim}
        fused = [Wanted(f"{name}{role}.weight", ((count, width),)) for role, count in rows.items()]
        form = functools.partial(assemble.grouped, groups=kv_heads)
        self.ledger.add(path + "qkvr_proj", (kv_heads, sum(rows.values()) // kv_heads, width), form, *fused, axis=1)
        self._plain(path + "o_proj", Wanted(name + "wo_ud.weight", ((width, heads * head),)))
        for norm in ("q_norm.weight", "k_norm.weight"):
            self._vector(path + norm, name + norm, head)
        bias = Wanted(name + "rel_logits_proj.proj", ((text.rel_dim, extent),))
        self.ledger.add(path + "rel_bias", (extent, text.rel_dim), assemble.transposed, bias)
        for stream in ("k", "v"):
            self._conv(f"{path}{stream}_conv.weight", f"{name}{stream}_sconv.weight", (kv_heads, head))

    def _plan_dense(self, path: str, name: str) -> None:
        width, inner = self.text.hidden_size, self.text.dense_width
        self._gate_up(path + "w13", Wanted(name + "w13_dn.weight", ((2 * inner, width),)))
        self._plain(path + "w2", Wanted(name + "w2_md.weight", ((width, inner),)))
        self._scalar(path + "global_scale", name + "global_scale")

    def _plan_sparse(self, layer: int, path: str, name: str) -> None:
        text = self.text
        width, inner, experts, sinks = text.hidden_size, text.expert_width, text.num_experts, text.num_shared_experts
        routed, shared = f"n_routed_experts {experts}", f"n_shared_experts {sinks}"
        gate = Wanted(name + "gate.weight", ((experts + sinks, width),), leading=f"{routed} + {shared}")
        self._plain(path + "router.weight", gate)
        self._plain(path + "router.bias", Wanted(name + "gate.bias", ((experts,),), leading=routed), dtype=_F32)
        self._scalar(path + "router.global_scale", name + "gate.global_scale")
        stem = name + "shared_experts.shared_"
        self._gate_up(path + "shared.w13", Wanted(stem + "w13_weight", ((sinks, 2 * inner, width),), leading=shared))
        down = Wanted(stem + "w2_weight", ((sinks, width, inner),), leading=shared)
        self.ledger.add(path + "shared.w2", (width, sinks, inner), assemble.leading_inside, down)
        for matrix, shape in (("w13", (experts, 2 * inner, width)), ("w2", (experts, width, inner))):
            stored, name_of = f"{path}experts.{matrix}", f"{name}experts.{matrix}_weight"
            if self._is_packed(name_of, shape):
                self.packed.add((layer, matrix))
                self._plan_packed(stored, name_of, shape, matrix == "w13", routed)
            elif matrix == "w13":
                self._gate_up(stored, Wanted(name_of, (shape,), leading=routed))
            else:
                self._plain(stored, Wanted(name_of, (shape,), leading=routed))

    def _is_packed(self, name: str, shape: _Shape) -> bool:
        """A stack is NVFP4 exactly if it is U8 with block scales beside it (spec 1.3); half of that is an error."""
        info = self.tensors.get(name)
        stored = info.dtype if info else "absent"
        scales = [scale for scale in (name + ".scale", name + ".scale2") if scale in self.tensors]
        if info and stored == "U8":
            if name + ".scale" not in scales:
                raise CheckpointError(f"{place(info)}: U8 without block scales; expected {show(name + '.scale')} beside it")
            if shape[-1] % nvfp4.BLOCK:
                raise CheckpointError(f"{place(info)}: {shape[-1]} columns are not whole NVFP4 blocks of {nvfp4.BLOCK}")
            return True
        if scales:
            where = place(self.tensors[scales[0]])
            raise CheckpointError(f"{where}: scales of packed weights, but {show(name)} is {stored}; expected U8")
        return False

    def _plan_packed(self, path: str, name: str, shape: _Shape, gate_up: bool, leading: str) -> None:
        """Codes, block scales and matrix scales of an expert stack whose unpacked shape is `shape` (spec 7.4)."""
        experts, rows, columns = shape
        values = Wanted(name, ((experts, rows, columns // 2),), ("U8",), leading)
        if gate_up:
            self._gate_up(path + ".values", values, dtype=_U8)
        else:
            self._plain(path + ".values", values, dtype=_U8)
        blocks = columns // nvfp4.BLOCK
        scale = Wanted(name + ".scale", ((experts, rows, blocks),), ("F8_E4M3",), leading)
        if gate_up:
            self._gate_up(path + ".scale", scale, dtype=_E4M3, check=nvfp4.check_scale)
        else:
            self._plain(path + ".scale", scale, dtype=_E4M3, check=nvfp4.check_scale)
        one_each = (experts, 2) if gate_up else (experts,)
        shapes = ((experts,), (experts, 1), (experts, 2)) if gate_up else ((experts,), (experts, 1))
        scale2 = Wanted(name + ".scale2", shapes, ("F32",), leading)
        form = functools.partial(assemble.matrix_scale, shape=one_each)
        self.ledger.add(path + ".scale2", one_each, form, scale2, dtype=_F32, check=nvfp4.check_scale2)
        if self.input_scales:
            amax = Wanted(name + ".input_amax", ((1,), ()))
            form = functools.partial(assemble.one_for_all, count=experts)
            self.ledger.add(path + ".input_amax", (experts,), form, amax, dtype=_F32, check=nvfp4.check_positive)

    def _plain(self, path: str, wanted: Wanted, dtype: np.dtype | None = None, check: Check | None = None) -> None:
        shape = wanted.shapes[0]
        self.ledger.add(path, shape, lambda info: View.of(info, shape), wanted, dtype=dtype, check=check)

    def _vector(self, path: str, name: str, size: int) -> None:
        self._plain(path, Wanted(name, ((size,),)))

    def _scalar(self, path: str, name: str) -> None:
        self._plain(path, Wanted(name, ((), (1,))), dtype=_F32)

    def _conv(self, path: str, name: str, channels: _Shape) -> None:
        shape = (*channels, self.text.conv_width)
        wanted = Wanted(name, assemble.conv_shapes(int(np.prod(channels)), self.text.conv_width))
        self.ledger.add(path, shape, lambda info: View.of(info, shape), wanted)

    def _gate_up(self, path: str, wanted: Wanted, dtype: np.dtype | None = None, check: Check | None = None) -> None:
        *batch, rows, columns = wanted.shapes[0]
        info = self.tensors.get(wanted.name)
        if info and len(info.shape) > 1 and info.shape[-2] % 2:
            raise CheckpointError(f"{place(info)}: {info.shape[-2]} rows, but gate and up rows interleave: expected {rows}")
        self.ledger.add(path, (*batch, 2, rows // 2, columns), assemble.gate_up, wanted, dtype=dtype, check=check)
