"""Real SGLang servers for the tests of weight sync, and what they say of themselves."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import requests
from safetensors.torch import save_file

from benchmarks.sync.server import kill
from megarl.types import ServerEndpoint
from megarl.weight_sync.control import LOAD_FORMAT
from tests.weight_sync import tiny
from tests.weight_sync.sabotage import LOADERS

ROOT = Path(__file__).parents[2]
START_S = 420.0


def make_model(folder: Path) -> Path:
    """The tiny policy as a Hugging Face checkpoint with the weights of seed 0."""
    shape = tiny.SHAPE
    config = {
        "architectures": [shape.architecture],
        "model_type": "qwen3",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tie_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_positions,
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tiny.weights(shape, 0), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class RealServer:
    """One SGLang server of a tiny policy on a CPU."""

    def __init__(
        self,
        name: str,
        model: Path,
        tp: int,
        log: Path,
        ep: int = 1,
        attention_dp: int = 1,
        dtype: str = "float32",
        device: str = "cpu",
        *,
        has_loader: bool = True,
        switches: Sequence[str] = (),
        module: str = "megarl.compat.sglang_server",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.log = log
        keys = {"api_key": secrets.token_hex(8), "admin_key": secrets.token_hex(8)}
        self.endpoint = ServerEndpoint(
            name, f"http://127.0.0.1:{port}", tp, 0, **keys, ep=ep, attention_dp=attention_dp
        )
        flags = {
            "--model-path": model,
            "--device": device,
            "--dtype": dtype,
            "--tp-size": tp,
            "--ep-size": ep,
            "--attn-dp-size": attention_dp,
            "--attention-backend": "torch_native",
            "--max-total-tokens": 4096,
            "--max-running-requests": 16,
            "--host": "127.0.0.1",
            "--port": port,
            "--log-level": "warning",
        }
        argv = [sys.executable, "-m", module]
        argv += ["--skip-tokenizer-init", "--skip-server-warmup"]
        argv += ["--sleep-on-idle"] if device == "cpu" else ["--disable-cuda-graph"]
        argv += [str(word) for pair in flags.items() for word in pair]
        argv += switches
        if has_loader:
            argv += ["--custom-weight-loader", LOAD_FORMAT, *LOADERS]
        self._argv, self._added = argv, {**self._environment(tp), **(environment or {})}
        self._start()

    def _start(self) -> None:
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                self._argv,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._added,
                cwd=ROOT,
                start_new_session=True,
            )

    def revive(self) -> None:
        """Start it anew where a test has ended it."""
        if self.process.poll() is not None:
            self._start()
            self.wait()

    def _environment(self, tp: int) -> dict[str, str]:
        cores = sorted(os.sched_getaffinity(0))
        added = {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONPATH": str(ROOT),
            "MEGARL_ROLLOUT_API_KEY": self.endpoint.api_key,
            "MEGARL_ROLLOUT_ADMIN_KEY": self.endpoint.admin_key,
        }
        if tp > 1:
            binding = "|".join(str(cores[rank % len(cores)]) for rank in range(tp))
            added["SGLANG_CPU_OMP_THREADS_BIND"] = binding
        return {**os.environ, **added}

    def call(self, route: str, body: dict[str, Any] | None = None, admin: bool = True) -> Any:
        """The answer to one call, which must be a success."""
        key = self.endpoint.admin_key if admin else self.endpoint.api_key
        answer = requests.request(
            "GET" if body is None else "POST",
            self.endpoint.url + route,
            json=body,
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
        )
        assert answer.status_code == 200, f"{route}: {answer.status_code} {answer.text}"
        return answer.json() if answer.text.startswith(("{", "[")) else answer.text

    def wait(self) -> None:
        """Until it serves."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                if requests.get(f"{self.endpoint.url}/health", timeout=10).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.3)
        raise AssertionError(f"{self.endpoint.name} did not start: {self.log.read_text()[-3000:]}")

    def checksums(self) -> list[dict[str, str]]:
        """SGLang's own checksum of every parameter, per TP rank."""
        answer = self.call("/weights_checker", {"action": "checksum"})
        # With data-parallel attention each group answers for all ranks.
        told = {one["parallelism_info"][0]["rank"]: one["checksums"] for one in answer["ranks"]}
        return [told[rank] for rank in sorted(told)]

    def version(self) -> str:
        """What the weights are called, without what tells their publish from others."""
        return tiny.version_of(self.label())

    def label(self) -> str:
        """What the weights are called."""
        return str(self.call("/get_model_info", admin=False)["weight_version"])

    def sample(self, prompt: list[int], num_tokens: int = 8) -> tuple[list[int], list[float], str]:
        """(response tokens, their log-probs, weight version) at temperature 1."""
        answer = self.call(
            "/generate",
            {
                "input_ids": prompt,
                "return_logprob": True,
                "sampling_params": {"temperature": 1.0, "max_new_tokens": num_tokens},
            },
            admin=False,
        )
        meta = answer["meta_info"]
        logprobs = meta["output_token_logprobs"]
        return (
            [int(token) for _, token, _ in logprobs],
            [float(logprob) for logprob, _, _ in logprobs],
            tiny.version_of(meta["weight_version"]),
        )

    def kill(self) -> None:
        """End all its processes at once, and remove what SGLang leaves in /dev/shm."""
        kill(self.process)
