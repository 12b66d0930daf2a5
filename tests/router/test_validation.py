"""The door: every value has its meaning or is refused, naming field, value and limit."""

import math
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.chat import ChatMessage, ToolCall
from router.constraints import Choice, Constraint, JsonSchema, Regex
from router.validation import (
    Chat,
    Conversation,
    Defaults,
    GenerateRequest,
    Limits,
    SamplingRequest,
    ValidRequest,
    check_prompt_logprobs,
    check_token_ids,
    checked,
    fitted,
)
from rpc.errors import RequestError

LIMITS = Limits(max_total_tokens=128, vocab_size=272)
SEED = 99
NOT_A_NUMBER = [math.nan, math.inf, -math.inf]


def valid(
    request: GenerateRequest | None = None,
    *,
    num_prompt_tokens: int = 10,
    limits: Limits = LIMITS,
    defaults: Defaults | None = None,
    **sampling: Any,
) -> ValidRequest:
    """What comes of a request whose prompt has this many tokens."""
    request = request or GenerateRequest(prompt="p")
    if sampling:
        request = replace(request, sampling=SamplingRequest(**sampling))
    return fitted(
        checked(request, model="m", limits=limits),
        [1] * num_prompt_tokens,
        limits=limits,
        defaults=defaults or Defaults(),
        drawn_seed=SEED,
    )


def refusal(request: GenerateRequest | None = None, **how: Any) -> RequestError:
    with pytest.raises(RequestError) as raised:
        valid(request, **how)
    return raised.value


def assert_refused(error: RequestError, field: str, *parts: object) -> None:
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.field == field
    for part in parts:
        assert str(part) in error.message


# --- defaults ---------------------------------------------------------------------------------------


def test_an_absent_value_takes_its_default() -> None:
    defaults = Defaults(temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, max_tokens=16)
    sampling = valid(defaults=defaults).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (16, 0, SEED)
    assert sampling.logprobs is None


def test_a_models_repetition_penalty_is_in_force_where_the_executors_can() -> None:
    defaults = Defaults(repetition_penalty=1.3)
    able = replace(LIMITS, features=frozenset({"penalties"}))
    assert valid(defaults=defaults, limits=able).sampling.repetition_penalty == 1.3
    assert valid(defaults=defaults, limits=LIMITS).sampling.repetition_penalty == 1.0
    assert valid(defaults=defaults, limits=able, repetition_penalty=1.0).sampling.repetition_penalty == 1.0


def test_a_given_zero_is_not_absent() -> None:
    defaults = Defaults(temperature=0.5, top_k=40, min_p=0.1)
    sampling = valid(defaults=defaults, temperature=0.0, top_k=0, min_p=0.0, seed=0, logprobs=0).sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.0, 0, 0.0)
    assert (sampling.seed, sampling.logprobs) == (0, 0)


# --- 7: lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_prompt_tokens", [128, 129, 300])
def test_b34_b35_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(num_prompt_tokens: int) -> None:
    error = refusal(num_prompt_tokens=num_prompt_tokens, max_tokens=1)
    assert_refused(error, "prompt", num_prompt_tokens, 128, 127)


def test_b34_too_many_ids_are_refused_before_they_are_looked_at() -> None:
    error = refusal(GenerateRequest(prompt=[-1] * 300))
    assert_refused(error, "token_ids", 300, 128)


def test_b35_the_longest_prompt_gets_its_one_token() -> None:
    assert valid(num_prompt_tokens=127, max_tokens=1).sampling.max_tokens == 1
    assert valid(num_prompt_tokens=127).sampling.max_tokens == 1


@pytest.mark.parametrize(("asked", "given"), [(27, 27), (28, 28), (None, 28)])
def test_b35_prompt_and_output_may_fill_the_limit(asked: int | None, given: int) -> None:
    assert valid(num_prompt_tokens=100, max_tokens=asked).sampling.max_tokens == given


def test_b35_one_token_too_many_is_refused_naming_the_numbers() -> None:
    assert_refused(
        refusal(num_prompt_tokens=100, max_tokens=29), "sampling.max_tokens", 29, 100, 129, 128, 28
    )


@pytest.mark.parametrize("max_tokens", [0, -1, -(1 << 63)])
def test_b36_fewer_than_one_token_is_refused_each_time(max_tokens: int) -> None:
    for _ in range(3):
        assert_refused(refusal(max_tokens=max_tokens), "sampling.max_tokens", max_tokens, "at least 1")


