"""Masking of secrets as `***`, and escaping of control characters, in all text that leaves this program.

Three kinds of secrets are masked: the exact values of secret options and environment variables, however a library
quotes them; values that follow a secret's name; and text that looks like a key. Results are meant to be sent around. A
key that is overlooked in one is stolen, while a needless `***` only has to be filled in again.

The patterns are this module's own. Of 31 keys in its test detect-secrets 1.5.0 finds 11 without its plugins for high
entropy, and 2 of 18 values behind a name; with these plugins it takes 17 of 19 ordinary lines for secrets. It takes
0.5 s to import. Every pattern here takes time in proportion to the text, since a text may come from a foreign result.

A terminal obeys control characters, and a direction mark reverses the text behind it. So all text from a file, a
command line or a process goes through `shown` on its way to a screen, a table or a page.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus

MASK = "***"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
#: Words before `key` or `token` that make a name secret, also in the middle of it: `access_key_id`.
_KEY_WORDS = (
    "(?:api|access|private|master|subscription|auth|account|storage|service|signing|encryption|ssh|license|hf|huggingface|hub|github|gitlab"
    "|gh|wandb|aws|azure|openai|refresh|login|id)"
)
#: Words before `token` in the vocabulary of tokenizers, which are not secret: `eos_token`.
_TOKENIZER_WORDS = "pad|padding|eos|bos|unk|cls|sep|mask|stop|end|start|special|per|new|image|prompt|next|last|first"
#: Names that are secret whatever their value. Names are matched as lower-case words between underscores.
_SECRET = re.compile(
    "_(?:secrets|passwords|passwd|pwd|credentials?|creds|jwt|bearer|pat|dsn|[a-z]*(?:password|passphrase|apikey|secret))_"
    f"|_{_KEY_WORDS}_keys?_"
)
#: Names that are secret only in capitals, as in environment variables.
_SECRET_VARIABLE = re.compile(r"_(?:keys?|pass|pw|sas|connection_string|webhook(?:_url)?)_(?:\d+_)*$")
#: Names that are secret only if the value is text: `hf_token` and `token_2`, but not `token_type` or `eos_token`.
_SECRET_TEXT = re.compile(
    rf"_{_KEY_WORDS}_tokens?_|(?:^|_(?!(?:{_TOKENIZER_WORDS})_)[a-z0-9]+)"
    r"_(?:auth|authorization|cookies?|session|[a-z]*(?:token|accesskey|privatekey|secretkey))_(?:\d+_)*$"
)

#: Prefixes of well-known services' keys, from the rules of gitleaks and detect-secrets. Letters and digits follow.
_PREFIX = (
    r"gh[pousr]_|sk-|sk_(?=[0-9a-f]{48})|sk[-_]live_|[rps]k_(?:live|test)_|whsec_|npm_|r8_|gsk_|xai-|pplx-|fw_"
    r"|lsv2_(?:pt|sk)_|KGAT_|wandb_v\d_|dapi|do[opr]_v1_|shp(?:at|ca|pa|ss)_|sbp_|nfp_|rnd_|lin_api_|ntn_|secret_"
    r"|gls?[ac]_|dckr_[op]at_|sntry[su]_|PMAK-|NRAK-|AGE-SECRET-KEY-1|rubygems_|AT[AC]TT3|EAA[AC]"
    r"|key-|SK|AC|rp[as]_|phx_|a[ks]-|bkua_|sgp_|xkeysib-|mlsn\.|AKCp|LTAI|ABSK|ops_|oy2|rdme_|pnu_|tfp_|aio_|fm2_"
    r"|csk-|tvly-|jina_|e2b_"
)
#: Prefixes of keys that may also contain `-`, `_` or `.`.
_LONG_PREFIX = (
    r"github_pat_|gl(?:pat|dt|rt|cbt|ptt|ft|soat|agent|imt|oas)-|sk-(?:ant|proj|svcacct|admin|or)-|pypi-|nvapi-|SG\."
    r"|GOCSPX-|ya29\.|hv[sbr]\.|figd_|sq0[a-z]{3}-|dp\.[a-z]+\.|pul-|sl\.|tgp_v1_|pcsk_"
    r"|pscale_(?:tkn|pw)_|sb_secret_|tskey-|HRKU-|CFPAT-|CCIPAT_|vercel_blob_rw_|dt0[cs]\d\d\.|bedrock-api-key-"
)
#: Text that looks like a key: the prefixes above, and the forms of Hugging Face (letters alone), AWS, Slack, Google,
#: Azure, Telegram, Discord, Mailgun, Mailchimp, Airtable, Terraform, JSON Web Tokens (RFC 7519) and PEM (RFC 7468).
_LOOKS = re.compile(
    rf"(?<![\w-])(?:(?:{_PREFIX})(?=[A-Za-z]*\d)[A-Za-z0-9]{{20,}}[\w.=-]*"
    rf"|(?:{_LONG_PREFIX})(?=[A-Za-z_.=-]{{0,64}}\d)[\w.=-]{{20,}}"
    r"|(?:hf_|api_org_)[A-Za-z0-9]{34,}"
    r"|(?:A3T[A-Z0-9]|ABIA|ACCA|AKIA|ASIA)[0-9A-Z]{16}|(?:xox[abeoprs]|xapp)-[\w-]{10,}|AIza[\w-]{35}"
    r"|\w{3}\dQ~[\w.~-]{31,34}|\d{8,10}:AA[\w-]{33}|[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,38}"
    r"|[0-9a-f]{32}-(?:us\d{1,2}|[0-9a-f]{8}-[0-9a-f]{8})"
    r"|pat[A-Za-z0-9]{14}\.[0-9a-f]{64}|[A-Za-z0-9]{14}\.atlasv1\.[\w-]{60,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*|eyJ[\w+/=-]{40,})(?![\w-])"
    r"|(?<=//hooks\.slack\.com/services/)[\w/]+|(?<=/api/webhooks/)[\w/-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)
#: HTTP credentials: `Authorization: Basic ...`.
_SCHEME = re.compile(
    r"""(authorization["']?\s*[:=]\s*["']?)?\b(bearer|basic|digest|token|apikey|sharedkey)(\s+)([\w.~+/=:-]{8,})""",
    re.I,
)
_ORDINARY_WORDS = re.compile(r"[A-Z]?[a-z]+(?:[-_.:/][A-Z]?[a-z]*)*")
#: A longer value is not looked at for ordinary words; it is none.
_MAX_ORDINARY = 200
#: A text without a break, and in it user and password of a URL, up to the last `@`. A password may contain a slash,
#: though it should not.
_UNBROKEN = re.compile(r"""[^\s"'<>?#]+""")
_USER = re.compile(r"""(?<![\w+.-])([A-Za-z][\w+.-]*://)(?:[^\s"'<>?#/]*|[^\s"'<>?#/:]*:(?!\d+/)[^\s"'<>?#]*)@""")
#: A name in front of its value: `Pwd=...;`, `?sig=...&`, `"api_key": "..."`; for an option also `--token ...` and
#: `'--token', '...'`.
_NAME = re.compile(
    r"""(?<![\w.-])(--)?+([\w.-]++)["']?+\]?+(\s*+[=:]>?\s*+|(?(1),?[ \t]++|(?!)))(?:b(?=["']))?+(["']?)"""
)
#: The end of a value, by the quotation mark in front of it.
_VALUE_END = {
    "": re.compile(r"""[\s"'&;,#<>(){}\[\]]|\Z"""),
    "'": re.compile(r"['\n]|\Z"),
    '"': re.compile(r'["\n]|\Z'),
}
_WORD_AT_END = re.compile(r"[\w.]+\Z")
#: Words behind the name of an option that are not its value: a placeholder, a word of the sentence. Nor is what begins
#: with a dash.
_NO_VALUE = re.compile(
    r"[${A-Z_}]+|(?:an?|and|are|as|at|be|belongs|but|by|can|cannot|first|for|from|given|has|here|if|in|instead|is|it"
    r"|may|must|needs|not|of|on|once|only|or|takes|that|the|then|to|too|twice|was|were|when|where|with|without)[.:!?]*"
)
_SIGNATURE = re.compile("(?:^|[-_])sig(?:nature)?$", re.I)
_MIN_SIGNATURE_LENGTH = 16

#: Values of this process's secrets, from its environment and its options.
_secrets: set[str] = set()
#: Shorter values are not masked everywhere, since the same text may occur by chance. For a variable's value of letters
#: alone, such as the desktop's name in DESKTOP_SESSION, the second limit holds.
_MIN_LENGTH, _MIN_WORD_LENGTH = 6, 10
#: Characters of a text that are looked at, and those at its end that are dropped where it is longer.
_MAX_LENGTH, _CUT_LENGTH = 2**18, 2**12


def is_secret(name: str, value: object = "") -> bool:
    """Whether an option, a variable or a field of this name holds a secret.

    Names are split into words at dots, underscores and capitals: `num_tokens`, `tokenizer`, `path` and `author` are not
    secret. True, false, zero and None are never secret; another number is only where the name leaves no doubt.
    """
    if value is None or value == 0 or isinstance(value, bool) or name in ("PWD", "OLDPWD"):
        return False
    return _names_secret(name, not isinstance(value, int | float))


@lru_cache(maxsize=4096)
def _names_secret(name: str, is_text: bool) -> bool:
    for part in name.split("."):
        words = "_".join(["", *map(str.lower, _WORDS.findall(part)), ""])
        patterns = [_SECRET, *([_SECRET_VARIABLE] if part.isupper() else []), *([_SECRET_TEXT] if is_text else [])]
        if any(pattern.search(words) for pattern in patterns):
            return True
    return False


def masked(tree: Any, name: str = "", masks_whole_text: bool = False) -> Any:
    """A tree of plain values, such as a configuration, with its secrets masked.

    Args:
        name: dotted name of the tree's root.
        masks_whole_text: mask the whole of a text that contains a secret, such as a URL, and not only that part.
    """
    if isinstance(tree, Mapping):
        return {
            masked_text(key) if isinstance(key, str) else key: masked(value, _dotted(name, key), masks_whole_text)
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [masked(value, name, masks_whole_text) for value in tree]
    text = masked_text(tree) if isinstance(tree, str) else tree
    is_whole = is_secret(name, tree) and tree != ""
    return MASK if is_whole or (masks_whole_text and text != tree) else text


def masked_whole(tree: Any) -> Any:
    """A tree with its secrets masked, for later use: whole texts are masked, so that a user can fill them in again."""
    return masked(tree, masks_whole_text=True)


def secrets_of(tree: Any) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a tree's secrets; those in a list have the list's name."""
    return ((path, value) for path, value in leaves(tree, into_lists=True) if masked(value, path) != value)


def to_fill_in(tree: Any) -> list[str]:
    """Dotted names of the values in a stored tree that are masked as a whole."""
    return list(dict.fromkeys(path for path, value in leaves(tree, into_lists=True) if value == MASK))


def leaves(tree: Any, name: str = "", into_lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a tree's leaves. Empty mappings are leaves, and so are lists.

    With `into_lists` the items of lists are leaves instead, which have the list's name.
    """
    if isinstance(tree, Mapping) and (tree or not name):
        for key, value in tree.items():
            yield from leaves(value, _dotted(name, key), into_lists)
    elif into_lists and isinstance(tree, list | tuple):
        for value in tree:
            yield from leaves(value, name, into_lists)
    else:
        yield name, tree


def _dotted(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def masked_text(text: str) -> str:
    """Text with its secrets masked, and without users and passwords in URLs. Over 262,144 characters it is cut."""
    if len(text) > _MAX_LENGTH:
        # A secret may be cut in two, so the end is dropped after masking.
        whole = masked_text(text[:_MAX_LENGTH])
        return f"{whole[:-_CUT_LENGTH]}... ({len(text):,} characters)"
    # Longer secrets first, since they may contain shorter ones.
    for value in sorted(_secrets, key=len, reverse=True):
        text = text.replace(value, MASK)
    if "://" in text:
        text = _UNBROKEN.sub(_without_user, text)
    if len(text) > _MIN_LENGTH:
        keys_masked = _LOOKS.sub(lambda match: match[0] if _is_class_path(match[0]) else MASK, text)
        text = _SCHEME.sub(_masked_scheme, keys_masked)
    return _masked_values(text) if any(sign in text for sign in ("=", ":", "--")) else text


def _is_class_path(text: str) -> bool:
    """Whether a text that begins like a key is a class with its module: `sl.models_v2.LargeModel`.

    Its words have three letters and more on average; those in a random key are shorter, or all in one case.
    """
    parts = text.split(".")
    words = [word for word in _WORDS.findall(text) if word.isalpha()]
    is_named = len(parts) > 1 and all(map(str.isidentifier, parts)) and parts[-1][0].isupper()
    return is_named and not parts[-1].isupper() and sum(map(len, words)) >= 3 * len(words)


def _without_user(match: re.Match[str]) -> str:
    """A text without a break, without users and passwords of URLs: they end at the last `@`."""
    head, at, tail = match[0].rpartition("@")
    return _USER.sub(r"\1", head + at) + tail if "://" in head else match[0]


def _masked_scheme(match: re.Match[str]) -> str:
    header, scheme, blank, value = match.groups(default="")
    # Behind a word such as "token", an ordinary word belongs to the sentence.
    is_word = not header and scheme.lower() != "bearer" and _is_ordinary(value)
    return match[0] if is_word else f"{header}{scheme}{blank}{MASK}"


def _masked_values(text: str) -> str:
    """Text with the values behind secrets' names masked."""
    pieces, end = list[str](), 0
    for match in _NAME.finditer(text):
        dashes, name, separator, quotation = match.groups()
        is_signature = _SIGNATURE.search(name) is not None
        is_option = dashes and ":" not in separator
        if match.start() < end or not (is_signature or is_secret(name, "text")):
            continue
        if is_option and text.startswith("-", match.end()):
            continue
        value = _value_at(text, match.end(), quotation)
        if not value or (is_option and _NO_VALUE.fullmatch(value)):
            continue
        is_query = match.start() > 0 and text[match.start() - 1] in "?&;"
        is_literal = is_option or is_query or quotation or not _is_ordinary(value)
        is_named = is_secret(name, 1) or (is_literal and not value.isdecimal() and is_secret(name, value))
        if is_named or (is_signature and len(value) >= _MIN_SIGNATURE_LENGTH):
            pieces += text[end : match.end()], MASK
            end = match.end() + len(value)
    return "".join([*pieces, text[end:]])


def _value_at(text: str, start: int, quotation: str) -> str:
    """The value that starts there; without a quotation mark, a word that is called or indexed is code, not a value."""
    stop = _VALUE_END[quotation].search(text, start)
    assert stop is not None
    value = text[start : stop.start()]
    return _WORD_AT_END.sub("", value) if not quotation and stop[0] in ("(", "[") else value


def _is_ordinary(value: str) -> bool:
    return len(value) <= _MAX_ORDINARY and _ORDINARY_WORDS.fullmatch(value) is not None


def masked_message(text: str) -> str:
    """A message with its secrets masked, including those that were added to the environment since the start."""
    keep_environment_secret()
    return masked_text(text)


def keep_environment_secret() -> None:
    """From now on mask the values of environment variables with a secret's name in all text."""
    keep_secret(
        value
        for name, value in os.environ.items()
        if is_secret(name, value) and not (value.isalpha() and len(value) < _MIN_WORD_LENGTH)
    )


def keep_secret(values: Iterable[object]) -> None:
    """From now on mask these values in all text, also as Python, JSON and URLs quote them, on one line, or in part.

    A part is a line of a secret of several lines, as an error quotes it.
    """
    for text in map(str, values):
        parts = [line.strip() for line in text.splitlines()]
        lines = [line for line in parts if not (line.isalpha() and len(line) < _MIN_WORD_LENGTH)]
        for form in (text, " ".join(text.split()), *(lines if len(parts) > 1 else ())):
            if len(form) >= _MIN_LENGTH:
                _secrets.update((form, repr(form)[1:-1], json.dumps(form)[1:-1]))
                _secrets.update((quote(form), quote(form, safe=""), quote_plus(form)))


def masked_words(words: Sequence[str]) -> list[str]:
    """A command line with its secrets masked: `--model.hf_token ***`, `--model.hf_token=***`."""
    result = list(words)
    for index, value in _secret_words(words):
        result[index] = words[index].removesuffix(value) + MASK
    return [masked_text(word) for word in result]


def keep_words_secret(words: Sequence[str]) -> None:
    """From now on mask the secrets of a command line, even before it is parsed."""
    keep_secret(value for _, value in _secret_words(words))


def _secret_words(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The index of each word that is a secret or ends in one, with the secret."""
    is_secret_next = False
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        is_option = word.startswith("--")
        if is_secret_next and not is_option:
            yield index, word
        is_named = is_option and is_secret(name.lstrip("-"))
        if is_named and value:
            yield index, value
        is_secret_next = is_named and not equals


def shown(text: str) -> str:
    r"""The text on one line, with unprintable characters (`str.isprintable`) escaped as in Python: `\n`, `\x1b`."""
    return _replace_unprintable(text, lambda character: character.encode("unicode_escape").decode())


def one_line(text: str) -> str:
    """A message as one line of printable characters, with line breaks and runs of blanks as single blanks."""
    return shown(" ".join(text.split()))


def shown_lines(text: str) -> str:
    """Text of several lines, with unprintable characters escaped in each."""
    return "\n".join(map(shown, text.split("\n")))


def shown_json(text: str) -> str:
    """Text of JSON with unprintable characters escaped, so that its content stays the same."""
    return "\n".join(
        _replace_unprintable(line, lambda character: json.dumps(character)[1:-1]) for line in text.split("\n")
    )


def _replace_unprintable(text: str, escape: Callable[[str], str]) -> str:
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else escape(character) for character in text)
