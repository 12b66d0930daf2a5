from scheduler.token_ids import NO_IDS, TokenIds


def test_a_token_id_takes_four_bytes_and_may_be_any_of_the_wires() -> None:
    ids = TokenIds("I", [0, 2**32 - 1])
    assert ids.itemsize == 4
    assert ids[1] == 2**32 - 1


def test_no_ids_are_none() -> None:
    assert len(NO_IDS) == 0
    assert list(TokenIds("I", [1]) + NO_IDS) == [1]
