import json

import pytest
from transformers import PreTrainedTokenizerFast

from router import model_files
from router.chat import (
    MAX_CHARACTERS,
    RESERVED_VARIABLES,
    ChatError,
    ChatMessage,
    ChatTemplate,
    TemplateError,
    ToolCall,
)
from router.tokenizer import Tokenizer
from tests.rig import tiny_model
from tests.router.real_model import REAL_MODEL, needs_real_model

HI = [ChatMessage("user", "Hi")]
CONVERSATION = [
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "  What <b>is</b> 'this'?\n\n{{ 7 * 7 }} {% raw %} 😀\r\n"),
    ChatMessage("assistant", 'A "test" & more.'),
    ChatMessage("user", "", name="Zoë"),
]
TOOLS = ['{"type": "function", "function": {"name": "größe", "parameters": {"a<b": [1, 2.5, null]}}}']
TEMPLATES = {
    "chatml": tiny_model.CHAT_TEMPLATE,
    "bos and eos": "{{ bos_token }}{% for m in messages %}"
    "[{{ m.role }}]{{ m['content'] }}{{ eos_token }}{% endfor %}",
    "whitespace control": "{% for m in messages %}\n"
    "    {% if m.role == 'user' %}\n  U {{ m.content | trim }}\n"
    "    {% else %}\n  O {{ m.content }}\n    {% endif %}\n{% endfor %}\n",
    "tools as json": "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ messages | tojson }}",
    "no tools test": "{% if tools is none %}none{% else %}{{ tools | length }}{% endif %}",
    "names": "{% for m in messages %}{{ m.name if m.name is defined else '-' }},{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ m.role }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": "{% set x = 0 %}{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.content }}"
    "{% endgeneration %}{{ x }}{% endfor %}",
    "macro": "{% macro show(m) %}<{{ m.role }}>{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{% endfor %}",
    "prompt": "{{ add_generation_prompt }}{{ messages[::-1][0].role }}{{ documents is none }}",
    "range": "{% for i in range(3) %}{{ i }}{{ messages[i].content }}{% endfor %}",
}


def render(source: str, messages: list[ChatMessage] = HI, tools: list[str] | None = None) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(messages, tools or [], add_generation_prompt=True)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tiny_model.build(tmp_path_factory.mktemp("model"))
    return PreTrainedTokenizerFast.from_pretrained(folder, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_the_text_is_that_of_transformers(
    oracle: PreTrainedTokenizerFast, source: str, with_tools: bool
) -> None:
    dicts = [
        {"role": m.role, "content": m.content} | ({"name": m.name} if m.name else {}) for m in CONVERSATION
    ]
    tools = TOOLS if with_tools else []
    if with_tools and "tools" not in source:
        with pytest.raises(ChatError, match=r"chat\.tools: the model's chat template does not know tools"):
            render(source, CONVERSATION, tools)
        return
    expected = oracle.apply_chat_template(
        dicts,
        tools=[json.loads(tool) for tool in tools] or None,
        chat_template=source,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert render(source, CONVERSATION, tools) == expected


def test_strftime_now_knows_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}").isdecimal()


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(ChatError, match="refuses this conversation: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].content.text }}",
        "{{ undefined_thing.x }}",
        "{{ 1 / 0 }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ range(10 ** 30) }}",
        "{% include 'x' %}",
    ],
)
def test_a_template_that_fails_is_a_sentence(source: str) -> None:
    with pytest.raises(ChatError, match="chat: the model's chat template failed on this conversation"):
        render(source)


def test_nested_loops_are_bounded_together() -> None:
    source = "{% for i in range(5000) %}{% for j in range(5000) %}{% endfor %}{% endfor %}"
    with pytest.raises(ChatError, match="loops for more than 1000000 steps"):
        render(source)


def test_the_bound_is_for_one_rendering() -> None:
    template = ChatTemplate("{% for i in range(600000) %}{% endfor %}ok", {})
    for _ in range(2):
        assert template.render(HI, [], add_generation_prompt=True) == "ok"


def test_text_is_bounded() -> None:
    source = "{% for i in range(100) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(ChatError, match=f"more than {MAX_CHARACTERS} characters"):
        render(source, [ChatMessage("user", "x" * (MAX_CHARACTERS // 50))])


def test_no_messages_are_refused() -> None:
    with pytest.raises(ChatError, match=r"chat\.messages is empty"):
        render("x", [])


@pytest.mark.parametrize("tool", ["", "{", "nonsense", "[" * 100_000])
def test_a_tool_that_is_not_json_is_named(tool: str) -> None:
    with pytest.raises(ChatError, match=r"chat\.tools\[1\] is not JSON"):
        render("{{ tools }}", HI, ["{}", tool])


def test_a_broken_template_is_refused_at_the_start_with_its_line() -> None:
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate("ok\n{% for %}", {})


CALLS = [
    ChatMessage("user", "Weather?"),
    ChatMessage(
        "assistant", "", tool_calls=[ToolCall("c1", "weather", '{"city": "Zürich", "days": [1, 2]}')]
    ),
    ChatMessage("tool", "rain", name="weather", tool_call_id="c1"),
]
CALLS_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}>"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.type }} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }} {{ c.function.arguments.city }}]{% endfor %}{% endfor %}"
)


def test_calls_and_their_answers_are_as_transformers_shows_them(oracle: PreTrainedTokenizerFast) -> None:
    function = {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}
    dicts = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "c1"},
    ]
    expected = oracle.apply_chat_template(dicts, chat_template=CALLS_TEMPLATE, tokenize=False)
    assert render(CALLS_TEMPLATE, CALLS) == expected
    assert 'weather {"city": "Zürich", "days": [1, 2]} Zürich]' in expected


