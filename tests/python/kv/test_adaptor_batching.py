"""Many requests at once, and caches that are handed from one manager to another."""

from __future__ import annotations

import copy
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from kv.adaptor import (
    AggregatedPageDesc,
    BatchDesc,
    BufferConfig,
    BufferId,
    KVCacheDesc,
    KVCacheManager,
    _KVCache,
)
from kv.engine import Engine, Sequence, colder_tiers, layer, make_config, memory


class Request:
    """A prompt and the number of tokens to generate; a dialog goes on with what came out."""

    def __init__(self, prompt: list[int], num_generated: int) -> None:
        self.prompt = prompt
        self.num_generated = num_generated


class Scheduler:
    """Runs requests in the order they came; suspends from the tail when there is no room."""

    def __init__(self, engine: Engine, rng: np.random.Generator, chunk: int) -> None:
        self.engine = engine
        self.rng = rng
        self.chunk = chunk
        self.waiting: deque[tuple[Request, Sequence | None]] = deque()
        self.running: list[tuple[Request, Sequence]] = []
        self.num_suspended = 0
        self.num_found = 0
        self.finished: list[list[int]] = []

    def run(self, max_batch: int) -> None:
        while self.waiting or self.running:
            self._admit(max_batch)
            assert self.running, "one request alone must fit"
            position = 0
            while position < len(self.running):
                position += self._step(position)
            self.engine.verify()

    def _admit(self, max_batch: int) -> None:
        while self.waiting and len(self.running) < max_batch:
            request, sequence = self.waiting[0]
            if sequence is None:
                sequence = self.engine.start(request.prompt)
                sequence.cache.close()
                cache = self.engine.manager.create_kv_cache(None, request.prompt[:-1])
                sequence = Sequence(cache, list(request.prompt), cache.num_committed_tokens)
                self.num_found += sequence.written
                self.waiting[0] = (request, sequence)
            if not sequence.cache.resume(self.engine.stream):
                return
            self.waiting.popleft()
            self.running.append((request, sequence))

    def _step(self, position: int) -> int:
        """One chunk or token of a request; 0 when it left the list."""
        request, sequence = self.running[position]
        target = len(request.prompt) + request.num_generated
        if sequence.written == target:
            sequence.cache.close()
            self.finished.append(sequence.tokens)
            del self.running[position]
            return 0
        if sequence.written == len(sequence.tokens):
            sequence.tokens.append(int(self.rng.integers(1000)))
        end = min(len(sequence.tokens), sequence.written + self.chunk)
        while not sequence.cache.resize(end, sequence.written):
            if len(self.running) == position + 1:
                assert position > 0, "a request that runs alone always fits"
                self._suspend_tail()
                return 1
            self._suspend_tail()
        self.engine.run(sequence, end)
        sequence.cache.commit(sequence.tokens[sequence.cache.num_committed_tokens : end])
        return 1

    def _suspend_tail(self) -> None:
        request, sequence = self.running.pop()
        sequence.cache.suspend()
        self.num_suspended += 1
        self.waiting.appendleft((request, sequence))


@pytest.mark.parametrize(
    ("tokens_per_block", "num_requests"),
    [(32, 100), (64, 60), (128, 60), pytest.param(32, 1500, marks=pytest.mark.slow)],
)
def test_requests_in_flight_share_suspend_and_read_their_own_values(
    device: str, tokens_per_block: int, num_requests: int, tmp_path: Path
) -> None:
    layers = [
        layer(0, tokens_per_block, "k"),
        layer(1, tokens_per_block, "k", sliding_window_size=100, num_sink_tokens=4),
    ]
    step = BatchDesc([KVCacheDesc(500, 300)] * 4)
    config = make_config(
        device,
        num_blocks=2400 // tokens_per_block,
        tokens_per_block=tokens_per_block,
        layers=layers,
        typical_step=step,
        colder=colder_tiers(str(tmp_path), 16 << 20),
    )
    engine = Engine(KVCacheManager(config))
    rng = np.random.default_rng(tokens_per_block + num_requests)
    scheduler = Scheduler(engine, rng, chunk=96)
    system = rng.integers(1000, size=150).tolist()
    for number in range(num_requests):
        kind = rng.random()
        start = system if kind < 0.5 else []
        prompt = [*start, *rng.integers(1000, size=rng.integers(1, 250)).tolist()]
        scheduler.waiting.append((Request(prompt, int(rng.integers(1, 40))), None))
        if number % 50 == 49:
            scheduler.run(max_batch=24)
            if scheduler.finished:  # dialogs: the next turn of earlier ones
                for tokens in scheduler.finished[-5:]:
                    turn = [*tokens, *rng.integers(1000, size=20).tolist()]
                    scheduler.waiting.append((Request(turn[:700], 5), None))
    scheduler.run(max_batch=24)
    assert len(scheduler.finished) >= num_requests
    assert scheduler.num_found > 0
    if device == "cpu":
        assert scheduler.num_suspended > 0, "the pool is small enough to be fought for"
    assert all(group.unavailable == 0 for group in engine.manager.get_storage_statistics(0))
    engine.manager.shutdown()


# ---- disaggregation


