"""The forward modules, their schemas, and the reference formulas against autograd."""

import pytest
import torch
from torch import Tensor, nn

from fusedbwd import schema as s
from fusedbwd.errors import FusedBwdError, SchemaError, UnsupportedError
from fusedbwd.modules import DecoderLayer, GeluFFN, rope_tables
from fusedbwd.numerics import relative_l2
from fusedbwd.problems import PROBLEMS, get_problem, record_inputs
from fusedbwd.tagging import collect

both = pytest.mark.parametrize("name", list(PROBLEMS))

DIMS = {
    "gqa": ("decoder_backward", {}),
    "mha": ("decoder_backward", {"num_kv_heads": 6}),
    "mqa": ("decoder_backward", {"num_kv_heads": 1}),
    "wide heads": ("decoder_backward", {"hidden_size": 33, "head_dim": 10, "eps": 1e-2}),
    "ffn": ("ffn_gelu_backward", {}),
    "odd ffn": ("ffn_gelu_backward", {"hidden_size": 33, "intermediate_size": 7, "eps": 1e-2}),
}


def small(name, dtype=torch.float64, seed=1, **dims):
    problem = get_problem(name)
    return problem, problem.build(seed=seed, dtype=dtype, **(dict(problem.small) | dims))


def autograd(problem, module, inputs):
    """The gradients in schema order, from autograd, on what ``inputs`` were recorded with."""
    schema = problem.schema(module)
    leaves = {i.of: inputs[i.name].clone() for i in schema.inputs if i.kind == s.ARGUMENT}
    named = {**dict(module.named_parameters()), **leaves}
    wanted = [named[g.of].requires_grad_() for g in schema.outputs]
    return torch.autograd.grad(module(**leaves), wanted, inputs["grad_output"])


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("case", [(2, 5), (1, 7), (3, 33)], ids=str)
def test_reference_equals_autograd(dims, case):
    problem, module = small(DIMS[dims][0], **DIMS[dims][1])
    inputs = problem.inputs(module, *case, seed=3)
    reference = problem.reference(inputs)
    schema = problem.schema(module)
    assert list(reference) == [g.name for g in schema.outputs]
    for gradient, expected in zip(schema.outputs, autograd(problem, module, inputs), strict=True):
        assert expected.norm() > 0
        assert relative_l2(reference[gradient.name], expected) < 1e-10, gradient.name


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_inputs_and_reference_match_the_schema(name, dtype):
    problem, module = small(name, dtype)
    schema = problem.schema(module)
    inputs = problem.inputs(module, 2, 5)
    sizes = {"batch_size": 2, "seq_len": 5}
    assert schema.symbols == tuple(sizes)
    assert list(inputs) == [i.name for i in schema.inputs]
    for i in schema.inputs:
        if i.kind == s.SCALAR:
            assert inputs[i.name] == i.default == module.eps
            continue
        value, shape = inputs[i.name], s.resolve(i.shape, sizes)
        assert (value.shape, value.dtype) == (shape, i.dtype), i.name
        assert value.stride() == i.strides(shape), i.name
        assert not value.requires_grad and value.isfinite().all(), i.name
    reference = problem.reference(inputs)
    for g in schema.outputs:
        value = reference[g.name]
        assert (value.shape, value.dtype) == (s.resolve(g.shape, sizes), g.dtype), g.name


DOCUMENTED = {
    "decoder_backward": (
        "grad_output, residual, attn_input, query_states, key_states, value_states, "
        "query_states_rotated, key_states_rotated, key_states_repeated, value_states_repeated, "
        "cos, sin, attn_weights, attn_output, residual2, ffn_input, gate, up, silu_up, "
        "swiglu_output, input_ln_weight, q_weight, k_weight, v_weight, o_weight, "
        "post_attn_ln_weight, gate_weight, up_weight, down_weight, variance1, variance2, "
        "hidden_states_normalized1, hidden_states_normalized2, eps",
        "grad_input, grad_input_ln_weight, grad_q_weight, grad_k_weight, grad_v_weight, "
        "grad_o_weight, grad_post_attn_ln_weight, grad_gate_weight, grad_up_weight, "
        "grad_down_weight",
    ),
    "ffn_gelu_backward": (
        "grad_output, hidden_states, fc1_weight, fc1_output, gelu_output, fc2_weight, "
        "residual_output, normalized, var, ln_weight, eps",
        "grad_hidden_states, grad_fc1_weight, grad_fc1_bias, grad_fc2_weight, grad_fc2_bias, "
        "grad_ln_weight, grad_ln_bias",
    ),
}


