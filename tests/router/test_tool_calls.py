"""Calls in text: what is one, what is none, and that neither cutting nor a failed attempt loses anything."""

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tool_calls import Called, ToolCallForm, ToolCallParser, chosen_form, form_of

HERMES, BARE, MISTRAL = ToolCallForm
TOOLS = {"weather", "time"}
BERN = '{"city":  "Bern", "days": [1, 2.50]}'
BERN_CALL = Called("weather", BERN)
NOW = Called("time", "{}")


def parsed(
    form: ToolCallForm,
    *pieces: str,
    tools: set[str] = TOOLS,
    max_calls: int | None = None,
    is_apart: bool = False,
) -> tuple[str, list[Called]]:
    """All content in one, and all calls."""
    parser = ToolCallParser(form, tools, max_calls=max_calls, is_apart=is_apart)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    calls = [part for part in parts if isinstance(part, Called)]
    assert len(calls) == parser.num_calls
    return "".join(part for part in parts if isinstance(part, str)), calls


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def mistral(name: str, arguments: str) -> str:
    return f'[{{"name": "{name}", "arguments": {arguments}}}]'


WRITTEN = {HERMES: hermes, BARE: llama, MISTRAL: mistral}


@pytest.mark.parametrize("form", ToolCallForm)
def test_a_call_is_found_with_its_arguments_as_they_were_written(form: ToolCallForm) -> None:
    assert parsed(form, WRITTEN[form]("weather", BERN)) == ("", [BERN_CALL])


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, f"I look.\n\n{hermes('weather', BERN)}\n", "I look.", [BERN_CALL]),
        (HERMES, f"{hermes('weather', BERN)}\n{hermes('time', '{}')}", "", [BERN_CALL, NOW]),
        (HERMES, f"{hermes('time', '{}')}{hermes('time', '{}')}", "", [NOW, NOW]),
        (HERMES, f"a {hermes('time', '{}')}\nb\n{hermes('time', '{}')} c\n", "a\nb c\n", [NOW, NOW]),
        (HERMES, '<tool_call>{"arguments": {}, "name": "time"}</tool_call>', "", [NOW]),
        (HERMES, '<tool_call>{"name": "time", "arguments": {}}', "", [NOW]),  # the end tag is an end token
        (HERMES, '<tool_call>{"name": "time", "arguments": {}}\n</tool', "", [NOW]),
        (HERMES, f"<tool_call>{hermes('time', '{}')}", "<tool_call>", [NOW]),
        (HERMES, f"<tool_<tool_call> x {hermes('time', '{}')}", "<tool_<tool_call> x", [NOW]),
        (BARE, f"<|python_tag|>{llama('weather', BERN)}", "", [BERN_CALL]),
        (BARE, f"Sure.\n<|python_tag|> {llama('time', '{}')}", "Sure.", [NOW]),
        (BARE, f"{llama('time', '{}')}; {llama('weather', BERN)}", "", [NOW, BERN_CALL]),
        (BARE, f"{llama('time', '{}')};\n", "", [NOW]),
        (BARE, f"x; {llama('time', '{}')}; y", "x;; y", [NOW]),
        (BARE, '{"type": "function", "name": "time", "parameters": {}}', "", [NOW]),
        (BARE, '{ "name" :\n"time" , "arguments":{ } }', "", [Called("time", "{ }")]),
        (MISTRAL, f"[TOOL_CALLS] {mistral('weather', BERN)}", "", [BERN_CALL]),
        (MISTRAL, f"[TOOL_CALLS]{mistral('time', '{}')}", "", [NOW]),
        (MISTRAL, f"Sure. [TOOL_CALLS] [ {mistral('time', '{}')[1:]}\n", "Sure.", [NOW]),
        (MISTRAL, f" {mistral('time', '{}')[:-1]}, {mistral('weather', BERN)[1:]}", "", [NOW, BERN_CALL]),
        (MISTRAL, '[{"name": "time", "arguments": {}, "id": "aB3dE5g7h"}]', "", [NOW]),
        (MISTRAL, f"[1] [T] [[{mistral('time', '{}')}]", "[1] [T] [[]", [NOW]),
        (MISTRAL, f"{mistral('time', '{}')} or [so]", " or [so]", [NOW]),
        (MISTRAL, f"{mistral('time', '{}')}]", "]", [NOW]),
        (MISTRAL, f'[{{"x": 1}}, {llama("time", "{}")}]', '[{"x": 1},]', [NOW]),
        (MISTRAL, f"see [this: {llama('time', '{}')}], ", "see [this:], ", [NOW]),
        (MISTRAL, llama("time", "{}"), "", [NOW]),
        (MISTRAL, f"[TOOL_CALLS]weather[ARGS]{BERN}", "", [BERN_CALL]),
        (
            MISTRAL,
            f"Sure.\n[TOOL_CALLS] time [ARGS] {{}}[TOOL_CALLS]weather[ARGS]{BERN}",
            "Sure.\n[TOOL_CALLS] time [ARGS] {}",
            [BERN_CALL],
        ),
        (
            MISTRAL,
            f"So [TOOL_CALLS]time[ARGS] {{}}\n[TOOL_CALLS] weather[ARGS]{BERN}\n",
            "So",
            [NOW, BERN_CALL],
        ),
        (MISTRAL, "[TOOL_CALLS]time[CALL_ID]aB3dE5g7h[ARGS]{}, so", ", so", [NOW]),
        (MISTRAL, f"[TOOL_CALLS]time[ARGS]{{}} {mistral('weather', BERN)}]", "]", [NOW, BERN_CALL]),
        (
            MISTRAL,
            f"[TOOL_CALLS]time[ARGS][TOOL_CALLS]weather[ARGS]{BERN}",
            "[TOOL_CALLS]time[ARGS]",
            [BERN_CALL],
        ),
        (BARE, f"def f() {{ return {{1}} }} {llama('time', '{}')}", "def f() { return {1} }", [NOW]),
    ],
)
def test_content_around_calls_is_kept_and_white_space_is_the_forms(
    form: ToolCallForm, text: str, content: str, calls: list[Called]
) -> None:
    assert parsed(form, text) == (content, calls)
    assert parsed(form, *text) == (content, calls)


