"""From a Hugging Face folder into real ranks and out again: only what a rank holds, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.learner import recorded
from tests.learner.parity import TEMPERATURE, Case, Oracle
from tests.megatron_engine import Engine

VPP2 = {"pp": 2, "vpp": 2}
CASES = {  # in fp32
    "qwen3": Case("qwen3", parallel={"tp": 2, "pp": 2}),
    "llama": Case("llama", dp=2, parallel=VPP2),  # tied
    "qwen3-moe": Case("qwen3-moe", dp=2, parallel={"tp": 2, "ep": 2}),
    "deepseek-v3": Case("deepseek-v3", dp=2, parallel={"pp": 2, "ep": 2}),
}
BF16 = "glm4-moe"  # stored and trained in it
MORE = {BF16: Case(BF16, parallel={"tp": 2, "pp": 2, "ep": 2})}
ALL = CASES | MORE
SLOW = ("deepseek-v3", BF16)
TOKENIZER = '{"of": "a test"}'


def marked(cases: Iterable[str]) -> list[Any]:
    """The cases, those marked that are not in the default tests."""
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in cases]


class Exports:
    """What four ranks have exported of a case's model, and what they saw, once it is asked for."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder, self._engine = folder, engine
        self._made: dict[str, dict[str, Any]] = {}

    def case(self, name: str) -> dict[str, Any]:
        """What the ranks were told, and what they saw."""
        if name not in self._made:
            told = self._tell(name)
            written = self.folder / f"{name}-case.json"
            written.write_text(json.dumps([told]))
            self._engine.run("tests.learner.export_ranks", written, ranks=4)
            seen = json.loads((self.folder / f"{name}.json").read_text())
            self._made[name] = {**told, **seen}
        return self._made[name]

    def _tell(self, name: str) -> dict[str, Any]:
        case, path = ALL[name], self.folder / f"{name}-model"
        oracle = Oracle(name, path, tied=name == "llama")
        config = case.config(path).model_dump()
        if name == BF16:
            half = oracle.model.bfloat16()
            for buffer in half.buffers():
                buffer.data = buffer.data.float()  # a router's bias is float32 in published ones
            half.save_pretrained(path)
            config["learner"]["precision"]["params"] = "bf16"
        (path / "tokenizer.json").write_text(TOKENIZER)
        refs = [ref for _, ref in oracle.samples]
        sequences = [(s.prompt_ids, s.response_ids) for s, _ in oracle.samples]
        plan = asdict(recorded.plan(refs, case.dp))
        return {"name": name, "config": config, "plan": plan, "sequences": sequences}

    def source(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors that the learner began with."""
        self.case(name)
        return load_file(self.folder / f"{name}-model/model.safetensors")

    def export(self, name: str, version: int) -> Path:
        """The folder of a version: 0, or that after a step."""
        self.case(name)
        return self.folder / f"{name}-v{version}"


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory, megatron_engine: Engine) -> Exports:
    return Exports(tmp_path_factory.mktemp("export"), megatron_engine)


def test_rank_reads_its_own_part_of_a_folder_and_nothing_else(exports: Exports) -> None:
    source = exports.source("qwen3")
    stored = sum(tensor.nbytes for tensor in source.values())
    norms = sum(tensor.nbytes for name, tensor in source.items() if "norm" in name)
    read = exports.case("qwen3")["read"]
    assert sum(read) == stored + norms  # each of TP2 has the norms, and one of them all the rest
    tied = exports.source("llama")
    stored = sum(tensor.nbytes for tensor in tied.values())
    again = tied["model.embed_tokens.weight"].nbytes  # the last stage has it for its output
    read = exports.case("llama")["read"]
    assert read[0] + read[2] == stored + again
    assert read[:2] == [read[0]] * 2 and read[2:] == [read[2]] * 2  # both replicas


def test_rank_reads_its_own_experts_only(exports: Exports) -> None:
    source = exports.source("qwen3-moe")
    experts = sum(tensor.nbytes for name, tensor in source.items() if ".experts." in name)
    rest = sum(tensor.nbytes for name, tensor in source.items() if ".experts." not in name)
    whole = ("norm", "mlp.gate.")
    copied = sum(t.nbytes for name, t in source.items() if any(part in name for part in whole))
    # EP2 of four ranks: experts are there twice. TP2: two replicas of the rest.
    assert sum(exports.case("qwen3-moe")["read"]) == 2 * experts + 2 * (rest + copied)


@pytest.mark.parametrize("case", marked(ALL))
def test_export_of_version_0_is_the_source_bit_for_bit(exports: Exports, case: str) -> None:
    folder, source = exports.export(case, 0), exports.source(case)
    found = load_file(folder / "model.safetensors")
    assert found.keys() == source.keys()
    for name, tensor in source.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert exports.case(case)["bytes"] == (folder / "model.safetensors").stat().st_size
    beside = {path.name for path in folder.iterdir()} - {"model.safetensors"}
    assert beside >= {"config.json", "tokenizer.json"}
    assert (folder / "tokenizer.json").read_text() == TOKENIZER
    assert not list(exports.folder.glob("*.partial"))


@pytest.mark.parametrize("case", marked(ALL))
def test_export_in_another_type_has_the_rounded_numbers_and_says_so(
    exports: Exports, case: str
) -> None:
    source, folder = exports.source(case), exports.folder / f"{case}-other"
    dtype = torch.float32 if case == BF16 else torch.bfloat16
    found = load_file(folder / "model.safetensors")
    assert found.keys() == source.keys()
    for name, tensor in source.items():
        fixed = name.endswith("e_score_correction_bias")  # a router's bias is float32 always
        wanted = tensor if fixed else tensor.to(dtype)
        assert found[name].dtype == wanted.dtype, name
        assert torch.equal(found[name].view(torch.uint8), wanted.view(torch.uint8)), name
    config = json.loads((folder / "config.json").read_text())
    assert str(dtype) == f"torch.{config.get('dtype', config.get('torch_dtype'))}"


@pytest.mark.parametrize("case", marked(CASES))
def test_transformers_loads_an_export_and_has_the_learners_logprobs(
    exports: Exports, case: str
) -> None:
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(
        exports.export(case, 1), dtype="auto", output_loading_info=True
    )
    assert not any(told.values()), told
    sequences, found = exports.case(case)["sequences"], exports.case(case)["logprobs"]
    changed = 0.0
    before = transformers.AutoModelForCausalLM.from_pretrained(exports.export(case, 0))
    for (prompt, response), logprobs in zip(sequences, found, strict=True):
        ids = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            both = [model(ids).logits[0, len(prompt) - 1 : -1] for model in (loaded, before)]
        wanted, old = (
            (logits / TEMPERATURE).log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
            for logits in both
        )
        bound = 1e-5 * float(both[0].abs().max())
        assert float((torch.tensor(logprobs) - wanted).abs().max()) < bound
        changed = max(changed, float((wanted - old).abs().max()))
    assert changed > 1e-3  # the step was one


@pytest.mark.parametrize("case", marked(ALL))
def test_export_that_cannot_be_written_is_told_and_leaves_nothing(
    exports: Exports, case: str
) -> None:
    told = exports.case(case)["told"]
    assert f"{case}-v0 exists already, and nothing is overwritten" in told["there"]
    assert "learner rank 0: [Errno 20] Not a directory" in told["below a file"]
    assert "learner rank 3: File too large" in told["full"], told["full"]
    assert f"{exports.folder}/{case}-full: the policy was not written there" in told["full"]
    assert not list(exports.folder.glob(f"{case}-full*"))
