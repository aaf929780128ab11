"""What moves bytes between device and host."""

from hf_offload.transport.base import Event, Segment, Segments, Transport
from hf_offload.transport.bell import Bell
from hf_offload.transport.host import HostTransport
from hf_offload.transport.select import make_transport

__all__ = ["Bell", "Event", "HostTransport", "Segment", "Segments", "Transport", "make_transport"]
