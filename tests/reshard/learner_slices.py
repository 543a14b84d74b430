"""The plain slices that Megatron's ranks are known to hold, written with numpy.

Group by group, expert by expert and chunk by chunk, on purpose unlike the intervals under test.
Names and orders are those of megatron-core 0.19.2; tests with real models show that they are.

`tensors` are the policy's under their parameters' names; the experts of a layer are one array.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.actor.shape import ModelShape
from megarl.reshard.mesh import LearnerMesh

Arrays = dict[str, np.ndarray]
Split = Sequence[Sequence[Sequence[int]]]
"""[stage][chunk]: the layers it holds, in order."""


def padded(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """`rows` with zero rows below."""
    return np.concatenate([rows, np.zeros((num_rows - len(rows), *rows.shape[1:]), rows.dtype)])


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def even_split(num_layers: int, pp: int, vpp: int = 1) -> Split:
    """Every chunk as many layers; chunk v of all stages before chunk v + 1 of any."""
    order = np.arange(num_layers).reshape(vpp, pp, -1)
    return [[order[v, p].tolist() for v in range(vpp)] for p in range(pp)]


def megatron_slices(
    shape: ModelShape,
    mesh: LearnerMesh,
    rank: int,
    tensors: Arrays,
    divisor: int,
    split: Split | None = None,
    forms: tuple[str, str] = ("te", "per_expert"),
) -> Arrays:
    """What Megatron's rank holds; `forms` are its layer spec and its class of routed experts."""
    stage = rank // mesh.stage_size
    chunks = (split or even_split(shape.num_layers, mesh.pp, mesh.vpp))[stage]
    mine = _Learner(shape, mesh, rank, tensors, divisor, forms)
    for number, layers in enumerate(chunks):
        mine.prefix = f"model{number}." if mesh.vpp > 1 else ""
        first = stage == 0 and number == 0
        last = stage == mesh.pp - 1 and number == mesh.vpp - 1
        mtp = range(shape.num_mtp_layers if last else 0)
        if first or mtp:
            mine.vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight")
        for local, layer in enumerate(layers):
            mine.layer(layer, f"decoder.layers.{local}.", shape.layer_kinds[layer])
        for local in mtp:
            mine.mtp(shape.num_layers + local, f"mtp.layers.{local}.")
        # With MTP layers the final norm is right behind the last layer, else before the loss.
        if shape.num_layers - 1 in layers if shape.num_mtp_layers else last:
            mine.put("decoder.final_layernorm.weight", tensors["model.norm.weight"])
        if last and not shape.tie_embeddings:
            mine.vocabulary("output_layer.weight", "lm_head.weight")
        elif last and not first and not mtp:
            mine.vocabulary("output_layer.weight", "model.embed_tokens.weight")
    return mine.out


