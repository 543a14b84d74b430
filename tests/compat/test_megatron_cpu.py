"""The CPU substitution of Megatron-Core: inert beside CUDA, and harmless to Hugging Face models."""

from __future__ import annotations

import subprocess
import sys


def _run(code: str) -> str:
    """Run `code` in a process of its own, as what it changes is global."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_hugging_face_models_loaded_after_the_install_have_right_rope_tables() -> None:
    out = _run(
        """
import tempfile, torch
from megarl.compat import megatron_cpu
megatron_cpu.install()
from transformers import Qwen3Config, Qwen3ForCausalLM
config = Qwen3Config(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=2, head_dim=16)
with tempfile.TemporaryDirectory() as folder:
    Qwen3ForCausalLM(config).save_pretrained(folder)
    junk = [torch.full((8,), 1e14) for _ in range(100)]  # what uninitialised memory would hold
    del junk
    model = Qwen3ForCausalLM.from_pretrained(folder)
found = model.model.rotary_emb.inv_freq
theta = config.rope_parameters["rope_theta"]
expected = 1.0 / theta ** (torch.arange(0, 16, 2).float() / 16)
torch.testing.assert_close(found, expected)
with torch.device("meta"):
    assert torch.zeros(3).is_meta and torch.arange(3).is_meta
print("right")
"""
    )
    assert out == "right"


def test_megatron_is_imported_without_a_compiler_or_wandb_which_stay_importable() -> None:
    out = _run(
        """
import sys
from megarl.compat import megatron_cpu
megatron_cpu.install()
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe import router
heavy = {"torch._inductor.compile_fx", "torch._dynamo.eval_frame", "wandb"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import torch
assert torch.compile(abs) is abs and torch.compile(dynamic=True)(abs) is abs
import wandb
print("light")
"""
    )
    assert out == "light"


def test_install_beside_cuda_changes_nothing() -> None:
    out = _run(
        """
import sys, torch
torch.cuda.is_available = lambda: True
before = [torch.zeros, torch.Tensor.type, torch.Tensor.cuda, torch.cuda.synchronize]
from megarl.compat import megatron_cpu
megatron_cpu.install()
after = [torch.zeros, torch.Tensor.type, torch.Tensor.cuda, torch.cuda.synchronize]
assert before == after and not megatron_cpu.is_installed()
assert "megatron" not in sys.modules and "triton" not in sys.modules
print("inert")
"""
    )
    assert out == "inert"


def test_packed_attention_equals_attention_on_each_sequence_alone() -> None:
    out = _run(
        """
import types, torch
from megarl.compat import megatron_cpu
megatron_cpu.install()
megatron_cpu.install()  # a second time does nothing
from megatron.core.packed_seq_params import PackedSeqParams
from megarl.compat.megatron_parts import CoreAttention
one = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
attention = CoreAttention(pg_collection=types.SimpleNamespace(cp=one))
torch.manual_seed(0)
q, k, v = torch.randn(19, 4, 8), torch.randn(19, 2, 8), torch.randn(19, 2, 8)
cu = torch.tensor([0, 4, 5, 11, 15, 19], dtype=torch.int32)
packed = attention(q, k, v, packed_seq_params=PackedSeqParams("thd", cu, cu))
def causal(q, k, v):
    k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
    scores = torch.einsum("qnd,knd->nqk", q, k) / 8 ** 0.5
    mask = torch.ones(len(q), len(q)).tril() == 0
    return torch.einsum("nqk,knd->qnd", scores.masked_fill(mask, -1e30).softmax(-1), v).flatten(1)
for a, b in ((0, 4), (4, 5), (5, 11), (11, 15), (15, 19)):
    torch.testing.assert_close(packed[a:b], causal(q[a:b], k[a:b], v[a:b]))
print("equal")
"""
    )
    assert out == "equal"


def test_packed_rope_equals_megatrons_own_loop_over_sequences() -> None:
    out = _run(
        """
import types, torch
from megarl.compat import placeholders
placeholders.install(["triton"])
from megatron.core.models.common.embeddings import rope_utils
own = rope_utils._apply_rotary_pos_emb_thd
from megarl.compat import megatron_cpu
megatron_cpu.install()
ours = rope_utils._apply_rotary_pos_emb_thd
assert ours is not own
cp = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
t, freqs = torch.randn(19, 4, 8), torch.randn(32, 1, 1, 8)
cu = torch.tensor([0, 4, 5, 11, 15, 19], dtype=torch.int32)
settings = dict(rotary_interleaved=False, mla_rotary_interleaved=False, mscale=1.0, cp_group=cp)
assert torch.equal(ours(t, cu, freqs, **settings), own(t, cu, freqs, **settings))
print("equal")
"""
    )
    assert out == "equal"
