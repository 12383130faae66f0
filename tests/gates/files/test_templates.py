# ruff: noqa: E501 - a template is a line
import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from gates.files import template_child
from gates.files.templates import Case, TemplateRefused, render, render_all
from tests.support.chain import PROMPT, TEMPLATE

ASKED = Case(PROMPT)

LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{{ m.content }}{% endfor %}"
)
TOOLS = (
    "{%- if tools %}{%- for tool in tools %}\n{{- tool | tojson(indent=2) }}\n{%- endfor %}{%- endif %}"
    "{%- set ns = namespace(found=false) %}{%- for m in messages %}{%- if m.role == 'tool' %}{%- set ns.found = true %}"
    "{%- break %}{%- endif %}{%- endfor %}{{- ns.found }}"
)


def outcome(template: str, case: Case = ASKED, **limits):
    (rendering,) = render_all(template, [case], **limits)
    return rendering


def test_a_template_is_rendered_as_its_engine_would():
    assert render(TEMPLATE, PROMPT) == "<|im_start|>user\nping<|im_end|>\n<|im_start|>assistant\n"
    assert render(TEMPLATE, PROMPT, add_generation_prompt=False) == "<|im_start|>user\nping<|im_end|>\n"
    said = render(LLAMA_3, [{"role": "user", "content": " hällo "}], variables={"bos_token": "<|begin_of_text|>"})
    assert said == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhällo<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_tools_loop_controls_and_namespaces_work():
    tool = {"type": "function", "function": {"name": "größe", "parameters": {"type": "object", "properties": {}}}}
    said = render(TOOLS, [*PROMPT, {"role": "tool", "content": "x"}, {"role": "user", "content": "y"}], tools=[tool])
    assert '"name": "größe"' in said  # nothing is escaped
    assert said.endswith("True")


def test_blocks_are_trimmed_and_the_generation_tag_is_transparent():
    template = "{% for m in messages %}\n    {% generation %}\n{{ m.content }}\n    {% endgeneration %}\n{% endfor %}\n"
    assert render(template, PROMPT) == "ping\n"


def test_the_clock_is_an_argument_and_its_use_is_told():
    template = "Today: {{ strftime_now('%d %b %Y') }}"
    assert render(template, PROMPT, now=datetime(2025, 1, 2)) == "Today: 02 Jan 2025"  # noqa: DTZ001 - a wall clock
    assert render(template, PROMPT) == render(template, PROMPT)
    assert outcome(template).reads_clock
    assert not outcome(TEMPLATE).reads_clock


def test_undefined_names_are_told_and_refused_on_request():
    template = "{% if date_string is defined %}{{ date_string }}{% endif %}{{ p['type'] | upper }}"
    case = Case(PROMPT, variables={"p": {}})
    lenient = outcome(template, case)
    assert lenient.text == ""
    assert "type" in lenient.missing
    strict = outcome(template, Case(PROMPT, variables={"p": {}}, strict=True))
    assert strict.refused is not None
    assert strict.refused.code == "template-undefined"
    flat = Case(PROMPT, variables={"p": {"type": "string"}}, strict=True)
    assert outcome(template, flat).text == "STRING"


@pytest.mark.parametrize(
    ("template", "code", "said"),
    [
        ("{% if %}", "template-syntax", "line 1"),
        ("a\nb\n{{ x", "template-syntax", "line 3"),
        ("{% include 'x' %}", "template-failed", "no loader"),
        ("{% break %}", "template-failed", "SyntaxError"),
        (ALTERNATING, "template-raised", "roles must alternate"),
        ("{{ nothing.at.all }}", "template-undefined", "'nothing' is undefined"),
        ("{{ messages[0]['content'] + 1 }}", "template-failed", "TypeError"),
        ("{{ 1 / 0 }}", "template-failed", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "template-unsafe", "__class__"),
        ("{{ cycler.__init__.__globals__.os.system('id') }}", "template-unsafe", "__init__"),
        ("{{ messages.append(1) }}", "template-unsafe", "append"),
        ("{{ (messages | attr('__class__')).__base__ }}", "template-unsafe", "__class__"),
        ("{{ range(100001) }}", "template-failed", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "template-too-deep", None),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "template-too-deep", None),
        ("{{ '\\ud800' }}", "template-failed", "character"),
        ("{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}", "template-too-long", "4194304"),
        ("{{ 'x' * 200000000 }}", "template-memory", None),
        ("{% set x = 'x' * 1000 %}{% for i in range(40) %}{% set x = x + x %}{% endfor %}{{ 'é' * 99999999 }}", "template-memory", None),
        ("x" * (1024 * 1024 + 1), "template-too-large", "1048576"),
    ],
    ids=range(20),
)  # fmt: skip
def test_a_template_that_gives_no_text_is_refused_for_its_reason(template, code, said):
    messages = [*PROMPT, *PROMPT] if template == ALTERNATING else PROMPT
    with pytest.raises(TemplateRefused) as refused:
        render(template, messages)
    assert refused.value.code == code, str(refused.value)
    assert said is None or said in str(refused.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 3 ** (10 ** 9) }}",
    ],
)
def test_a_template_without_end_is_ended(template):
    started = time.monotonic()
    found = outcome(template, cpu_seconds=1)
    assert found.refused is not None
    assert found.refused.code in {"template-time", "template-memory"}
    assert time.monotonic() - started < 8