class _Learner:
    """One rank of Megatron's, filled name by name."""

    def __init__(
        self,
        shape: ModelShape,
        mesh: LearnerMesh,
        rank: int,
        tensors: Arrays,
        divisor: int,
        forms: tuple[str, str],
    ) -> None:
        self.shape, self.tensors, self.divisor = shape, tensors, divisor
        self.spec, self.experts = forms
        self.t, self.tp = rank % mesh.tp, mesh.tp
        place = rank % mesh.stage_size
        self.x, self.etp = place % mesh.etp, mesh.etp
        self.e, self.ep = place // mesh.etp % mesh.ep, mesh.ep
        self.prefix, self.out = "", Arrays()

    def put(self, name: str, array: np.ndarray) -> None:
        self.out[self.prefix + name] = array

    def part(self, array: np.ndarray, axis: int = 0) -> np.ndarray:
        return np.split(array, self.tp, axis)[self.t]

    def vocabulary(self, name: str, hf: str) -> None:
        rows = round_up(self.shape.vocab_size, self.divisor * self.tp)
        self.put(name, self.part(padded(self.tensors[hf], rows)))

    def mtp(self, number: int, here: str) -> None:
        hf = f"model.layers.{number}."
        for norm in ("enorm", "hnorm"):
            self.put(f"{here}{norm}.weight", self.tensors[f"{hf}{norm}.weight"])
        self.put(f"{here}eh_proj.weight", self.part(self.tensors[f"{hf}eh_proj.weight"]))
        self.layer(number, f"{here}mtp_model_layer.", "moe")
        final = self.tensors[f"{hf}shared_head.norm.weight"]
        self.put(f"{here}final_layernorm.weight", final)

    def layer(self, number: int, here: str, kind: str) -> None:
        hf = f"model.layers.{number}."
        if self.shape.mla is None:
            norm = self.tensors[f"{hf}input_layernorm.weight"]
            fused = f"{here}self_attention.linear_qkv.layer_norm_weight"
            self.put(fused if self.spec == "te" else f"{here}input_layernorm.weight", norm)
            self.grouped_attention(f"{hf}self_attn.", f"{here}self_attention.")
        else:
            self.put(f"{here}input_layernorm.weight", self.tensors[f"{hf}input_layernorm.weight"])
            self.latent_attention(f"{hf}self_attn.", f"{here}self_attention.")
        output = self.part(self.tensors[f"{hf}self_attn.o_proj.weight"], 1)
        self.put(f"{here}self_attention.linear_proj.weight", output)
        norm = self.tensors[f"{hf}post_attention_layernorm.weight"]
        if kind == "dense":
            fused = f"{here}mlp.linear_fc1.layer_norm_weight"
            self.put(fused if self.spec == "te" else f"{here}pre_mlp_layernorm.weight", norm)
            self.gated(f"{hf}mlp.", f"{here}mlp.")
        else:
            self.put(f"{here}pre_mlp_layernorm.weight", norm)
            self.moe(f"{hf}mlp.", f"{here}mlp.")

    def grouped_attention(self, hf: str, here: str) -> None:
        shape, tensors = self.shape, self.tensors
        self.put(f"{here}linear_qkv.weight", self.fused(hf, "weight"))
        if shape.qkv_bias:
            self.put(f"{here}linear_qkv.bias", self.fused(hf, "bias"))
        if shape.qk_norm:
            self.put(f"{here}q_layernorm.weight", tensors[f"{hf}q_norm.weight"])
            self.put(f"{here}k_layernorm.weight", tensors[f"{hf}k_norm.weight"])

    def fused(self, hf: str, suffix: str) -> np.ndarray:
        """Group by group: its queries, their gates, its key, its value."""
        groups, dim = self.shape.num_kv_heads, self.shape.head_dim
        q, k, v = (self.tensors[f"{hf}{p}_proj.{suffix}"] for p in "qkv")
        rows: list[np.ndarray] = []
        for group in range(groups):
            heads = np.split(np.split(q, groups)[group], self.shape.num_heads // groups)
            rows += [head[:dim] for head in heads]
            if self.shape.attention_output_gate:
                rows += [head[dim:] for head in heads]
            rows += [k[group * dim : (group + 1) * dim], v[group * dim : (group + 1) * dim]]
        return self.part(np.concatenate(rows))

    def latent_attention(self, hf: str, here: str) -> None:
        """Up projections cut by rows; those down too in the local spec, else on every rank."""
        sides = ["q", "kv"]
        assert self.shape.mla is not None
        if self.shape.mla.q_lora_rank is None:
            sides.remove("q")
            self.put(f"{here}linear_q_proj.weight", self.part(self.tensors[f"{hf}q_proj.weight"]))
        for side in sides:
            down = {"q": "q_a_proj", "kv": "kv_a_proj_with_mqa"}[side]
            low = self.tensors[f"{hf}{down}.weight"]
            norm = self.tensors[f"{hf}{side}_a_layernorm.weight"]
            up, te = f"{here}linear_{side}_up_proj", self.spec == "te"
            self.put(f"{here}linear_{side}_down_proj.weight", low if te else self.part(low))
            self.put(f"{up}.layer_norm_weight" if te else f"{here}{side}_layernorm.weight", norm)
            self.put(f"{up}.weight", self.part(self.tensors[f"{hf}{side}_b_proj.weight"]))

    def gated(self, hf: str, here: str) -> None:
        gate, up = (self.part(self.tensors[f"{hf}{p}_proj.weight"]) for p in ("gate", "up"))
        self.put(f"{here}linear_fc1.weight", np.concatenate([gate, up]))
        self.put(f"{here}linear_fc2.weight", self.part(self.tensors[f"{hf}down_proj.weight"], 1))

    def moe(self, hf: str, here: str) -> None:
        moe, tensors = self.shape.moe, self.tensors
        assert moe is not None
        self.put(f"{here}router.weight", tensors[f"{hf}gate.weight"])
        if moe.router_bias:
            self.put(f"{here}router.expert_bias", tensors[f"{hf}gate.e_score_correction_bias"])
        if moe.shared_intermediate_size:
            self.gated(f"{hf}shared_experts.", f"{here}shared_experts.")
        fc1, fc2 = [], []
        for expert in np.split(np.arange(moe.num_experts), self.ep)[self.e]:
            gate, up, down = (tensors[f"{hf}experts.*.{p}_proj.weight"][expert]
                              for p in ("gate", "up", "down"))  # fmt: skip
            halves = [np.split(half, self.etp)[self.x] for half in (gate, up)]
            fc1.append(np.concatenate(halves))
            fc2.append(np.split(down, self.etp, 1)[self.x])
        for fc, local in (("linear_fc1", fc1), ("linear_fc2", fc2)):
            if self.experts == "grouped":
                self.put(f"{here}experts.{fc}.weight", np.stack(local))
                continue
            for i, array in enumerate(local):
                own = f"{fc}.weight{i}" if self.experts == "per_expert" else f"{i}.{fc}.weight"
                own = own if self.experts == "per_expert" else f"local_experts.{own}"
                self.put(f"{here}experts.{own}", array)
