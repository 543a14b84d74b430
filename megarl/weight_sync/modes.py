"""Which way each server gets its weights: in place, by SGLang's own calls, or from disk.

Owns the decision, made by learner rank 0 from what a server says of itself and told to all ranks,
and one report of all of it. How each way works is `session`'s (exact), `stock`'s (hf) and `disk`'s.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from megarl.config import capability
from megarl.config.capability import ServerFacts
from megarl.config.served import model_overrides
from megarl.errors import NoAnswerError, WeightSyncError, in_words
from megarl.reshard.blocks import ScaleBlock
from megarl.types import (
    QuantizationError,
    ServerEndpoint,
    ServerSync,
    SyncReport,
    SyncTimes,
    is_loopback,
)
from megarl.weight_sync.checkpoint_files import CheckpointWriter
from megarl.weight_sync.control import SourceSpec
from megarl.weight_sync.disk import DiskSync
from megarl.weight_sync.full import FullPolicy
from megarl.weight_sync.probe import Probe
from megarl.weight_sync.quantized import by_layer, tell
from megarl.weight_sync.server_calls import PauseMode, ServerCalls
from megarl.weight_sync.session import WeightSync
from megarl.weight_sync.stock import StockServer, StockSync, choose_via
from megarl.weight_sync.together import from_all, from_first

log = logging.getLogger(__name__)

Setting = Literal["auto", "shared", "exact", "hf", "disk"]
Mode = Literal["exact", "hf", "disk"]
FACTS_S = 10.0  # for a server to say what it is; a busy scheduler answers between two passes


@dataclass(frozen=True, slots=True)
class ModeSettings:
    """What the run's settings say of modes. `disk` is the folder of this run on a shared disk,
    `model` the one whose config and tokenizer files go with the weights."""

    mode: Setting = "auto"
    hf_via: Literal["auto", "broadcast", "request"] = "auto"
    pause: PauseMode = "retract"
    deadline_s: float = 300.0
    bucket_bytes: int = 64 << 20
    disk: Path = Path()
    model: Path = Path()


@dataclass(frozen=True, slots=True)
class Decision:
    """The mode of one server, why, and what of its facts that mode needs. `error`: it gets none."""

    mode: Mode
    why: str
    error: str = ""
    is_lost: bool = False
    on_gpu: bool = False


def decide(
    setting: Setting,
    server: ServerEndpoint,
    facts: ServerFacts,
    architecture: str,
    host: str,
    can_probe: bool = True,
    fp8_block: ScaleBlock | None = None,
    up_first: bool = False,
) -> Decision:
    """The mode of a server that says these facts, for a learner that listens on `host`.

    Without a log-prob probe nothing shows what SGLang's own calls have loaded. `fp8_block` is of
    the float8 weights that the learner sends, None where it sends none; `up_first` is
    `capability.can_write`'s.
    """
    on_gpu = facts.device == "cuda"

    def refused(mode: Mode, error: str) -> Decision:
        return Decision(mode, "", f"{server.name}: weight_sync.mode={setting}: {error}")

    if facts.tp != server.tp:
        return refused("hf", f"it has tp={facts.tp}, rollout.parallel.tp is {server.tp}")
    row = capability.can_write(facts, architecture, up_first)
    other = _other_weights(facts, fp8_block)
    if other:
        return refused("hf", f"{other} (exact is {row.verdict}: {row.why})")
    if row.verdict == "proved" and is_loopback(f"//{host}") and not is_loopback(server.url):
        where = f"the learner listens on {host}, which {server.url} cannot reach"
        row = replace(row, verdict="refused", why=where)
    if setting in ("exact", "shared"):
        if row.verdict != "proved":
            return refused("exact", f"{row.verdict}: {row.why}; use auto or hf")
        return Decision("exact", f"proved: {row.why}")
    if setting == "auto" and row.verdict == "proved":
        return Decision("exact", f"proved: {row.why}")
    why = f"exact is {row.verdict}: {row.why}" if setting == "auto" else "weight_sync.mode"
    mode: Mode = "disk" if setting == "disk" else "hf"
    if setting == "auto" and row.verdict == "unproved" and not can_probe:
        return Decision("exact", f"{why}; hf cannot be without a probe; checksums must show it")
    if not can_probe:
        return refused(
            mode,
            f"{mode} needs a log-prob probe, as SGLang says nothing of what it loaded; set "
            f"weight_sync.probe_tokens above 0, and placement.mode = disaggregated ({why})",
        )
    if facts.copies > 1 or facts.pp > 1:
        return refused(
            mode,
            f"it has {facts.copies} data-parallel replicas and {facts.pp} pipeline stages, and "
            "SGLang updates servers of one of each; start it so",
        )
    if mode == "disk" and facts.has_draft:
        return refused(mode, "SGLang would load the policy into its draft model too; use hf")
    return Decision(mode, why, on_gpu=on_gpu)


def _other_weights(facts: ServerFacts, fp8_block: ScaleBlock | None) -> str:
    """What is wrong where a server's weights are not of the kind that the learner sends."""
    if facts.fp8_block == fp8_block and (fp8_block or facts.quantization == capability.UNQUANTIZED):
        return ""
    words = facts.quantization
    if facts.fp8_block is not None:
        words += f" in blocks of {facts.fp8_block[0]} x {facts.fp8_block[1]}"
    if fp8_block is None:
        return (
            f"its weights are {words}, and SGLang would load those of the policy, which are not, "
            "as if they were; start it without quantization, or use rollout.precision.weights = "
            "fp8 where they are float8 in square blocks"
        )
    return (
        f"its weights are {words}, and rollout.precision has float8 in blocks of {fp8_block[0]} x "
        f"{fp8_block[1]}; start it with --load-format dummy --json-model-override-args "
        f"'{model_overrides(fp8_block)}'"
    )


