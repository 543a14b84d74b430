"""`[rollout.engine_args]` takes what the pinned engine takes, and nothing that megarl sets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.errors import ConfigError
from megarl.rollout import engine_args

ROOT = Path(__file__).parents[2]


def test_shipped_list_is_that_of_the_installed_engine() -> None:
    code = (
        "import json, sys; sys.path.insert(0, 'tools'); import make_engine_args as m; "
        "print(json.dumps(m.installed_arguments()))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    version, arguments = json.loads(run.stdout.splitlines()[-1])
    shipped_version, shipped = engine_args.known_arguments()
    assert version == shipped_version
    assert {name: tuple(row) for name, row in arguments.items()} == shipped


def test_arguments_that_megarl_rules_on_exist_in_the_engine() -> None:
    assert {*engine_args.SET_BY, *engine_args.REFUSED} <= set(engine_args.known_arguments()[1])


def test_every_violation_is_listed_with_what_to_do() -> None:
    given = {"tp_size": 2, "api_key": "x", "mem_fraction": 0.5, "disable_radix_cache": "yes"}
    with pytest.raises(ConfigError) as error:
        engine_args.flags(given)
    first, second, third, fourth = error.value.violations
    assert "use rollout.parallel.tp" in first
    assert "each run makes its own keys" in second
    assert "did you mean mem_fraction_static?" in third
    assert "use true or false" in fourth


def test_switch_that_is_off_is_not_written() -> None:
    given = {"disable_radix_cache": False, "enable_tf32_matmul": False, "enable_metrics": True}
    assert engine_args.flags(given) == ["--no-enable-tf32-matmul", "--enable-metrics"]
