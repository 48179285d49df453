"""The engine: requests in, tokens out. It dispatches steps to the device and reads their results one step behind.

Knows token ids and no text. One engine owns one state; every method is called from one thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

import jax
import numpy as np

from inkling_jax.cache.paged import CacheShape
from inkling_jax.cache.prefix import PrefixStatistics
from inkling_jax.config import TextConfig
from inkling_jax.engine import sampler
from inkling_jax.engine.check import StepCheck
from inkling_jax.engine.draft import DraftRunner
from inkling_jax.engine.media import MediaRunner
from inkling_jax.engine.output import Output, read_row
from inkling_jax.engine.pack import SCORE_CHUNK, pack_chunk, pack_decode, side_by_side
from inkling_jax.engine.replicas import Replicas
from inkling_jax.engine.request import Request, SamplingParams, check_ids, request_key
from inkling_jax.engine.scheduler import Limits, Plan, Scheduler
from inkling_jax.engine.sequence import Sequence
from inkling_jax.engine.shapes import SAMPLINGS, Shapes, smallest
from inkling_jax.engine.snapshots import Snapshots
from inkling_jax.engine.state import EngineState
from inkling_jax.engine.steps import Chunk, Programs, Sampled, Sampling
from inkling_jax.errors import InklingError, InputError
from inkling_jax.media import MediaItem
from inkling_jax.model import MediaRows
from inkling_jax.towers import Towers

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How the engine works; none of it changes a token beyond rounding."""

    chunk: int = 512  # tokens a step that reads prompts
    tokens_per_call: int = 8  # decode steps a host call
    ahead: int = 1  # steps dispatched before the oldest's result is read
    deterministic: bool = False  # to the bit, a request's tokens do not depend on what else runs or ran
    check: bool = False  # compare the device's state with the host's after each step, see `check.StepCheck`
    prefix_bytes: int = 1 << 30  # host memory for the states of prefixes that others may begin with; 0: none is kept
    prefix_spacing: int = 2048  # tokens between prefixes that are kept of a prompt, beside its end


@dataclasses.dataclass
class _InFlight:
    """A dispatched step: who its rows are, and results that the device may still be computing."""

    rows: list[tuple[int, Sequence]]
    sampled: Sampled
    step: int


