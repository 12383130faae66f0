"""Several chat templates by name: each is rendered, and each is held to what it is used for."""

import pytest

from tests.support.checkpoints import T0, alarms, micro, only, speak, validate, write_json

TOOLS = """\
{%- for tool in tools %}{{ tool.function.name }}: {% for name, told in tool.function.parameters.properties.items() %}\
{{ name }} {{ told.type | default('any') }} {% endfor %}
{% endfor -%}
"""
TOOL_USE = TOOLS + T0
RAG = "{% if not documents %}{{ raise_exception('no documents') }}{% endif %}" + T0
DATED = "{{ strftime_now('%d %B %Y') }} " + T0
ARGUMENTS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
WANTS = {"engine": {"name": "vllm", "version": "0.32.0", "arguments": ARGUMENTS}}
CHAT = WANTS | {"features": ["chat", "tools"]}


def in_list(root, templates):
    told = [{"name": name, "template": text} for name, text in templates.items()]
    speak(root, template=None, config={"chat_template": told})


def in_object(root, templates):
    speak(root, template=None)
    write_json(root / "chat_template.json", {"chat_template": templates})


def in_files(root, templates):
    speak(root, template=templates.get("default"))
    for name, text in templates.items():
        if name != "default":
            (root / "additional_chat_templates").mkdir(exist_ok=True)
            (root / "additional_chat_templates" / f"{name}.jinja").write_text(text)


FORMS = {"a list": in_list, "an object": in_object, "files": in_files}


def made(root, form="a list", **templates):
    micro(root)
    FORMS[form](root, templates)
    return root


@pytest.mark.parametrize("form", FORMS)
def test_tools_are_looked_for_in_the_template_that_is_given_them(tmp_path, form):
    assert alarms(validate(made(tmp_path / "m", form, default=T0, tool_use=TOOL_USE), CHAT)) == set()


def test_a_template_that_is_not_given_tools_need_not_write_them(tmp_path):
    assert alarms(validate(made(tmp_path / "n", default=T0, rag=RAG), CHAT)) == {"template-tools-missing"}
    found = validate(made(tmp_path / "o", default=T0, tool_use=T0), CHAT)
    assert only(found, "template-tools-missing").message.startswith("The template tool_use: ")


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("tool_use", "{% for %}", "template-fails"),
        ("tool_use", "{{ raise_exception('never') }}", "template-fails"),
        ("tool_use", TOOLS.replace(" | default('any')", "") + T0, "template-tool-schema"),
        ("tool_use", TOOLS + "{% for m in messages %}x{% endfor %}", "template-drops-message"),
        ("tool_use", TOOLS + T0.replace("<|im_end|>", "<spare>"), "turn-end-not-a-stop"),
        ("tool_use", TOOLS + DATED, "template-clock"),
        ("rag", "{% for %}", "template-fails"),
        ("rag", DATED, "template-clock"),
    ],
)
def test_what_is_wrong_with_one_of_them_is_told_with_its_name(tmp_path, name, text, code):
    features = CHAT if name == "tool_use" else WANTS | {"features": ["chat"]}
    found = validate(made(tmp_path / "m", **{"default": T0, name: text}), features)
    assert alarms(found) == {code}
    assert f"The template {name}: " in next(one for one in found.flaws if one.code == code).message


def test_templates_without_a_default_are_none_for_a_plain_question(tmp_path):
    found = validate(made(tmp_path / "m", tool_use=TOOL_USE), CHAT)
    assert "the templates are called tool_use, and none default" in only(found, "template-missing").message


def test_a_template_that_is_declared_is_the_only_one(tmp_path):
    root = made(tmp_path / "m", default=T0, tool_use="{% for %}")
    (root / "own.jinja").write_text(T0)
    assert alarms(validate(root, WANTS | {"features": ["chat"], "template": {"file": "own.jinja"}})) == set()


def test_a_file_of_templates_that_is_no_text_is_told(tmp_path):
    root = made(tmp_path / "m", "files", default=T0, rag=RAG)
    (root / "additional_chat_templates" / "rag.jinja").write_bytes(b"\xff\xfe")
    assert only(validate(root, WANTS), "config-unparseable").file == "additional_chat_templates/rag.jinja"
