"""What is changed in torch for a while is as before afterwards, and in other threads meanwhile."""

import threading

from torch._inductor import cpu_vec_isa

from fusedbwd import compat


def test_vector_instructions_are_not_asked_for_in_this_thread(monkeypatch):
    """And nothing remembers so: an instruction set that was told to be absent stays absent."""
    asked = []

    class Set(cpu_vec_isa.VecISA):
        def __bool__(self):
            asked.append(threading.get_ident())
            return True

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: [s for s in [Set()] if s])
    with compat.no_vector_probes():
        assert cpu_vec_isa.pick_vec_isa() is cpu_vec_isa.invalid_vec_isa
        assert not asked
        other = threading.Thread(target=cpu_vec_isa.valid_vec_isa_list)
        other.start()
        other.join()
        assert asked == [other.ident]
    assert len(cpu_vec_isa.valid_vec_isa_list()) == 1 and len(asked) == 2


def test_no_cache_is_filled():
    caches = [
        c
        for c in (cpu_vec_isa.VecAVX512.__bool__, cpu_vec_isa.VecAMX.__bool__,
                  cpu_vec_isa.valid_vec_isa_list)
        if hasattr(c, "cache_info")
    ]  # fmt: skip
    assert cpu_vec_isa.valid_vec_isa_list in caches
    before = [c.cache_info().currsize for c in caches]
    with compat.no_vector_probes():
        cpu_vec_isa.pick_vec_isa()
    assert [c.cache_info().currsize for c in caches] == before