@pytest.mark.parametrize(
    ("prompt", "field"),
    [("", "text"), ([], "token_ids"), (None, "prompt"), (Conversation([], [], True), "chat.messages")],
)
def test_b37_an_empty_prompt_is_refused(prompt: Any, field: str) -> None:
    assert_refused(refusal(GenerateRequest(prompt=prompt)), field)


def test_b37_a_text_of_which_the_tokenizer_leaves_nothing_is_refused() -> None:
    assert_refused(refusal(num_prompt_tokens=0), "prompt", "no tokens")


def test_b40_without_max_tokens_the_limit_holds() -> None:
    assert valid(num_prompt_tokens=20, limits=Limits(200, 272)).sampling.max_tokens == 180
    assert valid(num_prompt_tokens=20, defaults=Defaults(max_tokens=500)).sampling.max_tokens == 108


# --- 8: stops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stop", "position"), [([""], 0), (["x", ""], 1)])
def test_b46_an_empty_stop_string_is_refused(stop: list[str], position: int) -> None:
    assert_refused(refusal(GenerateRequest(prompt="p", stop=stop)), "stop", f"stop[{position}]", 0, 256)


def test_b46_no_stop_strings_are_no_stop_strings() -> None:
    assert valid(GenerateRequest(prompt="p", stop=[])).stop == ()


@pytest.mark.parametrize(
    ("stop", "numbers"), [(["a"] * 17, (17, 16)), (["a"] * 100_000, (100_000, 16)), (["a" * 257], (257, 256))]
)
def test_b101_long_stop_lists_and_strings_are_refused(stop: list[str], numbers: tuple[int, int]) -> None:
    assert_refused(refusal(GenerateRequest(prompt="p", stop=stop)), "stop", *numbers)


def test_b101_the_limits_of_the_lists_themselves_are_allowed() -> None:
    request = GenerateRequest(prompt="p", stop=["é" * 256] * 16)
    assert valid(request, stop_token_ids=list(range(256))).sampling.stop_token_ids == tuple(range(256))


# --- 10: sampling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [272, 273, 10**7, 2**31 - 1, 2**63 - 1, 0, -1])
def test_b53_b54_a_top_k_that_cuts_nothing_is_off(top_k: int) -> None:
    assert valid(top_k=top_k).sampling.top_k == 0


@pytest.mark.parametrize("top_k", [1, 271])
def test_b53_a_top_k_within_the_vocabulary_is_kept(top_k: int) -> None:
    assert valid(top_k=top_k).sampling.top_k == top_k


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_p", 1.0), ("top_p", 1e-9), ("min_p", 0.0), ("min_p", 1.0), ("temperature", 0.0)],
)
def test_b54_the_ends_of_the_ranges_are_allowed(field: str, value: float) -> None:
    assert getattr(valid(**{field: value}).sampling, field) == value


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [*NOT_A_NUMBER, -1.0, -1e-9, 100.1]),
        ("top_p", [*NOT_A_NUMBER, 0.0, -0.5, 1.0001, 7.0]),
        ("min_p", [*NOT_A_NUMBER, -0.1, 1.1]),
        ("top_k", [-2, -(1 << 63)]),
        ("min_tokens", [-1]),
        ("logprobs", [-1, 21, 300]),
    ],
)
def test_b55_numbers_without_sense_are_refused_naming_field_and_value(
    field: str, values: list[float]
) -> None:
    for value in values:
        assert_refused(refusal(**{field: value}), f"sampling.{field}", value)


@given(st.floats())
def test_b55_no_temperature_gets_through_unless_it_is_a_number_in_range(temperature: float) -> None:
    try:
        assert 0 <= valid(temperature=temperature).sampling.temperature <= 100
    except RequestError as error:
        assert_refused(error, "sampling.temperature")


def test_b58_min_tokens_beyond_max_tokens_are_refused() -> None:
    assert_refused(refusal(min_tokens=9, max_tokens=8), "sampling.min_tokens", 9, 8)
    assert_refused(refusal(min_tokens=119), "sampling.min_tokens", 119, 118)
    assert valid(min_tokens=8, max_tokens=8).sampling.min_tokens == 8


@pytest.mark.parametrize("seed", [-1, 0, 2**63 - 1, -(2**63)])
def test_b61_every_64_bit_seed_is_a_seed(seed: int) -> None:
    assert valid(seed=seed).sampling.seed == seed


# --- 17: hostile ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [272, 273, -1, 2**31 - 1, 2**63 - 1])
def test_b97_ids_outside_the_vocabulary_are_refused_naming_place_and_id(wrong: int) -> None:
    assert_refused(refusal(GenerateRequest(prompt=[1, wrong])), "token_ids", f"token_ids[1] is {wrong}", 271)
    error = refusal(stop_token_ids=[5, wrong])
    assert_refused(error, "sampling.stop_token_ids", f"sampling.stop_token_ids[1] is {wrong}", 271)


