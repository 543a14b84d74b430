"""One learner rank: builds the learner, then carries out the verbs that rank 0 gets, one at a time.

Owns the rank loop, what happens to an error, and how a rank ends. `megarl.learner.agent` starts one
process per rank. Knows nothing of losses, weights or servers: a verb is a method of the learner.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import logging
import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from megarl import run_paths
from megarl.config.load import read_config
from megarl.config.schema import Config
from megarl.errors import LearnerError, MegarlError
from megarl.learner.addresses import listen_address
from megarl.learner.control_group import ControlGroup, PeerLostError, RankError, is_lost_peer
from megarl.learner.front import Call, Front
from megarl.learner.parent import die_with_parent, leave
from megarl.learner.phases import PhaseFile
from megarl.learner.verbs import PEER_LOST, VERBS_OF, Verb
from megarl.learner.wire import decode, encode

log = logging.getLogger(__name__)

Build = Callable[[Config, Path, Callable[[str], None]], Any]
"""Makes this rank's learner from the settings, the run folder and `mark(phase)`. It initialises the
default process group; the result has one method per verb, but `close` for `shutdown`."""


class RankLoop:
    """Runs verbs on this rank until `shutdown`. `front` is the HTTP side, on rank 0 only."""

    def __init__(
        self,
        learner: Any,
        control: ControlGroup,
        phases: PhaseFile,
        front: Front | None,
        role: str = run_paths.LEARNER,
    ) -> None:
        self._learner, self._role = learner, role
        self._control = control
        self._phases = phases
        self._front = front
        self._sequence = 0

    def run(self) -> None:
        """Until `shutdown`. Raises LearnerError where the learner cannot go on."""
        while True:
            call = self._front.calls.get() if self._front else None
            self._sequence += 1
            if call and self._front:  # a rank that hangs while idle never takes the broadcast
                self._phases.begin(call.verb.name, self._sequence)
                self._phases.mark("telling the other ranks")
                self._front.begin(call, self._sequence)
            payload = self._control.broadcast(_pack(call) if call else None)
            verb, body = _unpack(payload, self._role)
            self._phases.begin(verb.name, self._sequence)
            failures = self._verb(verb, body, call)
            if failures and verb.changes_weights:
                raise LearnerError(
                    f"{failures[0]}; {verb.name} may have changed a part of the weights, so the "
                    f"{self._role} ends; the same command resumes from the last checkpoint"
                )
            if verb.name == "shutdown":
                return

    def _verb(self, verb: Verb, body: bytes, call: Call | None) -> tuple[RankError, ...]:
        """Run `verb` here, agree on its outcome with the other ranks, and answer the caller."""
        result, error = None, None
        try:
            if verb.name != "shutdown":
                method = getattr(self._learner, verb.name)
                result = encode(verb.result, method(*decode(verb.arguments, body)))
            else:
                result = encode(verb.result, None)
        except Exception as caught:  # noqa: BLE001  told to the caller, the log and the launcher
            error = self._report(caught)
        try:
            failures = first_causes(self._control.agree(error))
        except PeerLostError:
            if error and not error.lost_peer and call and self._front:
                self._front.answer(call, None, str(error), error.kind)
            raise
        self._phases.forgive()
        self._phases.idle()
        if call and self._front:
            if failures:
                first = failures[0]
                more = f" (and {len(failures) - 1} other ranks)" if len(failures) > 1 else ""
                self._front.answer(call, None, f"{first}{more}", first.kind)
            else:
                self._front.answer(call, result)
        return failures

    def _report(self, error: Exception) -> RankError:
        here = self._phases.current
        kind, message = type(error).__name__, str(error).strip() or "no message"
        lost_peer = is_lost_peer(error)
        self._phases.fail(f"{kind}: {message}", lost_peer)
        if not isinstance(error, MegarlError):
            log.error(
                "verb failed rank=%d at=%s\n%s", here.rank, here.place, traceback.format_exc()
            )
        place = here.rank, here.host, here.pid, here.place
        return RankError(*place, kind, message, lost_peer, self._role)


def first_causes(failures: Sequence[RankError]) -> tuple[RankError, ...]:
    """The failures, first causes before those that only lost a peer."""
    return tuple(sorted(failures, key=lambda failure: failure.lost_peer))


def serve(config: Config, run_dir: Path, build: Build, role: str = run_paths.LEARNER) -> NoReturn:
    """Build the learner, serve until `shutdown`, end the process: status 1 on any error, else 0."""
    rank = int(os.environ["RANK"])
    phases = PhaseFile(run_dir / run_paths.LOGS, rank, role)
    phases.begin("start", 0)
    phases.mark("building")
    front = None
    try:
        learner = build(config, run_dir, phases.mark)
        control = ControlGroup()
        gc.collect()
        gc.freeze()  # the engine's objects stay: to look through them again takes a second
        control.agree(None)  # every rank is built before the endpoint is told
        if rank == 0:
            world_size = dist.get_world_size()
            front = Front(
                config.deadline,
                run_dir / run_paths.LOGS,
                world_size,
                lambda text: _end(phases, text),
                role,
            )
            port = config.launch.learner_port if role == run_paths.LEARNER else 0
            front.start(listen_address(), port)
            front.publish(run_dir / run_paths.endpoint(role), os.getpid())
            log.info("%s ready url=%s ranks=%d", role, front.url, world_size)
        phases.idle()
        RankLoop(learner, control, phases, front, role).run()
    except Exception as error:  # noqa: BLE001  whatever it is, this rank ends and says why
        text = f"{type(error).__name__}: {error}"
        phases.fail(text, is_lost_peer(error))
        if front:
            front.stop(str(error), PEER_LOST if is_lost_peer(error) else type(error).__name__)
        if not isinstance(error, LearnerError):
            traceback.print_exc()
        _end(phases, text)
    if front:
        front.stop(f"the {role} has shut down")
    learner.close()
    dist.destroy_process_group()
    leave(0)


def build_learner(config: Config, run_dir: Path, mark: Callable[[str], None]) -> Any:
    """The real learner of this rank, on Megatron-Core."""
    from megarl.learner.learner import Learner

    return Learner(config, run_dir, mark)


def build_critic(config: Config, run_dir: Path, mark: Callable[[str], None]) -> Any:
    """The critic of this rank, where it has ranks of its own."""
    from megarl.learner.lone_critic import LoneCritic

    return LoneCritic(config, run_dir, mark)


BUILDS: Mapping[str, Build] = {run_paths.LEARNER: build_learner, run_paths.CRITIC: build_critic}


def main(argv: Sequence[str] | None = None, build: Build | None = None) -> None:
    """Entry of one rank; RANK, WORLD_SIZE and MASTER_* come from torch's launcher."""
    die_with_parent(signal.SIGKILL)
    faulthandler.enable()
    parser = argparse.ArgumentParser(prog="python -m megarl.learner.service", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--role", choices=BUILDS, default=run_paths.LEARNER)
    options = parser.parse_args(argv)
    role: str = options.role
    rank = os.environ["RANK"]
    logging.basicConfig(
        level=logging.INFO if rank == "0" else logging.WARNING,
        format=f"%(asctime)s {role} rank={rank} %(levelname)s %(message)s",
    )
    logging.getLogger("megatron").setLevel(logging.WARNING)
    serve(read_config(options.config), options.run_dir, build or BUILDS[role], role)


def _end(phases: PhaseFile, text: str) -> NoReturn:
    """End this rank as failed, with its first error in the phase file and the log."""
    phases.fail(text, lost_peer=False)
    log.error("rank ends rank=%d at=%s error=%s", phases.current.rank, phases.current.place, text)
    leave(1)


def _pack(call: Call) -> bytes:
    return json.dumps({"verb": call.verb.name}).encode() + b"\n" + call.body


def _unpack(payload: bytes, role: str) -> tuple[Verb, bytes]:
    head, _, body = payload.partition(b"\n")
    return VERBS_OF[role][json.loads(head)["verb"]], body


if __name__ == "__main__":
    main()
