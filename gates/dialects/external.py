"""How to speak to an endpoint of which only the form of OpenAI's API is known, through the relay on this machine.

Source: OpenAI's API reference, chat and completions. Fields beyond it are refused by some services, so that none is
sent: what they leave to a service's own defaults cannot be named here.
"""

from gates.dialects.base import Capability, Dialect, MetricNames

EXTERNAL = Dialect(
    name="external",
    verified_with="recorded, OpenAI's API reference",
    capabilities=frozenset(
        {
            *(Capability.CHAT, Capability.COMPLETIONS, Capability.STREAMING, Capability.MODEL_LIST),
            *(Capability.JSON_SCHEMA, Capability.TOOLS, Capability.DRAIN),
        }
    ),
    metrics=MetricNames(),
    sampling_fields={"temperature": "temperature", "top_p": "top_p", "seed": "seed"},
    reasoning_fields=("reasoning_content", "reasoning"),
    cache_field=None,
    # Nobody agrees on a route for health; this one has to answer for the endpoint to be of use.
    health_path="/v1/models",
    facts_path="/relay",
    facts_fields=("endpoint", "server"),
)
"""Its identity is what it reports: model list, and the name that its server gives itself."""
