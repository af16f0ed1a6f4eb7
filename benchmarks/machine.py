"""What was measured on, and with."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from pathlib import Path
from typing import Dict

import psutil


def machine() -> str:
    """What it was measured on."""
    information = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", information.read_text()) if information.exists() else None
    memory_size = psutil.virtual_memory().total / 2**30
    processor = model[1] if model else platform.processor() or platform.machine()
    return f"{processor}, {psutil.cpu_count()} cores, {memory_size:.0f} GiB, {platform.system()}"


def versions() -> Dict[str, str]:
    """What it was measured with."""
    packages = ("transformers", "accelerate", "torch", "numpy")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}
