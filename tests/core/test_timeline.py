"""Spans, clocks that account for every second (invariant 11), and the trace they become."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from gymllm.errors import MissingExtraError
from gymllm.timeline import Span, Timeline
from gymllm.timeline.perfetto import write_perfetto


class Clock:
    """Stands for `time.perf_counter_ns`, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 1_000
        monkeypatch.setattr("gymllm.timeline.timeline.time.perf_counter_ns", lambda: self.ns)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_span_is_recorded_also_when_the_block_raises(clock):
    timeline = Timeline()

    def body() -> None:
        with timeline.span("learner", "step", tokens=3):
            clock.ns += 5
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        body()
    assert timeline.spans() == [Span("learner", "step", 1_000, 1_005, {"tokens": 3})]


def test_ring_keeps_the_newest_and_counts_what_it_dropped():
    timeline = Timeline(capacity=3)
    for number in range(5):
        timeline.add("a", str(number), number, number + 1)
    assert [span.name for span in timeline.spans()] == ["2", "3", "4"]
    assert timeline.dropped == 2


def test_clock_accounts_for_every_nanosecond(clock):
    timeline = Timeline()
    learner = timeline.clock("learner")
    clock.ns += 3
    with learner.during("gradient"):
        clock.ns += 5
        learner.enter("gradient")
        clock.ns += 7
    clock.ns += 11
    totals = learner.totals_s()
    assert totals == pytest.approx({"starting": 14e-9, "gradient": 12e-9})
    assert sum(totals.values()) == pytest.approx((clock.ns - 1_000) / 1e9)
    spans = [(span.name, span.start_ns, span.end_ns) for span in timeline.spans()]
    assert spans == [
        ("starting", 1_000, 1_003),
        ("gradient", 1_003, 1_015),
        ("starting", 1_015, 1_026),
    ]


def test_clock_is_one_for_each_resource():
    timeline = Timeline()
    assert timeline.clock("a") is timeline.clock("a")
    assert set(timeline.clocks) == {"a"}


def test_threads_lose_no_span():
    timeline = Timeline()

    def record(track: str) -> None:
        for number in range(200):
            timeline.add(track, "x", number, number + 1)
            timeline.spans()

    threads = [threading.Thread(target=record, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timeline.spans()) == 800


def read_trace(path: Path) -> tuple[dict[int, tuple[str, int]], list[tuple[str, Span]]]:
    """Track uuid to name and parent; and every slice with the path of its track."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    tracks: dict[int, tuple[str, int]] = {}
    stacks: dict[int, list[tuple[str, int, dict[str, object]]]] = {}
    slices: list[tuple[str, Span]] = []

    def full_name(uuid: int) -> str:
        name, parent = tracks[uuid]
        return f"{full_name(parent)}/{name}" if parent else name

    last: dict[int, int] = {}
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            descriptor = packet.track_descriptor
            assert descriptor.parent_uuid == 0 or descriptor.parent_uuid in tracks
            tracks[descriptor.uuid] = (descriptor.name, descriptor.parent_uuid)
            continue
        event = packet.track_event
        assert packet.timestamp >= last.get(event.track_uuid, 0), "in order on each track"
        last[event.track_uuid] = packet.timestamp
        stack = stacks.setdefault(event.track_uuid, [])
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            arguments = {
                note.name: getattr(note, note.WhichOneof("value"))
                for note in event.debug_annotations
            }
            stack.append((event.name, packet.timestamp, arguments))
        else:
            name, start, arguments = stack.pop()
            span = Span(full_name(event.track_uuid), name, start, packet.timestamp, arguments)
            slices.append((span.track, span))
    assert all(not stack for stack in stacks.values()), "every slice ends"
    return tracks, slices


def test_trace_holds_every_span_with_its_attributes(tmp_path, clock):
    timeline = Timeline()
    attributes = {"tokens": 3, "share": 0.5, "text": "é <b>", "flag": True}
    timeline.add("episodes/3.1", "episode", 1_000, 1_100, {"turns": 2})
    timeline.add("episodes/3.1", "generate", 1_010, 1_050, attributes)
    timeline.add("episodes/3.1", "step", 1_050, 1_060)
    timeline.add("episodes/3.1", "instant", 1_060, 1_060)
    timeline.add("episodes/3.2", "episode", 1_020, 1_090)
    learner = timeline.clock("learner")
    clock.ns += 40
    learner.enter("gradient")
    clock.ns += 100
    path = tmp_path / "trace.perfetto-trace"
    expected = timeline.spans()
    assert write_perfetto(timeline, path) == len(expected)
    tracks, slices = read_trace(path)
    assert sorted(name for name, _ in tracks.values()) == ["3.1", "3.2", "episodes", "learner"]
    found = sorted((s.track, s.name, s.start_ns, s.end_ns) for _, s in slices)
    assert found == sorted(
        (s.track, s.name, s.start_ns - 1_000, s.end_ns - 1_000) for s in expected
    )
    by_name = {span.name: span.attributes for _, span in slices}
    assert by_name["generate"] == attributes
    assert list(tmp_path.iterdir()) == [path]


def test_spans_that_cross_are_drawn_on_lanes_of_one_name(tmp_path):
    timeline = Timeline()
    start = timeline.start_ns
    crossing = [(0, 10), (5, 15), (8, 20), (10, 12), (2, 4)]
    for number, (begin, end) in enumerate(crossing):
        timeline.add("engine", str(number), start + begin, start + end)
    write_perfetto(timeline, tmp_path / "t")
    tracks, slices = read_trace(tmp_path / "t")
    assert {name for name, _ in tracks.values()} == {"engine"}
    assert len(tracks) == 3
    found = {span.name: (span.start_ns, span.end_ns) for _, span in slices}
    assert found == {str(number): times for number, times in enumerate(crossing)}


def test_trace_of_nothing_is_a_file(tmp_path):
    assert write_perfetto(Timeline(), tmp_path / "t") == 0
    assert (tmp_path / "t").exists()


def test_missing_perfetto_names_its_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    with pytest.raises(MissingExtraError, match=r'pip install "gymllm\[perfetto\]"'):
        write_perfetto(Timeline(), tmp_path / "t")