def test_ids_at_the_edges_of_the_vocabulary_are_allowed() -> None:
    check_token_ids("token_ids", [0, 271], 272)


def test_b101_long_lists_are_refused_with_their_limits() -> None:
    assert_refused(refusal(stop_token_ids=range(10**6)), "sampling.stop_token_ids", 10**6, 256)
    turns = [ChatMessage("user", "x")] * 100_000
    error = refusal(GenerateRequest(prompt=Conversation(turns, [], True)))
    assert_refused(error, "chat.messages", 100_000, 4096)
    error = refusal(GenerateRequest(prompt=Conversation(turns[:1], ["{}"] * 257, True)))
    assert_refused(error, "chat.tools", 257, 256)


def test_a_turn_is_somebodys() -> None:
    turns = [ChatMessage("user", "x"), ChatMessage("", "x")]
    error = refusal(GenerateRequest(prompt=Conversation(turns, [], True)))
    assert_refused(error, "chat.messages", "chat.messages[1].role is missing")


def with_variables(text: str) -> GenerateRequest:
    return GenerateRequest(prompt=Conversation([ChatMessage("user", "x")], [], True, False, text))


def nested(levels: int) -> str:
    return '{"a": ' + "[" * (levels - 1) + "1" + "]" * (levels - 1) + "}"


def test_variables_of_the_template_are_an_object_of_bounded_size_and_depth() -> None:
    prompt = checked(with_variables('{"enable_thinking": false, "n": 1}'), model="m", limits=LIMITS).prompt
    assert isinstance(prompt, Chat)
    assert prompt.variables == {"enable_thinking": False, "n": 1}
    for text in (nested(8), '{"a": "' + "x" * (16_384 - 9) + '"}'):
        valid(with_variables(text))
    field = "chat.chat_template_kwargs"
    assert_refused(refusal(with_variables('{"a": "' + "x" * (16_384 - 8) + '"}')), field, 16_385, 16_384)
    for levels in (9, 8_000):
        assert_refused(refusal(with_variables(nested(levels))), field, "too deeply", 8)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "must be a JSON object"),
        ("{", "is not JSON"),
        ('{"a": NaN}', "NaN is no number of JSON"),
        ('{"messages": []}', "'messages'"),
        ('{"a": 1, "add_generation_prompt": true}', "'add_generation_prompt'"),
        ('{"bos_token": ""}', "'bos_token'"),
    ],
)
def test_variables_that_cannot_be_are_refused_by_name(text: str, why: str) -> None:
    assert_refused(refusal(with_variables(text)), "chat.chat_template_kwargs", why)


def test_an_assistants_last_message_alone_is_continued_and_then_none_is_begun() -> None:
    def asked(role: str, *, begins: bool) -> GenerateRequest:
        turns = [ChatMessage("user", "Hi"), ChatMessage(role, "The answer is")]
        return GenerateRequest(
            prompt=Conversation(turns, [], add_generation_prompt=begins, continue_final_message=True)
        )

    chat = checked(asked("assistant", begins=False), model="m", limits=LIMITS).prompt
    assert isinstance(chat, Chat)
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)
    error = refusal(asked("assistant", begins=True))
    assert_refused(error, "chat.continue_final_message", "add_generation_prompt")
    error = refusal(asked("user", begins=False))
    assert_refused(error, "chat.continue_final_message", "the last message is of 'user'")


def test_b101_what_a_conversation_says_in_json_is_bounded_in_all() -> None:
    def asked(messages: list[ChatMessage], tools: list[str]) -> GenerateRequest:
        return GenerateRequest(prompt=Conversation(messages, tools, add_generation_prompt=True))

    def turn(num_calls: int, arguments: str = "{}") -> ChatMessage:
        return ChatMessage("assistant", "", tool_calls=(ToolCall("", "f", arguments),) * num_calls)

    valid(asked([turn(256)] * 16, ["{}" * 1024] * 256))
    error = refusal(asked([turn(256)] * 16 + [turn(1)], []))
    assert_refused(error, "chat.messages", 4097, 4096)
    error = refusal(asked([turn(1)], ["x" * 262_145] * 2))
    assert_refused(error, "chat.tools", 524_290, 524_288)
    error = refusal(asked([turn(1), turn(2, "x" * 524_289)], []))
    assert_refused(error, "chat.messages", 524_289, 524_288)


