"""What a template made of the probes is kept: it is rendered once, and never in the place of another."""

import pytest

from gates.files import templates
from gates.recent import Recent
from gates.static import probes

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}{{ bos_token }}{% if tools %}tools{% endif %}"


@pytest.fixture
def children(monkeypatch):
    """How often a child renders, with nothing kept from before."""
    started = []

    def counted(source, cases, **limits):
        started.append(source)
        return templates.render_all(source, cases, **limits)

    monkeypatch.setattr(probes, "render_all", counted)
    monkeypatch.setattr(probes, "_KEPT", Recent(probes.MOST_KEPT))
    return started


def test_the_same_template_is_rendered_once_for_the_bundles_of_a_model(children):
    first = probes.render(PLAIN, "chat_template.jinja", {"bos_token": "<s>"})
    again = probes.render(PLAIN, "tokenizer_config.json", {"bos_token": "<s>"})
    assert children == [PLAIN]
    assert again.by_name == first.by_name
    assert again.by_name.keys() == probes.CASES.keys()
    assert (first.file, again.file) == ("chat_template.jinja", "tokenizer_config.json")
    assert first.text("plain") == "ping<s>"


def test_another_template_other_names_or_tools_are_rendered_for_themselves(children):
    given = [(PLAIN, "<s>", False), (PLAIN, "<b>", False), (PLAIN, "<s>", True), (PLAIN + "!", "<s>", False)]
    said = [
        probes.render(source, "f", {"bos_token": bos}, with_tools=tools).text("plain") for source, bos, tools in given
    ]
    assert said == ["ping<s>", "ping<b>", "ping<s>tools", "ping<s>!"]
    assert len(children) == 4


def test_a_refusal_of_the_template_s_own_is_kept(children):
    source = "{{ raise_exception('no') }}"
    codes = {probes.render(source, "f", {}).by_name["plain"].refused.code for _ in range(2)}
    assert codes == {"template-raised"}
    assert len(children) == 1


@pytest.mark.parametrize("code", ["template-time", "template-memory", "template-crashed", "template-too-deep"])
def test_what_may_have_come_of_the_machine_is_tried_again(children, monkeypatch, code):
    def short(_source, cases):
        children.append(code)
        refused = templates.TemplateRefused(code, "the machine had none left")
        return [templates.Rendering("x", None) for _ in cases[1:]] + [templates.Rendering(None, refused)]

    counted = probes.render_all
    monkeypatch.setattr(probes, "render_all", short)
    refused = list(probes.render(PLAIN, "f", {}).by_name.values())[-1].refused
    assert refused.code == code
    monkeypatch.setattr(probes, "render_all", counted)
    found = probes.render(PLAIN, "f", {})
    assert not any(one.refused for one in found.by_name.values())
    assert children == [code, PLAIN]


def test_only_the_latest_are_kept_and_nothing_long(children, monkeypatch):
    monkeypatch.setattr(probes, "_KEPT", Recent(2))
    for number in (1, 2, 1, 3, 1, 2):  # the third puts the second out, which was used the longest ago
        probes.render(f"{number}", "f", {})
    assert children == ["1", "2", "3", "2"]
    monkeypatch.setattr(probes, "MOST_KEPT_CHARACTERS", len(probes.CASES))
    for source in ("ab", "ab", "c", "c"):
        probes.render(source, "f", {})
    assert children[4:] == ["ab", "ab", "c"]
