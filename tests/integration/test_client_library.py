"""The client library against real processes: it shows what the model says, whatever dies meanwhile."""

from pathlib import Path

import pytest

from chairlift import ChairliftError, Client, FinishReason
from tests.rig import cluster
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
