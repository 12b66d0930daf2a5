"""The client library against real processes: it shows what the model says, whatever dies meanwhile."""

import asyncio
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import chairlift
from chairlift import AsyncClient, ChairliftError, Client, FinishReason
from tests.rig import cluster, tiny_model
from tests.rig.cluster import Cluster
from tests.rig.quiet import check_quiet

PROMPT = [7 * i % 256 for i in range(20)]


def test_generate_stream_and_chat_agree_with_the_contract(tiny_cluster: Cluster) -> None:
    with Client(tiny_cluster.address("router")) as client:
        answer = client.generate(PROMPT, max_tokens=16, n=2, seed=3, temperature=1.2, logprobs=1)
        with client.stream(PROMPT, max_tokens=16, n=2, seed=3, temperature=1.2, logprobs=1) as stream:
            pieces = list(stream)
        streamed = stream.answer
        for whole, choice in zip(answer.choices, streamed.choices, strict=True):
            assert (whole.token_ids, whole.text) == (choice.token_ids, choice.text)
            logprobs = [[entry.logprob for entry in one.logprobs] for one in (whole, choice)]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
            assert len(whole.logprobs) == len(whole.token_ids) == whole.usage.num_output_tokens
            assert "".join(piece.text for piece in pieces if piece.index == choice.index) == choice.text
        assert client.chat("Hi", max_tokens=2, temperature=0).choices[0].finish_reason is FinishReason.LENGTH
        with pytest.raises(ChairliftError, match=r"top_p is 7\.0") as raised:
            client.generate("Hi", top_p=7.0)
        assert raised.value.field == "sampling.top_p"
    check_quiet(tiny_cluster)


def example(member: Any, margin: int) -> str:
    """The lines of a docstring that stand four columns to the right of its text."""
    lines = (member.__doc__ or "").splitlines()[1:]
    return textwrap.dedent(
        "\n".join(line for line in lines if line.startswith(" " * (margin + 4)) or not line)
    )


EXAMPLES = [
    pytest.param(kind, code, id=f"{kind.__name__}.{name}")
    for kind in (Client, AsyncClient)
    for name, code in [
        ("", example(kind, 4)),
        *((name, example(member, 8)) for name, member in vars(kind).items() if not name.startswith("_")),
    ]
    if code.strip()
]


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A model whose template knows tools."""
    folder = tiny_model.build(tmp_path_factory.mktemp("tools") / "tiny")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}"
        "{% for call in m['tool_calls'] %}{{ call['function']['name'] }}{% endfor %}"
        "{{ m['tool_call_id'] }}\n{% endfor %}{{ tools }}"
    )
    path.write_text(json.dumps(config))
    with cluster.running(folder, executor_flags=("--num-blocks", "512")) as running:
        yield running


def test_every_call_has_an_example() -> None:
    calls = {name for name in vars(Client) if not name.startswith("_") and name != "close"}
    shown = {parameter.id for parameter in EXAMPLES}
    assert shown == {
        "Client.",
        "AsyncClient.",
        *(f"{kind}.{n}" for kind in ("Client", "AsyncClient") for n in calls),
    }


@pytest.mark.parametrize(("kind", "code"), EXAMPLES)
def test_the_examples_of_docstrings_run(
    with_tools: Cluster, kind: type, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address = with_tools.address("router")
    code = code.replace("127.0.0.1:50051", address)
    names = {"chairlift": chairlift, "asyncio": asyncio}
    if kind is Client:
        with Client(address) as client:
            exec(code, names | {"client": client})
    else:
        exec("async def example(client):\n" + textwrap.indent(code, "    "), names)

        async def run() -> None:
            async with AsyncClient(address) as client:
                await names["example"](client)  # type: ignore[operator]

        asyncio.run(run())
    assert capsys.readouterr().out or "print" not in code


async def test_prompt_logprobs_are_the_same_whole_and_streamed(tiny_cluster: Cluster) -> None:
    async with AsyncClient(tiny_cluster.address("router")) as client:
        whole = await client.generate(PROMPT, max_tokens=2, temperature=0, prompt_logprobs=2)
        async with client.stream(PROMPT, max_tokens=2, temperature=0, prompt_logprobs=2) as stream:
            async for _ in stream:
                pass
        assert [entry.token_id for entry in whole.prompt_logprobs] == PROMPT[1:]
        assert all(len(entry.top) == 2 for entry in whole.prompt_logprobs)
        assert stream.answer.prompt_logprobs == whole.prompt_logprobs
        model = await client.model()
        assert (model.vocab_size, model.has_chat_template) == (tiny_model.VOCAB_SIZE, True)
        assert await client.detokenize(await client.tokenize("Grüße 😀")) == "Grüße 😀"


def test_b106_a_stream_whose_router_dies_goes_on_after_it_is_back(tiny_model_folder: Path) -> None:
    with cluster.running(tiny_model_folder, executor_flags=("--num-blocks", "512")) as running:
        with Client(running.address("router"), max_retries=40) as client:
            options = {"max_tokens": 200, "ignore_eos": True, "seed": 11, "temperature": 1.0}
            undisturbed = client.generate(PROMPT, **options)  # type: ignore[arg-type]
            del options["seed"]  # the one that is drawn must be used again
            with client.stream(PROMPT, **options) as stream:  # type: ignore[arg-type]
                shown = [next(stream) for _ in range(5)]
                running.kill("router")
                running.restart("router")
                shown += list(stream)
            answer = stream.answer
            assert "".join(piece.text for piece in shown) == answer.text
            token_ids = [token_id for piece in shown for token_id in piece.token_ids]
            assert tuple(token_ids) == answer.choices[0].token_ids
            assert len(token_ids) == 200
            again = client.generate(PROMPT, **options, seed=answer.seed)  # type: ignore[arg-type]
            assert again.choices[0].token_ids == answer.choices[0].token_ids
            assert undisturbed.choices[0].token_ids != answer.choices[0].token_ids
        check_quiet(running)
