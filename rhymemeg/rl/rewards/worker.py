"""The program of a worker process; see `rhymemeg.rl.rewards.pool`.

The reward runs in the main thread. A second thread reads requests, so that the process ends as soon as its parent
does, even in the middle of a reward. What rewards print goes to standard error: standard output carries the replies.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import Any, BinaryIO

from rhymemeg.errors import RewardError
from rhymemeg.rl.rewards.judge import judge
from rhymemeg.rl.rewards.pool import Frames, pack
from rhymemeg.rl.rewards.registry import Reward, load


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    source = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nor does a reward read the requests
    threading.Thread(target=_read, args=(source, requests), daemon=True).start()
    setup = requests.get()
    sys.path[:] = setup["path"]
    try:
        function = load(setup["location"], setup["name"])
        call = Reward(setup["name"], function, setup["location"]).bound(setup["arguments"])
    except RewardError as error:
        _reply(replies, {"error": str(error)})
        return
    _reply(replies, {"error": ""})
    while True:
        verdict = judge(call, requests.get())
        _reply(replies, {"components": verdict.components, "problem": verdict.problem})


def _read(source: int, requests: queue.SimpleQueue[Any]) -> None:
    frames = Frames()
    while data := os.read(source, 1 << 16):
        for message in frames.feed(data):
            requests.put(message)
    os._exit(0)


def _reply(replies: BinaryIO, message: dict[str, Any]) -> None:
    replies.write(pack(message))
    replies.flush()


if __name__ == "__main__":
    main()