@both
def test_schemas_name_the_documented_tensors_in_order(name):
    problem, module = small(name)
    schema = problem.schema(module)
    inputs, outputs = DOCUMENTED[name]
    assert ", ".join(i.name for i in schema.inputs) == inputs
    assert ", ".join(g.name for g in schema.outputs) == outputs


@both
def test_what_the_schema_calls_read_matters_and_the_rest_does_not(name):
    problem, module = small(name)
    schema = problem.schema(module)
    inputs = problem.inputs(module, 2, 5)
    before = problem.reference(inputs)

    def change(i):
        value = inputs[i.name]
        other = value + 0.5 if isinstance(value, float) else torch.rand_like(value) + 0.5
        after = problem.reference({**inputs, i.name: other})
        return max(relative_l2(after[g], before[g]) for g in before)

    # silu_up is given to the formulas but follows from up, so a backward may recompute it.
    for i in schema.inputs:
        assert (change(i) > 1e-9) == (i.read or i.name == "silu_up"), i.name


@both
def test_seeds(name):
    problem, module = small(name)
    again = problem.build(seed=1, dtype=torch.float64, **problem.small)
    other = problem.build(seed=2, dtype=torch.float64, **problem.small)
    for key, value in module.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    first, second = problem.inputs(module, 2, 5, seed=0), problem.inputs(again, 2, 5, seed=0)
    assert all(not isinstance(t, Tensor) or torch.equal(t, second[k]) for k, t in first.items())
    assert not torch.equal(
        first["grad_output"], problem.inputs(module, 2, 5, seed=1)["grad_output"]
    )
    norms = [key for key in module.state_dict() if key.endswith("ln_weight")]
    assert norms
    for key in norms:
        assert module.state_dict()[key].std() > 0.01
        assert not torch.equal(module.state_dict()[key], other.state_dict()[key])


@both
def test_initialisation(name):
    module = small(name, hidden_size=160, intermediate_size=320, seed=0)[1]
    for key, value in module.state_dict().items():
        if value.dim() == 2:
            assert value.std().item() == pytest.approx((2 / value.shape[1]) ** 0.5, rel=0.05), key
        elif key.endswith("ln_weight"):
            assert value.mean().item() == pytest.approx(1.0, abs=0.1), key
        else:
            assert not value.any(), key
    assert torch.equal(GeluFFN(48, 80).ln_weight, torch.ones(48))


@both
def test_zero_batch(name):
    problem, module = small(name, torch.float32)
    gradients = problem.reference(problem.inputs(module, 0, 4))
    assert all(not value.any() for value in gradients.values())