def test_one_case_that_is_ended_costs_no_other_one_its_text():
    template = "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
    cases = [Case([{"role": "user", "content": word}]) for word in ("a", "loop", "b", "loop", *"cdefghijklmno")]
    found = render_all(template, cases, cpu_seconds=1)
    # What ends two of them is tried with no further one: a model has many cases, and many templates.
    assert [one.text for one in found] == ["a", None, "b", None, *[None] * 13]
    assert {one.refused.code for one in found if one.refused} == {"template-time"}


def test_a_long_template_is_compiled_once_for_all_its_cases():
    lines = [
        f"{{% if messages[0].content == '{n}' and tools %}}{{{{ tools[{n}] | tojson }}}}{{% endif %}}"
        for n in range(700)
    ]
    cases = [Case([{"role": "user", "content": "a"}], strict=bool(n % 2)) for n in range(40)]
    found = render_all("".join(lines) + "{{ messages[0].content }}{{ nothing }}", cases, cpu_seconds=2)
    assert [one.text for one in found] == ["a", None] * 20
    assert {one.refused.code for one in found if one.refused} == {"template-undefined"}


def test_many_cases_take_one_process():
    cases = [Case([{"role": "user", "content": str(n)}]) for n in range(300)]
    started = time.monotonic()
    found = render_all(TEMPLATE, cases)
    assert [one.text for one in found] == [
        f"<|im_start|>user\n{n}<|im_end|>\n<|im_start|>assistant\n" for n in range(300)
    ]
    assert time.monotonic() - started < 5
    assert render_all(TEMPLATE, []) == []


def test_all_texts_together_are_bounded_too():
    found = render_all("{{ 'x' * 1000 }}", [ASKED] * 6, characters=1000)
    assert [len(one.text or "") for one in found] == [1000] * 4 + [0, 0]
    assert [one.refused.code for one in found if one.refused] == ["template-too-long"] * 2


def test_a_large_conversation_is_refused_before_a_process_starts():
    (found,) = render_all("x", [Case([{"role": "user", "content": "x" * (17 << 20)}])])
    assert found.refused is not None
    assert found.refused.code == "template-too-large"


def test_the_child_has_no_environment_and_no_files_of_ours(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_OF_THE_SERVICE", "x")
    held = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(held, True)
    # What the interpreter of the child has before it reads anything, told by the same call.
    seen = []
    real = subprocess.Popen

    class Watched(real):
        def __init__(self, command, **options):
            seen.append((command, options))
            super().__init__(command, **options)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    try:
        render("x", PROMPT)
    finally:
        os.close(held)
    ((command, options),) = seen
    assert (options["env"], options["close_fds"], options["cwd"]) == ({}, True, "/")
    assert command == [sys.executable, "-I", str(Path(template_child.__file__))]


def test_the_child_imports_nothing_of_the_product():
    code = (
        f"import runpy, sys; runpy.run_path({template_child.__file__!r}, run_name='seen');"
        "print([m for m in sys.modules if m.split('.')[0] in ('gates', 'schemas', 'registry', 'pydantic')])"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_process_is_left_when_the_caller_is_interrupted(monkeypatch):
    started = []
    real = subprocess.Popen.communicate

    def interrupted(self, *args, **options):
        started.append(self)
        if len(started) == 1:
            raise KeyboardInterrupt
        return real(self, *args, **options)

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        render(TEMPLATE, PROMPT)
    assert started[0].returncode is not None
