"""What only `megarl reshard explain` can do is refused by a run in words; nothing is ignored."""

from __future__ import annotations

import pytest

from megarl.actor.model_shape import Yarn
from megarl.actor.shape import read_shape
from megarl.config.check_parallel import check_servers
from megarl.config.layouts import learner_pipeline, run_layouts
from megarl.config.load import load_layout
from megarl.config.transformer_fields import FROM_MODEL, REFUSED, SET_BY, known_fields
from megarl.errors import ConfigError, LayoutError
from tests.config.conftest import EXPERTS
from tests.reshard.models import tiny_shape


def test_run_refuses_what_is_only_planned(place) -> None:
    text = place.violation("--rollout.parallel.pp", "2")
    assert text.startswith("rollout.parallel.pp")
    assert "`megarl reshard explain` plans it" in text


def test_run_takes_context_and_virtual_pipeline_parallelism(place) -> None:
    sizes = "--learner.parallel.pp 2 --learner.parallel.vpp 2 --learner.parallel.cp 2"
    parallel = place.load(*sizes.split()).learner.parallel
    assert (parallel.vpp, parallel.cp, parallel.num_ranks) == (2, 2, 4)


def test_run_refuses_model_chunks_without_stages(place) -> None:
    text = place.violation("--learner.parallel.vpp", "2")
    assert text == (
        "learner.parallel.pp: vpp=2 with pp=1: chunks interleave over stages; use a larger pp"
    )


def test_colocated_run_refuses_more_server_ranks_than_learner_ranks(place) -> None:
    text = place.violation("--placement.mode", "colocated", "--rollout.servers", "2")
    assert text == (
        "placement.mode = colocated: 2 servers x 1 ranks = 2 server ranks share the GPUs of 1 "
        "learner ranks; use fewer servers, a smaller rollout.parallel.tp, or more "
        "placement.learner_gpus"
    )


@pytest.mark.parametrize("name", ["learner.parallel.ep", "learner.parallel.etp"])
def test_run_of_a_dense_model_refuses_ranks_for_experts(place, name: str) -> None:
    text = place.violation(f"--{name}", "2", "--placement.learner_gpus", "2")
    assert text == f"{name} = 2: actor.model has no routed experts; use 1"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            "--learner.parallel.ep 3 --placement.learner_gpus 3",
            "learner.parallel.ep = 3: 8 experts do not split over 3 ranks; use 1, 2, 4 or 8",
        ),
        (
            "--learner.parallel.etp 3 --placement.learner_gpus 3",
            "learner.parallel.etp = 3: 64 rows of an expert's gate (moe_intermediate_size) do not "
            "split over 3 ranks; use 1, 2, 4, 8, 16, 32 or 64",
        ),
        (
            "--learner.parallel.tp 2 --learner.parallel.sequence_parallel false",
            "learner.parallel.sequence_parallel = false: with learner.parallel.tp = 2 "
            "Megatron trains routed experts only with it; remove it",
        ),
        (
            "--learner.transformer_config.moe_aux_loss_coeff 0.01",
            "learner.transformer_config.moe_aux_loss_coeff: the loss is the policy's alone, "
            "without auxiliary losses of the router; remove it",
        ),
    ],
)
def test_run_with_experts_refuses_what_megatron_cannot_train(
    place, arguments: str, text: str
) -> None:
    place.change_model(**EXPERTS)
    assert place.violation(*arguments.split()) == text


def test_fields_that_are_refused_or_set_are_fields_of_megatron() -> None:
    _, known = known_fields()
    assert {*REFUSED, *SET_BY, *FROM_MODEL} <= set(known)


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("softmax_scale 0.5", "log-probs would not be the policy's"),
        ("calculate_per_token_loss false", "gradients are sums"),
        ("batch_p2p_comm true", "megarl sets it; use learner.parallel.vpp"),
        ("sequence_parallel true", "megarl sets it; use learner.parallel.sequence_parallel"),
        ("hybrid_context_parallel true", "samples are placed on ranks"),
    ],
)
def test_run_refuses_fields_with_which_megatron_would_compute_something_else(
    place, field: str, reason: str
) -> None:
    assert reason in place.violation(*f"--learner.transformer_config.{field}".split())


def test_run_with_experts_takes_expert_parallelism(place) -> None:
    place.change_model(**EXPERTS)
    arguments = "--learner.parallel.tp 2 --learner.parallel.ep 4 --placement.learner_gpus 4"
    assert place.load(*arguments.split()).learner.parallel.ep == 4
    arguments = "--learner.parallel.tp 2 --learner.parallel.etp 2 --launch.device cpu"
    assert place.load(*arguments.split()).learner.parallel.etp == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("first_stage_layers", "1"), ("last_stage_layers", "3"), ("pipeline_layout", "Et|tttL")],
)
def test_run_takes_pipelines_that_are_not_even(place, name: str, value: str) -> None:
    place.load("--learner.parallel.pp", "2", f"--learner.parallel.{name}", value)


def test_run_refuses_a_pipeline_of_another_model(place) -> None:
    arguments = "--learner.parallel.pp 2 --learner.parallel.pipeline_layout Et|ttL"
    assert place.violation(*arguments.split()).startswith("the pipeline has 3 decoder layers, the ")


def test_run_takes_servers_with_data_parallel_attention(place) -> None:
    config = place.load("--rollout.parallel.tp", "2", "--rollout.parallel.attention_dp", "2")
    assert config.rollout.parallel.attention_dp == 2


