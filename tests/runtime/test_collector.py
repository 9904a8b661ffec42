"""The collector waits while passes run, and goes on afterwards, also after an error."""

import gc

import pytest

from attn_engine.runtime.collector import no_collection


def test_waits_and_goes_on():
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), no_collection():
        assert not gc.isenabled()
        with no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()


def test_stays_off_where_it_was():
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
