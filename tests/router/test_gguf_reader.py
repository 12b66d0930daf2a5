"""Reading arrays in one go: the same as the package reads one by one."""

from pathlib import Path

import gguf
import pytest

import executor.model.gguf_reader
import router.gguf_reader
from router.gguf_reader import Reader

ARRAYS = {
    "texts": ["", "a", "\u2581été", "🙂" * 9],
    "numbers": [3, 1, 2],
    "scores": [-1000.0, 0.5],
    "switches": [True, False],
}


@pytest.fixture(params=[gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.BIG], ids=["little", "big"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=request.param)
    for name, values in ARRAYS.items():
        writer.add_array(name, values)
    writer.add_string("last", "after them")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_fields_are_those_of_the_package(path: Path) -> None:
    ours, theirs = Reader(path), gguf.GGUFReader(path)
    assert list(ours.fields) == list(theirs.fields)
    for name, expected in theirs.fields.items():
        field = ours.fields[name]
        assert field.contents() == expected.contents()
        assert (field.offset, field.data, field.types) == (expected.offset, expected.data, expected.types)
        sizes = [[part.nbytes for part in parts] for parts in (field.parts, expected.parts)]
        assert sizes[0] == sizes[1]
    assert {name: ours.fields[name].contents() for name in ARRAYS} == ARRAYS


def test_a_file_cut_before_the_end_of_its_arrays_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for size in range(Reader(path).fields["last"].offset):
        path.write_bytes(whole[:size])
        with pytest.raises((ValueError, IndexError, KeyError, OverflowError)):
            Reader(path)


def test_router_and_executor_have_the_same_reader() -> None:
    files = (router.gguf_reader.__file__, executor.model.gguf_reader.__file__)
    assert Path(files[0]).read_text() == Path(files[1]).read_text()
