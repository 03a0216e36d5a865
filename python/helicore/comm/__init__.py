"""Collective calls between ranks: through shared memory, or through a process group.

`Communicator` and `ProcessGroupCommunicator` have the same methods and give the same bits.
`DeviceCommunicator` sums over ranks that address each other's GPU memory.
"""

from helicore._core.comm import CommError, Communicator, DeviceCommunicator, Segment, Shots
from helicore.comm.process_group import ProcessGroupCommunicator

__all__ = [
    "CommError",
    "Communicator",
    "DeviceCommunicator",
    "ProcessGroupCommunicator",
    "Segment",
    "Shots",
]
