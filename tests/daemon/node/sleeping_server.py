"""Reads no orders, until their socket ends."""

import select
import socket

if __name__ == "__main__":
    orders = socket.socket(fileno=0)  # which is closed with this object, so it is kept
    waiting = select.poll()
    waiting.register(orders, select.POLLHUP)
    waiting.poll()
