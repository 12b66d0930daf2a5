import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.address import MAX_UNIX_PATH_BYTES, Address, AddressError, parse_groups, parse_list


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("127.0.0.1:50051", "127.0.0.1:50051"),
        ("localhost:0", "localhost:0"),
        (" 127.0.0.1:50051 ", "127.0.0.1:50051"),
        ("[::1]:7", "[::1]:7"),
        ("executor_1.example.com:50053", "executor_1.example.com:50053"),
        ("unix:/run/x.sock", "unix:/run/x.sock"),
        ("unix:///run/x.sock", "unix:/run/x.sock"),
        ("unix:x.sock", "unix:x.sock"),
        ("dns:///executor:50053", "dns:///executor:50053"),
    ],
)
def test_what_people_write_becomes_what_grpc_wants(text: str, target: str) -> None:
    assert Address.parse(text, field="--listen").target == target


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "HOST:PORT"),
        ("50051", "HOST:PORT"),
        (":50051", "HOST:PORT"),
        ("::1:50051", "HOST:PORT"),
        ("host name:1", "HOST:PORT"),
        ("http://host:1", "HOST:PORT"),
        ("host:", "a number from 0 to 65535"),
        ("host:-1", "a number from 0 to 65535"),
        ("host:65536", "a number from 0 to 65535"),
        ("host:٣", "a number from 0 to 65535"),
        ("unix:", "needs the path"),
        ("unix:a\0b", "needs the path"),
    ],
)
def test_a_malformed_address_is_refused_by_a_sentence_that_names_field_and_value(
    text: str, says: str
) -> None:
    with pytest.raises(AddressError, match="--listen is ") as refusal:
        Address.parse(text, field="--listen")
    assert says in str(refusal.value)


def test_a_socket_path_is_measured_in_bytes_and_the_refusal_tells_both_numbers() -> None:
    fits = "/" + "é" * 53
    assert len(fits.encode()) == MAX_UNIX_PATH_BYTES == 107
    assert Address.parse(f"unix:{fits}", field="--listen").unix_path == fits
    with pytest.raises(AddressError, match=r"--listen is a socket path of 108 bytes.* 107"):
        Address.parse(f"unix:{fits}x", field="--listen")


def test_host_and_port_come_without_brackets_and_scheme() -> None:
    assert Address.parse("[::1]:7", field="x").host_and_port == ("::1", 7)
    assert Address.parse("dns:///executor:50053", field="x").host_and_port == ("executor", 50053)
    assert Address.parse("unix:/x", field="x").host_and_port is None


def test_a_list_keeps_its_order_and_refuses_what_stands_there_twice() -> None:
    addresses = parse_list("a:1, unix:/b ,dns:///c:3", field="--scheduler")
    assert [str(address) for address in addresses] == ["a:1", "unix:/b", "dns:///c:3"]
    with pytest.raises(AddressError, match="a:1 stands there twice"):
        parse_list("a:1,b:2,a:1", field="--scheduler")
    with pytest.raises(AddressError, match="--scheduler is ''"):
        parse_list("a:1,", field="--scheduler")


@given(st.text())
def test_any_text_is_an_address_that_parses_again_or_a_refusal(text: str) -> None:
    try:
        address = Address.parse(text, field="x")
    except AddressError:
        return
    assert Address.parse(address.target, field="x") == address


def test_groups_are_parted_by_commas_and_their_addresses_by_bars() -> None:
    groups = parse_groups("a:1|b:2, unix:/c", field="--scheduler")
    assert [[str(address) for address in group] for group in groups] == [["a:1", "b:2"], ["unix:/c"]]
    for text in ("a:1|a:1", "a:1|b:2,a:1", "a:1||b:2", "a:1|"):
        with pytest.raises(AddressError, match="--scheduler"):
            parse_groups(text, field="--scheduler")