@pytest.mark.parametrize("n", [17, 10**6, -1])
def test_b102_many_choices_are_refused(n: int) -> None:
    assert_refused(refusal(GenerateRequest(prompt="p", n=n)), "n", n, 16)


@pytest.mark.parametrize(("n", "choices"), [(0, 1), (1, 1), (16, 16)])
def test_n_counts_the_choices_and_absent_is_one(n: int, choices: int) -> None:
    assert valid(GenerateRequest(prompt="p", n=n)).n == choices


def test_b102_max_tokens_in_the_billions_is_refused() -> None:
    assert_refused(refusal(max_tokens=2**31 - 1), "sampling.max_tokens", 2**31 - 1, 128)


EVERYTHING = Limits(
    max_total_tokens=128,
    vocab_size=272,
    eos_token_ids=frozenset({257, 259}),
    features=frozenset({"prompt_logprobs", "penalties", "logit_bias", "token_lists"}),
)
WISHES: list[tuple[str, Any, str]] = [
    ("prompt_logprobs", 0, "prompt_logprobs"),
    ("repetition_penalty", 1.1, "penalties"),
    ("presence_penalty", -2.0, "penalties"),
    ("frequency_penalty", 2.0, "penalties"),
    ("logit_bias", {0: 100.0, 271: -100.0}, "logit_bias"),
    ("allowed_token_ids", [0, 271, 0], "token_lists"),
    ("banned_token_ids", [5], "token_lists"),
]


@pytest.mark.parametrize(("name", "value", "feature"), WISHES)
def test_a_wish_is_served_where_every_executor_can_and_refused_by_name_where_not(
    name: str, value: Any, feature: str
) -> None:
    assert valid(limits=EVERYTHING, **{name: value})
    error = refusal(limits=replace(EVERYTHING, features=EVERYTHING.features - {feature}), **{name: value})
    assert error.code is grpc.StatusCode.UNIMPLEMENTED
    assert error.field == f"sampling.{name}"
    assert repr(feature) in error.message


def test_b54_what_is_off_needs_no_ability() -> None:
    sampling = valid(
        repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=-0.0, logit_bias={},
        allowed_token_ids=[], banned_token_ids=[],
    ).sampling  # fmt: skip
    assert sampling == valid().sampling


def test_lists_are_in_force_sorted_and_without_doubles() -> None:
    sampling = valid(
        limits=EVERYTHING, logit_bias={9: 1.0, 3: -1.0}, allowed_token_ids=[7, 3, 7], banned_token_ids=[9, 9]
    ).sampling
    assert sampling.logit_bias == ((3, -1.0), (9, 1.0))
    assert (sampling.allowed_token_ids, sampling.banned_token_ids) == ((3, 7), (9,))


@pytest.mark.parametrize("value", [*NOT_A_NUMBER, 0.0, -1.0, 100.5, 1e30])
def test_b55_a_repetition_penalty_out_of_range_is_refused(value: float) -> None:
    error = refusal(limits=EVERYTHING, repetition_penalty=value)
    assert_refused(error, "sampling.repetition_penalty", value, "more than 0", 100)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [*NOT_A_NUMBER, -2.01, 2.01, 1e30])
def test_b55_the_other_penalties_go_from_minus_two_to_two(name: str, value: float) -> None:
    assert_refused(refusal(limits=EVERYTHING, **{name: value}), f"sampling.{name}", value, -2, 2)


@pytest.mark.parametrize("value", [*NOT_A_NUMBER, -100.1, 101.0])
def test_b55_a_bias_out_of_range_is_refused_naming_its_token(value: float) -> None:
    error = refusal(limits=EVERYTHING, logit_bias={3: 1.0, 4: value})
    assert_refused(error, "sampling.logit_bias", "token 4", value, -100, 100)


@pytest.mark.parametrize("wrong", [-1, 272, 2**40])
def test_b97_listed_ids_outside_the_vocabulary_are_refused(wrong: int) -> None:
    assert_refused(refusal(limits=EVERYTHING, logit_bias={wrong: 1.0}), "sampling.logit_bias", wrong, 271)
    for name in ("allowed_token_ids", "banned_token_ids"):
        assert_refused(refusal(limits=EVERYTHING, **{name: [5, wrong]}), f"sampling.{name}", wrong, 271)


def test_b101_long_lists_of_tokens_are_refused_with_their_limit() -> None:
    many = dict.fromkeys(range(4097), 1.0)
    assert_refused(refusal(limits=EVERYTHING, logit_bias=many), "sampling.logit_bias", 4097, 4096)
    for name in ("allowed_token_ids", "banned_token_ids"):
        assert_refused(refusal(limits=EVERYTHING, **{name: [1] * 10**6}), f"sampling.{name}", 10**6, 4096)