def copy_pages(
    source: tuple[Engine, _KVCache], target: tuple[Engine, _KVCache], buffers: list[BufferId]
) -> None:
    """What a transfer does: run by run, slot by slot, on the streams of both caches."""
    (sender, out), (receiver, into) = source, target

    def runs(engine: Engine) -> dict[tuple[int, ...], AggregatedPageDesc]:
        return {
            tuple(b.id.layer_id for b in run.buffers): run
            for run in engine.manager.get_aggregated_pages(buffers)
        }

    ours, theirs = runs(sender), runs(receiver)
    assert ours.keys() == theirs.keys()
    for key, run in ours.items():
        other = theirs[key]
        from_slots = list(out.get_aggregated_page_indices(run.layer_group_id, valid_only=True))
        into_slots = list(into.get_aggregated_page_indices(other.layer_group_id, valid_only=True))
        assert len(from_slots) == len(into_slots)
        with receiver.on_stream():
            for a, b in zip(from_slots, into_slots, strict=True):
                shape = (1, run.size // 8)
                here = memory(sender.device, run.base + run.stride * a, shape)
                there = memory(receiver.device, other.base + other.stride * b, shape)
                there.copy_(here)


@pytest.mark.parametrize("windowed", [False, True])
def test_what_a_transfer_brought_is_committed_after_it(device: str, windowed: bool) -> None:
    tokens_per_block = 8
    options = {"sliding_window_size": 20, "num_sink_tokens": 3} if windowed else {}
    layers = [layer(0, tokens_per_block), layer(1, tokens_per_block, **options)]
    step = BatchDesc([KVCacheDesc(80, 0)])
    config = make_config(device, 200, tokens_per_block, layers=layers, typical_step=step)
    context, generation = (Engine(KVCacheManager(config)) for _ in range(2))
    prompt = list(range(45))
    sent = context.start(prompt)
    assert context.prefill(sent)

    got = generation.start(prompt)
    assert got.written == 0
    assert got.cache.resume(generation.stream)
    assert got.cache.resize(len(prompt), len(prompt))
    live = list(got.cache.get_aggregated_page_indices(1, valid_only=True)) if windowed else []
    assert len(live) < 6, "only pages that the window still reads are allocated"
    sent.cache.cuda_stream = generation.stream
    buffers = list(context.manager.all_buffer_ids)
    copy_pages((context, sent.cache), (generation, got.cache), buffers)
    sent.cache.close()
    got.written = len(prompt)
    got.cache.commit(prompt)
    assert generation.decode(got, 7)
    generation.verify()
    assert generation.num_checked > 0
    got.cache.close()
    expected = len(prompt) + 1
    assert generation.manager.probe_reuse(None, [*prompt, 7]) == expected
    assert context.manager.probe_reuse(None, prompt) == len(prompt)
    if device == "cuda":
        torch.cuda.synchronize()
    context.manager.shutdown()
    generation.manager.shutdown()


@pytest.mark.parametrize(("pipeline", "tensor"), [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_pages_of_several_ranks_become_the_pages_of_one(
    device: str, pipeline: int, tensor: int
) -> None:
    tpb, num_layers = 8, 4
    layers = [layer(i, tpb) for i in range(num_layers)]
    layers[1].sliding_window_size = 20
    step = BatchDesc([KVCacheDesc(80, 0)])
    whole = Engine(KVCacheManager(make_config(device, 200, tpb, layers=layers, typical_step=step)))
    prompt = list(range(45))
    got = whole.start(prompt)
    assert got.cache.resume(whole.stream)
    assert got.cache.resize(len(prompt), len(prompt))
    for stage in range(pipeline):
        per_stage = num_layers // pipeline
        own = copy.deepcopy(layers[stage * per_stage : (stage + 1) * per_stage])
        for part in own:
            part.buffers = [BufferConfig(b.role, b.size // tensor) for b in part.buffers]
        for rank in range(tensor):
            config = make_config(device, 200, tpb, layers=own, typical_step=step)
            sender = Engine(KVCacheManager(config))
            sent = sender.start(prompt)
            assert sender.prefill(sent)
            sent.cache.cuda_stream = whole.stream
            copy_shard((sender, sent.cache), (whole, got.cache), rank)
            sent.cache.close()  # right after the copies are enqueued
    got.written = len(prompt)
    got.cache.commit(prompt)
    assert whole.decode(got, 7)
    whole.verify()
    assert whole.num_checked >= 3 * 2 * 45
    got.cache.close()


def copy_shard(source: tuple[Engine, _KVCache], target: tuple[Engine, _KVCache], rank: int) -> None:
    """Buffer by buffer: the sender's rows go into their part of the receiver's rows."""
    (sender, out), (receiver, into) = source, target
    for buffer in sender.buffers:
        other = next(
            b for b in receiver.buffers if (b.layer_id, b.role) == (buffer.layer_id, buffer.role)
        )
        pages = [
            torch.as_tensor(b.converter(list(c.get_aggregated_page_indices(b.group, 0, True))))
            for b, c in ((buffer, out), (other, into))
        ]
        assert len(pages[0]) == len(pages[1]) > 0
        words = buffer.pages.shape[2]
        with receiver.on_stream():
            here, there = (index.to(receiver.device) for index in pages)
            other.pages[there, :, rank * words : (rank + 1) * words] = buffer.pages[here]


def test_a_transfer_that_is_wrong_is_noticed(device: str) -> None:
    config = make_config(device)
    context, generation = (Engine(KVCacheManager(config)) for _ in range(2))
    prompt = list(range(20))
    sent, got = context.start(prompt), generation.start(prompt)
    assert context.prefill(sent)
    assert got.cache.resume(generation.stream)
    assert got.cache.resize(20, 20)
    sent.cache.cuda_stream = generation.stream
    copy_pages((context, sent.cache), (generation, got.cache), [BufferId(0, "k"), BufferId(0, "v")])
    got.written = 20
    assert generation.decode(got, 7)
    with pytest.raises(AssertionError, match="layer 1"):
        generation.verify()
