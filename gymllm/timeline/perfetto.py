"""The timeline as a Perfetto trace, for ui.perfetto.dev."""

# The classes of the trace format are made when `perfetto` is imported, so no type checker knows them.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from gymllm.errors import MissingExtraError
from gymllm.timeline.timeline import Span, Timeline

_SEQUENCE = 1  # every packet comes from this one writer
Packet: TypeAlias = Any


def write_perfetto(timeline: Timeline, path: Path) -> int:
    """Writes every span that the timeline holds as a trace file.

    A track's name nests at "/": `episodes/3.1` is drawn below `episodes`. Spans of a track that overlap
    without one holding the other are spread over lanes of the same name. Attributes are arguments of
    their slice. The file appears whole or not at all.

    Args:
        timeline: Any; may still be recording.
        path: The file to write, by custom `*.perfetto-trace`.

    Returns:
        How many spans were written.

    Raises:
        MissingExtraError: The `perfetto` package is not installed.
    """
    try:
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
    except ImportError as error:
        raise MissingExtraError(
            'Traces are written with the package perfetto: pip install "gymllm[perfetto]".'
        ) from error
    spans = timeline.spans()
    partial = path.with_name(f".{path.name}.partial")
    try:
        # Packets go to the file one by one: a trace of a long run isn't held a second time.
        with partial.open("wb", buffering=2**20) as file:
            builder = StreamingTraceProtoBuilder(file)
            for packet in _packets(builder, spans, timeline.start_ns):
                builder.write_packet(packet)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return len(spans)


def _packets(builder: Any, spans: Iterable[Span], origin_ns: int) -> Iterator[Packet]:
    by_track: dict[str, list[Span]] = {}
    for span in spans:
        by_track.setdefault(span.track, []).append(span)
    uuids: dict[tuple[str, int], int] = {}

    def descriptor(track: str, lane: int) -> Iterator[Packet]:
        """Describes a track once, the ones it is nested in first."""
        if (track, lane) in uuids:
            return
        parent, _, name = track.rpartition("/")
        if parent:
            yield from descriptor(parent, 0)
        uuids[track, lane] = len(uuids) + 1
        packet = builder.create_packet()
        packet.track_descriptor.uuid = uuids[track, lane]
        packet.track_descriptor.name = name
        if parent:
            packet.track_descriptor.parent_uuid = uuids[parent, 0]
        yield packet

    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

    first = True
    for track in sorted(by_track):
        for lane, nested in enumerate(_lanes(by_track[track])):
            yield from descriptor(track, lane)
            for time_ns, span in _boundaries(nested):
                packet = builder.create_packet()
                packet.timestamp = max(0, time_ns - origin_ns)
                packet.trusted_packet_sequence_id = _SEQUENCE
                if first:
                    packet.sequence_flags = 1  # SEQ_INCREMENTAL_STATE_CLEARED: nothing came before
                    first = False
                event = packet.track_event
                event.track_uuid = uuids[track, lane]
                if span is None:
                    event.type = TrackEvent.TYPE_SLICE_END
                else:
                    event.type = TrackEvent.TYPE_SLICE_BEGIN
                    event.name = span.name
                    for key, value in (span.attributes or {}).items():
                        _annotate(event.debug_annotations.add(), key, value)
                yield packet


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """Spreads spans so that in each lane any two are apart or one holds the other."""
    lanes: list[list[Span]] = []
    open_ends: list[list[int]] = []
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        for lane, ends in zip(lanes, open_ends, strict=True):
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or span.end_ns <= ends[-1]:
                lane.append(span)
                ends.append(span.end_ns)
                break
        else:
            lanes.append([span])
            open_ends.append([span.end_ns])
    return lanes


def _boundaries(spans: Iterable[Span]) -> Iterator[tuple[int, Span | None]]:
    """Starts and ends (None) of the spans of one lane, in the order that a trace wants them."""
    ends: list[int] = []
    for span in spans:
        while ends and ends[0] <= span.start_ns:
            yield heapq.heappop(ends), None
        yield span.start_ns, span
        heapq.heappush(ends, span.end_ns)
    while ends:
        yield heapq.heappop(ends), None


def _annotate(annotation: Any, key: str, value: int | float | str) -> None:
    annotation.name = key
    if isinstance(value, bool):
        annotation.bool_value = value
    elif isinstance(value, int):
        annotation.int_value = value
    elif isinstance(value, float):
        annotation.double_value = value
    else:
        annotation.string_value = value
