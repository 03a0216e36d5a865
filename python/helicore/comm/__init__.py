"""Collective calls between ranks: through shared memory, or through a process group.

`Communicator` and `ProcessGroupCommunicator` have the same methods and give the same bits.
"""

from helicore._core.comm import CommError, Communicator, Segment
from helicore.comm.process_group import ProcessGroupCommunicator

__all__ = ["CommError", "Communicator", "ProcessGroupCommunicator", "Segment"]