def test_decoder_forward_is_causal_and_starts_at_position_zero():
    problem, module = small("decoder_backward")
    x = problem.arguments(module, 2, 9, torch.Generator().manual_seed(0))
    full = module(**x)
    prefix = module(*(t[:, :4] for t in x.values()))
    assert torch.allclose(full[:, :4], prefix, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(
        full[:, 4:], module(**{**x, "residual": x["residual"].flip(1)})[:, 4:]
    )


def test_decoder_attention_equals_sdpa():
    module = small("decoder_backward")[1]
    q, k, v = (torch.randn(2, n, 5, 8, dtype=torch.float64) for n in (6, 2, 2))
    # The projections pick their part of the concatenated heads.
    weights = torch.eye(80, dtype=torch.float64).split((48, 16, 16))
    module.q_weight, module.k_weight, module.v_weight = map(nn.Parameter, weights)
    heads = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
    cos, sin = torch.ones(2, 5, 8).double(), torch.zeros(2, 5, 8).double()
    actual = module._attention(torch.cat(heads, dim=-1), cos, sin)
    expected = nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    assert torch.allclose(actual, expected.flatten(2), rtol=1e-12, atol=1e-14)


def test_rope_tables_rotate_by_halves():
    cos, sin = rope_tables(2, 7, 8, dtype=torch.float64)
    assert cos.shape == sin.shape == (2, 7, 8)
    angles = torch.arange(7).double()[:, None] * 1e6 ** (-torch.arange(4).double() / 4)
    assert torch.allclose(cos[1, :, :4], angles.cos(), rtol=1e-12, atol=1e-14)
    assert torch.allclose(sin[0, :, 4:], angles.sin(), rtol=1e-12, atol=1e-14)


@both
def test_eps_may_be_a_tensor(name):
    problem, module = small(name)
    arguments = problem.arguments(module, 2, 5, torch.Generator().manual_seed(0))
    expected = module(**arguments)
    module.eps = torch.tensor(module.eps, dtype=torch.float64)
    assert torch.equal(module(**arguments), expected)
    module.eps = torch.tensor(0.5)
    assert not torch.allclose(module(**arguments), expected)


@both
def test_forward_traces_whole_with_dynamic_sizes(name):
    problem, module = small(name, torch.bfloat16)
    graphs = []
    compiled = torch.compile(
        module, fullgraph=True, dynamic=True, backend=lambda gm, _: graphs.append(gm) or gm.forward
    )
    for case in ((2, 5), (3, 17)):
        arguments = problem.arguments(module, *case, torch.Generator().manual_seed(0))
        assert torch.equal(compiled(**arguments), module(**arguments))
    assert len(graphs) == 1


def test_shared_names_are_refused():
    module = GeluFFN(48, 80)
    with collect(), pytest.raises(SchemaError, match="'fc1_output' is tagged twice"):
        module(module(torch.randn(1, 2, 48)))


def test_record_inputs_names_what_is_missing():
    module = GeluFFN(48, 80)
    schema = s.Schema(
        "mine",
        (
            s.grad_output("grad", ("b", "s", 48), torch.float32),
            s.saved("x", ("b", "s", 80), torch.float32, of="no_such_tag"),
        ),
        (s.Gradient("grad_w", "fc1_weight", (80, 48), torch.float32),),
    )
    with pytest.raises(SchemaError, match="mine: input 'x': no saved is called 'no_such_tag'"):
        record_inputs(schema, module, {"hidden_states": torch.randn(1, 2, 48)}, torch.Generator())


def test_dimensions_that_do_not_fit():
    with pytest.raises(UnsupportedError, match=r"num_heads must be a multiple.*6 and 4"):
        DecoderLayer(48, 6, 4, 8, 80)
    with pytest.raises(UnsupportedError, match=r"head_dim must be even.*got 7"):
        DecoderLayer(48, 6, 2, 7, 80)


def test_get_problem_lists_the_names():
    with pytest.raises(UnsupportedError, match=r"'decoder'.*decoder_backward, ffn_gelu_backward"):
        get_problem("decoder")


@both
def test_select_cases(name):
    problem = get_problem(name)
    assert problem.select_cases("all") == problem.cases
    assert len(set(problem.cases)) == 16
    assert problem.select_cases("all", small=True) == problem.small_cases
    assert problem.select_cases("0, 3,8x257") == (problem.cases[0], problem.cases[3], (8, 257))
    for text in ("16", "3x", "axb", "", "-1"):
        with pytest.raises(FusedBwdError, match=f"{name}: case"):
            problem.select_cases(text)


def test_flops_at_full_size():
    with torch.device("meta"):
        decoder = DecoderLayer()
        ffn = GeluFFN()
    linear = 4 * 128 * (2 * 5120**2 + 2 * 1280 * 5120 + 3 * 5120 * 14336)
    attention = 4 * 2 * 32 * 128 * 128 * 160
    assert get_problem("decoder_backward").flops(decoder, 1, 128) == linear + attention
    assert get_problem("ffn_gelu_backward").flops(ffn, 1, 128) == 4 * 2 * 128 * 512 * 2048
