"""A messenger as a real process: prints ``{"port"}``, then answers every message with the same bytes until rank 0 goes.

``{"certificate", "key", "authority"}`` on standard input, in PEM, or ``{}`` for links that are plain. It prints
``{"lost"}``, the reason, in the end.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import closing

from motley.transport import Connected, Listener, Lost, Membership, Message, Messenger, Plain, Tls

MEMBER = Membership("test", 1, 1, 2, b"a secret of the session".ljust(32), hashlib.sha256(b"the plan").digest())


def main() -> None:
    keys = json.loads(input())
    security = Tls(*(keys[name].encode() for name in ("certificate", "key", "authority"))) if keys else Plain()
    with (
        closing(Listener("127.0.0.1")) as listener,
        closing(Messenger(MEMBER, security, listener=listener, accepts={0})) as messenger,
    ):
        print(json.dumps({"port": listener.port}), flush=True)
        while True:
            for event in messenger.receive(1.0):
                match event:
                    case Message(peer, data):
                        messenger.send(peer, [data])
                    case Lost(_, reason):
                        print(json.dumps({"lost": reason}), flush=True)
                        return
                    case Connected():
                        pass


if __name__ == "__main__":
    main()