class ModalSync:
    """What the learner holds for stage g; every rank holds one, and every method is collective.

    `exact` is the sync that writes in place, which also knows the learner's layout. The others are
    made when a server first needs them. `score` computes the log-prob probe on all ranks.
    """

    def __init__(
        self,
        exact: WeightSync,
        source: SourceSpec,
        rank: int,
        parameters: Mapping[str, torch.Tensor],
        dtype: str,
        *,
        group: dist.ProcessGroup | None,
        host: str,
        settings: ModeSettings,
        score: Callable[[], Probe] | None,
    ) -> None:
        self._exact, self._source, self._rank = exact, source, rank
        self._parameters, self._dtype, self._group = parameters, dtype, group
        self._host, self._settings, self._score = host, settings, score
        self._facts: dict[tuple[str, int, str], ServerFacts] = {}
        self._said: dict[str, tuple[int, Decision]] = {}
        self._stock: StockSync | None = None
        self._disk: DiskSync | None = None

    def publish(self, version: int, servers: Sequence[ServerEndpoint] = ()) -> SyncReport:
        """Bring `servers` (counted on rank 0) to policy `version`, which the parameters now hold.

        A server that fails, or that the settings' mode cannot serve, is reported. Raises
        WeightSyncError, on every rank, for what goes wrong in the learner.
        """
        start = time.monotonic()
        until = start + self._settings.deadline_s
        decisions = self._decided(servers, until) if self._rank == 0 else ()
        decisions = from_first(self._group, decisions)
        mine = tuple(zip(servers, decisions, strict=True)) if self._rank == 0 else ()
        reports = [SyncReport(version, _undecided(mine), 0, 0, 0.0)]
        wanted = {decision.mode for decision in decisions if not decision.error}
        if "exact" in wanted or not decisions:
            reports.append(self._exact.publish(version, _of(mine, "exact"), until))
        stages = wanted & {"hf", "disk"}
        lost = self._prepared() if stages else {}
        if "hf" in wanted:
            stock = [
                self._stock_server(server, decision)
                for server, decision in mine
                if decision.mode == "hf" and not decision.error
            ]
            reports.append(self._hf().publish(version, stock, until, self._score))
        if "disk" in wanted:
            disk = _of(mine, "disk")
            reports.append(self._from_disk().publish(version, disk, until, self._score))
        if stages:
            self._exact.sender.withdraw()
            reports.append(
                SyncReport(version, (), 0, 0, 0.0, quantization=QuantizationError.of(lost))
            )
        report = merged(version, servers, reports) if self._rank == 0 else reports[0]
        return replace(from_first(self._group, report), took_s=time.monotonic() - start)

    def close(self) -> None:
        """Remove what would outlive this process, and leave all groups."""
        self._exact.close()
        if self._stock is not None:
            self._stock.close()

    def _decided(self, servers: Sequence[ServerEndpoint], until: float) -> tuple[Decision, ...]:
        """Rank 0: ask each server that is new, and decide. Raises nothing: the others wait."""
        errors: dict[str, Exception] = {}
        threads = [
            threading.Thread(target=self._ask, args=(server, until, errors), daemon=True)
            for server in servers
            if _key(server) not in self._facts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = []
        for server in servers:
            facts = self._facts.get(_key(server))
            if facts is None:
                error = errors[server.name]
                is_lost = isinstance(error, NoAnswerError)
                text = f"{server.name}: {in_words(error)}"
                found.append(Decision("hf", "", text, is_lost=is_lost))
            else:
                found.append(self._decide(server, facts))
        return tuple(found)

    def _ask(self, server: ServerEndpoint, until: float, errors: dict[str, Exception]) -> None:
        calls = ServerCalls(server, min(until, time.monotonic() + FACTS_S))
        try:
            self._facts[_key(server)] = capability.server_facts(calls.info())
        except Exception as error:  # noqa: BLE001 - told in the report of that server
            errors[server.name] = error
        finally:
            calls.close()

    def _decide(self, server: ServerEndpoint, facts: ServerFacts) -> Decision:
        settings = self._settings
        architecture = self._source.shape.architecture
        can_probe, block = self._score is not None, self._source.fp8_block
        up_first = self._exact.server_mesh.up_first
        decision = decide(
            settings.mode, server, facts, architecture, self._host, can_probe, block, up_first
        )
        if self._said.get(server.name) != (server.incarnation, decision):
            self._said[server.name] = (server.incarnation, decision)
            log.info(
                "weight sync mode server=%s incarnation=%d mode=%s why=%s",
                server.name,
                server.incarnation,
                "none" if decision.error else decision.mode,
                decision.error or decision.why,
            )
        return decision

    def _stock_server(self, server: ServerEndpoint, decision: Decision) -> StockServer:
        via = choose_via(self._settings.hf_via, server.url, self._host)
        return StockServer(server, via, "nccl" if decision.on_gpu and self._on_gpu else "gloo")

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _prepared(self) -> dict[str, float]:
        """Quantize what travels as float8, on all ranks; what that loses, by layer.

        Raises WeightSyncError, on every rank, where one of them cannot.
        """
        if self._source.float8 is None:
            return {}
        sender, error = self._exact.sender, ""
        try:
            sender.prepare()
        except WeightSyncError as caught:
            error = str(caught)
        parts = from_all(self._group, (error, sender.quantization_errors))
        errors = [text for text, _ in parts if text]
        if errors:
            raise WeightSyncError("the policy was not quantized: " + "; ".join(errors))
        layers = by_layer(lost for _, lost in parts)
        if self._rank == 0:
            tell(layers)
        return layers

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def _hf(self) -> StockSync:
        if self._stock is None:
            settings, exact = self._settings, self._exact
            policy = FullPolicy(
                self._source.shape,
                exact.sender.layout,
                self._rank,
                exact.sender.sent,
                self._dtype,
                group=self._group,
                devices=exact.devices,
                bucket_bytes=settings.bucket_bytes,
                fp8_block=self._source.fp8_block,
            )
            self._stock = StockSync(
                policy, self._rank, self._group, self._host, self._device, settings.pause
            )
        return self._stock

    def _from_disk(self) -> DiskSync:
        if self._disk is None:
            settings, sender = self._settings, self._exact.sender
            writer = CheckpointWriter(
                self._source.shape,
                sender.layout,
                self._rank,
                sender.sent,
                self._dtype,
                settings.model,
                self._group,
                fp8_block=self._source.fp8_block,
            )
            self._disk = DiskSync(writer, settings.disk, self._rank, self._group, settings.pause)
        return self._disk


Mine = Sequence[tuple[ServerEndpoint, Decision]]


def _key(server: ServerEndpoint) -> tuple[str, int, str]:
    return server.name, server.incarnation, server.url


def _of(mine: Mine, mode: Mode) -> list[ServerEndpoint]:
    return [server for server, found in mine if found.mode == mode and not found.error]


def _undecided(mine: Mine) -> tuple[ServerSync, ...]:
    """The results of servers that get no weights in any mode."""
    return tuple(
        ServerSync(server.name, server.incarnation, False, found.error, is_lost=found.is_lost)
        for server, found in mine
        if found.error
    )


def merged(
    version: int, servers: Sequence[ServerEndpoint], reports: Sequence[SyncReport]
) -> SyncReport:
    """One report of all modes, one after the other: its servers in the order asked for.

    `took_s` is the caller's, who waited for more than these.
    """
    found = {result.server: result for report in reports for result in report.servers}
    return SyncReport(
        version=version,
        servers=tuple(found[server.name] for server in servers),
        moved_bytes=sum(report.moved_bytes for report in reports),
        minimum_bytes=sum(report.minimum_bytes for report in reports),
        took_s=0.0,
        network_bytes=sum(report.network_bytes for report in reports),
        quantization=max(
            (report.quantization for report in reports), key=lambda lost: lost.largest
        ),
        times=functools.reduce(SyncTimes.plus, (report.times for report in reports)),
    )