class Engine:
    """Runs requests to their end. `banned` ids (media slots) are never sampled; `default_stop_ids` end a request by default."""

    def __init__(
        self,
        programs: Programs,
        leaves: list[jax.Array],
        create_state: Callable[[], EngineState],
        config: TextConfig,
        shape: CacheShape,
        *,
        banned: tuple[int, ...] = (),
        default_stop_ids: tuple[int, ...] = (),
        options: EngineOptions = EngineOptions(),
        media: MediaRunner | None = None,
        shapes: Shapes | None = None,
        entropy: int | None = None,
    ):
        """`create_state`: makes an empty state on the mesh, now and after a failure. `shapes`: those that steps are compiled for,
        by default Shapes.of the cache. `entropy`: what requests without a seed draw theirs from, by default fresh; several
        processes must have the same.
        """
        window = config.local_attention.window or shape.max_context
        self.programs, self.leaves, self.options = programs, leaves, options
        self._create_state, self.state = create_state, create_state()
        self.media = media or MediaRunner(Towers(None, None, programs.dtype), [], programs.mesh, programs.dtype)
        self.shapes = shapes or Shapes.of(shape, options.chunk, single=options.deterministic)
        ways = SAMPLINGS[-1:] if options.deterministic else SAMPLINGS
        self.samplings = [Sampling(mode, top and min(config.usable_vocab_size, top), banned) for mode, top in ways]
        self.vocab, self.banned, self.default_stop_ids = config.usable_vocab_size, banned, default_stop_ids
        self.shape = shape
        self.drafts: DraftRunner | None = None  # once something asks for it
        self.snapshots = Snapshots(programs, self.state.cache)
        limits = Limits(
            slots=shape.slots,
            page_size=shape.page_size,
            global_pages=shape.global_pages,
            local_pages=shape.local_pages,
            global_width=shape.table_width(None),
            local_width=shape.table_width(window),
            window=window,
            max_context=shape.max_context,
            chunk=options.chunk,
            steps=options.tokens_per_call,
            prefixes=0 if options.deterministic else options.prefix_bytes // self.snapshots.nbytes,
            spacing=options.prefix_spacing,
            alone=options.deterministic,
        )
        self.replicas = programs.mesh.shape["data"]
        self.scheduler = Scheduler(limits) if self.replicas == 1 else Replicas(limits, self.replicas)
        self.check = StepCheck(config.local_layers) if options.check else None
        self._seeds = np.random.default_rng(entropy)
        self._sequences: dict[int, Sequence] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._next_id, self._step, self.closed = 0, 0, False
        self._told: list[Output] = []  # what no caller has been given
        self._failed = False  # whether a step did since a token was made
        self._broken = ""  # why nothing can run any more

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished or any result unread."""
        return bool(self._sequences or self._in_flight)

    @property
    def prefix_statistics(self) -> PrefixStatistics:
        """What the reuse of prefixes has come to."""
        return PrefixStatistics() if self.scheduler.prefixes is None else self.scheduler.prefixes.statistics

    def close(self) -> None:
        """Free the device memory of weights and state; later calls raise InputError."""
        with contextlib.suppress(RuntimeError):  # of a step that failed, or of a state that went with one
            jax.block_until_ready(self.state)  # a process that ends while a step runs aborts
        for array in [*self.leaves, *jax.tree.leaves(self.state)]:
            array.delete()
        self.media.close()
        if self.drafts is not None:
            self.drafts.close()
        self.leaves, self.closed = [], True
        self._sequences.clear()
        self._in_flight.clear()

    def add(self, request: Request) -> int:
        """Queue a request; its id. Raises InputError or CapacityError naming what is wrong with it."""
        self._check_open()
        check_ids(request.prompt_ids, self.vocab)
        self.media.check(request.media)
        request.params.validate_for(self.vocab)
        if request.deadline is not None and jax.process_count() > 1:
            raise InputError("a deadline needs a single process: the clocks of several do not agree")
        sequence = self.scheduler.add(request)
        self._next_id += 1
        self._sequences[self._next_id] = sequence
        sequence.id = self._next_id
        return self._next_id

    def cancel(self, request_id: int) -> None:
        """End a request; nothing more comes out of it. Unknown and finished ids are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._retire(sequence)

    def step(self) -> list[Output]:
        """Dispatch the next step, if any, and return what a step that lies `ahead` behind has made.

        After a failure requests read again what they had. Raises InklingError where it comes twice without a token in between,
        or nothing can run any more: see `_recover`.
        """
        self._check_open()
        self._told += [self._cancel_overdue(sequence) for sequence in self.scheduler.overdue()]
        try:
            made = self._advance()
            self._failed = self._failed and not any(output.token_ids or output.finish_reason for output in made)
            self._told += made
        except InklingError:  # the check has found something
            raise
        except Exception as error:
            again, self._failed = self._failed, not self._failed
            message = self._recover(error)
            if again:
                raise InklingError(message) from error
            logger.warning("%s", message)
        told, self._told = self._told, []
        return told

    def _advance(self) -> list[Output]:
        """Dispatch a step, and collect an older one."""
        plans, ahead = self.scheduler.plans(), self.options.ahead
        for sequence in (sequence for plan in plans for sequence in plan.admitted):
            self._admit(sequence)
        if self.check is not None:
            self.check.before(self)
        if not any(plan.parts or plan.decoding for plan in plans):
            ahead = 0
        elif plans[0].mixed:
            self._dispatch_chunk(plans)
        else:
            self._dispatch_decode(plans)
        return self._collect() if len(self._in_flight) > ahead else []

    def run(self) -> Iterator[Output]:
        """Step until nothing is left."""
        while self.busy:
            yield from self.step()

    def evaluate(
        self, token_ids: SequenceOf[int], trace: bool = False, media: tuple[MediaItem, ...] = ()
    ) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Logits [t, usable] and, with `trace`, hidden states and routing, of each chunk of a prompt in turn (teacher forced).

        Takes a slot and pages like any request, and gives them back.
        """
        with self._teacher_forced(token_ids, media) as sequence:
            for begin, end in self._pieces(sequence):
                chunk, context = self._piece(sequence, begin, end)
                (logits, tape), self.state = self.programs.score(self.leaves, self.state, chunk, context=context, trace=trace)
                first = self._replica(sequence) * (len(chunk.token_ids) // self.replicas)
                own = slice(first, first + end - begin)
                # cut on the host: on the device each count would be a program of its own
                yield np.asarray(logits)[own], {name: np.asarray(value)[own] for name, value in tape.items()}

    def draft_logits(self, token_ids: SequenceOf[int], media: tuple[MediaItem, ...] = ()) -> Iterator[list[np.ndarray]]:
        """Of each chunk of a prompt in turn, the logits [t, usable] of each depth of the draft head (teacher forced).

        Depth k has them at every token but the last 1 + k of the prompt. Takes a slot, pages and a cache of its own for the time.
        """
        self._check_open()
        drafts, length = self.drafts, len(token_ids)
        if drafts is None:
            raise InputError("the draft head of this model is not loaded")
        with self._teacher_forced(token_ids, media) as sequence:
            cache, shape = drafts.create_cache(length, self.shape.page_size, min(self.options.chunk, SCORE_CHUNK))
            for begin, end in self._pieces(sequence):
                chunk, context = self._piece(sequence, begin, end)
                hidden, self.state = self.programs.hidden(self.leaves, self.state, chunk, context=context)
                later = [self._later(sequence, begin + 1 + k, end + 1 + k, len(chunk.token_ids)) for k in range(drafts.depths)]
                states, cache = drafts.states(self.leaves, cache, shape, end, hidden, chunk, later)
                counts = [max(0, min(end, length - 1 - k) - begin) for k in range(drafts.depths)]
                yield [np.asarray(drafts.logits(self.leaves, states[k]))[:count] for k, count in enumerate(counts)]

    def _later(self, sequence: Sequence, begin: int, end: int, places: int) -> tuple[np.ndarray, MediaRows | None]:
        """Tokens begin .. end of a prompt as far as it has them, and the rows of media among them, in `places`."""
        ids = np.zeros(places, np.int32)
        found = sequence.request.prompt_ids[begin:end]
        ids[: len(found)] = found
        return ids, self.media.rows(places, [(sequence, begin, begin + len(found))])

    @contextlib.contextmanager
    def _teacher_forced(self, token_ids: SequenceOf[int], media: tuple[MediaItem, ...]) -> Iterator[Sequence]:
        """A sequence with a slot, whose prompt the caller reads by itself."""
        self._check_open()
        check_ids(token_ids, self.vocab)
        self.media.check(media)
        sequence = self.scheduler.open(Request(tuple(token_ids), SamplingParams(temperature=0, max_tokens=1), media=media))
        try:
            yield sequence
        except Exception as error:
            if isinstance(error, InklingError) or self._state_is_sound():
                raise
            raise InklingError(self._recover(error)) from error
        finally:
            self._retire(sequence)

    def _pieces(self, sequence: Sequence) -> Iterator[tuple[int, int]]:
        """Where the chunks of a prompt that is read for its logits begin and end."""
        length = min(self.options.chunk, max(size for size in self.shapes.chunks if size <= SCORE_CHUNK))
        for begin in range(0, sequence.to_read, length):
            yield begin, min(sequence.to_read, begin + length)

    def _piece(self, sequence: Sequence, begin: int, end: int) -> tuple[Chunk, int]:
        """A chunk of a prompt that is read for its logits, and the bound on its length."""
        if sequence.done:
            raise InklingError("what was read of this prompt went with a step that failed: ask again")
        plans = [Plan(1, True) for _ in range(self.replicas)]
        parts, entries = [(sequence, begin, end)], self.scheduler.hold(sequence, begin, end)
        plans[self._replica(sequence)] = Plan(1, True, parts=parts, entries=entries)
        return self._chunk(plans, whole=False)

    def _check_open(self) -> None:
        if self.closed:
            raise InputError("this model is closed: load it again")
        if self._broken:
            raise InklingError(self._broken)

    def _state_is_sound(self) -> bool:
        """Whether it was not donated to a call that failed."""
        try:
            jax.block_until_ready(self.state)
        except RuntimeError:
            return False
        return True

    def _recover(self, error: Exception) -> str:
        """Go on after a call that raised, which may have taken the donated state with it; what happened, in a line.

        With an empty state: requests return to the line to read again what they had, and prefixes and rows of media are
        forgotten. In deterministic mode a request that has made tokens ends as an error: read again, they might not be the same.
        Raises InklingError, as every later call does, where no state can be made, or other processes know nothing of it.
        """
        what = f"a step failed: {type(error).__name__}: {next(iter(str(error).splitlines()), 'it says no more')}"
        self._in_flight.clear()
        try:
            if jax.process_count() > 1:
                raise InklingError("the other processes are a step ahead")
            for array in jax.tree.leaves(self.state):
                array.delete()  # before there is another
            self.state = jax.block_until_ready(self._create_state())
        except Exception as second:
            self._broken = f"{what}; no new cache could be made ({second}): load the model again"
            raise InklingError(self._broken) from error
        self.media.forget()
        self.snapshots.forget()
        self.scheduler.lose_all()
        if self.check is not None:
            self.check.forget()
        if self.options.deterministic:
            for sequence in [sequence for sequence in self._sequences.values() if sequence.made]:
                del self._sequences[sequence.id]
                self._retire(sequence)
                self._told.append(Output(sequence.id, (), (), "error", what))
        return f"{what}; the cache was made anew, and what ran reads again what it had"

    def _retire(self, sequence: Sequence, *, spoilt: bool = False) -> None:
        self.scheduler.retire(sequence, spoilt=spoilt)
        self.media.release(sequence)

    def _cancel_overdue(self, sequence: Sequence) -> Output:
        del self._sequences[sequence.id]
        self._retire(sequence)
        message = f"the deadline of {sequence.request.deadline:g} s has passed ({len(sequence.made)} tokens were made)"
        return Output(sequence.id, (), (), "cancelled", message)

    def _admit(self, sequence: Sequence) -> None:
        """Set a sequence's slot up: its settings, what it has made before it lost an earlier one, and what it begins with."""
        request = sequence.request
        seed = request.params.seed
        if sequence.key is None:
            sequence.key = request_key(int(self._seeds.integers(1 << 63)) if seed is None else seed, request.sample)
        values = sampler.slot_values(request.params, self.default_stop_ids, self.vocab, sequence.key)
        values["max_tokens"] = np.asarray(sequence.max_tokens, np.int32)
        row = sampler.prompt_row(request.prompt_ids, self.state.sampler.prompt_seen.shape[1])
        settings = sampler.admit(self.state.sampler, sequence.slot, values, row)
        if sequence.resumed:
            settings = sampler.resume(settings, sequence.slot, sequence.made)
        self.state = dataclasses.replace(self.state, sampler=settings)
        if sequence.prefix is not None:
            rows = {name: pages.row() for name, pages in sequence.pages.items()}
            cache = self.snapshots.restore(self.state.cache, sequence.slot, sequence.prefix.snapshot, rows)
            self.state = dataclasses.replace(self.state, cache=cache)

    def _dispatch_chunk(self, plans: list[Plan]) -> None:
        """Dispatch parts of prompts, and a token for each that decodes beside them."""
        chunk, context = self._chunk(plans, whole=True)
        made, count = [], len(chunk.slot) // self.replicas
        for r, plan in enumerate(plans):
            made += [(r * count + row, s) for row, (s, _, end) in enumerate(plan.parts) if end == s.to_read]
            made += list(enumerate(plan.decoding, r * count + len(plan.parts)))
        parts, keep = ([item for plan in plans for item in listed(plan)] for listed in (lambda p: p.parts, lambda p: p.keep))
        sampling = self._sampling([*(s for s, _, _ in parts), *(s for plan in plans for s in plan.decoding)])
        sampled, self.state = self.programs.prefill(self.leaves, self.state, chunk, context=context, sampling=sampling)
        self._launched(made, sampled)
        for sequence, _, end in parts:
            if end == sequence.to_read:
                self.media.release(sequence)
        for sequence, end in keep:
            take = functools.partial(self.snapshots.take, self.state.cache, sequence.slot, self._step)
            self.scheduler.keep(sequence, end, take)

    def _dispatch_decode(self, plans: list[Plan]) -> None:
        sequences, steps = [s for plan in plans for s in plan.decoding], plans[0].steps
        rows = smallest(self.shapes.rows, max(len(plan.decoding) for plan in plans))
        packed = [pack_decode(self._own_slots(plan.decoding), plan.entries, self.shape, rows, steps) for plan in plans]
        inputs = side_by_side(packed)
        context = smallest(self.shapes.contexts, max(s.positions for s in sequences))
        sampling = self._sampling(sequences)
        sampled, self.state = self.programs.decode(
            self.leaves, self.state, inputs, context=context, sampling=sampling, steps=steps
        )
        self._launched([(r * rows + i, s) for r, plan in enumerate(plans) for i, s in enumerate(plan.decoding)], sampled)

    def _launched(self, rows: list[tuple[int, Sequence]], sampled: Sampled) -> None:
        self._step += 1
        for leaf in jax.tree.leaves(sampled):
            leaf.copy_to_host_async()
        self._in_flight.append(_InFlight(rows, sampled, self._step))
        if self.check is not None:
            self.check.after(self, rows, sampled)

    def _collect(self) -> list[Output]:
        """Read the oldest step in flight and turn its rows into outputs."""
        flight = self._in_flight.popleft()
        sampled = jax.device_get(flight.sampled)
        self.snapshots.settle(flight.step)
        outputs = []
        for row, sequence in flight.rows:
            sequence.in_flight -= 1
            if sequence.done:
                continue
            output = read_row(sequence, jax.tree.map(lambda a, row=row: a[:, row], sampled), flight.step)
            if output.finish_reason:
                del self._sequences[sequence.id]
                self._retire(sequence, spoilt=output.finish_reason == "error")
            outputs.append(output)
        return outputs

    def _chunk(self, plans: list[Plan], whole: bool) -> tuple[Chunk, int]:
        """The device's view of parts of prompts and rows that decode, replica after replica, and the bound on their lengths.

        whole: with media it has the largest chunk's places.
        """
        parts, chunks, firsts = [part for plan in plans for part in plan.parts], [], []
        for sequence, begin, _ in parts:
            # the rows of what lies in a prefix that it began with are not needed
            self.media.admit(sequence, [i for i in sequence.request.media if i.begin + len(i.values) > begin])
        tokens = max(sum(end - begin for _, begin, end in plan.parts) + len(plan.decoding) for plan in plans)
        # programs that take media are of one size: there are half as many, and towers run for longer than places are idle
        places = self.shapes.chunks[-1] if whole and self.media.wants(parts) else smallest(self.shapes.chunks, tokens)
        for r, plan in enumerate(plans):
            slots = self._own_slots([s for s, _, _ in plan.parts])
            packed = [
                (slot, s.ids[begin:end], begin, end == s.to_read) for slot, (s, begin, end) in zip(slots, plan.parts, strict=True)
            ]
            chunks.append(pack_chunk(packed, plan.entries, self.shape, places, self._own_slots(plan.decoding)))
            first = r * places
            for _, begin, end in plan.parts:
                firsts.append(first)
                first += end - begin
        chunk = dataclasses.replace(side_by_side(chunks), media=self.media.rows(self.replicas * places, parts, firsts))
        longest = max([*(end for _, _, end in parts), *(s.positions for plan in plans for s in plan.decoding)])
        return chunk, smallest(self.shapes.contexts, longest)

    def _replica(self, sequence: Sequence) -> int:
        return sequence.slot // (self.shape.slots + 1)

    def _own_slots(self, sequences: list[Sequence]) -> list[int]:
        """Their numbers in their replica."""
        return [sequence.slot % (self.shape.slots + 1) for sequence in sequences]

    def _sampling(self, sequences: list[Sequence]) -> Sampling:
        params = [s.request.params for s in sequences]
        everything = sampler.mode_for(params) == "full" or any(p.logprobs is not None for p in params)
        return self.samplings[-1 if everything else 0]
