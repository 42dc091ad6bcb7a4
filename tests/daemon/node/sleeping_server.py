"""Reads no orders, until their socket ends."""

import select
import socket

if __name__ == "__main__":
    waiting = select.poll()
    waiting.register(socket.socket(fileno=0), select.POLLHUP)
    waiting.poll()
