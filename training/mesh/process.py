"""The process of a training worker, which a daemon starts: it reads an order from its standard input, and does it."""

from __future__ import annotations

import sys

from motley.training.mesh.pipe import Pipe


def main() -> int:
    """Do what the order says; the exit status is 0 if that was possible, or the daemon was told why not."""
    pipe = Pipe()
    from motley.protocol import LEADER
    from motley.training.errors import TrainingError, import_extra
    from motley.training.mesh.order import WorkerOrder
    from motley.transport import TransportError

    try:
        order = WorkerOrder.read(pipe.order())
        import_extra("torch", "transformers", "peft")
        if order.mode == "chain":
            from motley.training.mesh.chained import take_part

            try:
                take_part(order, pipe)
            except TransportError as error:  # another rank's death, which is not this one's fault
                pipe.say(broke=str(error))
        elif order.member == LEADER:
            from motley.training.mesh.owner import deal_and_merge

            deal_and_merge(order, pipe)
        else:
            from motley.training.mesh.trainer import train_alone

            train_alone(order, pipe)
    except (TrainingError, TransportError) as error:
        pipe.say(failed=str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