def test_run_refuses_expert_parallel_servers_of_a_dense_model(place) -> None:
    text = place.violation("--rollout.parallel.ep", "2", "--rollout.parallel.tp", "2")
    assert "ep=2, but Qwen3ForCausalLM has no experts here; use ep=1" in text


def test_latent_attention_without_yarn_is_refused_on_a_cpu_only(place) -> None:
    shape = tiny_shape("DeepseekV3ForCausalLM", intermediate_size=64)
    stretched = tiny_shape(
        "DeepseekV3ForCausalLM",
        intermediate_size=64,
        rope_scaling=Yarn(4.0, 64, 32.0, 1.0, 1.0, 1.0),
    )
    on_cpu, on_gpu = (load_layout(place.file, ["--launch.device", d]) for d in ("cpu", "cuda"))
    (text,) = (violation.text for violation in check_servers(on_cpu, shape))
    assert "with yarn positions only" in text
    assert not [*check_servers(on_cpu, stretched), *check_servers(on_gpu, shape)]


def test_run_refuses_sizes_of_a_server_that_contradict_each_other(place) -> None:
    text = place.violation("--rollout.parallel.attention_dp", "2")
    assert "rollout.parallel.attention_dp = 2 does not divide rollout.parallel.tp = 1" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            "--learner.parallel.cp 2 --placement.learner_gpus 3",
            "placement.learner_gpus = 3 is no multiple of learner.parallel.tp x "
            "learner.parallel.pp x learner.parallel.cp = 1 x 1 x 2 = 2; use 4",
        ),
        (
            "--learner.parallel.ep 3 --placement.learner_gpus 4",
            "learner.parallel.ep x learner.parallel.etp = 3 x 1 = 3 does not divide the 4 ranks",
        ),
        (
            "--learner.parallel.pipeline_layout Et*4L --learner.parallel.first_stage_layers 1",
            "learner.parallel.pipeline_layout already says how many layers each stage has",
        ),
        (
            "--rollout.parallel.attention_dp 2",
            "rollout.parallel.attention_dp = 2 does not divide rollout.parallel.tp = 1",
        ),
        (
            "--learner.transformer_config.expert_model_parallel_size 2",
            "megarl sets it; use learner.parallel.ep",
        ),
    ],
)
def test_layout_refuses_sizes_that_contradict_each_other(place, arguments: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_layout(place.file, arguments.split())
    assert [v for v in caught.value.violations if text in v] == caught.value.violations


def test_layout_needs_no_weights_no_tokenizer_and_no_prompts(place) -> None:
    for path in (*place.model.glob("*.safetensors"), place.model / "tokenizer.json"):
        path.unlink()
    (place.folder / "prompts.jsonl").unlink()
    config = load_layout(place.file, ["--rollout.parallel.tp", "4", "--rollout.servers", "2"])
    # two copies of each of the two kv heads, as GPUs hold them, though this machine may have none
    run = run_layouts(config)
    assert (len(run.destination.rank_ids), run.server.cpu) == (8, False)


def test_pipeline_written_out_is_laid_out(place) -> None:
    arguments = ["--learner.parallel.pp", "2", "--learner.parallel.pipeline_layout", "Et|tttL"]
    config = load_layout(place.file, arguments)
    pipeline = learner_pipeline(config, read_shape(place.model))
    assert [chunk.num_layers for _, _, chunk in pipeline] == [1, 3]


def test_fields_that_move_the_ends_of_the_pipeline_are_laid_out(place) -> None:
    name = "--learner.transformer_config.account_for_loss_in_pipeline_split"
    place.change_model(num_hidden_layers=5)
    config = load_layout(place.file, ["--learner.parallel.pp", "2", name, "true"])
    pipeline = learner_pipeline(config, read_shape(place.model))
    assert [chunk.num_layers for _, _, chunk in pipeline] == [3, 2]


def test_layout_that_does_not_divide_is_named_by_the_layout(place) -> None:
    config = load_layout(place.file, ["--learner.parallel.tp", "3"])
    with pytest.raises(LayoutError, match="4 attention heads do not split"):
        run_layouts(config)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            "--rollout.servers 99999999999",
            "rollout.servers x rollout.parallel.tp x rollout.parallel.pp = 99999999999 x 1 x 1 = "
            "99999999999: megarl lays out 131072 ranks of a side at most",
        ),
        (
            "--placement.learner_gpus 20000000",
            "placement.learner_gpus = 20000000: megarl lays out 131072 ranks of a side at most",
        ),
        (
            "--learner.parallel.tp 9999999999",
            "learner.parallel.tp x learner.parallel.pp x learner.parallel.cp = 9999999999 x 1 x 1",
        ),
    ],
)
def test_more_ranks_than_are_laid_out_are_refused_before_anything_is_made(
    place, arguments: str, text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_layout(place.file, arguments.split())
    assert [v for v in caught.value.violations if text in v] == caught.value.violations
    assert any(text in violation for violation in place.violations(*arguments.split()))


@pytest.mark.parametrize("end", ["embedding", "loss"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("first_stage_layers", "1"), ("last_stage_layers", "1"), ("pipeline_layout", "Ettt|tL")],
)
def test_counted_end_beside_an_uneven_pipeline_is_refused_as_by_megatron(
    place, end: str, name: str, value: str
) -> None:
    field = f"learner.transformer_config.account_for_{end}_in_pipeline_split"
    arguments = ["--learner.parallel.pp", "2", f"--learner.parallel.{name}", value]
    load_layout(place.file, [*arguments, f"--{field}", "false"])
    with pytest.raises(ConfigError, match=f"{field} = true beside learner.parallel.{name}"):
        load_layout(place.file, [*arguments, f"--{field}", "true"])