@pytest.mark.parametrize("form", ToolCallForm)
def test_what_stands_in_a_string_is_of_the_string(form: ToolCallForm) -> None:
    arguments = r'{"text": "}]</tool_call><tool_call>{\"name\": \"time\"}\\"}'
    assert parsed(form, WRITTEN[form]("weather", arguments)) == ("", [Called("weather", arguments)])


NONE_OF_HERMES = [
    "<tool_call>hello</tool_call>",
    hermes("unheard_of", "{}"),
    hermes("weather", "[]"),
    hermes("weather", '"{}"'),
    hermes("weather", "null"),
    hermes("weather", '{"a": NaN}'),
    hermes("weather", '{"a": 01}'),
    hermes("weather", '{"a": 1,}'),
    hermes("weather", '{"a": "\n"}'),
    hermes("weather", '{"a": [}'),
    hermes("weather", "{}, {}"),
    hermes("weather", '{}, "reason": "x"'),
    hermes("weather", '{}, "parameters": {}'),
    hermes("weather", '{}, "name": "time"'),
    hermes("weather", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    hermes("weather", '{"a": "x"'),
    hermes("weather", r'{"a": \u0061}'),
    '<tool_call>\n{"name": "weather"}\n</tool_call>',
    '<tool_call>\n{"name": ["weather"], "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "argu',
    "<tool_call>\n",
    "a < b <tool_call",
    " \n\t",
    "",
]


@pytest.mark.parametrize("text", NONE_OF_HERMES)
def test_what_is_no_call_is_content_to_the_letter(text: str) -> None:
    assert parsed(HERMES, text) == (text, [])
    bare = text.replace("<tool_call>", "").replace("</tool_call>", "").replace("arguments", "parameters", 1)
    assert parsed(BARE, bare) == (bare, [])
    listed = text.replace("<tool_call>", "[TOOL_CALLS] [").replace("</tool_call>", "]")
    assert parsed(MISTRAL, listed) == (listed, [])


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]unheard_of[ARGS]{}",
        "[TOOL_CALLS][ARGS]{}",
        "[TOOL_CALLS]time[CALL_ID][ARGS]{}",
        "[TOOL_CALLS]time[CALL_ID]x{}",
        "[TOOL_CALLS]time{}",
        "[TOOL_CALLS]time",
        "[TOOL_CALLS]time[ARGS]",
        "[TOOL_CALLS]time[ARGS]{",
        "[TOOL_CALLS]time[ARGS][]",
        '[TOOL_CALLS]time[ARGS]{"a": NaN}',
        '[TOOL_CALLS]time[ARGS]{"a": 1,}',
        "[TOOL_CALLS]time[ARGUMENTS]{}",
        '[TOOL_CALLS]time[ARGS]{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "time[ARGS]{}",
    ],
)
def test_a_name_before_arguments_that_is_no_call_is_content_to_the_letter(text: str) -> None:
    assert parsed(MISTRAL, text) == (text, [])
    assert parsed(MISTRAL, *text[:200], text[200:]) == (text, [])


