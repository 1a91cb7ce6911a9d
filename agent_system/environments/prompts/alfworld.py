# SPDX-License-Identifier: Apache-2.0
"""Templates of the full ALFWorld prompt; fields in braces."""

__all__ = ["ALFWORLD_TEMPLATE", "ALFWORLD_TEMPLATE_NO_HIS"]

_REPLY_FORMAT = """\
Decide what to do next.
First think step by step about the situation, inside <think> </think> tags.
Then give exactly one action, copied from the list above, inside <action> </action> tags."""

ALFWORLD_TEMPLATE_NO_HIS = f"""\
You control a household robot in the text world ALFRED.

What you see now:
{{current_observation}}

Actions you can take now:
[{{admissible_actions}}]

{_REPLY_FORMAT}"""

ALFWORLD_TEMPLATE = f"""\
You control a household robot in the text world ALFRED. Your task is to: {{task_description}}

You have taken {{step_count}} step(s) so far. The last {{history_length}} observation(s) and the action(s) you took on \
them were:
{{action_history}}

This is step {{current_step}}. What you see now:
{{current_observation}}

Actions you can take now:
[{{admissible_actions}}]

{_REPLY_FORMAT}"""
