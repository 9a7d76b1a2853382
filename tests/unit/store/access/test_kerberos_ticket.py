from __future__ import annotations

import ctypes
import ctypes.util

import pytest

from sparkhvd.errors import StoreError
from sparkhvd.store.access.kerberos_ticket import principal_of


@pytest.fixture
def make_cache(tmp_path):
    """Provide a function that lets Kerberos write an empty ticket cache of a principal."""
    name = ctypes.util.find_library("krb5")
    if name is None:
        pytest.skip("there is no libkrb5 here")
    kerberos = ctypes.CDLL(name)

    def make(principal):
        path = tmp_path / "ticket"
        context, cache, principal_handle = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        assert kerberos.krb5_init_context(ctypes.byref(context)) == 0
        assert kerberos.krb5_cc_resolve(context, f"FILE:{path}".encode(), ctypes.byref(cache)) == 0
        assert kerberos.krb5_parse_name(context, principal.encode(), ctypes.byref(principal_handle)) == 0
        assert kerberos.krb5_cc_initialize(context, cache, principal_handle) == 0
        assert kerberos.krb5_cc_close(context, cache) == 0
        kerberos.krb5_free_principal(context, principal_handle)
        kerberos.krb5_free_context(context)
        return path

    return make


@pytest.mark.parametrize("principal", ["me@EXAMPLE.COM", "me/host.example.com@EXAMPLE.COM"])
def test_the_principal_of_a_cache_that_kerberos_wrote_is_found(make_cache, principal):
    path = make_cache(principal)
    assert principal_of(str(path)) == principal_of(f"FILE:{path}") == principal


def test_damaged_and_foreign_credential_caches_are_reported(make_cache, tmp_path):
    path = make_cache("me@EXAMPLE.COM")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(StoreError, match=r"ticket cache .*/ticket is damaged"):
        principal_of(str(path))
    path.write_text("something else")
    with pytest.raises(StoreError, match=r"/ticket is not a Kerberos ticket cache; pass the file that kinit -c wrote"):
        principal_of(str(path))
    with pytest.raises(StoreError, match=r"Cannot read the Kerberos ticket cache .*/gone: No such file"):
        principal_of(str(tmp_path / "gone"))
