"""Kinds 10 and 12 against transformers through a real cluster: gRPC and HTTP, streamed or not."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
import torch

from protos.v1 import common_pb2, router_pb2
from tests.executor.numerics import reference_logits
from tests.integration.prompts import prompt
from tests.rig import cluster, tiny_model
from tests.rig.client import request
from tests.rig.cluster import Cluster
from tests.rig.quiet import check_quiet
from tests.rig.scripted_executor import Script

EOS = 257


@pytest.fixture(scope="module")
def doors(tiny_model_folder: Path) -> Iterator[Cluster]:
    """The tiny model behind both doors, its prompts cut into chunks."""
    with cluster.assembling(tiny_model_folder) as running:
        running.start_executor("--num-blocks", "512")
        running.start_scheduler("--max-num-batched-tokens", "20")
        running.start_router("--http", f"unix:{running.folder}/http.sock")
        running.wait()
        yield running


@pytest.fixture(scope="module")
def http(doors: Cluster) -> Iterator[httpx2.Client]:
    transport = httpx2.HTTPTransport(uds=f"{doors.folder}/http.sock")
    with httpx2.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
        yield client


def strict(text: str) -> Any:
    """JSON without the words that it does not have."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def posted(http: httpx2.Client, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    (choice,) = strict(response.text)["choices"]
    return dict(choice)


def streamed(http: httpx2.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a stream's chunks."""
    text = http.post("/v1/completions", json=body | {"stream": True}).text
    chunks = [strict(piece.removeprefix("data: ")) for piece in text.split("\n\n")[:-2]]
    return [choice for chunk in chunks for choice in chunk["choices"]]


def ids_at_every_door(
    doors: Cluster, http: httpx2.Client, ids: Sequence[int], **sampling: Any
) -> list[list[int]]:
    """Output ids through gRPC unary and stream, HTTP and HTTP stream."""
    message = request(ids, **sampling)
    body = {"prompt": list(ids), "temperature": 0.0, "return_token_ids": True, "ignore_eos": True} | sampling
    body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.get("logit_bias", {}).items()}
    events = doors.router.Generate(message, timeout=60)
    return [
        list(doors.router.Complete(message, timeout=60).choices[0].token_ids),
        [token_id for event in events if event.HasField("delta") for token_id in event.delta.token_ids],
        posted(http, body)["token_ids"],
        [token_id for choice in streamed(http, body) for token_id in choice.get("token_ids", [])],
    ]


def by_transformers(model: Path, ids: list[int], num_tokens: int, **options: Any) -> list[int]:
    from transformers import AutoModelForCausalLM, GenerationConfig

    of_transformers = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    of_transformers.generation_config = GenerationConfig()
    config = GenerationConfig(do_sample=False, max_new_tokens=num_tokens, pad_token_id=0, **options)
    with torch.inference_mode():
        inputs = torch.tensor([ids])
        output = of_transformers.generate(
            inputs, attention_mask=torch.ones_like(inputs), generation_config=config
        )
    return output[0, len(ids) :].tolist()


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        (
            {"repetition_penalty": 1.2, "logit_bias": {5: 3.0, 90: -4.0}, "banned_token_ids": [7, 8, 9]},
            {
                "repetition_penalty": 1.2,
                "sequence_bias": [[[5], 3.0], [[90], -4.0]],
                "suppress_tokens": [7, 8, 9],
            },
        ),
    ],
    ids=["repetition", "bias_repetition_banned"],
)
def test_greedy_with_penalties_and_bias_is_transformers_at_every_door(
    doors: Cluster, http: httpx2.Client, sampling: dict[str, Any], options: dict[str, Any]
) -> None:
    ids = prompt(33)
    plain, *_ = ids_at_every_door(doors, http, ids, max_tokens=32)
    expected = by_transformers(doors.model, ids, 32, **options)
    assert expected != plain
    assert ids_at_every_door(doors, http, ids, max_tokens=32, **sampling) == [expected] * 4


@pytest.mark.parametrize("penalties", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}])
def test_b57_presence_and_frequency_change_what_comes_after_the_first_token(
    doors: Cluster, http: httpx2.Client, penalties: dict[str, float]
) -> None:
    ids = [120] * 30
    message = request(ids, max_tokens=24, logprobs=3)
    plain = doors.router.Complete(message, timeout=60).choices[0]
    for name, value in penalties.items():
        setattr(message.sampling, name, value)
    penalized = doors.router.Complete(message, timeout=60).choices[0]
    assert penalized.logprobs[0] == plain.logprobs[0]  # nothing is out yet
    repeated = len(plain.token_ids) - len(set(plain.token_ids))
    assert len(penalized.token_ids) - len(set(penalized.token_ids)) <= repeated
    every = ids_at_every_door(doors, http, ids, max_tokens=24, **penalties)
    assert every == [list(penalized.token_ids)] * 4


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_b58_an_end_token_with_a_bias_of_a_hundred_waits_for_min_tokens(
    doors: Cluster, http: httpx2.Client, min_tokens: int
) -> None:
    every = ids_at_every_door(
        doors,
        http,
        prompt(9),
        max_tokens=32,
        min_tokens=min_tokens,
        ignore_eos=False,
        logit_bias={EOS: 100.0},
    )
    assert every == [every[0]] * 4
    assert len(every[0]) == min_tokens + 1
    assert every[0][-1] == EOS
    assert EOS not in every[0][:-1]


