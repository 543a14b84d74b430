"""The plain slices that the ranks of SGLang servers are known to hold, written with numpy.

Head by head, expert by expert and block by block, on purpose unlike the intervals under test. Names
and orders are those of sglang 0.5.23; the tests of its own loaders show that they are.

`tensors` are the policy's under their parameters' names; the experts of a layer are one array.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from megarl.actor.shape import ModelShape
from megarl.reshard.mesh import ServerMesh
from tests.reshard.learner_slices import Arrays, padded, round_up

# Their models make the head on every pipeline stage.
HEAD_ON_EVERY_STAGE = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM")
# Their dense MLP has no group of its own with --moe-dense-tp-size 1.
DENSE_CAN_BE_WHOLE = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")


def sglang_slices(shape: ModelShape, tp: int, rank: int, tensors: Arrays) -> Arrays:
    """What rank `rank` of one server of `tp` ranks holds."""
    return server_slices(shape, ServerMesh(tp), rank, tensors)


def server_slices(
    shape: ModelShape,
    mesh: ServerMesh,
    rank: int,
    tensors: Arrays,
    block: tuple[int, int] | None = None,
) -> Arrays:
    """What a rank of the servers holds; `block` is the size of FP8 blocks in `tensors`."""
    return _Server(shape, mesh, rank % mesh.size, tensors, block).fill()


def padded_for_cpu(shape: ModelShape, tp: int, tensors: Arrays) -> tuple[ModelShape, Arrays]:
    """The policy as a server on a CPU makes it fit: more heads, wider MLPs, of zeros.

    For policies without latent attention and shared experts.
    """
    heads, kv, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    if heads % tp or kv % tp:
        heads, kv = heads * round_up(kv, tp) // kv, round_up(kv, tp)
    inner = round_up(shape.intermediate_size, 32 * tp)
    moe = shape.moe
    if moe is not None:
        wide = round_up(moe.expert_intermediate_size, 32 * tp)
        moe = replace(moe, expert_intermediate_size=wide)
    grown = Arrays()
    for name, array in tensors.items():
        sizes = list(array.shape)
        part = name.split(".")[-2]
        wanted = {"q_proj": heads * dim, "k_proj": kv * dim, "v_proj": kv * dim}
        if part in wanted:
            sizes[0] = wanted[part]
        elif part == "o_proj":
            sizes[1] = heads * dim
        elif part in ("gate_proj", "up_proj", "down_proj"):
            size = moe.expert_intermediate_size if moe is not None and "*" in name else inner
            sizes[-1 if part == "down_proj" else -2] = size
        more = [(0, new - old) for new, old in zip(sizes, array.shape, strict=True)]
        grown[name] = np.pad(array, more)
    changes = {"num_heads": heads, "num_kv_heads": kv, "intermediate_size": inner}
    return replace(shape, moe=moe, **changes), grown


class _Server:
    """One rank of SGLang's, filled name by name. Every rank is a place in three groups."""

    def __init__(
        self,
        shape: ModelShape,
        mesh: ServerMesh,
        rank: int,
        tensors: Arrays,
        block: tuple[int, int] | None,
    ) -> None:
        if mesh.cpu:
            shape, tensors = padded_for_cpu(shape, mesh.tp, tensors)
        self.shape, self.mesh, self.tensors, self.block = shape, mesh, tensors, block
        self.stage, self.rank = divmod(rank, mesh.tp)
        self.whole, self.all = (0, 1), (self.rank, mesh.tp)  # (which part, of how many)
        attention_tp = mesh.tp // mesh.attention_dp
        self.attention = (self.rank % attention_tp, attention_tp)
        self.expert_tp = mesh.tp // mesh.ep
        self.e, self.x = self.rank // self.expert_tp, self.rank % self.expert_tp
        self.out = Arrays()

    def fill(self) -> Arrays:
        shape, mesh = self.shape, self.mesh
        first, last = self.stage == 0, self.stage == mesh.pp - 1
        late = mesh.draft and shape.architecture == "DeepseekV3ForCausalLM"
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        if first or (last and late):
            self.vocabulary(embedding, embedding, self.attention)
        for layer in self.layers():
            self.layer(f"model.layers.{layer}.", shape.layer_kinds[layer])
        if last:
            self.out["model.norm.weight"] = self.tensors["model.norm.weight"]
        over = self.attention if mesh.dp_head else self.all
        if shape.tie_embeddings and last and not first:
            self.vocabulary(head, embedding, over)
        elif not shape.tie_embeddings and (last or shape.architecture in HEAD_ON_EVERY_STAGE):
            self.vocabulary(head, head, over)
        return self.out

    def layers(self) -> list[int]:
        """This stage's; the stages at the end have one more where they do not divide."""
        pp = self.mesh.pp
        sizes = list(self.mesh.pp_layers) or [self.shape.num_layers // pp] * pp
        for late in range(self.shape.num_layers - sum(sizes)):
            sizes[-1 - late] += 1
        start = sum(sizes[: self.stage])
        return list(range(start, start + sizes[self.stage]))

    def vocabulary(self, name: str, hf: str, over: tuple[int, int]) -> None:
        rank, size = over
        rows = round_up(self.shape.vocab_size, 64)
        if rows % size:
            rows = round_up(self.shape.vocab_size, 64 * size)
        self.out[name] = np.split(padded(self.tensors[hf], rows), size)[rank]

    def put(
        self,
        name: str,
        parts: Iterable[tuple[str, np.ndarray | None]],
        columns: np.ndarray | None = None,
    ) -> None:
        """One tensor of chosen rows (None: all) of weights below one another, with its scales."""
        parts = list(parts)
        self.out[f"{name}.weight"] = np.concatenate(
            [_taken(self.tensors[f"{hf}.weight"], rows, columns) for hf, rows in parts]
        )
        scales = [self.tensors.get(f"{hf}.weight_scale_inv") for hf, _ in parts]
        if scales[0] is not None:
            self.out[f"{name}.weight_scale_inv"] = np.concatenate(
                [
                    self.scales(scale, hf, rows, columns)
                    for (hf, rows), scale in zip(parts, scales, strict=True)
                    if scale is not None
                ]
            )

    def scales(
        self, scale: np.ndarray, hf: str, rows: np.ndarray | None, columns: np.ndarray | None
    ) -> np.ndarray:
        """The scales of the blocks that these rows and columns make up."""
        assert self.block is not None
        num_rows, num_columns = self.tensors[f"{hf}.weight"].shape
        return _taken(
            scale,
            _blocks(rows, num_rows, self.block[0]),
            _blocks(columns, num_columns, self.block[1]),
        )

    def layer(self, here: str, kind: str) -> None:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            self.out[f"{here}{norm}.weight"] = self.tensors[f"{here}{norm}.weight"]
        if self.shape.mla is None:
            self.grouped_attention(f"{here}self_attn.")
        else:
            self.latent_attention(f"{here}self_attn.")
        width = self.tensors[f"{here}self_attn.o_proj.weight"].shape[1]
        mine = np.split(np.arange(width), self.attention[1])[self.attention[0]]
        self.put(f"{here}self_attn.o_proj", [(f"{here}self_attn.o_proj", None)], mine)
        if kind == "dense":
            whole = self.mesh.dense_whole and self.shape.architecture in DENSE_CAN_BE_WHOLE
            self.gated(f"{here}mlp.", self.whole if whole else self.all)
        else:
            self.moe(f"{here}mlp.")

    def grouped_attention(self, here: str) -> None:
        """This rank's query heads (each with its gate), and the KV heads that they attend to."""
        shape, (rank, tp) = self.shape, self.attention
        heads = range(rank * shape.num_heads // tp, (rank + 1) * shape.num_heads // tp)
        kv = sorted({head * shape.num_kv_heads // shape.num_heads for head in heads})
        per_head = shape.head_dim * (2 if shape.attention_output_gate else 1)
        queries = np.concatenate([np.arange(h * per_head, (h + 1) * per_head) for h in heads])
        keys = np.concatenate([np.arange(h * shape.head_dim, (h + 1) * shape.head_dim) for h in kv])
        parts = [(f"{here}q_proj", queries), (f"{here}k_proj", keys), (f"{here}v_proj", keys)]
        self.put(f"{here}qkv_proj", parts)
        if shape.qkv_bias:
            biases = [self.tensors[f"{hf}.bias"][rows] for hf, rows in parts]
            self.out[f"{here}qkv_proj.bias"] = np.concatenate(biases)
        if shape.qk_norm:
            for norm in ("q_norm", "k_norm"):
                self.out[f"{here}{norm}.weight"] = self.tensors[f"{here}{norm}.weight"]

    def latent_attention(self, here: str) -> None:
        """Down projections whole, queries' before keys'; the heads of the up projections."""
        mla, (rank, tp) = self.shape.mla, self.attention
        assert mla is not None
        downs = [(f"{here}kv_a_proj_with_mqa", None)]
        if mla.q_lora_rank is None:
            self.put(f"{here}kv_a_proj_with_mqa", downs)
            ups, norms = ["q_proj", "kv_b_proj"], ["kv_a_layernorm"]
        else:
            fused = [(f"{here}q_a_proj", None), *downs]
            self.put(f"{here}fused_qkv_a_proj_with_mqa", fused)
            ups, norms = ["q_b_proj", "kv_b_proj"], ["q_a_layernorm", "kv_a_layernorm"]
        for up in ups:
            size = len(self.tensors[f"{here}{up}.weight"])
            heads = np.arange(size).reshape(self.shape.num_heads, -1)
            mine = np.split(heads, tp)[rank].ravel()
            self.put(f"{here}{up}", [(f"{here}{up}", mine)])
        for norm in norms:
            self.out[f"{here}{norm}.weight"] = self.tensors[f"{here}{norm}.weight"]

    def gated(self, here: str, over: tuple[int, int]) -> None:
        size = len(self.tensors[f"{here}gate_proj.weight"])
        mine = np.split(np.arange(size), over[1])[over[0]]
        self.put(f"{here}gate_up_proj", [(f"{here}{p}_proj", mine) for p in ("gate", "up")])
        self.put(f"{here}down_proj", [(f"{here}down_proj", None)], mine)

    def moe(self, here: str) -> None:
        moe = self.shape.moe
        assert moe is not None
        router = ["gate.weight"] + (["gate.e_score_correction_bias"] if moe.router_bias else [])
        for name in router:
            self.out[here + name] = self.tensors[here + name]
        fused = self.mesh.fused_shared_experts
        if moe.shared_intermediate_size and not fused:
            shared = self.whole if self.mesh.shared_whole else self.all
            self.gated(f"{here}shared_experts.", shared)
        local = np.split(np.arange(moe.num_experts), self.mesh.ep)[self.e]
        inner = np.split(np.arange(moe.expert_intermediate_size), self.expert_tp)[self.x]
        for suffix, units in (("weight", (1, 1)), ("weight_scale_inv", self.block)):
            if units is None:
                continue
            stacks: list[list[np.ndarray]] = []
            for part in ("gate", "up", "down"):
                stack = self.tensors[f"{here}experts.*.{part}_proj.{suffix}"]
                stacks.append([stack[expert] for expert in local])
                if fused:  # one more slot behind the routed experts, on every rank
                    stacks[-1].append(self.tensors[f"{here}shared_experts.{part}_proj.{suffix}"])
            rows = _blocks(inner, moe.expert_intermediate_size, units[0])
            columns = _blocks(inner, moe.expert_intermediate_size, units[1])
            gate, up, down = stacks
            halves = (up, gate) if self.mesh.up_first else (gate, up)
            w13 = [np.concatenate([one[rows], two[rows]]) for one, two in zip(*halves, strict=True)]
            self.out[f"{here}experts.w13_{suffix}"] = np.stack(w13)
            self.out[f"{here}experts.w2_{suffix}"] = np.stack([d[:, columns] for d in down])


def _taken(array: np.ndarray, rows: np.ndarray | None, columns: np.ndarray | None) -> np.ndarray:
    array = array if rows is None else array[rows]
    return array if columns is None else array[:, columns]


def _blocks(index: np.ndarray | None, size: int, unit: int) -> np.ndarray | None:
    """The blocks that these rows (or columns) of `size` are made of; they must be whole."""
    if index is None:
        return None
    blocks = list(dict.fromkeys((index // unit).tolist()))
    whole = [i for b in blocks for i in range(b * unit, min((b + 1) * unit, size))]
    assert whole == index.tolist(), "a block is cut"
    return np.array(blocks)
