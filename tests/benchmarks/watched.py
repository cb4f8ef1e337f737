"""Steps that may crash, hang or break a device for good, each survived by the others.

They run in a child process. When it dies, or says nothing for too long, another takes the steps that are left: without
the variant that was being tried, or, if there was none, without the step.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Step = dict[str, Any]
Row = dict[str, Any]


class Child:
    """What the child process says to the one that watches it: a line of JSON an event."""

    def __init__(self, path: str):
        self._path = path

    def say(self, **event: Any) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(event) + "\n")

    def serve(self, steps: Sequence[Step], do: Callable[[Step], Iterator[Row]], is_well: Callable[[], bool]) -> None:
        """Runs the steps. Ends the process after an error that leaves the device broken for whatever comes next."""
        for step in steps:
            self.say(event="begin")
            try:
                for row in do(step):
                    self.say(event="row", row=row)
            except Exception as error:
                if not is_well():
                    raise SystemExit(f"broken: {error}") from error
                self.say(event="row", row={"error": f"{type(error).__name__}: {error}"[:500]})
            self.say(event="end")


def watch(
    command: Sequence[str], steps: Sequence[Step], record: Callable[[Row], None], *, end: float, quiet: float
) -> list[Step]:
    """Runs `command STEPS LINES` until all steps are over, and returns those that weren't begun before `end`.

    Each row of a step goes to `record` with the step's name. `quiet`: seconds without an event after which the child
    is killed, unless what it is trying says others. `end` is of `time.monotonic`.
    """
    left: list[Step] = [{**step, "skip": []} for step in steps]
    while left and time.monotonic() < end:
        life = _attempt(command, left, record, end, quiet)
        left = left[life.ended :]
        if life.why is None or not left:
            continue
        step = left[0]
        record({"step": step["name"], "variant": life.trying, "error": life.why})
        if life.began and life.trying is not None and life.trying not in step["skip"]:
            step["skip"].append(life.trying)
        elif life.began or life.ended == 0:  # a child that can't even begin costs a step, or this would never end
            left.pop(0)
    return left


class _Life(NamedTuple):
    ended: int  # how many steps it ended
    trying: str | None
    began: bool  # whether it was in a step
    why: str | None  # it died


def _attempt(
    command: Sequence[str], steps: Sequence[Step], record: Callable[[Row], None], end: float, quiet: float
) -> _Life:
    """One child's life."""
    ended, trying, began, why, most = 0, None, False, None, quiet
    with tempfile.TemporaryDirectory() as folder:
        todo, lines, log = (Path(folder, name) for name in ("steps", "lines", "log"))
        todo.write_text(json.dumps(steps))
        lines.touch()
        with log.open("w") as out, lines.open() as said:
            child = subprocess.Popen([*command, todo, lines], stdout=out, stderr=out, start_new_session=True)
            heard, alive, rest = time.monotonic(), True, ""
            while alive:
                time.sleep(0.05)
                alive = child.poll() is None  # before what it said is read: nothing is missed
                rest += said.read()
                *whole, rest = rest.split("\n")
                for event in map(json.loads, whole):
                    heard = time.monotonic()
                    match event["event"]:
                        case "begin":
                            began, trying, most = True, None, quiet
                        case "trying":
                            trying, most = event["variant"], event["quiet"] or quiet
                        case "row":
                            record({"step": steps[ended]["name"]} | event["row"])
                        case "end":
                            ended, began, trying = ended + 1, False, None
                if alive and (time.monotonic() > end or time.monotonic() - heard > most):
                    why = "the time was up" if time.monotonic() > end else f"said nothing for {most:.0f} s"
                    os.killpg(child.pid, signal.SIGKILL)  # and what it started
                    break
            try:
                code = child.wait(timeout=15)
            except subprocess.TimeoutExpired:  # in the driver, where no signal reaches it
                why = f"{why}, and couldn't be ended"
                code = None
        if why is None and code:
            why = f"exit status {code}: {log.read_text()[-500:]}"
    return _Life(ended, trying, began, why)


def is_broken_on_purpose(variant: str) -> None:
    """For a rehearsal: `BREAK="name:exit;other:hang"` in the environment has those variants do so."""
    for pair in filter(None, os.environ.get("BREAK", "").split(";")):
        name, how = pair.rsplit(":", 1)
        if name == variant:
            match how:
                case "exit":
                    os._exit(9)
                case "hang":
                    time.sleep(3600)
                case _:
                    raise RuntimeError("broken on purpose")
