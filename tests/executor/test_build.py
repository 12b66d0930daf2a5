"""How kernels come to be there: built once, found again, and said to be missing in a sentence."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from executor.attention.base import AttentionSpec
from executor.kernels import build, library
from executor.kernels.build import InstructionSet, KernelsUnavailableError
from executor.operations.cpu import CpuOperations
from tests.executor.numerics import load, one_shot_logits, reference_logits
from tests.rig import tiny_model

TEXT = list(b"kernels or none")


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that compiles at once, and an empty cache."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "kernels.cpp").write_text('extern "C" int seven() { return 7; }\n')
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path / "cache"))
    return sources / "kernels.cpp"


PLAIN = InstructionSet("plain", (), frozenset())


def test_a_source_is_built_once_and_its_successor_beside_it(small_source: Path, tmp_path: Path) -> None:
    with capture_logs() as logs:
        first, again = build.built(PLAIN), build.built(PLAIN)
        small_source.write_text('extern "C" int seven() { return 8; }\n')
        other = build.built(PLAIN)
    assert first == again != other
    assert [line["event"] for line in logs] == ["kernels_built"] * 2
    assert sorted((tmp_path / "cache").iterdir()) == sorted([first, other])


def test_who_waits_for_a_build_is_told_before_it_and_only_then(
    small_source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        # It has none of our functions.
        with capture_logs(), pytest.raises(AttributeError):
            library.Kernels(PLAIN, num_threads=1)
    assert capsys.readouterr().out == "building the plain kernels with g++, once; it takes seconds\n"


def test_what_another_machine_has_built_needs_no_compiler(
    small_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = build.built(PLAIN)
    monkeypatch.setattr(build, "COMPILER", "no-such-compiler")
    assert build.built(PLAIN) == there


def test_every_set_is_built_for_images(small_source: Path) -> None:
    def run() -> subprocess.CompletedProcess[str]:
        code = (
            "import sys; from pathlib import Path; from executor.kernels import __main__, build;"
            f"build.SOURCES = Path({str(small_source.parent)!r}); sys.exit(__main__.main())"
        )
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    done = run()
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == len(build.INSTRUCTION_SETS)
    assert all(Path(line).exists() for line in done.stdout.splitlines())
    small_source.write_text("no c plus plus\n")
    assert run().returncode == 1


def test_kernels_are_known_by_what_the_compiler_made_of_them(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(number: int) -> str:
        functions = (
            "bool start(int) { return true; } void pack_weight() {} void pack_codes() {} void compute() {}"
        )
        last = f"int choose_tokens() {{ return {number}; }}"
        small_source.write_text(
            '#pragma GCC visibility push(default)\nextern "C" {' + functions + last + "}\n"
        )
        return library.Kernels(PLAIN, 1).digest

    first = digest(7)
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert digest(7) == first != digest(8)


def test_other_flags_are_another_file(small_source: Path) -> None:
    assert build.built(PLAIN) != build.built(InstructionSet("plain", ("-O1",), frozenset()))


def test_a_source_that_does_not_compile_says_why_and_leaves_nothing(
    small_source: Path, tmp_path: Path
) -> None:
    small_source.write_text("no c plus plus\n")
    with pytest.raises(KernelsUnavailableError, match=r"g\+\+ failed: "):
        build.built(PLAIN)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        KernelsUnavailableError, match=r"cache \(.*\): name another folder by CHAIRLIFT_CACHE_DIR"
    ):
        build.built(PLAIN, tell=pytest.fail)


def test_a_compiler_that_hangs_is_given_up(small_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("g++", 120)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(KernelsUnavailableError, match="did not end within 120 s"):
        build.built(PLAIN)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert build.cache_directory() == Path("/one")
    monkeypatch.delenv("CHAIRLIFT_CACHE_DIR")
    assert build.cache_directory() == Path("/two/chairlift")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/three")
    assert build.cache_directory() == Path("/three/.cache/chairlift")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CHAIRLIFT_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(build.Path, "home", no_home)
    with pytest.raises(KernelsUnavailableError, match="set CHAIRLIFT_CACHE_DIR"):
        build.built(PLAIN)


def test_only_sets_that_the_processor_has_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    haswell = next(each for each in build.INSTRUCTION_SETS if each.name == "avx2").features
    monkeypatch.setattr(build, "processor_features", lambda: haswell)
    assert [each.name for each in build.available()] == ["avx2", "x86_64"]
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    assert build.available() == ()
    with pytest.raises(KernelsUnavailableError, match="none of the instruction sets"):
        library.fastest(1)


def test_without_a_compiler_torch_computes_the_same_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMPILER", "no-such-compiler")
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path / "empty"))
    folder = tiny_model.build(tmp_path / "tiny")
    with capture_logs() as logs:
        model = load(folder)
    selected = next(line for line in logs if line["event"] == "operations_selected")
    assert "there is no compiler no-such-compiler" in selected["no_kernels"]
    assert "install it" in selected["no_kernels"]
    warned = [line["reason"] for line in logs if line["event"] == "kernels_unavailable"]
    assert warned == [selected["no_kernels"]] * bool(build.available()), "said once for all instruction sets"
    assert not model.row_invariant
    assert "torch, reference attention" in model.fingerprints.numerics
    difference = one_shot_logits(model, TEXT) - reference_logits(folder, TEXT)
    assert difference.abs().max() < 1e-4


def test_a_shape_that_kernels_refuse_is_served_by_torch(tmp_path: Path) -> None:
    folder = tiny_model.build(tmp_path, num_heads=4, num_kv_heads=2, hidden_size=96, head_dim=24)
    with capture_logs() as logs:
        model = load(folder)
    selected = next(line for line in logs if line["event"] == "operations_selected")
    assert "head_dim 24" in selected["no_kernels"]
    difference = one_shot_logits(model, TEXT) - reference_logits(folder, TEXT)
    assert difference.abs().max() < 1e-4


def test_devices_without_kernels_are_refused_by_name() -> None:
    spec = AttentionSpec(torch.device("meta"), torch.float32, 4, 2, 16, 16, 0.25)
    assert CpuOperations.refusal(spec) == "the kernels run on the cpu, not on meta"