def test_lists_that_leave_nothing_to_choose_are_refused() -> None:
    error = refusal(limits=EVERYTHING, allowed_token_ids=[1, 2], banned_token_ids=[1, 2, 3])
    assert_refused(error, "sampling.banned_token_ids", "no token to choose")
    error = refusal(limits=EVERYTHING, banned_token_ids=range(272))
    assert_refused(error, "sampling.banned_token_ids", "no token to choose")
    assert valid(limits=EVERYTHING, banned_token_ids=range(271))


def test_b58_end_tokens_alone_cannot_fill_min_tokens() -> None:
    only_ends = {"limits": EVERYTHING, "allowed_token_ids": [257, 7], "stop_token_ids": [7]}
    assert_refused(refusal(min_tokens=1, **only_ends), "sampling.min_tokens", "end tokens")
    assert valid(min_tokens=0, **only_ends)
    assert valid(min_tokens=1, ignore_eos=True, **only_ends)
    all_but_ends = [token_id for token_id in range(272) if token_id not in EVERYTHING.eos_token_ids]
    error = refusal(limits=EVERYTHING, min_tokens=1, banned_token_ids=all_but_ends)
    assert_refused(error, "sampling.min_tokens", "end tokens")


@pytest.mark.parametrize("value", [-1, 21, 2**31 - 1])
def test_prompt_logprobs_go_to_twenty(value: int) -> None:
    error = refusal(limits=EVERYTHING, prompt_logprobs=value)
    assert_refused(error, "sampling.prompt_logprobs", value, 0, 20)


def test_b101_length_times_alternatives_has_a_limit() -> None:
    check_prompt_logprobs(131_072)
    with pytest.raises(RequestError) as raised:
        check_prompt_logprobs(131_073)
    assert_refused(raised.value, "sampling.prompt_logprobs", 131_073, 131_072)


@pytest.mark.parametrize(
    ("constraint", "name"),
    [(JsonSchema("{}"), "json_schema"), (Regex("a"), "regex"), (Choice(["a"]), "choice")],
)
def test_b99_a_constraint_needs_executors_that_can_and_an_end_token(
    constraint: Constraint, name: str
) -> None:
    error = refusal(constraint=constraint)
    assert error.code is grpc.StatusCode.UNIMPLEMENTED
    assert error.field == f"sampling.{name}"
    assert refusal(constraint=constraint, ignore_eos=True).field == "sampling.ignore_eos"


# --- the rest ---------------------------------------------------------------------------------------


def test_another_model_is_not_found_and_the_served_one_is_named() -> None:
    error = refusal(GenerateRequest(model="gpt", prompt="p"))
    assert error.code is grpc.StatusCode.NOT_FOUND
    assert "'gpt'" in error.message
    assert "'m'" in error.message
    assert valid(GenerateRequest(model="m", prompt="p"))


def test_a_long_name_of_a_model_is_not_echoed_whole() -> None:
    assert len(refusal(GenerateRequest(model="x" * 10**6, prompt="p")).message) < 300


@pytest.mark.parametrize("request_id", ["a" * 129, "a\nb", "é", "\x7f", "a\0", " a", "a ", " "])
def test_request_ids_that_would_spoil_a_log_line_are_refused(request_id: str) -> None:
    assert_refused(refusal(GenerateRequest(request_id=request_id, prompt="p")), "request_id")


@pytest.mark.parametrize("request_id", ["", "a", "a b~!", "a" * 128])
def test_printable_request_ids_are_taken(request_id: str) -> None:
    assert valid(GenerateRequest(request_id=request_id, prompt="p"))


@pytest.mark.parametrize("priority", [-1001, 1001, 2**31 - 1])
def test_priorities_out_of_range_are_refused(priority: int) -> None:
    assert_refused(refusal(GenerateRequest(prompt="p", priority=priority)), "priority", priority, 1000)


def test_the_cache_salt_is_measured_in_bytes() -> None:
    assert valid(GenerateRequest(prompt="p", cache_salt="é" * 64)).cache_salt == "é" * 64
    assert_refused(refusal(GenerateRequest(prompt="p", cache_salt="é" * 65)), "cache_salt", 130, 128)


def test_a_conversation_becomes_a_chat() -> None:
    turns = [ChatMessage("system", "s"), ChatMessage("user", "u", "bob")]
    request = GenerateRequest(prompt=Conversation(turns, ["{}"], False))
    assert checked(request, model="m", limits=LIMITS).prompt == Chat(turns, ["{}"], False)