def test_a_tag_and_more_than_an_object_is_no_call() -> None:
    text = '<tool_call>\n{"name": "time", "arguments": {}} and so on\n</tool_call>'
    assert parsed(HERMES, text) == (text, [])


def test_behind_the_last_call_that_is_wanted_all_is_content() -> None:
    twice = hermes("time", "{}") + hermes("time", "{}")
    assert parsed(HERMES, twice, max_calls=1) == (hermes("time", "{}"), [NOW])


@pytest.mark.parametrize(
    ("form", "pieces", "told"),
    [
        (HERMES, ["Hello ", "you", " <", "b>"], ["Hello", " you", "", " <b>"]),
        (HERMES, ["\n", "<tool_c", "ups"], ["", "", "\n<tool_cups"]),
        (HERMES, ["<tool_call>\n", '{"nam', 'ing": 1}'], ["", "", '<tool_call>\n{"naming": 1}']),
        (BARE, ["if {", "x", '} {"answer"', ": 1}"], ["if", " {x", '} {"answer"', ": 1}"]),
        (BARE, ['{"', "name", '": 5', "}"], ["", "", "", '{"name": 5}']),
        (MISTRAL, ["see [", "1] [TOO", "T] ["], ["see", " [1]", " [TOOT]"]),
    ],
)  # fmt: skip
def test_text_is_held_back_only_as_far_as_it_may_be_of_a_call(
    form: ToolCallForm, pieces: list[str], told: list[str]
) -> None:
    parser = ToolCallParser(form, TOOLS)
    assert ["".join(map(str, parser.push(piece))) for piece in pieces] == told


def test_a_call_is_told_with_its_last_character() -> None:
    for form, text in (
        (HERMES, hermes("time", "{}")),
        (BARE, llama("time", "{}")),
        (MISTRAL, mistral("time", "{}")[:-1]),
        (MISTRAL, "[TOOL_CALLS]time[ARGS]{}"),
    ):
        parser = ToolCallParser(form, TOOLS)
        assert parser.push(text[:-1]) == []
        assert parser.push(text[-1]) == [NOW]


# --- whatever is said -------------------------------------------------------------------------------

ARGUMENTS = st.dictionaries(
    st.text(max_size=5), st.recursive(st.text(max_size=8) | st.integers() | st.none(), st.lists), max_size=3
)
SCRAPS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "<", "{", "}", '"', '{"name": "time"', '"name"'),
        *(
            "\\",
            "\n",
            " ",
            ";",
            ",",
            ": ",
            "[",
            "]",
            "[TOOL_CALLS]",
            "time",
            "[ARGS]",
            "[CALL_ID]",
            "{}",
            "[{",
            llama("time", "{}"),
            '"arguments": {',
            "x",
            "<tool_",
        ),
    ]
)


def cut(text: str, at: Sequence[int]) -> list[str]:
    edges = [0, *sorted(at), len(text)]
    return [text[first:last] for first, last in pairwise(edges)]


