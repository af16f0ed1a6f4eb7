"""A program that knows nothing of the shim gives the same metrics under `python -m shim run`, also spooled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Dict

import pytest

from tests.distributed.test_processes import LOOPBACK, ROOT
from tests.unit.test_import import on_releases

PROGRAM = """
    import json, os
    from dataclasses import dataclass

    os.environ["HF_HOME"] = os.path.abspath("home")  # before transformers is imported

    import numpy as np
    import transformers
    from transformers import HfArgumentParser, Trainer, TrainingArguments
    from huggingface_hub import constants

    from tests.fixtures import Lin, Rows

    @dataclass
    class Data:
        rows: int = 10

    def compute_metrics(eval_pred):
        logits, labels = eval_pred
        assert isinstance(logits, np.ndarray) and len(logits) == data.rows
        order = int((labels * (1 + np.arange(len(labels)))).sum())
        return {"accuracy": float((logits.argmax(-1) == labels).mean()), "order": order}

    data, args = HfArgumentParser((Data, TrainingArguments)).parse_args_into_dataclasses()
    trainer = Trainer(Lin(), args, eval_dataset=Rows(data.rows), compute_metrics=compute_metrics)
    metrics = trainer.evaluate()
    if args.process_index == 0:
        found = {name: metrics[f"eval_{name}"] for name in ("loss", "accuracy", "order")}
        options = [getattr(args, name, None) for name in ("batch_eval_metrics", "cuda_cache_clear")]
        home = constants.HF_HOME == os.environ["HF_HOME"]
        print("found", json.dumps({"metrics": found, "options": options, "home": home}), flush=True)
    os._exit(0)  # threads of gloo may abort a process that ends
"""
OPTIONS = ["--output_dir=out", "--use_cpu", "--report_to=none", "--disable_tqdm=true", "--per_device_eval_batch_size=3"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
SPOOLED = ["-m", "shim", "run", "--spool-metrics", "--spool-directory", "."]


def run(folder: Path, *words: str) -> Dict[str, Any]:
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [sys.executable, *words, *OPTIONS],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **LOOPBACK},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (found,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    result: Dict[str, Any] = json.loads(found.removeprefix("found "))
    assert result["home"]
    return result


@on_releases("4.40.2", "5.24.0")
@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["one process", "two processes of torchrun"])
def test_metrics_are_those_of_the_program_alone(tmp_path, launcher):
    alone = run(tmp_path, *launcher, "program.py")
    under_shim = run(tmp_path, *launcher, "-m", "shim", "run", "program.py", "--cuda_cache_clear=around_eval")
    assert under_shim == {**alone, "options": [False, "around_eval"]}
    spooled = run(tmp_path, *launcher, *SPOOLED, "program.py", "--cuda_cache_clear=around_eval")
    assert spooled == {**alone, "options": [True, "around_eval"]}
    assert not list(tmp_path.glob("shim-spool-*"))
