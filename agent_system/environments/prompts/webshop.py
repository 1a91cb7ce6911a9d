# SPDX-License-Identifier: Apache-2.0
"""Templates of the full WebShop prompt; fields in braces."""

__all__ = ["WEBSHOP_TEMPLATE", "WEBSHOP_TEMPLATE_NO_HIS"]

_REPLY_FORMAT = """\
Decide what to do next.
First think step by step about the request and the page, inside <think> </think> tags.
Then give exactly one action, in one of the forms listed above, inside <action> </action> tags."""

WEBSHOP_TEMPLATE_NO_HIS = f"""\
You are shopping on an online store through its text pages. A customer wants you to: {{task_description}}

The page you see now:
{{current_observation}}

Actions you can take now:
[
{{available_actions}}
]

{_REPLY_FORMAT}"""

WEBSHOP_TEMPLATE = f"""\
You are shopping on an online store through its text pages. A customer wants you to: {{task_description}}

You have taken {{step_count}} step(s) so far. The last {{history_length}} page(s) and your action(s) on them were:
{{action_history}}

This is step {{current_step}}. The page you see now:
{{current_observation}}

Actions you can take now:
[
{{available_actions}}
]

{_REPLY_FORMAT}"""
