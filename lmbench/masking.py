"""Secrets, by the names and the looks of them: what is stored or shown has `***` in their place.

A result is meant to be sent around. A key in it that nobody sees is lost; a `***` too many only asks somebody to fill
it in again, so what looks like a secret under an innocent name is masked as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

MASK = "***"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
#: A name with one of these words is a secret's, whatever stands around it.
_ALWAYS = frozenset({
    "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd", "credential", "credentials", "bearer",
    "apikey", "pat", "dsn",
})  # fmt: skip
#: These only at the end of a name (`hf_token`, not `token_type`), and only where its value is text.
_AT_THE_END = frozenset({"token", "auth", "authorization", "cookie", "cookies", "session"})
#: What makes a `key` one that opens something, or a `token` in the midst of a name: `access_key_id`, `hf_token_read`.
_OPENING = frozenset({
    "api", "access", "private", "auth", "account", "storage", "service", "signing", "encryption", "ssh", "license",
    "hf", "huggingface", "hub", "github", "gitlab", "gh", "wandb", "aws", "azure", "openai", "refresh", "login", "id",
})  # fmt: skip
#: A tokenizer's own words.
_SPECIAL_TOKENS = frozenset({"pad", "padding", "eos", "bos", "unk", "cls", "sep", "mask", "stop", "end", "start",
                             "special", "per", "new", "image", "prompt", "next", "last", "first"})  # fmt: skip
_DIRECTORIES = frozenset({"PWD", "OLDPWD"})

#: Keys whose issuers gave them a mark of their own: Hugging Face, GitHub, GitLab, OpenAI and Anthropic, AWS, Slack,
#: Google, JSON Web Tokens (RFC 7519), PEM (RFC 7468).
_LOOKS = re.compile(
    r"(?<![\w-])(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
    r"|sk-(?:ant-|proj-|svcacct-)[\w-]{20,}|sk[-_](?:live_)?[A-Za-z0-9]{24,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|xox[abeoprs]-[\w-]{10,}|AIza[\w-]{35}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*)(?![\w-])"
    r"|(?<=Bearer )[\w.~+/=-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
#: The user's part of an address, up to its last `@` before the path; a password may hold a slash, though it should not.
_USER = re.compile(r"""(?<![\w+.-])([A-Za-z][\w+.-]*://)(?:[^\s"'<>?#/]*|[^\s"'<>?#/:]*:(?!\d+/)[^\s"'<>?#]*)@""")
_QUERY = re.compile(r"""([?&;]([\w.-]+)=)[^&;\s#"'<>]+""")

#: Values that this process was given under a secret's name.
_given: set[str] = set()
#: Shorter ones would mask what only happens to be the same.
_SHORTEST = 6


def is_secret(name: str, value: object = "") -> bool:
    """Whether an option, a variable or a field of this name holds a secret; dotted names by their parts.

    Words are told apart by underscores, dots and capitals: `num_tokens`, `tokenizer`, `path`, `author` are none. True,
    false, zero and nothing are never secrets; a number is only where the name leaves no doubt.
    """
    if value is None or value == 0 or isinstance(value, bool) or name in _DIRECTORIES:
        return False
    is_text = not isinstance(value, int | float)
    for part in name.split("."):
        words = [word.lower() for word in _WORDS.findall(part)]
        for place, word in enumerate(words):
            before = words[place - 1] if place else ""
            is_last = all(rest.isdigit() for rest in words[place + 1 :])
            if word in _ALWAYS or word.endswith(("password", "passphrase", "apikey", "secret")):
                return True
            if word in ("key", "keys") and (before in _OPENING or (part.isupper() and is_last)):
                return True
            if is_text and word in ("token", "tokens") and before in _OPENING:
                return True
            if is_text and is_last and _ends_secret(word) and before not in _SPECIAL_TOKENS:
                return True
    return False


def _ends_secret(word: str) -> bool:
    return word in _AT_THE_END or word.endswith(("token", "accesskey", "privatekey", "secretkey"))


def masked(tree: Any, name: str = "") -> Any:
    """A configuration, or any other tree of plain values, without its secrets; of text that holds one (an address), the
    rest stays."""
    return _masked(tree, name, masked_text)


def masked_whole(tree: Any) -> Any:
    """The same for what is to be used again: text that holds a secret is one, and has to be filled in."""
    return _masked(tree, "", lambda text: text if masked_text(text) == text else MASK)


def _masked(tree: Any, name: str, mask: Callable[[str], str]) -> Any:
    if isinstance(tree, Mapping):
        return {key: _masked(value, f"{name}.{key}" if name else str(key), mask) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_masked(value, name, mask) for value in tree]
    if is_secret(name, tree) and tree != "":
        return MASK
    return mask(tree) if isinstance(tree, str) else tree


def masked_words(words: Sequence[str]) -> list[str]:
    """A command line without its secrets: `--model.hf_token X`, `--model.hf_token=X`."""
    found = list(words)
    for place, value in _secret_words(words):
        name, equals, _ = found[place].partition("=")
        found[place] = f"{name}={MASK}" if equals and value != found[place] else MASK
    return [masked_text(word) for word in found]


def masked_text(text: str) -> str:
    """Text without what looks like a secret, and without the users and passwords of addresses."""
    if "://" in text:
        text = _USER.sub(r"\1", text)
        text = _QUERY.sub(lambda found: f"{found[1]}{MASK}" if is_secret(found[2]) else found[0], text)
    return _LOOKS.sub(MASK, text)


def masked_message(text: str) -> str:
    """The same without the secrets that this process was given: libraries quote them in what they complain of."""
    for value in sorted(_given, key=len, reverse=True):
        text = text.replace(value, MASK)
    return masked_text(text)


def secrets_of(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a tree's secrets; of those within a list, the list's name."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from secrets_of(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from secrets_of(value, name)
    elif tree != "" and (is_secret(name, tree) or (isinstance(tree, str) and masked_text(tree) != tree)):
        yield name, tree


def to_fill_in(tree: Any) -> list[str]:
    """Dotted names of what was masked in a tree that was stored."""
    if isinstance(tree, Mapping):
        found = [(str(key), name) for key, value in tree.items() for name in to_fill_in(value)]
        return list(dict.fromkeys(f"{key}.{name}".removesuffix(".") for key, name in found))
    if isinstance(tree, list | tuple):
        return list(dict.fromkeys(name for value in tree for name in to_fill_in(value)))
    return [""] if tree == MASK else []


def keep_secret(values: Iterable[object]) -> None:
    """Mask these in every message that this process stores and shows."""
    _given.update(text for value in values if len(text := str(value)) >= _SHORTEST)


def keep_words_secret(words: Sequence[str]) -> None:
    """The same of a command line's secrets, before anybody has understood it."""
    keep_secret(value for _, value in _secret_words(words))


def _secret_words(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Where a command line has a secret, and which."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not name.startswith("--") or not is_secret(name.lstrip("-")):
            continue
        if equals and value:
            yield place, value
        elif not equals and place + 1 < len(words) and not words[place + 1].startswith("--"):
            yield place + 1, words[place + 1]