@given(form=st.sampled_from(ToolCallForm), scraps=st.lists(SCRAPS | st.text(max_size=3)), data=st.data())
def test_any_cutting_gives_the_same(form: ToolCallForm, scraps: list[str], data: st.DataObject) -> None:
    text = "".join(scraps)
    whole = parsed(form, text)
    assert parsed(form, *text) == whole
    assert parsed(form, *cut(text, data.draw(st.lists(st.integers(0, len(text)), max_size=5)))) == whole
    if not whole[1]:
        assert whole[0] == text


@given(
    form=st.sampled_from(ToolCallForm),
    scraps=st.lists(SCRAPS | st.text(max_size=3)),
    data=st.data(),
)
def test_any_cutting_gives_the_same_where_text_and_calls_are_apart(
    form: ToolCallForm, scraps: list[str], data: st.DataObject
) -> None:
    text = "".join(scraps)
    whole = parsed(form, text, is_apart=True)
    at = data.draw(st.lists(st.integers(0, len(text)), max_size=5))
    assert parsed(form, *text, is_apart=True) == parsed(form, *cut(text, at), is_apart=True) == whole
    if not whole[1]:
        assert whole[0] == text
    assert all(call in parsed(form, text)[1] for call in whole[1])


@pytest.mark.parametrize("form", ToolCallForm)
def test_behind_text_there_is_no_call_where_they_are_apart(form: ToolCallForm) -> None:
    call = WRITTEN[form]("time", "{}")
    for text in ("{}", "x ", '"', "[1]"):
        assert parsed(form, text + call, is_apart=True) == (text + call, [])


def test_a_list_without_a_tag_is_text_where_they_are_apart() -> None:
    assert parsed(MISTRAL, mistral("time", "{}"), is_apart=True) == (mistral("time", "{}"), [])
    assert parsed(MISTRAL, "[TOOL_CALLS]" + mistral("time", "{}"), is_apart=True) == ("", [NOW])


@given(form=st.sampled_from(ToolCallForm), text=st.text() | st.lists(SCRAPS).map("".join))
def test_without_tools_every_text_comes_out_unchanged(form: ToolCallForm, text: str) -> None:
    assert parsed(form, *text, tools=set()) == (text, [])


@given(
    form=st.sampled_from(ToolCallForm),
    calls=st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), ARGUMENTS), min_size=1, max_size=3),
    ascii_only=st.booleans(),
    before=st.text(st.characters(exclude_characters="<{;[", exclude_categories=["Cs"]), max_size=8),
    size=st.integers(1, 9),
)
def test_every_call_is_found_behind_any_content(
    form: ToolCallForm,
    calls: list[tuple[str, dict[str, object]]],
    ascii_only: bool,
    before: str,
    size: int,
) -> None:
    written = [(name, json.dumps(arguments, ensure_ascii=ascii_only)) for name, arguments in calls]
    text = before + "\n".join(WRITTEN[form](name, arguments) for name, arguments in written)
    content, found = parsed(form, *(text[i : i + size] for i in range(0, len(text), size)))
    assert content == before.rstrip(" \t\r\n")
    assert found == [Called(name, arguments) for name, arguments in written]


# --- which form -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ('{{- "within <tool_call></tool_call> XML tags:\\n{\\"name\\": <name>, …}" }}', HERMES),
        ("""{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}""", BARE),
        ('{{ "{\\"name\\": function name, \\"parameters\\": dictionary}" }}', BARE),
        ("{{- '<|python_tag|>' + tool_call.name }}", BARE),
        ('{{- "[TOOL_CALLS] [" }}', MISTRAL),
        ('{{ tools | tojson }}{# "parameters" in passing #}', None),
    ],
)  # fmt: skip
def test_the_template_shows_the_form(template: str | None, form: ToolCallForm | None) -> None:
    assert form_of(template) is form


@pytest.mark.parametrize(
    ("setting", "form"),
    [("auto", HERMES), ("hermes", HERMES), ("llama3_json", BARE), ("mistral", MISTRAL), ("none", None)],
)
def test_the_setting_chooses(setting: str, form: ToolCallForm | None) -> None:
    assert chosen_form(setting, "{{ '<tool_call>' }}") is form


def test_without_a_template_nothing_is_looked_for() -> None:
    assert chosen_form("auto", None) is None
