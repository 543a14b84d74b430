"""Servers given by URL, and the modes of the weight sync, against the other settings."""

from __future__ import annotations

import pytest

URL = "http://10.0.0.7:30000"
URLS = ("--rollout.urls", f'["{URL}", "http://10.0.0.8:30000"]')


def test_number_of_servers_is_the_number_of_urls(place) -> None:
    config = place.load(*URLS)
    assert config.rollout.servers == 2
    assert config.started_servers == 0
    assert place.load().started_servers == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((*URLS, "--rollout.servers", "3"), "rollout.servers = 3 beside 2 rollout.urls"),
        (("--rollout.urls", f'["{URL}", "{URL}"]'), f"names {URL} twice"),
        (("--rollout.urls", '["10.0.0.7:30000"]'), "no http://host:port"),
        (("--rollout.urls", '["http://10.0.0.7"]'), "no http://host:port"),
        ((*URLS, "--launch.rollout_port", "30000"), "rollout.urls run already"),
        ((*URLS, "--weight_sync.mode", "shared"), "use auto"),
        ((*URLS, "--placement.mode", "colocated"), "share no devices"),
        (("--weight_sync.mode", "disk"), "needs weight_sync.disk_dir"),
        (("--weight_sync.disk_dir", "/shared"), "has no meaning with weight_sync.mode = auto"),
        (
            ("--weight_sync.mode", "exact", "--weight_sync.hf_route", "request"),
            "weight_sync.hf_route = request has no meaning",
        ),
        (
            ("--weight_sync.mode", "hf", "--weight_sync.probe_tokens", "0"),
            "only log-probs show it",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_words(
    place, arguments: tuple[str, ...], text: str
) -> None:
    assert text in "\n".join(place.violations(*arguments))