def test_b66_a_choice_of_two_tokens_is_strictly_valid_json(doors: Cluster, http: httpx2.Client) -> None:
    every = ids_at_every_door(
        doors, http, prompt(9), max_tokens=8, temperature=1.0, seed=5, allowed_token_ids=[40, 41]
    )
    assert every == [every[0]] * 4
    assert set(every[0]) <= {40, 41}
    body = {"prompt": prompt(9), "max_tokens": 4, "logprobs": 5, "echo": True, "allowed_token_ids": [40, 41]}
    logprobs = posted(http, body)["logprobs"]
    assert [len(values) for values in logprobs.values()] == [13] * 4


# --- log-probabilities of the prompt ------------------------------------------------------------------


def reports(info: router_pb2.PromptInfo) -> list[common_pb2.TokenLogprobs]:
    return list(info.logprobs)


def check_reports(found: Sequence[common_pb2.TokenLogprobs], ids: list[int], expected: torch.Tensor) -> None:
    """They are those of this prompt, by the reference, each with its two alternatives."""
    assert [report.token_id for report in found] == ids[1:]
    for place, report in enumerate(found):
        most = expected[place].topk(2)
        assert report.logprob == pytest.approx(float(expected[place, report.token_id]), abs=1e-4)
        assert list(report.top_logprobs) == pytest.approx(most.values.tolist(), abs=1e-4)
        assert report.rank == 1 + int((expected[place] > expected[place, report.token_id]).sum())


def test_b20_b71_prompt_logprobs_are_the_references_cold_and_warm_at_every_door(
    doors: Cluster, http: httpx2.Client
) -> None:
    ids = prompt(48, salt=77)
    expected = reference_logits(doors.model, ids).double().log_softmax(-1)
    message = request(ids, max_tokens=3, prompt_logprobs=2)
    first = doors.router.Complete(message, timeout=60)
    check_reports(reports(first.prompt_info), ids, expected)
    doors.router.Complete(request(ids, max_tokens=3), timeout=60)  # fills the cache
    warm = doors.router.Complete(message, timeout=60)
    assert reports(warm.prompt_info) == reports(first.prompt_info)
    assert warm.prompt_info.num_cached_tokens == 0
    events = list(doors.router.Generate(message, timeout=60))
    assert [event.WhichOneof("event") for event in events][:3] == ["accepted", "prompt_info", "delta"]
    assert reports(events[1].prompt_info) == reports(first.prompt_info)

    body = {"prompt": ids, "max_tokens": 3, "temperature": 0.0, "prompt_logprobs": 2}
    entries = posted(http, body)["prompt_logprobs"]
    assert (len(entries), entries[0]) == (48, None)
    for entry, token_id, report in zip(entries[1:], ids[1:], first.prompt_info.logprobs, strict=True):
        assert entry[str(token_id)]["logprob"] == pytest.approx(report.logprob, abs=1e-4)
        assert entry[str(token_id)]["rank"] == report.rank
        assert {*map(str, report.top_token_ids)} <= set(entry)
    opening, *_ = streamed(http, body)
    assert opening["prompt_logprobs"] == entries
    check_quiet(doors)


