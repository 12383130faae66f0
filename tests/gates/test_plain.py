import ssl

from gates.plain import NO_AUTHORITY


def test_no_certificate_is_believed_in_the_place_of_none() -> None:
    assert NO_AUTHORITY.cert_store_stats() == {"x509": 0, "crl": 0, "x509_ca": 0}
    assert (NO_AUTHORITY.verify_mode, NO_AUTHORITY.check_hostname) == (ssl.CERT_REQUIRED, True)
