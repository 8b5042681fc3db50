"""What is kept from torch for a while must be as before afterwards."""

from torch._inductor import cpu_vec_isa

from fusedbwd import compat


def test_vector_instructions_are_found_out_later():
    """Inside, Inductor is told of none; outside, code for the CPU is vectorized as before."""
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    with compat.no_vector_probes():
        assert cpu_vec_isa.pick_vec_isa() is cpu_vec_isa.invalid_vec_isa
    assert cpu_vec_isa.valid_vec_isa_list.cache_info().currsize == 0


def test_what_was_found_out_is_kept():
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    found = cpu_vec_isa.valid_vec_isa_list()
    with compat.no_vector_probes():
        assert cpu_vec_isa.valid_vec_isa_list() is found
    assert cpu_vec_isa.valid_vec_isa_list() is found
