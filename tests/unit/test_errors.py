"""The tree of exceptions that the module shows to its readers is the one that it defines."""

import pickle
import re

from sglang_aiter_ext import errors


def shown():
    """Class -> (the class it stands under, what it is besides), as the docstring of the module draws them."""
    found, path = {}, []
    for line in errors.__doc__.splitlines():
        drawn = re.match(r"((?:    |│   |├── |└── )+)([A-Z]\w+)(?: \((\w+)\))?(?: {2,}\S|$)", line)
        if drawn:
            depth = len(drawn[1]) // 4 - 1
            path[depth:] = [drawn[2]]
            found[drawn[2]] = (path[depth - 1] if depth else None, drawn[3])
    return found


def test_the_tree_in_the_docstring_is_that_of_the_classes():
    defined = {}
    for name, value in vars(errors).items():
        if isinstance(value, type) and value.__module__ == errors.__name__:
            first, *others = (base.__name__ for base in value.__bases__)
            defined[name] = (None if value is errors.ExtensionError else first, *(others or [None]))
    assert errors.ExtensionError.__bases__ == (Exception,)
    assert shown() == defined and len(defined) == 9


def test_an_internal_error_of_decode_says_what_is_not_served_and_what_helps():
    message = "SGLANG_USE_AITER_PA=1 is not served: KeyError: 'a'; start with SGLANG_USE_AITER_PA=0 to decode on the"
    assert str(errors.InternalError("KeyError: 'a'")).startswith(message)


def test_an_error_that_another_process_gets_has_the_same_message():
    error = errors.InternalError("boom")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and isinstance(again, errors.DecodeError)
