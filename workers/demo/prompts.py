"""What the demonstration's clients ask: single questions, and the next question of a conversation under house rules.

The suites hold single questions only. A conversation begins with the same words every time, so that an engine with
a prompt cache reads little more than its last question; a bundle that makes much more of it than that is slow there
and nowhere else.
"""

from typing import Final

from workers.demo.traffic import Shape

MODEL: Final = "gemma-demo"
"""The name that every bundle of the demonstration is served under."""

HOUSE_RULES: Final = (
    "You answer visitors of the museum of the harbour. It is open from ten until six, on Thursdays until nine, and "
    "closed on Mondays. A ticket costs nine euros, five for pupils. The tower has 212 steps and no lift. Answer in "
    "one short sentence and say so when you do not know."
)
_TURNS: Final = (
    ("When do you close today?", "We close at six."),
    ("What does a ticket cost?", "It costs nine euros."),
    ("Is there a lift in the tower?", "No, there are 212 steps."),
    ("May we take photographs?", "Yes, without flash."),
)
_LAST: Final = (
    "Where can we eat?",
    "May I bring a dog?",
    "Is the tug shown today?",
    "Where is the next tram?",
    "Are you open on Monday?",
    "How long does a visit take?",
)
_SINGLE: Final = (
    "What is the capital of France?",
    "Who wrote Hamlet?",
    "Which colour has the sky?",
    "What do bees make?",
    "Where does the sun rise?",
    "How many days has a week?",
    "What is ice made of?",
    "Which animal barks?",
)


def single(number: int) -> list[dict[str, str]]:
    """Return a question on its own."""
    return [{"role": "user", "content": _SINGLE[number % len(_SINGLE)]}]


def conversation(number: int) -> list[dict[str, str]]:
    """Return the fifth question of a conversation under house rules."""
    messages = [{"role": "system", "content": HOUSE_RULES}]
    for question, answer in _TURNS:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    question = f"{_LAST[number % len(_LAST)]} We are {number % 89 + 2} people."
    return [*messages, {"role": "user", "content": question}]


SHAPES: Final = (
    Shape("single", 0.55, single, max_tokens=4),
    Shape("conversation", 0.45, conversation, max_tokens=4),
)
