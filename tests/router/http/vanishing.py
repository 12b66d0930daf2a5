"""A client that is gone without a word, as behind a cable that was pulled."""

import ctypes
import socket
import struct

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)  # one instruction of BPF: return 0 bytes


def vanish(client: socket.socket) -> None:
    """From now on nothing that comes reaches the socket, and nothing is answered."""
    code = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    client.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(code)))
