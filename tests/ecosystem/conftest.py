"""These run where the libraries are: in the lanes of tox.ini that are named after them."""

import importlib.util

NEEDED = ("datasets", "trl", "peft", "sentence_transformers", "wrapt")
collect_ignore_glob = [] if all(map(importlib.util.find_spec, NEEDED)) else ["test_*.py"]