def test_b71_a_chats_prompt_is_told_with_its_first_chunk(http: httpx2.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0.0}
    body |= {"prompt_logprobs": 0, "n": 2}
    whole = strict(http.post("/v1/chat/completions", json=body).text)
    first, second = whole["choices"]
    assert len(first["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in second
    text = http.post("/v1/chat/completions", json=body | {"stream": True}).text
    chunks = [strict(piece.removeprefix("data: ")) for piece in text.split("\n\n")[:-2]]
    openings = [chunk["choices"][0] for chunk in chunks[:2]]
    assert [opening["delta"]["role"] for opening in openings] == ["assistant"] * 2
    assert openings[0]["prompt_logprobs"] == first["prompt_logprobs"]
    assert not any("prompt_logprobs" in chunk["choices"][0] for chunk in chunks[1:])


@pytest.mark.parametrize("logprobs", [0, 2])
def test_b20_b71_an_echo_with_logprobs_tells_of_prompt_and_answer(
    doors: Cluster, http: httpx2.Client, logprobs: int
) -> None:
    text = "An echo of Grüße."
    body = {"prompt": text, "max_tokens": 4, "temperature": 0.0, "echo": True, "logprobs": logprobs}
    whole = posted(http, body)
    ids = list(text.encode())
    expected = reference_logits(doors.model, ids).double().log_softmax(-1)
    lists = whole["logprobs"]
    assert {len(values) for values in lists.values()} == {len(ids) + 4}
    assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)
    told = [float(expected[place, token_id]) for place, token_id in enumerate(ids[1:])]
    assert lists["token_logprobs"][1 : len(ids)] == pytest.approx(told, abs=1e-4)
    assert all(len(tops) == logprobs for tops in lists["top_logprobs"][1:])
    assert lists["text_offset"][:3] == [0, 1, 2]
    assert lists["text_offset"][len(ids)] == len(text)
    assert whole["text"].startswith(text)
    parts = streamed(http, body)
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name, values in lists.items():
        assert [v for part in parts if part["logprobs"] for v in part["logprobs"][name]] == values


def test_b62_the_prompt_is_told_once_for_all_choices_and_before_any_of_them(doors: Cluster) -> None:
    ids = prompt(40, salt=5)
    message = request(ids, max_tokens=4, n=3, prompt_logprobs=0)
    names = [event.WhichOneof("event") for event in doors.router.Generate(message, timeout=60)]
    assert (names.count("prompt_info"), names[1]) == (1, "prompt_info")
    answer = doors.router.Complete(message, timeout=60)
    assert [report.token_id for report in answer.prompt_info.logprobs] == ids[1:]
    assert answer.accepted.sampling.prompt_logprobs == 0
    assert answer.accepted.sampling.HasField("prompt_logprobs")


def test_b101_length_times_alternatives_is_refused_at_both_doors(doors: Cluster, http: httpx2.Client) -> None:
    ids = prompt(400)
    with pytest.raises(grpc.RpcError) as raised:
        doors.router.Complete(request(ids, max_tokens=1, n=16, prompt_logprobs=20), timeout=60)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "131072" in raised.value.details()
    body = {"prompt": [ids] * 8, "n": 8, "max_tokens": 1, "echo": True, "logprobs": 5}
    response = http.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")


# --- what an executor cannot do -----------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["model", "none"])
def test_a_models_generation_config_is_in_force_and_told_unless_it_is_to_be_left_out(
    tmp_path: Path, flag: str
) -> None:
    model = tiny_model.build(tmp_path / "tiny")
    path = model / "generation_config.json"
    wishes = {"temperature": 0.0, "repetition_penalty": 1.4, "do_sample": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | wishes))
    with cluster.running(
        model, executor_flags=("--num-blocks", "64"), router_flags=("--generation-config", flag)
    ) as running:
        told = running.router.GetModel(router_pb2.GetModelRequest(), timeout=60).defaults
        message = router_pb2.GenerateRequest(sampling={"max_tokens": 8, "ignore_eos": True, "seed": 1})  # type: ignore[arg-type]
        message.token_ids.ids.extend(prompt(33))
        answer = running.router.Complete(message, timeout=60)
        in_force = answer.accepted.sampling
        expected = (0.0, 1.4) if flag == "model" else (1.0, 1.0)
        assert (told.temperature, told.repetition_penalty) == expected
        penalty = in_force.repetition_penalty if in_force.HasField("repetition_penalty") else 1.0
        assert (in_force.temperature, penalty) == expected
        if flag == "model":
            wanted = by_transformers(model, prompt(33), 8, repetition_penalty=1.4)
            assert list(answer.choices[0].token_ids) == wanted


def test_what_not_every_executor_can_do_is_refused_by_name(tiny_model_folder: Path) -> None:
    scripts = [Script(features=("logprobs", "penalties")), Script(features=("logit_bias", "penalties"))]
    with cluster.assembling(tiny_model_folder) as running:
        for name, script in zip(("one", "two"), scripts, strict=True):
            running.start_scripted_executor(script, name=name)
        running.wait()
        running.start_scheduler(executors=("one", "two"))
        running.start_router("--http", f"unix:{running.folder}/http.sock")
        running.wait()
        with pytest.raises(grpc.RpcError) as raised:
            running.router.Complete(request([1, 2], max_tokens=1, prompt_logprobs=0), timeout=60)
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert raised.value.details().startswith("sampling.prompt_logprobs needs the ability")
        transport = httpx2.HTTPTransport(uds=f"{running.folder}/http.sock")
        with httpx2.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
            body = {"prompt": [1, 2], "max_tokens": 1, "banned_token_ids": [4]}
            response = client.post("/v1/completions", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "banned_token_ids")
        assert running.router.Complete(
            request([1, 2], max_tokens=1, presence_penalty=1.0), timeout=60
        ).choices
