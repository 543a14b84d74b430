"""What servers given by URL, and the modes of the weight sync, ask of the other settings."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from megarl.config.schema import Config
from megarl.config.violation import Violation


def check_urls(config: Config) -> Iterator[Violation]:
    """Servers that run already: as many as there are, each once, and none started."""
    urls, servers = config.rollout.urls, config.rollout.servers
    if not urls:
        return
    for url in urls:
        if not _is_server(url):
            yield Violation(
                f"rollout.urls has {url!r}, which is no http://host:port of a server",
                ("rollout.urls",),
            )
    twice = sorted({url for url in urls if urls.count(url) > 1})
    if twice:
        yield Violation(f"rollout.urls names {twice[0]} twice; keep one", ("rollout.urls",))
    if servers != len(urls):
        yield Violation(
            f"rollout.servers = {servers} beside {len(urls)} rollout.urls; leave it out",
            ("rollout.servers", "rollout.urls"),
        )
    if config.weight_sync.mode == "shared":
        yield Violation(
            "weight_sync.mode = shared needs servers that the run starts, and rollout.urls are "
            "not; use auto",
            ("weight_sync.mode", "rollout.urls"),
        )
    if config.placement.mode == "colocated":
        yield Violation(
            "placement.mode = colocated with rollout.urls: servers that the run does not start "
            "share no devices with it; use disaggregated",
            ("placement.mode", "rollout.urls"),
        )
    started: tuple[tuple[str, object, object], ...] = (
        ("launch.rollout_port", config.launch.rollout_port, 0),
        ("launch.rollout_python", config.launch.rollout_python, ""),
        ("rollout.engine_args", config.rollout.engine_args, {}),
    )
    for name, value, unset in started:
        if value != unset:
            yield Violation(
                f"{name} says how servers are started, and rollout.urls run already; remove one",
                (name, "rollout.urls"),
            )


def _is_server(url: str) -> bool:
    """Whether a URL names a server and nothing on it.

    >>> _is_server("http://10.0.0.7:30000"), _is_server("10.0.0.7:30000")
    (True, False)
    >>> _is_server("http://host:port"), _is_server("http://host:1/v1")
    (False, False)
    """
    try:
        parts = urlsplit(url)
        has_port = parts.port is not None
    except ValueError:
        return False
    is_http = parts.scheme in ("http", "https")
    return is_http and has_port and bool(parts.hostname) and not (parts.path + parts.query)


def check_sync(config: Config) -> Iterator[Violation]:
    """What each mode of the weight sync needs, and what has no meaning with it."""
    sync = config.weight_sync
    if sync.mode == "disk" and not sync.disk_dir:
        yield Violation(
            "weight_sync.mode = disk needs weight_sync.disk_dir, a folder on a file system that "
            "learner and servers share",
            ("weight_sync.mode", "weight_sync.disk_dir"),
        )
    if sync.disk_dir and sync.mode != "disk":
        yield Violation(
            f"weight_sync.disk_dir = {sync.disk_dir!r} has no meaning with weight_sync.mode = "
            f"{sync.mode}; remove one",
            ("weight_sync.disk_dir", "weight_sync.mode"),
        )
    if sync.hf_route != "auto" and sync.mode not in ("auto", "hf"):
        yield Violation(
            f"weight_sync.hf_route = {sync.hf_route} has no meaning with weight_sync.mode = "
            f"{sync.mode}; remove one",
            ("weight_sync.hf_route", "weight_sync.mode"),
        )
    if sync.mode in ("hf", "disk") and not sync.probe_tokens:
        yield Violation(
            f"weight_sync.mode = {sync.mode} without weight_sync.probe_tokens: SGLang says nothing "
            "of what it loaded, so that only log-probs show it; use 1 or more",
            ("weight_sync.mode", "weight_sync.probe_tokens"),
        )
