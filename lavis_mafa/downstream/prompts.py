"""Prompts around questions."""

from __future__ import annotations


def problem_of_prompt(prompt: str) -> str | None:
    """Return why a question cannot be put into a prompt, None if it can."""
    try:
        if prompt.count("{}") == 1 and "question?" in prompt.format("question?"):
            return None
    except (LookupError, ValueError):
        pass
    return (
        f"{prompt!r} needs exactly one {{}}, where the question goes, and no other braces; "
        "expected such as 'Question: {} Answer:'"
    )