@pytest.mark.parametrize("arguments", ['{"city": "Zü', "[]", "5", "[" * 100_000])
def test_arguments_that_are_no_object_are_shown_as_the_text_that_they_are(arguments: str) -> None:
    source = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    turn = ChatMessage("assistant", "", tool_calls=[ToolCall("", "f", arguments)])
    assert render(source, [turn]) == json.dumps(arguments, ensure_ascii=False)


def test_no_arguments_are_an_object_without_fields() -> None:
    source = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    assert render(source, [ChatMessage("assistant", "", tool_calls=[ToolCall("", "f", "")])]) == "{}"


def test_arguments_that_a_template_cannot_take_apart_are_told_where_they_stand() -> None:
    source = "{% for name, value in messages[1].tool_calls[1].function.arguments.items() %}x{% endfor %}"
    calls = [ToolCall("", "f", "{}"), ToolCall("", "f", '{"city": "Zü')]
    turns = [ChatMessage("user", "Hi"), ChatMessage("assistant", "", tool_calls=calls)]
    with pytest.raises(ChatError, match=r"^chat\.messages: messages\[1\]\.tool_calls\[1\]\.arguments is no"):
        render(source, turns)


@pytest.mark.parametrize("said", ["The answer", "  The answer ", "a\n\nb\n", "<|im_end|> x"])
@pytest.mark.parametrize(
    "source",
    [
        tiny_model.CHAT_TEMPLATE,
        "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} [end]{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    ],
)
def test_the_last_message_is_continued_as_by_transformers(
    oracle: PreTrainedTokenizerFast, source: str, said: str
) -> None:
    messages = [ChatMessage("user", "The answer"), ChatMessage("assistant", said)]
    expected = oracle.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages],
        chat_template=source,
        continue_final_message=True,
        tokenize=False,
    )
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    rendered = template.render(messages, [], add_generation_prompt=False, continue_final_message=True)
    assert rendered == expected


def test_a_developer_is_the_system_to_a_template_that_knows_none() -> None:
    """Some templates show users, systems and assistants, and pass over whatever else comes."""
    rules = [ChatMessage("developer", "Be brief."), *HI]
    older = "{% for m in messages %}{{ m.content if m.role in ['system', 'user'] }}{% endfor %}"
    assert render(older, rules) == "Be brief.Hi"
    newer = "{% for m in messages %}{{ m.content if m.role == 'developer' }}{% endfor %}"
    assert render(newer, rules) == "Be brief."


@pytest.mark.parametrize(("source", "said"), [("x", "abc"), ("{{ messages[-1].content | upper }}", "a")])
def test_what_the_template_does_not_show_cannot_be_continued(source: str, said: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(ChatError, match=r"chat\.continue_final_message"):
        template.render(
            [ChatMessage("assistant", said)], [], add_generation_prompt=False, continue_final_message=True
        )


THINKING = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ extra }}"
)


@pytest.mark.parametrize(
    "variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}, {"extra": [1, {"ü": None}]}]
)
def test_a_template_sees_further_variables_as_transformers_shows_them(
    oracle: PreTrainedTokenizerFast, variables: dict[str, object]
) -> None:
    expected = oracle.apply_chat_template(
        [{"role": "user", "content": "Hi"}], chat_template=THINKING, tokenize=False, **variables
    )
    template = ChatTemplate(THINKING, {})
    assert template.render(HI, [], add_generation_prompt=True, variables=variables) == expected


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "range"])
def test_what_the_renderer_sets_is_reserved(name: str) -> None:
    template = ChatTemplate("{{ " + name + " }}", {"bos_token": "<s>", "eos_token": "</s>"})
    plain = template.render(HI, [], add_generation_prompt=True)
    assert name in RESERVED_VARIABLES
    if name != "range":  # whose picture tells where it lies in memory
        assert template.render(HI, [], add_generation_prompt=True, variables={name: "x"}) == plain


@pytest.mark.model
@needs_real_model
def test_ids_of_the_real_models_template_are_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    gguf_path = next(REAL_MODEL.glob("*.gguf"))
    theirs = AutoTokenizer.from_pretrained(REAL_MODEL, gguf_file=gguf_path.name)
    ours = Tokenizer(model_files.read(REAL_MODEL))
    for messages in (CONVERSATION[:3], CONVERSATION[1:3], HI):
        dicts = [{"role": m.role, "content": m.content} for m in messages]
        for prompt in (False, True):
            expected = theirs.apply_chat_template(dicts, add_generation_prompt=prompt, return_dict=False)
            assert ours.encode_chat(messages, [], prompt) == expected
